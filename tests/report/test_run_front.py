"""The front of a run takes the values by prompt from the files beside its adapters."""

import math

import torch
from safetensors.torch import save_file

from firm.report.run_front import values_by_prompt


def test_values_by_prompt_are_means_of_rows_and_a_stranger_s_indices_cost_nothing(tmp_path):
    table = {
        "prompt": torch.tensor([2**60, 0, 2**60]),
        "rewards/a": torch.tensor([0.0, 0.5, 1.0]),
        "scores/a": torch.tensor([7.0, 7.0, 7.0]),
        "scores/parse": torch.tensor([1.0, torch.nan, 0.5]),
        "kl": torch.tensor([1.0, 2.0, 3.0]),
    }
    save_file(table, tmp_path / "scores.safetensors")
    found = values_by_prompt(tmp_path / "scores.safetensors", ["a"])
    assert found["a"] == (0.5, 0.5)
    assert found["kl"] == (2.0, 2.0)
    assert math.isnan(found["parse"][0])
    assert found["parse"][1] == 0.75
    assert found.keys() == {"a", "kl", "parse"}
    assert values_by_prompt(tmp_path / "nothing", ["a"]) == {}
    for prompts in (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.bfloat16)):
        own = {"prompt": prompts, "rewards/a": torch.ones(prompts.shape)}
        save_file(own, tmp_path / "odd.safetensors")
        assert values_by_prompt(tmp_path / "odd.safetensors", ["a"]) == {}
