import pytest
import torch

from firm.federation.serialization import pack, unpack
from firm.gradients.messages import COMPRESSORS, message_from_dict, message_to_dict


def _message(name, num_objectives=2, num_parameters=400, budget=None):
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(num_objectives, num_parameters, generator=generator)
    return COMPRESSORS[name](budget).compress(jacobian, generator=generator, shared_seed=5)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("num_objectives", [1, 2, 5])
@pytest.mark.parametrize("budget", [None, 257, 50_000])
def test_a_message_counts_what_its_tensors_and_seed_take_within_the_budget(
    name, num_objectives, budget
):
    message = _message(name, num_objectives, budget=budget)
    content = message_to_dict(message)
    tensors = sum(value.nbytes for value in content.values() if isinstance(value, torch.Tensor))
    seeds = 8 * sum("seed" in key for key in content)
    assert message.num_bytes == tensors + seeds
    assert message.num_bytes <= 4 * (budget or 400) + 8


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_message_survives_the_wire(name):
    message = _message(name)
    packed = pack(message_to_dict(message))
    received = message_from_dict(unpack(packed))
    assert type(received) is type(message)
    assert received.shape == message.shape
    assert received.num_bytes == message.num_bytes
    assert torch.equal(received.reconstruct(), message.reconstruct())
    assert message.num_bytes < len(packed) < message.num_bytes + 800  # the rest is framing


def test_a_broken_upload_is_refused():
    content = message_to_dict(_message("low_rank"))
    with pytest.raises(ValueError, match="unknown kind of message 'pickle'"):
        message_from_dict({**content, "kind": "pickle"})
    with pytest.raises(ValueError, match="unknown kind of message None"):
        message_from_dict({})
    with pytest.raises(ValueError, match=r"'low_rank' has wrong fields.*extra"):
        message_from_dict({**content, "extra": 1})
    with pytest.raises(ValueError, match="'low_rank' has wrong fields"):
        message_from_dict({**content, "left": None})
    for shape in ((), (2,), (0, 400), (2, -1), (2, 400.0), (2, 400, 1)):
        with pytest.raises(ValueError, match="shape of a message must be M and d"):
            message_from_dict({**content, "shape": shape})
    assert message_from_dict({**content, "shape": [2, 400]}).shape == (2, 400)
    with pytest.raises(ValueError, match="bucket must be at least 1, got 0"):
        message_from_dict({**message_to_dict(_message("quantizing")), "bucket": 0})
    quantised = message_to_dict(_message("quantizing"))
    for name in ("bits", "bucket", "num_kept", "seed"):
        for value in (float(quantised[name]), True, "4", None):
            with pytest.raises(ValueError, match=f"{name} of a message must be an integer, got"):
                message_from_dict({**quantised, name: value})
    content["left"][3, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity"):
        message_from_dict(content)
