"""Exact hypervolume dominated by a set of points, relative to a reference point.

Implements up to three objectives; more require the optional package moocore.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from firm.base.extras import install_command
from firm.fronts.dominance import as_points


def hypervolume(
    points: ArrayLike,
    reference: ArrayLike,
    *,
    names: Sequence[str] | None = None,
    objectives: Sequence[str] | None = None,
) -> float:
    """Returns the volume of the region above the reference and dominated by at least one point.

    More is better in every objective. Dominated and duplicate points add nothing.

    Args:
        points: Shape [N, M].
        reference: Reference point, strictly below every point in every objective, shape [M].
        names: N names of the points for error messages; their indices by default.
        objectives: M names of the objectives for error messages; their indices by default.

    Raises:
        ValueError: When the shape is wrong, points are not finite, a point is not above the
            reference, or there are more than three objectives and moocore is not installed.

    >>> hypervolume([[3.0, 1.0], [1.0, 2.0]], [0.0, 0.0])
    4.0
    """
    points = as_points(points)
    corner = as_reference(reference, points.shape[1])
    if (wrong := points <= corner).any():
        point, objective = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            "the reference point must be strictly below every point in every objective: point "
            f"{names[point] if names else point} has {points[point, objective]:g} in objective "
            f"{objectives[objective] if objectives else objective}, the reference "
            f"{corner[objective]:g}; lower the reference or exclude the point."
        )
    return float(volumes(points - corner))


def as_reference(reference: ArrayLike, num_objectives: int) -> np.ndarray:
    """Returns a reference point as finite float64, shape [M], or raises ``ValueError``."""
    corner = np.asarray(reference, dtype=np.float64)
    if corner.shape != (num_objectives,) or not np.isfinite(corner).all():
        raise ValueError(
            f"the reference point must have one finite number for each of the {num_objectives} "
            f"objectives, got {corner.tolist()}."
        )
    return corner


def volumes(gains: np.ndarray) -> np.ndarray:
    """Returns the hypervolumes of many sets of points [..., N, M], measured from the origin.

    Negative coordinates are clipped to 0 and add nothing.
    """
    gains = np.maximum(gains, 0.0)
    num_objectives = gains.shape[-1]
    if num_objectives == 1:
        return gains[..., 0].max(axis=-1)
    if num_objectives == 2:
        return _areas(gains)
    if num_objectives == 3:
        return _solids(gains)
    return _by_moocore(gains)


def _areas(gains: np.ndarray) -> np.ndarray:
    """Sweeps the points by descending first objective, in strips of the running maximum height."""
    points = _by_falling(gains, 0)
    heights = np.maximum.accumulate(points[..., 1], axis=-1)  # [..., N]
    return (_steps(points[..., 0]) * heights).sum(axis=-1)


def _solids(gains: np.ndarray) -> np.ndarray:
    """Sweeps the points by descending third objective, in slabs with the area of those so far."""
    points = _by_falling(gains, 2)
    thickness = _steps(points[..., 2])  # [..., N]
    total = np.zeros(gains.shape[:-2])
    for index in range(gains.shape[-2]):
        total += thickness[..., index] * _areas(points[..., : index + 1, :2])
    return total


def _by_falling(gains: np.ndarray, objective: int) -> np.ndarray:
    order = np.argsort(-gains[..., objective], axis=-1)
    return np.take_along_axis(gains, order[..., None], axis=-2)


def _steps(falling: np.ndarray) -> np.ndarray:
    """Returns the difference of each value to the next, and of the last to 0, shape [..., N]."""
    return falling - np.concatenate([falling[..., 1:], np.zeros_like(falling[..., :1])], axis=-1)


def _by_moocore(gains: np.ndarray) -> np.ndarray:
    try:
        import moocore  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"the hypervolume of {gains.shape[-1]} objectives requires moocore, which is not "
            f"installed: {install_command('fronts')}."
        ) from None
    sets = gains.reshape(-1, *gains.shape[-2:])
    origin = np.zeros(gains.shape[-1])
    volumes = [moocore.hypervolume(-points, ref=origin) for points in sets]  # moocore minimises
    return np.array(volumes).reshape(gains.shape[:-2])
