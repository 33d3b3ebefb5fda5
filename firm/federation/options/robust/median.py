"""Coordinate-wise median of updates."""

from collections.abc import Sequence

import torch

from firm.base.state import State
from firm.federation.aggregation import by_client, update_lengths
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.options.robust.rule import RobustConfig, robust_rule
from firm.federation.options.robust.updates import merged_update, stacks


def coordinate_median(rows: torch.Tensor) -> torch.Tensor:
    """Returns the median of each coordinate, [N, ...] to float64 [...].

    For even N it is the midpoint of the two middle values. Yin et al. (2018), "Byzantine-Robust
    Distributed Learning: Towards Optimal Statistical Rates", arXiv:1803.01498, Definition 1: with f
    < N/2 attackers every coordinate stays within the range of the honest values. The result is
    bitwise independent of the order of the rows.
    """
    ordered = rows.double().sort(dim=0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


@robust_rule("median")
def _median(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    merged = {name: coordinate_median(rows) for name, rows in stacks(start, updates)}
    distances = update_lengths(merged, updates)
    return [merged_update(merged, start)], {"distances": by_client(updates, distances)}
