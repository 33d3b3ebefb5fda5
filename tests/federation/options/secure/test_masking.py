"""Masks: numbers are added exactly, and look random under a mask."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.options.secure.masking import (
    MAX_UPDATES,
    SEED_BYTES,
    STEP,
    add_messages,
    as_bytes,
    largest,
    mask,
    real_numbers,
    whole_numbers,
)

SEED = bytes(range(SEED_BYTES))
widths = st.sampled_from([6, 8])


@given(
    seed=st.integers(0, 10**6),
    num_messages=st.integers(1, 12),
    size=st.integers(1, 40),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 100.0]),
    num_bytes=widths,
)
def test_a_sum_under_masks_is_right_to_half_a_step_of_each_message(
    seed, num_messages, size, scale, num_bytes
):
    rng = np.random.default_rng(seed)
    vectors = np.clip(scale * rng.standard_normal((num_messages, size)), -511, 511)
    seeds = [rng.bytes(SEED_BYTES) for _ in vectors]
    messages = [
        as_bytes(whole_numbers(vector, num_bytes) + mask(own, size), num_bytes)
        for vector, own in zip(vectors, seeds, strict=True)
    ]
    assert {tuple(message.shape) for message in messages} == {(size, num_bytes)}
    total = add_messages(messages)
    for own in seeds:
        total -= mask(own, size)
    opened = real_numbers(total, num_bytes)
    assert np.abs(opened - vectors.sum(0)).max() <= num_messages * STEP / 2 * (1 + 1e-6)


@pytest.mark.parametrize("num_bytes", [6, 8])
def test_the_largest_values_of_the_most_updates_do_not_overflow(num_bytes):
    for sign in (1, -1):
        vector = np.array([sign * (largest(num_bytes) - STEP)])
        messages = [as_bytes(whole_numbers(vector, num_bytes), num_bytes)] * MAX_UPDATES
        total = real_numbers(add_messages(messages), num_bytes)
        assert total[0] == pytest.approx(sign * largest(num_bytes) * MAX_UPDATES, rel=1e-6)


@pytest.mark.parametrize("value", [512.0, -512.0, 512.0 - STEP / 4, np.inf, np.nan])
def test_a_value_that_would_overflow_is_refused(value):
    with pytest.raises(ValueError, match=r"magnitude (512|inf|nan) cannot be added"):
        whole_numbers(np.array([0.0, value]), 6)


def test_a_masked_vector_looks_random():
    message = as_bytes(whole_numbers(np.zeros(100_000), 6) + mask(SEED, 100_000), 6)
    other = as_bytes(whole_numbers(np.zeros(100_000), 6) + mask(SEED[::-1], 100_000), 6)
    for values in (message, message.int() - other.int()):  # alone, and to who compares two
        counts = np.bincount(values.numpy().astype(np.uint8).ravel(), minlength=256)
        expected = values.numel() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
    agree = (message == other).double().mean().item()
    assert agree == pytest.approx(1 / 256, abs=0.0005)


def test_a_mask_is_chacha20s_key_stream():
    """RFC 8439, appendix A.1, test vector 1: the stream of a zero key, nonce and counter."""
    stream = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert mask(bytes(32), 8).tobytes() == stream


@pytest.mark.parametrize("count", [0, MAX_UPDATES + 1])
def test_a_sum_is_of_some_messages_and_not_of_too_many(count):
    with pytest.raises(ValueError, match=f"1 to 1024 messages, got {count}"):
        add_messages([torch.zeros(2, 6, dtype=torch.uint8)] * count)
