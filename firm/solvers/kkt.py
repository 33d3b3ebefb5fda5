"""How far weights are from the optimum: the check that every solver's answer passes."""

import numpy as np
import torch

from firm.solvers.checks import ArrayT, as_float64, as_gram, like, rounding


def kkt_gap(gram: ArrayT, weights: torch.Tensor | np.ndarray) -> ArrayT:
    """Returns by how much weights miss the optimality conditions of min λᵀGλ on the simplex.

    At an optimum every (Gλ)ᵢ is at least λᵀGλ. The gap is the largest shortfall, relative to what
    the Cauchy-Schwarz inequality allows, so that it neither changes when G is scaled nor hides
    short gradients behind long ones::

        maxᵢ (λᵀGλ - (Gλ)ᵢ) / √(D · max(Gᵢᵢ, D)),  D = Σᵢⱼ λᵢ |Gᵢⱼ| λⱼ.

    Its square is about the relative decrease of λᵀGλ that a step towards objective i would give.

    Args:
        gram: Gram matrix of the objectives' gradients, shape [..., M, M]; add the regulariser to
            check regularised weights.
        weights: Weights on the simplex, shape [..., M].

    Returns:
        The gap, shape [...]: non-negative, 0 at the optimum, about 1e-16 at a float64 solution.

    Raises:
        ValueError: When ``gram`` is no Gram matrix, or the weights' shape is not its own, or they
            are not on the simplex.

    >>> kkt_gap(torch.eye(2), torch.tensor([0.5, 0.5]))
    tensor(0.)
    >>> kkt_gap(torch.eye(2), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    matrix = as_gram(gram)
    point = as_float64(weights, name="weights")
    if point.shape != matrix.shape[:-1]:
        raise ValueError(
            f"weights must have shape {list(matrix.shape[:-1])} beside this gram, "
            f"got {list(point.shape)}."
        )
    slack = rounding(weights)
    if (point < -slack).any() or (np.abs(point.sum(axis=-1) - 1) > slack).any():
        raise ValueError(
            f"weights must be non-negative with sum 1, got minimum {point.min():.3g} and sums "
            f"from {point.sum(axis=-1).min():.6g} to {point.sum(axis=-1).max():.6g}."
        )
    return like(relative_gap(matrix, point), gram)


def relative_gap(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns ``kkt_gap`` of checked float64 arrays, shapes [..., M, M] and [..., M] to [...]."""
    product = np.einsum("...ij,...j->...i", matrix, weights)  # [..., M]
    value = np.einsum("...i,...i->...", weights, product)  # [...]
    bound = np.einsum("...i,...ij,...j->...", weights, np.abs(matrix), weights)  # [...]
    diagonal = np.einsum("...ii->...i", matrix)
    bound = bound[..., None]
    # two roots, because their product under one would overflow above 1e154
    scale = np.sqrt(bound) * np.sqrt(np.maximum(diagonal, bound))  # [..., M]
    shortfall = value[..., None] - product
    ratio = np.divide(shortfall, scale, out=np.zeros_like(shortfall), where=scale > 0)
    return np.maximum(ratio.max(axis=-1), 0.0)
