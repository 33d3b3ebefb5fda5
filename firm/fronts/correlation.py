"""Agreement of models with their preferences: does more weight on an objective raise its reward?"""

from dataclasses import dataclass
from math import atanh, sqrt, tanh
from statistics import NormalDist

import numpy as np

from firm.fronts.front import Front, mean_front


def preference_correlations(front: Front) -> dict[str, float | None]:
    """Returns Spearman's rank correlation of preference and reward, by objective.

    Covers all points with a preference, of all seeds, including collapsed ones. None if the reward
    does not vary or the points have fewer than three distinct shares of the objective: with two, ρ
    is always ±1.
    """
    preferences, rewards = front.preferences(), front.rewards()
    has_preference = ~np.isnan(preferences).any(axis=1)
    columns = zip(preferences[has_preference].T.round(9), rewards[has_preference].T, strict=True)
    return {
        name: rank_correlation(shares, reward) if len(np.unique(shares)) > 2 else None
        for name, (shares, reward) in zip(front.objectives, columns, strict=True)
    }


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Returns Spearman's ρ of two arrays [N]; ties get their mean rank.

    None if either of them is constant.
    """
    from scipy.stats import rankdata  # takes half a second to import

    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1].clip(-1, 1))


def correlation_interval(
    correlation: float, num_points: int, *, level: float = 0.95
) -> tuple[float, float]:
    """Returns an approximate confidence interval of Spearman's ρ, within [-1, 1].

    The interval of Bonett and Wright (2000), doi:10.1007/BF02294183, for N points: tanh(artanh ρ ±
    q √((1 + ρ²/2)/(N − 3))). With three points or fewer it is [-1, 1]. A ρ of ±1 has an infinite
    artanh: it is one end itself, and the other end is that of the nearest possible ρ, with two
    neighbours swapped.

    >>> [round(end, 2) for end in correlation_interval(0.95, 9)]
    [0.7, 0.99]
    """
    if num_points <= 3:
        return -1.0, 1.0
    largest = 1 - 12 / (num_points * (num_points**2 - 1))
    rho = min(max(correlation, -largest), largest)
    half = NormalDist().inv_cdf((1 + level) / 2) * sqrt((1 + rho**2 / 2) / (num_points - 3))
    low, high = tanh(atanh(rho) - half), tanh(atanh(rho) + half)
    return (low if correlation > -1 else -1.0), (high if correlation < 1 else 1.0)


@dataclass(frozen=True)
class Violation:
    """A case in which more weight on an objective gave less of its reward."""

    objective: str
    lower: float
    """Share of the preference, in [0, 1]."""
    higher: float
    """The next larger share among the trained ones."""
    fall: float
    """Decrease of the mean reward from `lower` to `higher`, positive."""


def monotone_violations(front: Front, *, tolerance: float = 0.0) -> list[Violation]:
    """Returns the cases in which an objective's mean reward falls as its share increases.

    The mean at a share is over the seeds of each preference and, with three or more objectives,
    over all preferences that give the objective this share. Only neighbouring shares are compared.
    Points without a preference are excluded, as are decreases up to the tolerance, for which the
    rewards' standard error is a sensible choice.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be non-negative, got {tolerance}.")
    means = mean_front(front)
    violations = []
    for index, objective in enumerate(front.objectives):
        shares = sorted({preference[index] for preference in means})
        levels = [np.mean([r[index] for p, r in means.items() if p[index] == s]) for s in shares]
        violations += [
            Violation(objective, shares[i], shares[i + 1], float(levels[i] - levels[i + 1]))
            for i in range(len(shares) - 1)
            if levels[i] - levels[i + 1] > tolerance
        ]
    return violations
