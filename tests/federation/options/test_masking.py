"""Masks: they come off of the sum that they were made for, and of nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.options.masking import (
    KEY_BYTES,
    LARGEST,
    MAX_MESSAGES,
    NUM_BYTES,
    STEP,
    Key,
    added,
    masked,
    opened,
)

KEY = Key(bytes(range(KEY_BYTES)))


@given(
    seed=st.integers(0, 10**6),
    num_messages=st.integers(1, 12),
    size=st.integers(1, 40),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 100.0]),
)
def test_a_sum_is_right_to_half_a_step_of_each_message_in_any_order(
    seed, num_messages, size, scale
):
    rng = np.random.default_rng(seed)
    vectors = np.clip(scale * rng.standard_normal((num_messages, size)), 1 - LARGEST, LARGEST - 1)
    nonces, messages = zip(*[masked(vector, KEY) for vector in vectors], strict=True)
    total = opened(added(messages), nonces, KEY)
    assert np.abs(total - vectors.sum(0)).max() <= num_messages * STEP / 2 * (1 + 1e-6)
    order = rng.permutation(num_messages)
    again = opened(added([messages[i] for i in order]), [nonces[i] for i in reversed(order)], KEY)
    assert (again == total).all()  # whole numbers have no order


def test_the_largest_values_of_the_most_messages_do_not_overflow():
    for sign in (1, -1):
        vector = np.array([sign * (LARGEST - STEP)])
        nonces, messages = zip(*[masked(vector, KEY) for _ in range(MAX_MESSAGES)], strict=True)
        total = opened(added(messages), nonces, KEY)
        assert total[0] == pytest.approx(sign * LARGEST * MAX_MESSAGES, rel=1e-6)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, LARGEST - STEP / 4, np.inf, np.nan])
def test_a_value_that_would_overflow_is_refused(value):
    with pytest.raises(ValueError, match=r"magnitude (512|inf|nan) cannot be added"):
        masked(np.array([0.0, value]), KEY)


def test_a_message_looks_random_and_never_repeats():
    zeros = np.zeros(100_000)
    (first_nonce, first), (second_nonce, second) = masked(zeros, KEY), masked(zeros, KEY)
    assert first_nonce != second_nonce
    assert first.shape == (100_000, NUM_BYTES)
    for values in (first, first.int() - second.int()):  # alone, and to who compares two
        counts = np.bincount(values.numpy().astype(np.uint8).ravel(), minlength=256)
        expected = values.numel() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
    agree = (first == second).double().mean().item()
    assert agree == pytest.approx(1 / 256, abs=0.0005)


def _is_random(numbers):
    """Whether numbers spread over the whole range that masks have, and not over the values'."""
    return np.abs(numbers).mean() > LARGEST * MAX_MESSAGES / 4


def test_masks_come_off_of_no_other_sum_and_with_no_other_key():
    vectors = np.random.default_rng(0).standard_normal((3, 1000))
    (first, second, third), messages = zip(*[masked(v, KEY) for v in vectors], strict=True)
    one, two = messages[0], added(messages[:2])
    assert not _is_random(opened(two, [first, second], KEY))
    assert _is_random(opened(two, [first, third], KEY))
    assert _is_random(opened(two, [first], KEY))
    assert _is_random(opened(two, [first, second, third], KEY))
    assert _is_random(opened(two, [first, second], Key.generate()))
    # one message is not opened as a sum of two, however often it is in it
    assert _is_random(opened(one, [first, second], KEY))
    assert _is_random(opened(added([one, one]), [first, second], KEY))


def test_keys_are_told_apart_without_being_told():
    first, second = Key.generate(), Key.generate()
    assert first.identity != second.identity
    assert Key(first.content).identity == first.identity
    assert first.content.hex() not in repr(first) + first.identity
    assert repr(first) == f"Key({first.identity})"


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_a_key_of_another_length_is_refused(content):
    with pytest.raises(ValueError, match=f"a key has 32 bytes, got {len(content)}"):
        Key(content)


@pytest.mark.parametrize("count", [0, MAX_MESSAGES + 1])
def test_a_sum_is_of_some_messages_and_not_of_too_many(count):
    with pytest.raises(ValueError, match=f"1 to 1024 messages, got {count}"):
        added([torch.zeros(2, NUM_BYTES, dtype=torch.uint8)] * count)
