"""The pretend accelerator refuses what a real one refuses, and counts every byte."""

import gc

import pytest
import torch
from torch import nn

from firm.alignment.policy import move_
from firm.federation import RandomStream
from tests.accelerator.device import IS_PRETEND

pytestmark = pytest.mark.skipif(not IS_PRETEND, reason="FIRM_ACCELERATOR names a real one")
HERE, THERE = "pretend:0", "pretend:1"


def test_torch_finds_two_devices():
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    assert torch.accelerator.device_count() == 2


def test_operands_on_two_devices_are_refused():
    one = torch.ones(3, device=HERE)
    for other in (torch.ones(3), torch.ones(3, device=THERE)):
        for operation in (torch.add, torch.equal, torch.dot, lambda a, b: torch.cat([a, b])):
            with pytest.raises(RuntimeError, match="on the same device"):
                operation(one, other)
    assert (one + torch.tensor(1.0)).tolist() == [2.0] * 3  # a scalar may come from the host


def test_a_device_tensor_takes_host_indices_and_no_host_tensor_takes_the_devices():
    one = torch.arange(3.0, device=HERE)
    assert one[torch.tensor([2, 0])].tolist() == [2.0, 0.0]
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.arange(3.0)[torch.tensor([2], device=HERE)]


def test_host_pointers_and_host_generators_are_refused():
    one = torch.ones(3, device=HERE)
    with pytest.raises(TypeError, match="convert pretend:0 device type tensor to numpy"):
        one.numpy()
    for device in ("cpu", THERE):
        with pytest.raises(RuntimeError, match="Expected a generator of pretend:0"):
            one.normal_(generator=torch.Generator(device))


def test_each_device_has_a_generator():
    torch.manual_seed(0)
    first, second = (torch.rand(3, device=device) for device in (HERE, THERE))
    assert first.tolist() == second.tolist()
    assert torch.rand(3, device=HERE).tolist() != first.tolist()


def test_bytes_are_counted_exactly_by_device():
    gc.collect()
    before = [torch.pretend.memory_allocated(device) for device in (HERE, THERE)]
    torch.pretend.reset_peak_memory_stats(THERE)
    one = torch.ones(5, 7, device=THERE)
    product = one @ one.T  # an operator's result
    del one
    after = [torch.pretend.memory_allocated(device) for device in (HERE, THERE)]
    assert after == [before[0], before[1] + product.nbytes]
    assert torch.pretend.max_memory_allocated(THERE) == before[1] + 4 * (35 + 25)


def test_what_exceeds_a_devices_memory_is_out_of_memory():
    torch.pretend.limit_memory(torch.pretend.memory_allocated(THERE) + 100, THERE)
    try:
        one = torch.ones(20, device=THERE)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 80 bytes on device 1"):
            one * 2
    finally:
        torch.pretend.limit_memory(2**62, THERE)


def test_a_module_that_moves_there_has_new_parameters():
    """As on NPUs: whoever kept the parameters of before would train copies."""
    layer = nn.Linear(2, 2)
    before = layer.weight
    assert layer.to(HERE).weight is not before


def test_a_tied_head_is_still_tied_after_a_move():
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    move_(nn.ModuleList([embedding, head]), torch.device(HERE))
    assert head.weight is embedding.weight
    assert str(head.weight.device) == HERE


@pytest.mark.parametrize("device", [HERE, THERE])
def test_a_stream_covers_every_devices_generator(device):
    with RandomStream(0, "a"):
        first = torch.rand(3, device=device)
    torch.manual_seed(1)
    stream = RandomStream(0, "a")
    with stream:
        assert torch.equal(torch.rand(3, device=device), first)
    state = stream.state()
    with stream:
        second = torch.rand(3, device=device)
    stream.restore(state)
    with stream:
        assert torch.equal(torch.rand(3, device=device), second)


def test_a_stream_of_other_devices_starts_these_from_its_seed():
    with RandomStream(0, "a"):
        first = torch.rand(3, device=THERE)
    stream = RandomStream(0, "a")
    with stream:
        torch.rand(5, device=THERE)
    state = stream.state()
    for saved in ({"type": "cuda", "states": [torch.zeros(16)]}, {"type": None, "states": []}):
        stream.restore({**state, "accelerators": saved})
        with stream:
            assert torch.equal(torch.rand(3, device=THERE), first)
