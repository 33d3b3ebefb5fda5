"""Euclidean projections onto the simplex."""

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
