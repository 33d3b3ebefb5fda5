"""Euclidean projections onto the simplex and onto its intersection with a box."""

import numpy as np

from firm.solvers.checks import ArrayT, as_float64, like


def project_to_simplex(values: ArrayT) -> ArrayT:
    """Returns the nearest point of the simplex to each vector [..., M].

    >>> import torch
    >>> project_to_simplex(torch.tensor([0.5, 2.0, -1.0]))
    tensor([0., 1., 0.])
    """
    points = as_float64(values, name="values")
    if points.ndim == 0 or points.shape[-1] == 0:
        raise ValueError(f"values must have shape [..., M] with M >= 1, got {list(points.shape)}.")
    return like(simplex_projection(points), values)


def simplex_projection(points: np.ndarray) -> np.ndarray:
    """Returns the projections of float64 vectors [..., M], by sorting and thresholding."""
    points = points - points.max(axis=-1, keepdims=True)  # invariant to shifts; avoids large sums
    ordered = -np.sort(-points, axis=-1)
    counts = np.arange(1, points.shape[-1] + 1)
    shifts = (np.cumsum(ordered, axis=-1) - 1.0) / counts
    num_positive = (ordered > shifts).sum(axis=-1, keepdims=True)
    nearest = np.maximum(points - np.take_along_axis(shifts, num_positive - 1, axis=-1), 0.0)
    return nearest / nearest.sum(axis=-1, keepdims=True)


def box_projection(points: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Projects float64 vectors [..., M] onto the simplex within bounds [M].

    The result is clip(values - τ, lower, upper) with the τ that makes the sum 1. The sum is
    piecewise linear in τ, so τ is exact. The bounds must be feasible.
    """
    points = points - points.max(axis=-1, keepdims=True)
    shifts = np.sort(
        np.concatenate([points - lower, points - upper], axis=-1), axis=-1
    )  # [..., 2M]
    clipped = np.clip(points[..., None, :] - shifts[..., None], lower, upper)
    sums = clipped.sum(axis=-1)  # decreases from Σ upper to Σ lower
    last = np.clip((sums >= 1.0).sum(axis=-1, keepdims=True) - 1, 0, shifts.shape[-1] - 2)
    above, below = (np.take_along_axis(sums, last + step, axis=-1) for step in (0, 1))
    left, right = (np.take_along_axis(shifts, last + step, axis=-1) for step in (0, 1))
    fall = above - below
    share = np.divide(above - 1.0, fall, out=np.zeros_like(fall), where=fall > 0)
    return np.clip(points - (left + np.clip(share, 0.0, 1.0) * (right - left)), lower, upper)
