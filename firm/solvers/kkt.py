"""Optimality gap of weights: the check that every solver's result must pass."""

from collections.abc import Sequence

import numpy as np
import torch

from firm.solvers.checks import ArrayT, as_box, as_gram, as_weights, like, rounding


def kkt_gap(
    gram: ArrayT,
    weights: torch.Tensor | np.ndarray,
    *,
    center: Sequence[float] | np.ndarray | None = None,
    radius: float | None = None,
) -> ArrayT:
    """Returns the violation of the optimality conditions of min λᵀGλ on the simplex.

    At an optimum every (Gλ)ᵢ is at least λᵀGλ. The gap is the largest shortfall, relative to its
    Cauchy-Schwarz bound, so that it is invariant to the scale of G and does not hide short
    gradients behind long ones::

        maxᵢ (λᵀGλ - (Gλ)ᵢ) / √(D · max(Gᵢᵢ, D)),  D = Σᵢⱼ λᵢ |Gᵢⱼ| λⱼ.

    Its square is approximately the relative decrease of λᵀGλ after a step towards objective i.
    Within the box ``|λ - center| ≤ radius``, the step towards i takes weight from the objectives
    with the largest (Gλ)ⱼ, as far as the bounds allow.

    Args:
        gram: G, shape [..., M, M]; add the regulariser to check regularised weights.
        weights: λ, shape [..., M], on the simplex and in the box.
        center: λ₀ of the box, shape [M]; uniform by default. Requires a radius.
        radius: ε of the box, at least 0; no box by default.

    Returns:
        The gap of shape [...], non-negative, 0 at the optimum, below 1e-12 at float64 solutions.

    >>> kkt_gap(torch.eye(2), torch.tensor([0.5, 0.5]))
    tensor(0.)
    >>> kkt_gap(torch.eye(2), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    matrix = as_gram(gram)
    point = as_weights(weights, matrix)
    if radius is None and center is None:
        return like(relative_gap(matrix, point), gram)
    lower, upper = as_box(center, radius, matrix.shape[-1])
    slack = rounding(weights)
    if (point < lower - slack).any() or (point > upper + slack).any():
        raise ValueError(
            f"weights must be in the box from {lower.tolist()} to {upper.tolist()}, "
            f"got {point.tolist()}."
        )
    return like(box_gap(matrix, point, lower, upper), gram)


def relative_gap(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns ``kkt_gap`` of checked float64 arrays, shapes [..., M, M] and [..., M] to [...]."""
    product = np.einsum("...ij,...j->...i", matrix, weights)  # [..., M]
    value = np.einsum("...i,...i->...", weights, product)  # [...]
    shortfall = value[..., None] - product
    scale = _scale(matrix, weights, np.ones(()))
    ratio = np.divide(shortfall, scale, out=np.zeros_like(shortfall), where=scale > 0)
    return np.maximum(ratio.max(axis=-1), 0.0)


def box_gap(
    matrix: np.ndarray, weights: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> np.ndarray:
    """Returns ``kkt_gap`` within bounds of checked float64 arrays, shape [...].

    Objective i takes weight from the objectives with a larger (Gλ)ⱼ, largest first, as far as its
    own and their bounds allow; the gap is the largest first-order decrease over i.
    """
    product = np.einsum("...ij,...j->...i", matrix, weights)  # [..., M]
    order = np.argsort(-product, axis=-1, kind="stable")
    level = np.take_along_axis(product, order, axis=-1)  # (Gλ)ⱼ of the givers, largest first
    gives = np.take_along_axis(np.maximum(weights - lower, 0.0), order, axis=-1)
    given_before = np.cumsum(gives, axis=-1) - gives
    room = np.maximum(upper - weights, 0.0)
    taken = np.clip(room[..., None] - given_before[..., None, :], 0.0, gives[..., None, :])
    gain = np.maximum(level[..., None, :] - product[..., None], 0.0)  # [..., i, j]
    decrease = (taken * gain).sum(axis=-1)
    scale = _scale(matrix, weights, room)
    ratio = np.divide(decrease, scale, out=np.zeros_like(decrease), where=scale > 0)
    return ratio.max(axis=-1)


def _scale(matrix: np.ndarray, weights: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Returns √(D · max(room² Gᵢᵢ, D)), shape [..., M]."""
    bound = np.einsum("...i,...ij,...j->...", weights, np.abs(matrix), weights)[..., None]
    diagonal = np.maximum(np.einsum("...ii->...i", matrix), 0.0)
    # a single root of the product would overflow above 1e154
    return np.sqrt(bound) * np.maximum(room * np.sqrt(diagonal), np.sqrt(bound))


def scaled_gap(matrix: np.ndarray, scale: np.ndarray, point: np.ndarray) -> float:
    """Returns ``relative_gap`` of Q = K/ssᵀ and λ = s·y, several times faster, from K, s, y."""
    product = matrix @ point
    bound = float(np.sqrt(point @ (np.abs(matrix) @ point)))
    shortfall = (point @ product) * scale - product
    return max(float((shortfall / np.maximum(1.0, bound * scale)).max()) / bound, 0.0)
