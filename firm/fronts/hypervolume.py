"""Exact hypervolume dominated by a set of points, and its uncertainty.

Implements up to three objectives; more require the optional package moocore.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from firm.base.extras import install_command
from firm.fronts.dominance import as_points
from firm.solvers.checks import check_finite


class PackageMissing(ValueError):
    """Raised when a hypervolume needs a package that is not installed."""


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
        raise PackageMissing(
            f"the hypervolume of {gains.shape[-1]} objectives requires moocore, which is not "
            f"installed: {install_command('fronts')}."
        ) from None
    sets = gains.reshape(-1, *gains.shape[-2:])
    origin = np.zeros(gains.shape[-1])
    volumes = [moocore.hypervolume(-points, ref=origin) for points in sets]  # moocore minimises
    return np.array(volumes).reshape(gains.shape[:-2])


def bootstrap_hypervolume(
    points: ArrayLike,
    reference: ArrayLike,
    *,
    generator: np.random.Generator,
    groups: ArrayLike | None = None,
    num_resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Returns the bootstrap percentile interval of a hypervolume over prompts, as (low, high).

    Prompts are resampled with replacement, jointly for all points, because the points were measured
    on the same prompts. The interval reflects the choice of prompts for these models, not the
    variation between seeds. Since a hypervolume takes the best of noisy means, both the estimate
    and its resamples are biased slightly upwards.

    Args:
        points: Rewards of N points on R ≥ 2 rows of data, shape [N, R, M]; NaN where a reward does
            not apply to a row, which means then exclude. Resamples in which a mean has no rows are
            excluded as well.
        reference: Reference point, shape [M]. Resampled points that are not above it add nothing.
        generator: Random generator that draws the prompts.
        groups: Prompt of each row, as numbers, shape [R]; rows of a prompt are drawn together. By
            default every row has its own prompt.
        num_resamples: Number of resamples.
        level: Share of the resamples inside the interval, in (0, 1).
    """
    if num_resamples < 1 or not 0 < level < 1:
        raise ValueError(
            f"num_resamples must be positive and level in (0, 1), got {num_resamples} and {level}."
        )
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 3 or points.size == 0 or (~np.isnan(points)).sum(axis=1).min() < 2:
        raise ValueError(
            "points must have shape [N, R, M], with rewards of each objective on at least 2 rows, "
            f"got {list(points.shape)}: evaluate on more prompts to which every reward applies."
        )
    check_finite(np.nan_to_num(points, posinf=np.inf, neginf=-np.inf), name="points")
    num_points, num_rows, num_objectives = points.shape
    groups = np.arange(num_rows) if groups is None else np.asarray(groups)
    groups = np.unique(groups, return_inverse=True)[1]
    num_prompts = int(groups.max()) + 1
    corner = as_reference(reference, num_objectives)
    counts = generator.multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples
    )[:, groups]  # [resamples, R]
    by_row = points.swapaxes(0, 1).reshape(num_rows, -1)  # [R, N M]
    num_rewards = counts @ ~np.isnan(by_row)  # [resamples, N M]
    has_all = num_rewards.all(axis=1)
    means = (counts[has_all] @ np.nan_to_num(by_row)) / num_rewards[has_all]
    means = means.reshape(-1, num_points, num_objectives)
    tail = (1 - level) / 2
    low, high = np.quantile(volumes(means - corner), [tail, 1 - tail])
    return float(low), float(high)
