"""The exact minimiser of a convex quadratic form on the simplex, which every weighting shares."""

import numpy as np
from scipy.optimize import nnls

from firm.solvers.kkt import relative_gap

GAP_TOLERANCE = 1e-10
"""Largest accepted ``kkt_gap``; the solver's own rounding stays below 1e-14."""


def simplex_qp(matrix: np.ndarray) -> np.ndarray:
    """Returns argmin λᵀQλ over the simplex; where several λ are optimal, one of them.

    Args:
        matrix: Q, symmetric and positive semidefinite up to rounding, float64, [..., M, M].

    Returns:
        λ, float64, shape [..., M]: non-negative, sums to 1.

    Raises:
        RuntimeError: When the optimality conditions are missed by more than ``GAP_TOLERANCE``.
    """
    num_objectives = matrix.shape[-1]
    if num_objectives == 1:
        return np.ones(matrix.shape[:-1])
    if num_objectives == 2:
        return _two(matrix)
    flat = matrix.reshape(-1, num_objectives, num_objectives)
    weights = np.array([_three_or_more(single) for single in flat])
    return weights.reshape(matrix.shape[:-1])


def _two(matrix: np.ndarray) -> np.ndarray:
    """M = 2 in closed form: λ is inversely proportional to the slopes at the two corners."""
    first = np.maximum(matrix[..., 1, 1] - matrix[..., 0, 1], 0.0)
    second = np.maximum(matrix[..., 0, 0] - matrix[..., 0, 1], 0.0)
    total = first + second  # 0 where both gradients are equal: every λ is optimal
    share = np.divide(first, total, out=np.full_like(total, 0.5), where=total > 0)
    return np.stack([share, 1.0 - share], axis=-1)


def _three_or_more(matrix: np.ndarray) -> np.ndarray:
    """M >= 3 by non-negative least squares, an active-set method and so exact.

    With Q = RᵀR, the minimiser of ‖Ry‖² + (1ᵀy - 1)² over y >= 0 is proportional to λ. Columns are
    first scaled to Qⱼⱼ = 1: unscaled, gradient norms six decades apart give wrong weights.
    """
    diagonal = matrix.diagonal()
    is_zero = diagonal <= 0.0
    if is_zero.any():  # a zero gradient is optimal alone; several share
        return is_zero / is_zero.sum()
    scale = 1.0 / np.sqrt(diagonal)
    eigenvalues, eigenvectors = np.linalg.eigh(matrix * scale * scale[:, None])
    root = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * eigenvectors.T  # R, also if singular
    border = scale / scale.max()
    solution, _ = nnls(np.vstack([root, border]), np.append(np.zeros(len(scale)), 1.0))
    weights = border * solution
    weights /= weights.sum()
    # against RᵀR, so that an eigenvalue that rounding made negative is no failure
    gap = relative_gap(root.T @ root / scale / scale[:, None], weights)
    if not gap <= GAP_TOLERANCE:
        raise RuntimeError(f"No optimal weights found: the optimality gap is {gap:.3g}.")
    return weights
