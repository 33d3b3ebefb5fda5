"""Uncertainty of a hypervolume due to the sampling of prompts."""

import numpy as np
from numpy.typing import ArrayLike

from firm.fronts.hypervolume import as_reference, volumes
from firm.solvers.checks import check_finite


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
        groups: Prompt index of each row, from 0 to P - 1, shape [R]; rows of a prompt are drawn
            together. By default every row has its own prompt.
        num_resamples: Number of resamples.
        level: Share of the resamples inside the interval, in (0, 1).
    """
    if num_resamples < 1 or not 0 < level < 1:
        raise ValueError(
            f"num_resamples must be positive and level in (0, 1), got {num_resamples} and {level}."
        )
    points = _as_points_by_row(points)
    num_points, num_rows, num_objectives = points.shape
    groups = np.arange(num_rows) if groups is None else np.asarray(groups)
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


def _as_points_by_row(points: ArrayLike) -> np.ndarray:
    try:
        points = np.asarray(points, dtype=np.float64)
    except ValueError:
        shapes = sorted({np.shape(rows) for rows in points})  # pyright: ignore
        raise ValueError(
            f"all points must have rewards on the same rows and objectives, got shapes {shapes}."
        ) from None
    if points.ndim != 3 or points.size == 0 or points.shape[1] < 2:
        raise ValueError(
            "points must have shape [N, R, M], one value per point, row and objective, with at "
            f"least 2 rows, got {list(points.shape)}."
        )
    is_missing = np.isnan(points)
    check_finite(np.where(is_missing, 0.0, points), name="points")
    if (num_rewards := (~is_missing).sum(axis=1).min()) < 2:
        raise ValueError(
            "points must have rewards of each objective on at least 2 rows, got "
            f"{num_rewards}: evaluate on more prompts to which every reward applies."
        )
    return points
