"""Shamir's secret sharing (1979) of 32 bytes over a prime field.

Written here because the maintained library, PyCryptodome, shares 16 bytes at a time in a field of
2¹²⁸, so that a key takes two sharings, and would be a second cryptographic dependency beside
``cryptography``, which has none. Arithmetic in Python takes different times for different secrets;
an observer on the same machine is outside the model.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
"""Smallest prime above all secrets."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Returns a share of a secret for each holder.

    ``threshold`` shares determine the secret, and fewer are independent of it.

    Args:
        secret: 32 bytes.
        holders: Distinct positive numbers of the holders.
        threshold: Number of shares that determine the secret, from 1 to the number of holders.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}.")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"threshold must be from 1 to {len(holders)}, got {threshold}.")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return {holder: _value(coefficients, holder).to_bytes(SHARE_BYTES, "big") for holder in holders}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Returns the secret of which these are shares, from the first ``threshold`` of them.

    Raises:
        ValueError: There are too few shares, or they are not shares of one secret.
    """
    if len(shares) < threshold:
        raise ValueError(f"{threshold} shares are needed, got {len(shares)}.")
    holders = tuple(sorted(shares)[:threshold])
    values = [int.from_bytes(shares[holder], "big") for holder in holders]
    total = sum(factor * value for factor, value in zip(_factors(holders), values, strict=True))
    secret = total % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares are not of one secret.")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: Sequence[int], point: int) -> int:
    """Returns a polynomial's value by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


@lru_cache(maxsize=1024)
def _factors(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the factors of the values at these points in the value at 0 (Lagrange)."""
    factors = []
    for own in holders:
        above, below = 1, 1
        for other in holders:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
