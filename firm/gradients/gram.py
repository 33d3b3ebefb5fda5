"""Gram matrix of the objectives' gradients, and their weighted sum."""

import torch

from firm.gradients.jacobian import check_finite_rows

CHUNK = 65_536
"""Columns per float64 product: 0.5 MB per row, which fits into the CPU's cache."""


def gram_matrix(jacobian: torch.Tensor) -> torch.Tensor:
    """Returns all inner products of the rows, G = JJᵀ, summed in float64.

    Nearly parallel gradients need this precision: a single float32 product over 4.5 million columns
    is accurate to three or four digits, these sums to thirteen; they take 7 ms at M = 2.

    Args:
        jacobian: Gradients, one row per objective, any float dtype (16-bit entries are widened
            exactly, a chunk at a time), shape [M, d].

    Returns:
        float64, shape [M, M], symmetric, on the Jacobian's device.

    Raises:
        ValueError: When the shape is not [M, d], M is 0, or a row holds NaN or infinity; names the
            objective.
    """
    if jacobian.ndim != 2:
        raise ValueError(f"jacobian must have shape [M, d], got {list(jacobian.shape)}.")
    if len(jacobian) == 0:
        raise ValueError(f"jacobian must hold at least one row, got shape {list(jacobian.shape)}.")
    num_objectives = len(jacobian)
    gram = jacobian.new_zeros(num_objectives, num_objectives, dtype=torch.float64)
    for chunk in jacobian.split(CHUNK, dim=1):
        chunk = chunk.double()
        gram += chunk @ chunk.T
    if not gram.isfinite().all():
        check_finite_rows(jacobian)
    return (gram + gram.T) / 2  # a matrix product may round its two triangles differently


def combine(jacobian: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of the rows, λᵀJ; with M = 1 and weight 1, the row bit for bit.

    Shapes [M, d] and [M] give [d], in the Jacobian's dtype and on its device.
    """
    if weights.shape != jacobian.shape[:1]:
        raise ValueError(
            f"weights must have shape {list(jacobian.shape[:1])} for this Jacobian, "
            f"got {list(weights.shape)}."
        )
    first, *others = weights.tolist()
    direction = jacobian[0] * first
    for row, weight in zip(jacobian[1:], others, strict=True):
        direction.add_(row, alpha=weight)
    return direction
