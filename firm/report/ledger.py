"""Bytes sent by a run, and the bytes that other algorithms would have sent."""

from itertools import accumulate

import firm.federation.strategies  # noqa: F401 - each strategy registers its rival
from firm.federation.rivals import RIVALS
from firm.report.record import Record


def uploads_so_far(record: Record, rival: str) -> list[tuple[int, int]]:
    """Returns the bytes that a rival would have uploaded up to each round, with the round.

    Counts only clients whose updates arrived. Empty if the run does not log its sizes.
    """
    header = record.header
    if not {"num_trainable", "adapter_bytes"} <= header.keys():
        return []
    sizes = header["num_trainable"], header["adapter_bytes"]
    each = RIVALS[rival].upload(len(record.objectives), *sizes)
    totals = accumulate(each * len(row.get("clients") or ()) for row in record.rounds)
    return [(row["round"], total) for row, total in zip(record.rounds, totals, strict=True)]


def total_bytes(record: Record, key: str) -> int:
    """Returns the bytes measured in a whole run, in the direction bytes_up or bytes_down."""
    return sum(row.get(key) or 0 for row in record.rounds)
