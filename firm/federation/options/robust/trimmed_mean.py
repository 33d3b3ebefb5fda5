"""Coordinate-wise trimmed mean of updates."""

from collections.abc import Sequence

import torch

from firm.base.state import State
from firm.federation.aggregation import by_client
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.options.robust.rule import RobustConfig, robust_rule
from firm.federation.options.robust.updates import mean_of_rows, merged_update, stacks


def trimmed_mean(rows: torch.Tensor, num_trimmed: int) -> torch.Tensor:
    """Returns the mean over rows without the b extreme values per side, [N, ...] to [...].

    Yin et al. (2018), arXiv:1803.01498, Definition 2, with b = βN values trimmed on each side,
    b < N/2. With f ≤ b attackers every coordinate stays within the range of the honest values.
    Values are summed in float64 in ascending order, so that the result is bitwise independent of
    the order of the rows.
    """
    ordered = rows.double().sort(dim=0).values
    return mean_of_rows(ordered[num_trimmed : len(rows) - num_trimmed])


@robust_rule("trimmed_mean", needs_attackers=True)
def _trimmed_mean(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    merged, trimmed = {}, torch.zeros(len(updates), dtype=torch.int64)
    for name, rows in stacks(start, updates):
        merged[name] = trimmed_mean(rows, num_attackers)
        order = rows.argsort(dim=0, stable=True)
        outer = torch.cat([order[:num_attackers], order[len(order) - num_attackers :]])
        trimmed += outer.flatten().bincount(minlength=len(updates))
    size = sum(parameter.numel() for parameter in start.values())
    return [merged_update(merged, start)], {
        "trimmed": by_client(updates, trimmed.tolist()),
        "num_coordinates": size,
    }
