"""Krum and Multi-Krum: the updates with the nearest neighbours."""

from collections.abc import Sequence
from math import inf

import torch

from firm.federation.aggregation import by_client
from firm.federation.client import Adapter, State
from firm.federation.messages import Update
from firm.federation.options.robust.rule import RobustConfig, robust_rule, stacks


def squared_distances(rows: torch.Tensor) -> torch.Tensor:
    """Returns the squared distances of all pairs of rows, [N, ...] to float64 [N, N].

    They are of differences, not of inner products, which lose all digits where rows are close.
    """
    squares = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        for j in range(i):
            difference = row.double() - rows[j].double()
            squares[i, j] = squares[j, i] = difference.square().sum()
    return squares


def krum_scores(squares: torch.Tensor, num_attackers: int) -> torch.Tensor:
    """Returns each update's score: the sum of its squared distances to its nearest others.

    Blanchard et al. (2017), "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NIPS 2017 (preprint arXiv:1703.02757): the N - f - 2 nearest others, so that an update
    that looks honest has honest ones near. It tolerates f attackers where N ≥ 2f + 3.

    Args:
        squares: Squared distances of all pairs, shape [N, N].
        num_attackers: f, from 0 to (N - 3)/2.

    Returns:
        float64 [N], non-negative.
    """
    count = len(squares)
    if num_attackers < 0 or count < 2 * num_attackers + 3:
        raise ValueError(
            f"Krum needs 2f + 3 updates for f = {num_attackers} attackers, f not negative, got "
            f"{count}."
        )
    others = squares.double().clone().fill_diagonal_(inf)
    return others.sort(dim=1).values[:, : count - num_attackers - 2].sum(dim=1)


def krum(squares: torch.Tensor, num_attackers: int, *, num_chosen: int = 1) -> list[int]:
    """Returns which updates Krum chooses: those of the smallest scores, in the given order.

    One (m = 1) is Krum, which gives one update and its client's noise as they are; more, up to N,
    is Multi-Krum. Its authors leave m open; ``robust_updates`` takes N - f, as many as are honest.
    Of equal scores the first counts.
    """
    scores = krum_scores(squares, num_attackers)
    if not 1 <= num_chosen <= len(scores):
        raise ValueError(f"num_chosen must be from 1 to {len(scores)}, got {num_chosen}.")
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
    if count < 3:  # no attacker is left among them, and nobody has two neighbours to compare
        return list(updates), {"chosen": [update.client for update in updates]}
    num_chosen = 1 if cfg.rule == "krum" else count - num_attackers
    chosen = [updates[i] for i in krum(squares, num_attackers, num_chosen=num_chosen)]
    return chosen, {
        "chosen": [update.client for update in chosen],
        "scores": by_client(updates, krum_scores(squares, num_attackers).tolist()),
    }
