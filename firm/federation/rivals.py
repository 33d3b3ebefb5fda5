"""Registry of algorithms that reports compare with a run by upload size."""

from collections.abc import Callable
from dataclasses import dataclass

FLOAT_BYTES = 4
"""Jacobians travel in single precision."""


@dataclass(frozen=True)
class Rival:
    """Uploads of an algorithm."""

    upload: Callable[[int, int, int], int]
    """Bytes of parameters and gradients that one client uploads in one round, of the number of
    objectives M, the number of trainable parameters d, and the adapter's bytes. Names, shapes and
    metrics come on top, some kilobytes with every algorithm alike."""
    text: str
    """The same in words, after "would have uploaded"."""


RIVALS: dict[str, Rival] = {}
"""By the name that reports call them."""
