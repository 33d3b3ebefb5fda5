"""Masks for secure aggregation: a server adds vectors that it cannot read.

The additively homomorphic stream cipher of Castelluccia, Mykletun and Tsudik (2005), "Efficient
Aggregation of Encrypted Data in Wireless Sensor Networks" (doi:10.1109/MOBIQUITOUS.2005.25), on
integers modulo 2⁴⁸. A holder of the key K sends c = x + F_K(nonce), with a fresh nonce for every
message. The sum of messages is Σx + ΣF_K(nonce): with K and the nonces the masks can be removed,
without them the sum is uniformly random. Only the sum of exactly these messages can be unmasked,
so a single message cannot be unmasked as a sum of several. However, messages are not bound to a
round or sender: two messages with the same content are unmasked as a sum of two.

F_K is SHAKE-256 of the key and the nonce, a pseudo-random function of 256 bits of key.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

NUM_BYTES = 6
"""Bytes of a number as it travels."""
STEP = 2.0**-28
"""Distance of two numbers that can be told apart: a rounding error of at most 2e-9."""
MAX_MESSAGES = 1024
"""Most messages in a sum."""
LARGEST = 2 ** (8 * NUM_BYTES - 1) * STEP / MAX_MESSAGES
"""Magnitude below which a number must be for any such sum to be right: 512."""
KEY_BYTES = 32
NONCE_BYTES = 16

_MODULUS = np.uint64(2 ** (8 * NUM_BYTES))


class Key:
    """Secret that masks messages and unmasks their sums; shared by all sites, not by the server.

    Attributes:
        identity: Digest that distinguishes keys without revealing them.
    """

    def __init__(self, content: bytes) -> None:
        if len(content) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(content)}.")
        self._content = content
        self.identity = hashlib.sha256(b"identity of a masking key" + content).hexdigest()[:16]

    @classmethod
    def generate(cls) -> Self:
        """Returns a new key from the operating system's entropy."""
        return cls(os.urandom(KEY_BYTES))

    @property
    def content(self) -> bytes:
        """The secret bytes of the key, 32 bytes."""
        return self._content

    def __repr__(self) -> str:
        return f"Key({self.identity})"  # logs must not contain the secret

    def mask(self, nonce: bytes, size: int) -> np.ndarray:
        """Returns F_K(nonce): integers modulo 2⁴⁸, shape [size]."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, got {len(nonce)}.")
        stream = hashlib.shake_256(self._content + nonce).digest(NUM_BYTES * size)
        return _integers(np.frombuffer(stream, dtype=np.uint8).reshape(size, NUM_BYTES))


def masked(values: np.ndarray, key: Key) -> tuple[bytes, torch.Tensor]:
    """Returns a fresh nonce, and the values in multiples of STEP, masked with it.

    Args:
        values: Float64 [d], each below LARGEST in magnitude.
        key: K.

    Returns:
        The nonce and the message, uint8 [d, 6].

    Raises:
        ValueError: A value is too large, or not finite.
    """
    largest = np.abs(values).max(initial=0.0)
    if not np.rint(largest / STEP) * STEP < LARGEST:
        raise ValueError(
            f"a number of magnitude {largest:.4g} cannot be added under masks, which hold less "
            f"than {LARGEST:g}."
        )
    nonce = os.urandom(NONCE_BYTES)
    whole = np.rint(values / STEP).astype(np.int64).astype(np.uint64)  # modulo 2⁶⁴
    return nonce, _as_bytes(whole + key.mask(nonce, len(values)))


def added(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of messages, uint8 [d, 6]; no key is needed.

    Raises:
        ValueError: There are no messages, or more than MAX_MESSAGES.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise ValueError(f"a sum is of 1 to {MAX_MESSAGES} messages, got {len(messages)}.")
    total = np.zeros(len(messages[0]), dtype=np.uint64)
    for message in messages:
        total += _integers(message.numpy())
    return _as_bytes(total)


def opened(total: torch.Tensor, nonces: Sequence[bytes], key: Key) -> np.ndarray:
    """Returns the sum of the values behind the messages with these nonces, float64 [d].

    For other messages, or with another key, the result is random.
    """
    numbers = _integers(total.numpy())
    for nonce in nonces:
        numbers -= key.mask(nonce, len(numbers))  # modulo 2⁶⁴, which 2⁴⁸ divides
    numbers %= _MODULUS
    signed = numbers.astype(np.int64)
    signed[numbers >= _MODULUS // np.uint64(2)] -= int(_MODULUS)
    return signed * STEP


def _as_bytes(numbers: np.ndarray) -> torch.Tensor:
    """Returns integers modulo 2⁴⁸ as uint8 [d, 6], the lowest byte first."""
    columns = numbers.astype("<u8").view(np.uint8).reshape(len(numbers), 8)
    return torch.from_numpy(columns[:, :NUM_BYTES].copy())


def _integers(columns: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(columns), 8), dtype=np.uint8)
    padded[:, :NUM_BYTES] = columns
    return padded.view("<u8").reshape(-1).astype(np.uint64)
