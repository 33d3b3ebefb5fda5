"""Shamir's secret sharing: enough shares give the secret, and fewer nothing."""

import itertools
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import isprime  # comes with torch

from firm.federation.options.secure.shamir import PRIME, SHARE_BYTES, combine, split

SECRET = bytes(range(32))


@given(secret=st.binary(min_size=32, max_size=32), data=st.data())
def test_any_shares_that_are_enough_give_the_secret(secret, data):
    holders = data.draw(st.sets(st.integers(1, 2000), min_size=1, max_size=12))
    threshold = data.draw(st.integers(1, len(holders)))
    shares = split(secret, sorted(holders), threshold)
    chosen = data.draw(st.lists(st.sampled_from(sorted(holders)), min_size=threshold, unique=True))
    assert combine({holder: shares[holder] for holder in chosen}, threshold) == secret
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}


def test_fewer_shares_fit_every_secret_alike():
    """With one share missing, each value of it leads to another secret: none is excluded."""
    shares = split(SECRET, [1, 2, 3], 3)
    guesses = [bytes(32), bytes(31) + b"\1", secrets.token_bytes(32)]
    for guess in guesses:
        # the polynomial of degree 2 through the two shares and the guessed secret at 0
        points = {0: int.from_bytes(guess, "big")}
        points |= {x: int.from_bytes(shares[x], "big") for x in (1, 2)}
        third = _interpolated(points, 3).to_bytes(SHARE_BYTES, "big")
        assert combine({1: shares[1], 2: shares[2], 3: third}, 3) == guess


def _interpolated(points, at):
    total = 0
    for own, value in points.items():
        above = below = 1
        for other in points:
            if other != own:
                above = above * (at - other) % PRIME
                below = below * (own - other) % PRIME
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME


def test_too_few_shares_or_those_of_no_secret():
    shares = split(SECRET, [1, 2, 3], 2)
    with pytest.raises(ValueError, match="2 shares are needed, got 1"):
        combine({1: shares[1]}, 2)
    # the line through two equal values has that value at 0, which is above every secret
    with pytest.raises(ValueError, match="not of one secret"):
        combine({1: _number(2**256), 2: _number(2**256)}, 2)


def _number(value):
    return value.to_bytes(SHARE_BYTES, "big")


@pytest.mark.parametrize(("secret", "threshold"), [(bytes(31), 2), (SECRET, 0), (SECRET, 4)])
def test_what_cannot_be_shared_is_refused(secret, threshold):
    with pytest.raises(ValueError, match=r"32 bytes, got 31|threshold must be from 1 to 3"):
        split(secret, [1, 2, 3], threshold)


def test_the_field_is_a_prime_above_all_secrets():
    assert PRIME > 2**256
    assert isprime(PRIME)
    assert not any(isprime(number) for number in range(2**256, PRIME))


def test_shares_of_equal_secrets_differ():
    shares = [split(SECRET, [1], 1)[1], *(split(SECRET, [1, 2], 2)[1] for _ in range(3))]
    assert all(a != b for a, b in itertools.combinations(shares, 2))
