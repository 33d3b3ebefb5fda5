"""What a run sent, and what FedCMOO-A and FSMGDA would have sent in its place."""

from collections.abc import Callable
from itertools import accumulate

from firm.report.record import Record

FLOAT_BYTES = 4
"""Jacobians travel in single precision."""

UPLOADS: dict[str, Callable[[int, int, int], int]] = {
    "FIRM": lambda num_objectives, num_trainable, adapter_bytes: adapter_bytes,
    "FedCMOO-A": lambda num_objectives, num_trainable, adapter_bytes: (
        adapter_bytes + FLOAT_BYTES * num_objectives * num_trainable
    ),
    "FSMGDA": lambda num_objectives, num_trainable, adapter_bytes: num_objectives * adapter_bytes,
}
"""Bytes of parameters and gradients that one client uploads in one round, of M, d and the adapter's
bytes. Names, shapes and metrics come on top, some kilobytes with every algorithm alike.

FIRM sends the adapter, FedCMOO-A, the uncompressed FedCMOO with adapters, the Jacobian besides,
FSMGDA one adapter for each objective.
"""

WOULD_BE = ("FedCMOO-A", "FSMGDA")
"""The algorithms that a run is set beside."""


def uploads_so_far(record: Record, algorithm: str) -> list[tuple[int, int]]:
    """Returns rounds and the bytes that an algorithm would have uploaded up to each of them.

    The clients are those whose updates arrived. Nothing of a run that does not tell its sizes.
    """
    header = record.header
    if not {"num_trainable", "adapter_bytes"} <= header.keys():
        return []
    sizes = header["num_trainable"], header["adapter_bytes"]
    each = UPLOADS[algorithm](len(record.objectives), *sizes)
    totals = accumulate(each * len(row.get("clients") or ()) for row in record.rounds)
    return [(row["round"], total) for row, total in zip(record.rounds, totals, strict=True)]


def total_bytes(record: Record, key: str) -> int:
    """Returns the bytes measured in a whole run, in the direction bytes_up or bytes_down."""
    return sum(row.get(key) or 0 for row in record.rounds)
