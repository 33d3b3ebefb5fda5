"""Numbers under masks: fixed-point integers that are added modulo a power of two.

A client's numbers are multiples of STEP, as integers modulo 2⁴⁸, or 2⁶⁴ where clients count by
their number of examples. Adding a mask that is uniform modulo that power makes them uniform, too.
Masks are ChaCha20's key stream of a 32-byte seed, 8 bytes per number: the lowest bytes of a uniform
integer are uniform.
"""

from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

STEP = 2.0**-28
"""Distance of two numbers that can be told apart: a rounding error of at most 2e-9."""
MAX_UPDATES = 1024
"""Most updates in a sum."""
SEED_BYTES = 32


def largest(num_bytes: int) -> float:
    """Returns the magnitude below which a number must be for any sum to be right.

    >>> largest(6), largest(8)
    (512.0, 33554432.0)
    """
    return 2 ** (8 * num_bytes - 1) * STEP / MAX_UPDATES


def whole_numbers(values: np.ndarray, num_bytes: int) -> np.ndarray:
    """Returns float64 values [d] in multiples of STEP, as integers modulo 2⁶⁴, uint64 [d].

    Raises:
        ValueError: A value is too large, or not finite.
    """
    magnitude = np.abs(values).max(initial=0.0)
    if not np.rint(magnitude / STEP) * STEP < largest(num_bytes):
        raise ValueError(
            f"a number of magnitude {magnitude:.4g} cannot be added under masks, which hold less "
            f"than {largest(num_bytes):g}."
        )
    return np.rint(values / STEP).astype(np.int64).astype(np.uint64)


def real_numbers(whole: np.ndarray, num_bytes: int) -> np.ndarray:
    """Returns the values of integers modulo 2⁴⁸ or 2⁶⁴, float64 [d], nearest to zero."""
    shift = np.uint64(64 - 8 * num_bytes)
    return ((whole << shift).view(np.int64) >> np.int64(shift)) * STEP


def mask(seed: bytes, size: int) -> np.ndarray:
    """Returns the mask of a seed of 32 bytes, which must have no other use, uint64 [size]."""
    # a seed masks one vector, so that the nonce may be constant
    encryptor = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def as_bytes(whole: np.ndarray, num_bytes: int) -> torch.Tensor:
    """Returns integers as they travel, uint8 [d, num_bytes], the lowest byte first."""
    columns = whole.astype("<u8").view(np.uint8).reshape(len(whole), 8)
    return torch.from_numpy(columns[:, :num_bytes].copy())


def from_bytes(columns: torch.Tensor) -> np.ndarray:
    """Returns the integers of uint8 [d, num_bytes], uint64 [d]."""
    padded = np.zeros((len(columns), 8), dtype=np.uint8)
    padded[:, : columns.shape[1]] = columns.numpy()
    return padded.view("<u8").reshape(-1).astype(np.uint64)


def add_messages(messages: Sequence[torch.Tensor]) -> np.ndarray:
    """Returns the sum of messages of one shape, uint64 [d].

    Raises:
        ValueError: There are no messages, or more than MAX_UPDATES.
    """
    if not 0 < len(messages) <= MAX_UPDATES:
        raise ValueError(f"a sum is of 1 to {MAX_UPDATES} messages, got {len(messages)}.")
    total = np.zeros(len(messages[0]), dtype=np.uint64)
    for message in messages:
        total += from_bytes(message)  # modulo 2⁶⁴, which 2⁴⁸ divides
    return total
