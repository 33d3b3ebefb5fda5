import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.alignment.prompt_stream import PromptStream
from firm.alignment.prompts import Prompt
from firm.federation.randomness import RandomStream


def shard(size):
    return [Prompt(str(index), "") for index in range(size)]


@given(size=st.integers(1, 12), data=st.data())
def test_passes_use_every_prompt_once_and_no_batch_repeats_one(size, data):
    batch_size = data.draw(st.integers(1, size))
    stream = PromptStream(shard(size), RandomStream(0, "prompts"))
    batches = [stream.draw(batch_size) for _ in range(3 * size)]
    assert all(len(set(batch)) == batch_size for batch in batches)
    counts = [sum(prompt in batch for batch in batches) for prompt in shard(size)]
    assert counts == [3 * batch_size] * size


def test_drawing_ahead_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    PromptStream(shard(5), RandomStream(0, "prompts")).draw(3)
    assert torch.equal(torch.rand(1), expected)


def test_passes_differ_and_seeds_decide():
    def orders(seed):
        stream = PromptStream(shard(9), RandomStream(seed, "prompts"))
        return [stream.draw(9) for _ in range(2)]

    assert orders(0) == orders(0)
    assert orders(0) != orders(1)
    assert orders(0)[0] != orders(0)[1]


def test_a_restored_stream_goes_on_as_if_nothing_had_happened():
    stream = PromptStream(shard(7), RandomStream(0, "prompts"))
    stream.draw(3)
    state = stream.state()
    expected = [stream.draw(3) for _ in range(5)]
    other = PromptStream(shard(7), RandomStream(1, "prompts"))
    for target in (stream, other):
        target.restore(state)
        assert [target.draw(3) for _ in range(5)] == expected


@pytest.mark.parametrize("batch_size", [0, 4])
def test_a_shard_smaller_than_the_batch_is_refused(batch_size):
    stream = PromptStream(shard(3), RandomStream(0, "prompts"))
    with pytest.raises(ValueError, match=f"a batch of {batch_size} .* shard of 3"):
        stream.draw(batch_size)
