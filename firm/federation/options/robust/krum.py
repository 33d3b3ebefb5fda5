"""Krum and Multi-Krum: select the updates that are closest to their neighbours."""

from collections.abc import Sequence
from math import inf

import torch

from firm.base.state import State
from firm.federation.aggregation import by_client
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.options.robust.rule import RobustConfig, robust_rule
from firm.federation.options.robust.updates import stacks


def squared_distances(rows: torch.Tensor) -> torch.Tensor:
    """Returns the squared distances between all pairs of rows, [N, ...] to float64 [N, N].

    Computed from differences: inner products lose all digits when rows are close.
    """
    squares = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        for j in range(i):
            difference = row.double() - rows[j].double()
            squares[i, j] = squares[j, i] = difference.square().sum()
    return squares


def krum_scores(squares: torch.Tensor, num_attackers: int) -> torch.Tensor:
    """Returns each update's score: the sum of squared distances to its nearest neighbours.

    Blanchard et al. (2017), "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NIPS 2017 (preprint arXiv:1703.02757), use the N - f - 2 nearest neighbours, so that
    the neighbours of an honest-looking update include honest ones. Krum tolerates f attackers if
    N ≥ 2f + 3.

    Args:
        squares: Squared distances between all pairs, shape [N, N].
        num_attackers: f, from 0 to (N - 3)/2.

    Returns:
        float64 [N], non-negative.
    """
    others = squares.double().clone().fill_diagonal_(inf)
    return others.sort(dim=1).values[:, : len(squares) - num_attackers - 2].sum(dim=1)


def krum(squares: torch.Tensor, num_attackers: int, *, num_chosen: int = 1) -> list[int]:
    """Returns the indices of the updates with the smallest scores, in ascending order.

    With ``num_chosen`` = m = 1 this is Krum, which returns a single update with its client's noise;
    with larger m, up to N, it is Multi-Krum. The authors do not prescribe m; ``robust_updates``
    uses N - f, the number of honest updates. Ties are broken in favour of the first update.
    """
    scores = krum_scores(squares, num_attackers)
    return sorted(scores.argsort(stable=True)[:num_chosen].tolist())


@robust_rule("krum", margin=3, needs_attackers=True)
@robust_rule("multi_krum", margin=3, needs_attackers=True)
def _krum(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    count = len(updates)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for _, rows in stacks(start, updates):
        squares += squared_distances(rows)
    if count < 3:  # no attackers left, and too few neighbours to compare
        return list(updates), {"chosen": [update.client for update in updates]}
    num_chosen = 1 if cfg.rule == "krum" else count - num_attackers
    chosen = [updates[i] for i in krum(squares, num_attackers, num_chosen=num_chosen)]
    return chosen, {
        "chosen": [update.client for update in chosen],
        "scores": by_client(updates, krum_scores(squares, num_attackers).tolist()),
    }
