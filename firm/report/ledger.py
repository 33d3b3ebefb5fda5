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
"""Bytes that one client uploads in one round, of objectives, parameters and the adapter's bytes.

FIRM sends the adapter, FedCMOO-A, the uncompressed FedCMOO with adapters, the Jacobian besides,
FSMGDA one adapter for each objective.
"""

WOULD_BE = ("FedCMOO-A", "FSMGDA")
"""The algorithms that a run is set beside."""


def upload_bytes(
    algorithm: str, *, num_objectives: int, num_trainable: int, adapter_bytes: int
) -> int:
    """Returns the bytes of parameters and gradients that one client uploads in one round.

    Names, shapes and metrics come on top, some kilobytes with every algorithm alike.

    Args:
        algorithm: One of `UPLOADS`.
        num_objectives: M.
        num_trainable: Parameters of the adapter, d.
        adapter_bytes: Bytes of the adapter.

    Raises:
        ValueError: On another algorithm.

    >>> sizes = {"num_objectives": 2, "num_trainable": 1000, "adapter_bytes": 4000}
    >>> [upload_bytes(name, **sizes) for name in UPLOADS]
    [4000, 12000, 8000]
    """
    if algorithm not in UPLOADS:
        raise ValueError(f"algorithm must be one of {', '.join(UPLOADS)}, got {algorithm!r}.")
    return UPLOADS[algorithm](num_objectives, num_trainable, adapter_bytes)


def uploads_so_far(record: Record, algorithm: str) -> list[tuple[int, int]]:
    """Returns rounds and the bytes that an algorithm would have uploaded up to each of them.

    The clients are those whose updates arrived. Nothing of a run that does not tell its sizes.
    """
    header = record.header
    if not {"num_trainable", "adapter_bytes"} <= header.keys():
        return []
    each = upload_bytes(
        algorithm,
        num_objectives=len(record.objectives),
        num_trainable=header["num_trainable"],
        adapter_bytes=header["adapter_bytes"],
    )
    totals = accumulate(each * len(row.get("clients") or ()) for row in record.rounds)
    return [(row["round"], total) for row, total in zip(record.rounds, totals, strict=True)]


def total_bytes(record: Record, key: str) -> int:
    """Returns the bytes measured in a whole run, in the direction bytes_up or bytes_down."""
    return sum(row.get(key) or 0 for row in record.rounds)
