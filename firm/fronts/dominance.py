"""Pareto dominance between points; more is better in every objective."""

import numpy as np
from numpy.typing import ArrayLike


def as_points(points: ArrayLike) -> np.ndarray:
    """Returns N points as finite float64, shape [N, M], or raises ``ValueError``."""
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.size == 0:
        raise ValueError(
            f"points must have shape [N, M] with N, M >= 1, one row per point and one column per "
            f"objective, got {list(points.shape)}."
        )
    if not np.isfinite(points).all():
        point, objective = np.argwhere(~np.isfinite(points))[0].tolist()
        raise ValueError(
            f"points must be finite, got {points[point, objective]} at point {point}, objective "
            f"{objective}."
        )
    return points


def dominators(points: ArrayLike) -> list[list[int]]:
    """Returns, for every point of [N, M], the indices of the points that dominate it.

    A point dominates another if it is at least as good in every objective and better in one.

    >>> dominators([[0.5, 0.5], [0.6, 0.5], [0.2, 0.9]])
    [[1], [], []]
    """
    return [np.flatnonzero(column).tolist() for column in _dominates(as_points(points)).T]


def non_dominated(points: ArrayLike) -> np.ndarray:
    """Returns a mask of the points [N, M] that no other point dominates, bool [N].

    >>> non_dominated([[0.5, 0.5], [0.6, 0.5], [0.2, 0.9]]).tolist()
    [False, True, True]
    """
    return ~np.any(_dominates(as_points(points)), axis=0)


def _dominates(points: np.ndarray) -> np.ndarray:
    """Returns whether point i dominates point j, bool [N, N]."""
    first, second = points[:, None], points[None]  # [N, 1, M], [1, N, M]
    return np.all(first >= second, axis=2) & np.any(first > second, axis=2)
