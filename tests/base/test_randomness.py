import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.base import randomness
from firm.base.errors import TimeLimitError
from firm.base.randomness import ShuffledPasses
from firm.federation import RandomStream, derive_seed


def _draw():
    """One number of every global generator; gauss and randn keep a second one in store."""
    return torch.rand(1).item(), torch.randn(1).item(), np.random.randn(), random.gauss(0, 1)


def test_equal_names_give_equal_numbers_and_other_names_others():
    with RandomStream(0, "client", "a"):
        first = _draw()
    with RandomStream(0, "client", "a"):
        assert _draw() == first
    for seed, names in ((1, ("client", "a")), (0, ("client", "b")), (0, ("client",))):
        with RandomStream(seed, *names):
            assert all(other != number for other, number in zip(_draw(), first, strict=True))


def test_a_stream_goes_on_where_it_stopped_whatever_happens_outside():
    with RandomStream(0, "a"):
        expected = [_draw(), _draw()]
    stream = RandomStream(0, "a")
    with stream:
        found = [_draw()]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    with stream:
        found.append(_draw())
    assert found == expected


def test_the_outer_generators_return_also_after_an_exception():
    def seed_outer():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        _draw()  # leaves a second gaussian in store, which must return too

    seed_outer()
    expected = _draw()
    seed_outer()
    with pytest.raises(ZeroDivisionError), RandomStream(0, "a"):
        _draw() and 1 / 0
    assert _draw() == expected


def test_streams_nest_and_one_stream_is_not_entered_twice():
    outer, inner = RandomStream(0, "outer"), RandomStream(0, "inner")
    with outer:
        expected = [_draw(), _draw()]
    outer = RandomStream(0, "outer")
    with outer:
        found = [_draw()]
        with inner:
            _draw()
        found.append(_draw())
        with pytest.raises(RuntimeError, match="already in use"):
            outer.__enter__()
    assert found == expected


@pytest.mark.every_case
@pytest.mark.parametrize("part", ["global_states", "set_global_states"])
@pytest.mark.parametrize("step", ["__enter__", "__exit__"])
def test_a_stream_that_a_time_limit_interrupts_can_be_entered_again(step, part, monkeypatch):
    """The signal of a time limit may arrive in any of the steps, once."""
    own, interrupted = getattr(randomness, part), []

    def interrupting(*arguments):
        if not interrupted:
            interrupted.append(True)
            raise TimeLimitError("it has not finished")
        return own(*arguments)

    stream = RandomStream(0, "a")
    outer = torch.get_rng_state()
    if step == "__exit__":
        stream.__enter__()
    monkeypatch.setattr(randomness, part, interrupting)
    with pytest.raises(TimeLimitError):
        stream.__enter__() if step == "__enter__" else stream.__exit__(None, None, None)
    if step == "__enter__" or part == "global_states":
        assert torch.equal(torch.get_rng_state(), outer)
    with stream:
        pass


def test_a_restored_stream_repeats_its_numbers_and_the_state_stays_untouched():
    stream = RandomStream(0, "a")
    with stream:
        _draw()
    state = stream.state()
    with stream:
        expected = [_draw() for _ in range(700)]  # past a block of the Mersenne twister
    for other in (stream, RandomStream(9, "b")):
        other.restore(state)
        with other:
            assert [_draw() for _ in range(700)] == expected


def test_a_state_shares_no_memory_with_its_stream():
    with RandomStream(0, "a"):
        expected = _draw()
    stream = RandomStream(0, "a")
    given, taken = stream.state(), stream.state()
    stream.restore(given)
    for state in (given, taken, stream.state()):
        state["torch"].zero_()
        state["numpy"]["keys"].zero_()
    with stream:
        assert _draw() == expected


def test_a_state_holds_only_what_a_checkpoint_can(same):
    state = RandomStream(0, "a").state()

    def through_json(value):
        if isinstance(value, torch.Tensor):
            return value.clone()
        if isinstance(value, dict):
            return {key: through_json(item) for key, item in value.items()}
        if isinstance(value, list):
            return [through_json(item) for item in value]
        return json.loads(json.dumps(value))

    assert same(through_json(state), state)


def test_derived_seeds_are_distinct_and_fixed_for_ever():
    names = [(a, b) for a in range(50) for b in ("x", "y")]
    assert len({derive_seed(0, *name) for name in names}) == len(names)
    assert derive_seed(0, "ab", "c") != derive_seed(0, "a", "bc")
    assert derive_seed(0, "sampling", 1) == 1021085013816111908


@given(size=st.integers(1, 12), data=st.data())
def test_passes_use_every_example_once_and_no_batch_repeats_one(size, data):
    batch_size = data.draw(st.integers(1, size))
    stream = ShuffledPasses(range(size), RandomStream(0, "order"))
    batches = [stream.draw(batch_size) for _ in range(3 * size)]
    assert all(len(set(batch)) == batch_size for batch in batches)
    counts = [sum(example in batch for batch in batches) for example in range(size)]
    assert counts == [3 * batch_size] * size


def test_drawing_ahead_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ShuffledPasses(range(5), RandomStream(0, "order")).draw(3)
    assert torch.equal(torch.rand(1), expected)


def test_passes_differ_and_seeds_decide():
    def orders(seed):
        stream = ShuffledPasses(range(9), RandomStream(seed, "order"))
        return [stream.draw(9) for _ in range(2)]

    assert orders(0) == orders(0)
    assert orders(0) != orders(1)
    assert orders(0)[0] != orders(0)[1]


def test_a_restored_stream_goes_on_as_if_nothing_had_happened():
    stream = ShuffledPasses(range(7), RandomStream(0, "order"))
    stream.draw(3)
    state = stream.state()
    expected = [stream.draw(3) for _ in range(5)]
    other = ShuffledPasses(range(7), RandomStream(1, "order"))
    for target in (stream, other):
        target.restore(state)
        assert [target.draw(3) for _ in range(5)] == expected


@pytest.mark.parametrize("batch_size", [0, 4])
def test_a_shard_smaller_than_the_batch_is_refused(batch_size):
    stream = ShuffledPasses(range(3), RandomStream(0, "order"))
    with pytest.raises(ValueError, match=f"a batch of {batch_size} .* shard of 3"):
        stream.draw(batch_size)
