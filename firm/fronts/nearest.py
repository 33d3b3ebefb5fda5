"""Selects models for a target preference: the nearest one, or a mixture of several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog

from firm.fronts.dominance import non_dominated
from firm.fronts.front import Front, Point
from firm.solvers.checks import as_shares

LP_TOLERANCE = 1e-7
"""Reduced costs below this count as zero; that is the solver's own tolerance."""
_SAME = 1e-9
"""Preferences and shares closer than this count as equal, because of rounding."""


def nearest(front: Front, target: Sequence[float]) -> Point:
    """Returns the model whose preference is nearest to the target preference [M].

    The distance is Euclidean, after scaling both to sum 1. Ties, such as the seeds of a preference,
    are broken by the best mean reward under `target`. Excludes dominated and collapsed models.

    Raises:
        ValueError: When the target preference is invalid, or no eligible model has a preference.
    """
    shares = _target_shares(front, target)
    candidates = sound(front)
    check_eligible(candidates, front)
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
    eligible, found = sound(front), []
    for seed in sorted({point.seed for point in eligible.points}):
        own = eligible.of_seed(seed)
        preferences, values = own.preferences(), own.selection_rewards() @ shares
        mixture = _closest_mixture(preferences, values, shares)
        spread = mixture @ ((preferences - shares) ** 2).sum(axis=1)
        parts = [(p, float(s)) for p, s in zip(own.points, mixture, strict=True) if s > 0]
        if parts:
            found.append((round(float(spread), 12), -float(mixture @ values), parts))
    if not found:
        return [(nearest(front, target), 1.0)]
    return min(found, key=lambda entry: entry[:2])[2]


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


def check_eligible(candidates: Front, front: Front) -> None:
    """Raises ``ValueError`` if no model of a front is eligible; see `sound`."""
    if not candidates.points:
        raise ValueError(
            f"none of the {len(front.points)} models has a preference and is neither dominated nor "
            "collapsed: train more models."
        )


def sound(front: Front, gains: Callable[[Point], Sequence[float]] = lambda _: ()) -> Front:
    """Returns the models with a preference that are neither collapsed nor dominated.

    Args:
        front: The measured models.
        gains: What counts besides the rewards, where more is better.
    """
    uncollapsed = replace(front, points=tuple(p for p in front.points if p.collapse is None))
    if not uncollapsed.points:
        return uncollapsed
    others = [list(gains(point)) for point in uncollapsed.points]
    kept = non_dominated(np.hstack([uncollapsed.selection_rewards(), others]))
    pairs = zip(uncollapsed.points, kept, strict=True)
    points = tuple(p for p, is_kept in pairs if is_kept and p.preference is not None)
    return replace(uncollapsed, points=points)


def _closest_mixture(preferences: np.ndarray, values: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the shares [N] of the mixture that gives the target with the smallest spread.

    The smallest spread is the optimum of a linear program, whose solutions contain no model with a
    positive reduced cost; a second program takes the one with the highest value. A vertex has at
    most M models.

    Args:
        preferences: Preferences of N models, shape [N, M].
        values: Their expected rewards under the target preference, shape [N].
        target: The target preference, shape [M].

    Returns:
        Shares that sum to 1; zeros if the preferences do not enclose the target.
    """
    costs, shares = ((preferences - target) ** 2).sum(axis=1), np.zeros(len(preferences))
    settings: Any = {"b_eq": target, "bounds": (0, None), "method": "highs-ds"}
    settings["options"] = {"primal_feasibility_tolerance": 1e-10}
    closest = linprog(costs, A_eq=preferences.T, **settings)
    if closest.x is None:
        return shares
    kept = np.flatnonzero(costs - preferences @ closest.eqlin.marginals <= LP_TOLERANCE)
    best = linprog(-values[kept], A_eq=preferences[kept].T, **settings)
    chosen = kept[(closest.x[kept] if best.x is None else best.x) > _SAME]
    shares[chosen] = target @ np.linalg.pinv(preferences[chosen])  # exact, unlike the program's
    return shares / shares.sum()
