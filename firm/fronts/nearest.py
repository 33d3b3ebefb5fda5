"""Selects models for a target preference: the nearest one, or a mixture of several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from firm.fronts.dominance import non_dominated
from firm.fronts.front import Front, Point
from firm.solvers.checks import as_shares

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
    mixtures = [
        mixture
        for seed in sorted({point.seed for point in front.points})
        for mixture in _mixtures(sound(front).of_seed(seed), shares)
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
    speaking = replace(front, points=tuple(p for p in front.points if p.collapse is None))
    if not speaking.points:
        return speaking
    kept = non_dominated(speaking.selection_rewards())
    points = tuple(p for p, is_kept in zip(speaking.points, kept, strict=True) if is_kept)
    return _with_preference(replace(speaking, points=points))


@dataclass(frozen=True)
class _Mixture:
    points: list[Point]
    shares: list[float]
    spread: float
    """Mean squared distance of the preferences from the target, rounded to twelve digits so that
    rounding errors do not break ties."""
    value: float
    """Expected reward under the target preference."""


def _mixtures(front: Front, target: np.ndarray) -> Iterator[_Mixture]:
    """Yields all mixtures of at most M models that give the target with positive shares."""
    preferences, values = front.preferences(), front.selection_rewards() @ target
    distances = np.linalg.norm(preferences - target, axis=1)
    for size in range(1, min(len(front.objectives), len(front.points)) + 1):
        sets = np.array(list(combinations(range(len(front.points)), size)))  # [K, size]
        corners = preferences[sets]  # [K, size, M]
        shares = target @ np.linalg.pinv(corners)  # [K, size]
        misses = np.abs((shares[:, None] @ corners)[:, 0] - target).max(axis=1)
        for index in np.flatnonzero((misses <= _SAME) & (shares > _SAME).all(axis=1)):
            chosen, parts = sets[index], shares[index] / shares[index].sum()
            yield _Mixture(
                [front.points[i] for i in chosen],
                parts.tolist(),
                round(float(parts @ distances[chosen] ** 2), 12),
                float(parts @ values[chosen]),
            )
