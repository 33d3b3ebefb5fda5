"""Selects models for a target preference: the nearest one, or a mixture of several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

import numpy as np
from scipy.optimize import linprog

from firm.fronts.dominance import non_dominated
from firm.fronts.front import Front, Point
from firm.solvers.checks import as_shares

MAX_SETS = 20_000
"""Number of sets of models of which all mixtures are tried."""
LP_TOLERANCE = 1e-7
"""Reduced costs below this count as zero; that is the solver's own tolerance."""
_SAME = 1e-9
"""Preferences and shares closer than this count as equal, because of rounding."""


def nearest(front: Front, target: Sequence[float], *, any_point: bool = False) -> Point:
    """Returns the model whose preference is nearest to the target preference [M].

    The distance is Euclidean, after scaling both to sum 1. Ties, such as the seeds of a preference,
    are broken by the best mean reward under `target`. `any_point` includes dominated and collapsed
    models.

    Raises:
        ValueError: When the target preference is invalid, or no eligible model has a preference.
    """
    shares = _target_shares(front, target)
    candidates = _with_preference(front) if any_point else sound(front)
    if not candidates.points:
        raise ValueError(
            f"none of the {len(front.points)} models has a preference"
            f"{'' if any_point else ' and is neither dominated nor collapsed'}: train more models."
        )
    distances = np.linalg.norm(candidates.preferences() - shares, axis=1)
    values = candidates.selection_rewards() @ shares
    values = np.where(distances <= distances.min() + _SAME, values, -np.inf)
    return candidates.points[int(values.argmax())]


def neighbours(front: Front, target: Sequence[float]) -> list[tuple[Point, float]]:
    """Returns models of one seed with shares that mix their preferences into `target`.

    With two objectives these are the two neighbouring preferences, with three the corners of a
    triangle around `target`, or fewer models if they suffice. Among all mixtures that give it, the
    one with the smallest spread ``Σ share · |preference - target|²`` is chosen, which is a simplex
    of the Delaunay triangulation; ties are broken by the best expected reward under `target`.
    Excludes models that have collapsed, are dominated by any other model or have no preference.
    Falls back to the nearest model if no seed's preferences enclose the target.

    Returns:
        At most M models of one seed, which can be merged, with positive shares that sum to 1.

    Raises:
        ValueError: When the target preference [M] is invalid, or no model is eligible.
    """
    shares = _target_shares(front, target)
    eligible = sound(front)
    preferences, values = eligible.preferences(), eligible.selection_rewards() @ shares
    seeds = np.array([point.seed for point in eligible.points])
    mixtures = [
        mixture
        for own in (np.flatnonzero(seeds == seed) for seed in np.unique(seeds))
        for mixture in _mixtures(
            [eligible.points[index] for index in own], preferences[own], values[own], shares
        )
    ]
    if not mixtures:
        return [(nearest(front, target), 1.0)]
    best = min(mixtures, key=lambda mixture: (mixture.spread, -mixture.value))
    return list(zip(best.points, best.shares, strict=True))


@dataclass(frozen=True)
class Expectation:
    """Expected rewards of a mixture of models, assuming linearity between them."""

    rewards: dict[str, float]
    errors: dict[str, float]


def expected_rewards(shares: Sequence[tuple[Point, float]]) -> Expectation:
    """Interpolates the rewards of models by shares that sum to 1.

    This is an estimate, not a measurement: merged parameters need not attain the interpolated
    rewards. The errors are Σ share · error, an upper bound for any correlation of the points'
    errors. Adding squares would be too optimistic, since the points share their prompts.
    """
    total = sum(share for _, share in shares)
    if not abs(total - 1) <= 1e-6 or min(share for _, share in shares) < 0:
        raise ValueError(
            f"shares must be non-negative and sum to 1, got {[share for _, share in shares]}."
        )
    objectives = list(shares[0][0].rewards)
    return Expectation(
        {name: sum(share * point.rewards[name] for point, share in shares) for name in objectives},
        {name: sum(share * point.errors[name] for point, share in shares) for name in objectives},
    )


def _target_shares(front: Front, target: Sequence[float]) -> np.ndarray:
    return as_shares(target, len(front.objectives), name="the target preference")


def _with_preference(front: Front) -> Front:
    return replace(front, points=tuple(p for p in front.points if p.preference is not None))


def sound(front: Front) -> Front:
    """Returns the models with a preference that are neither collapsed nor dominated."""
    uncollapsed = replace(front, points=tuple(p for p in front.points if p.collapse is None))
    if not uncollapsed.points:
        return uncollapsed
    kept = non_dominated(uncollapsed.selection_rewards())
    points = tuple(p for p, is_kept in zip(uncollapsed.points, kept, strict=True) if is_kept)
    return _with_preference(replace(uncollapsed, points=points))


@dataclass(frozen=True)
class _Mixture:
    points: list[Point]
    shares: list[float]
    spread: float
    """Mean squared distance of the preferences from the target, rounded to twelve digits so that
    rounding errors do not break ties."""
    value: float
    """Expected reward under the target preference."""


def _mixtures(
    points: Sequence[Point], preferences: np.ndarray, values: np.ndarray, target: np.ndarray
) -> Iterator[_Mixture]:
    """Yields all mixtures of at most M models that give the target with positive shares.

    Of many models, only those that can be in one with the smallest spread are considered.

    Args:
        points: N models.
        preferences: Their preferences, shape [N, M].
        values: Their expected rewards under the target preference, shape [N].
        target: The target preference, shape [M].
    """
    most = min(preferences.shape)
    distances = np.linalg.norm(preferences - target, axis=1)
    kept = np.arange(len(points))
    if comb(len(points), most) > MAX_SETS:
        kept = _around(preferences, values, target)
    for size in range(1, min(most, len(kept)) + 1):
        sets = np.array(list(combinations(kept, size)))  # [K, size]
        corners = preferences[sets]  # [K, size, M]
        shares = target @ np.linalg.pinv(corners)  # [K, size]
        misses = np.abs((shares[:, None] @ corners)[:, 0] - target).max(axis=1)
        for index in np.flatnonzero((misses <= _SAME) & (shares > _SAME).all(axis=1)):
            chosen, parts = sets[index], shares[index] / shares[index].sum()
            yield _Mixture(
                [points[i] for i in chosen],
                parts.tolist(),
                round(float(parts @ distances[chosen] ** 2), 12),
                float(parts @ values[chosen]),
            )


def _around(preferences: np.ndarray, values: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the indices of models that can be in a mixture with the smallest spread.

    That is the optimum of a linear program, whose solutions contain no model with a positive
    reduced cost. Of equal preferences, the one with the highest value is enough.
    """
    order = np.argsort(-values, kind="stable")  # `unique` returns the first of equal ones
    _, first = np.unique(preferences[order].round(12), axis=0, return_index=True)
    kept = np.sort(order[first])
    costs = ((preferences[kept] - target) ** 2).sum(axis=1)
    best = linprog(costs, A_eq=preferences[kept].T, b_eq=target, bounds=(0, None))
    if best.x is None:  # the preferences do not enclose the target
        return kept[:0]
    is_tight = costs - preferences[kept] @ best.eqlin.marginals <= LP_TOLERANCE
    kept, shares = kept[is_tight], best.x[is_tight]
    most = preferences.shape[1]
    if comb(len(kept), most) > MAX_SETS:  # many on a sphere: one of the solutions is enough
        kept = kept[np.argsort(-shares, kind="stable")[:most]]
    return kept
