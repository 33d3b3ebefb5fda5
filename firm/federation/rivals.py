"""Algorithms that reports compare with a run by upload size."""

from collections.abc import Callable
from dataclasses import dataclass

FLOAT_BYTES = 4
"""Jacobians are sent in single precision."""


@dataclass(frozen=True)
class Rival:
    """Upload size of an algorithm."""

    upload: Callable[[int, int, int], int]
    """Bytes of parameters and gradients that a client uploads per round, as a function of the
    number of objectives M, the number of trainable parameters d, and the adapter's bytes. Excludes
    names, shapes and metrics, some kilobytes that are the same for every algorithm."""
    text: str
    """Description of the upload, to follow "would have uploaded"."""


RIVALS: dict[str, Rival] = {
    "FedCMOO-A": Rival(  # one-way FedCMOO without a compressor, on adapters
        lambda num_objectives, num_trainable, adapter_bytes: (
            adapter_bytes + FLOAT_BYTES * num_objectives * num_trainable
        ),
        f"the adapter and an uncompressed Jacobian of M × d numbers of {FLOAT_BYTES} bytes",
    ),
    "FSMGDA": Rival(
        lambda num_objectives, num_trainable, adapter_bytes: num_objectives * adapter_bytes,
        "one adapter for each objective",
    ),
}
"""Rivals by their names in reports."""
