import json

import safetensors.torch
import torch

from firm.federation import Update
from firm.federation.engines.wire import num_bytes


def test_size_is_that_of_the_safetensors_file_and_of_the_json():
    adapter = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    message = {"round": 3, "adapter": adapter, "settings": [1.5, None, "é"]}
    file = safetensors.torch.save({f"/adapter/{name}": value for name, value in adapter.items()})
    text = json.dumps({"round": 3, "adapter": {"a": None, "b": None}, "settings": [1.5, None, "é"]})
    assert num_bytes(message) == len(file) + len(text.encode())
    assert 4 * 15 + 2 * 7 < len(file) < 4 * 15 + 2 * 7 + 200


def test_more_parameters_of_an_update_cost_their_own_bytes():
    small = Update("a", {"x": torch.zeros(1000)}, 5, {"weights": [[0.5, 0.5]]})
    large = Update("a", {"x": torch.zeros(3000)}, 5, {"weights": [[0.5, 0.5]]})
    assert abs(num_bytes(large) - num_bytes(small) - 8000) < 16  # the header's digits and padding
    told = Update("a", {"x": torch.zeros(1000)}, 5, {"weights": [[0.5, 0.5]] * 2})
    assert num_bytes(told) - num_bytes(small) == len(", [0.5, 0.5]")


def test_views_are_counted_by_what_they_show():
    assert num_bytes(torch.zeros(4, 6).T) == num_bytes(torch.zeros(6, 4))
