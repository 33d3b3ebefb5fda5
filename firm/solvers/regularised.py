"""FIRM's weights: the min-norm problem with a regulariser or a preference."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from firm.solvers.checks import ArrayT, as_gram, as_shares, like
from firm.solvers.constraints import check_feasible
from firm.solvers.programs import constrained_qp
from firm.solvers.simplex_qp import simplex_qp

Solver = Literal["exact", "cvxpy"]


def firm_weights(
    gram: ArrayT,
    *,
    beta: float = 0.01,
    preference: Sequence[float] | np.ndarray | None = None,
    preference_strength: float = 1.0,
    normalize: bool = True,
    norm_power: float = 0.0,
    solver: Solver = "exact",
    constraints: Sequence[Sequence[float]] = (),
) -> ArrayT:
    """Returns the objectives' weights λ of FIRM, exactly.

    Without a preference this is Eq. 9 of FIRM (Nourzad et al.), or Eq. 1 and 2 when ``normalize``
    is off:

        λ = argmin over the simplex of λᵀ(Ĝ + β/2 I)λ,  Ĝ = G / (tr(G)/M).

    With a preference p it is Eq. 54, or Eq. 3 when ``normalize`` is off, where
    ``preference_strength`` · Diag(1/p) takes the place of the β term. p is scaled to sum 1, so that
    the strength means the same for every p; an objective with pⱼ = 0 is left out of the problem,
    trace included, and gets weight 0. Where all gradients are zero the regulariser alone decides:
    uniform weights, or p.

    Args:
        gram: G, shape [..., M, M].
        beta: Strength β of the pull towards uniform weights, at least 0. Unused with a preference.
        preference: p, shape [M], non-negative, not all zero.
        preference_strength: Factor of the preference term, at least 0; the paper's is 1.
        normalize: Whether to divide G by the mean of its diagonal.
        norm_power: q ≥ 0 solves for the gradients gⱼ/‖gⱼ‖^q, as GAPO does (Li et al. 2025,
            arXiv:2507.01915), a zero gradient counting as long as the longest; at q = 1 only angles
            count. Returned are the given gradients' weights of that direction, ∝ λⱼ/‖gⱼ‖^q.
        solver: "exact" for closed forms and active sets, "cvxpy" for an interior-point method that
            also takes constraints; its λ are right to about 1e-4, and a call takes milliseconds.
        constraints: Rows of M + 1 numbers (a₁, ..., a_M, b), each asking for Σⱼ aⱼλⱼ ≤ b, as
            ``linear_constraints`` writes them; for "cvxpy" alone. They hold for the λ solved for.

    >>> import torch
    >>> firm_weights(torch.tensor([[4.0, 0.0], [0.0, 1.0]]), beta=0.0)
    tensor([0.2000, 0.8000])
    """
    matrix = as_gram(gram)
    num_objectives = matrix.shape[-1]
    if preference is None:
        _check_strength("beta", beta)
        is_active = np.full(num_objectives, True)
        regulariser = np.full(num_objectives, beta / 2)
    else:
        _check_strength("preference_strength", preference_strength)
        shares = as_shares(preference, num_objectives, name="preference")
        is_active = shares > 0
        regulariser = preference_strength / shares[is_active]
    _check_strength("norm_power", norm_power)
    rows = _as_rows(constraints, num_objectives, solver)
    matrix = matrix[..., is_active, :][..., is_active]
    norms = None
    if norm_power > 0:
        norms = _norms(matrix) ** norm_power
        matrix = matrix / norms[..., None, :] / norms[..., None]
    if normalize:
        mean_square = np.einsum("...ii->...", matrix)[..., None, None] / len(regulariser)
        matrix = np.divide(matrix, mean_square, out=matrix, where=mean_square > 0)
    matrix = matrix + np.diag(regulariser)
    if solver == "exact":
        solved = simplex_qp(matrix)
    else:
        solved = _constrained(matrix, rows[:, :-1][:, is_active], rows[:, -1])
    if norms is not None:
        solved = solved / norms
        solved /= solved.sum(axis=-1, keepdims=True)
    weights = np.zeros((*matrix.shape[:-2], num_objectives))
    weights[..., is_active] = solved
    return like(weights, gram)


def _norms(matrix: np.ndarray) -> np.ndarray:
    """Returns the gradients' norms [..., M], those of zero gradients as long as the longest."""
    norms = np.sqrt(np.maximum(np.einsum("...ii->...i", matrix), 0.0))
    longest = norms.max(axis=-1, keepdims=True)
    return np.where(norms > 0, norms, np.where(longest > 0, longest, 1.0))


def _constrained(matrix: np.ndarray, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    return np.array([constrained_qp(each, rows, bounds) for each in flat]).reshape(
        matrix.shape[:-1]
    )


def _as_rows(
    constraints: Sequence[Sequence[float]], num_objectives: int, solver: Solver
) -> np.ndarray:
    """Returns the constraints as a table [R, M + 1] that some weights meet."""
    if solver not in ("exact", "cvxpy"):
        raise ValueError(f"solver must be 'exact' or 'cvxpy', got {solver!r}.")
    if len(constraints) == 0:
        return np.zeros((0, num_objectives + 1))
    if solver == "exact":
        raise ValueError("constraints need solver 'cvxpy', got 'exact'.")
    for index, row in enumerate(constraints):
        if len(row) != num_objectives + 1 or not np.isfinite(row).all():
            raise ValueError(
                f"Each constraint must have {num_objectives + 1} finite numbers, a coefficient for "
                f"each objective and the bound; row {index} is {list(row)}."
            )
    check_feasible(constraints)
    return np.array(constraints, dtype=np.float64)


def _check_strength(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must be non-negative, got {value}.")
    if np.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}; 1e6 is as good as infinite.")
