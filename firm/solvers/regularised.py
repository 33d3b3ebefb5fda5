"""FIRM's weights: the min-norm problem with a regulariser or a preference term."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import torch

from firm.solvers.checks import ArrayT, as_gram, as_shares, like
from firm.solvers.constraints import check_feasible
from firm.solvers.programs import constrained_qp
from firm.solvers.settings import Solver, check_strength
from firm.solvers.simplex_qp import simplex_qp


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
    """Returns FIRM's weights λ of the objectives; exact with the default solver.

    Without a preference this is Eq. 9 of FIRM (Nourzad et al.; Eq. 1 and 2 if not ``normalize``):

        λ = argmin over the simplex of λᵀ(Ĝ + β/2 I)λ,  Ĝ = G / (tr(G)/M).

    With a preference p, scaled to sum 1, this is Eq. 54 (Eq. 3 if not ``normalize``), in which
    ``preference_strength`` · Diag(1/p) replaces the β term. An objective with pⱼ = 0 is excluded,
    also from the trace. If all gradients are zero, the weights are uniform, or p.

    Args:
        gram: G, shape [..., M, M].
        beta: Strength β of the regularisation towards uniform weights, at least 0. Not used with a
            preference.
        preference: p, shape [M], non-negative, not all zero.
        preference_strength: Factor of the preference term, at least 0; 1 in the paper.
        normalize: Whether to divide G by the mean of its diagonal.
        norm_power: q ≥ 0 solves for the rescaled gradients gⱼ/‖gⱼ‖^q, as in GAPO (Li et al. 2025,
            arXiv:2507.01915), and returns the weights of the original gradients that give the same
            direction, ∝ λⱼ/‖gⱼ‖^q. At q = 1 only angles matter. A zero gradient is assigned the
            largest norm.
        solver: "exact", or "cvxpy", which supports constraints and is accurate to about 1e-4.
        constraints: Rows (a₁, ..., a_M, b) from ``linear_constraints``, each requiring Σⱼ aⱼλⱼ ≤ b
            of the λ that is solved for; "cvxpy" only. Those on an excluded objective do not apply,
            and none does if a single objective is left.

    >>> firm_weights(np.diag([4.0, 1.0]), beta=0.0)
    array([0.2, 0.8])
    """
    matrix = as_gram(gram)
    if preference is None:
        regulariser = np.full(matrix.shape[-1], _strength("beta", beta) / 2)
    else:
        shares = as_shares(preference, matrix.shape[-1], name="preference")
        strength = _strength("preference_strength", preference_strength)
        regulariser = np.divide(strength, shares, out=np.full_like(shares, inf), where=shares > 0)
    is_active = regulariser < inf
    rows = _applicable(_as_rows(constraints, len(regulariser), solver), is_active)
    if not is_active.all():
        check_feasible(rows[:, [*np.flatnonzero(is_active), -1]].tolist())
    matrix = matrix[..., is_active, :][..., is_active]
    norms = _norms(matrix) ** _strength("norm_power", norm_power)
    matrix = matrix / norms[..., None, :] / norms[..., None]
    if normalize:
        mean_square = np.einsum("...ii->...", matrix)[..., None, None] / is_active.sum()
        matrix = np.divide(matrix, mean_square, out=matrix, where=mean_square > 0)
    matrix = matrix + np.diag(regulariser[is_active])
    solved = simplex_qp(matrix) if solver == "exact" else _constrained(matrix, rows, is_active)
    if norm_power > 0:
        solved = solved / norms
        solved /= solved.sum(axis=-1, keepdims=True)
    weights = np.zeros((*matrix.shape[:-2], len(regulariser)))
    weights[..., is_active] = solved
    return like(weights, gram)


def served_weights(
    gram: torch.Tensor,
    *,
    served: Sequence[int],
    preference: Sequence[float] | None = None,
    constraints: Sequence[Sequence[float]] = (),
    **options: Any,
) -> torch.Tensor:
    """Returns FIRM's weights for the served objectives, and 0 for the others, shape [M].

    Objectives that are not served have zero gradients, which are the shortest: if they were
    included, they would get all the weight. If the preference is zero for all served objectives,
    all weights are 0.

    Args:
        gram: Gram matrix of all objectives, shape [M, M].
        served: Indices of the served objectives.
        preference: As for ``firm_weights``, for all objectives.
        constraints: As for ``firm_weights``, for all objectives; those that are not served count
            as excluded.
        **options: Other options of ``firm_weights``.
    """
    rows = list(served)
    if len(rows) == len(gram):
        return firm_weights(gram, preference=preference, constraints=constraints, **options)
    weights = torch.zeros(len(gram), dtype=gram.dtype)
    if preference is not None:
        preference = [preference[j] for j in rows]
        if not any(preference):
            return weights
    if constraints:
        is_served = np.isin(np.arange(len(gram)), rows)
        bounds = _applicable(np.array(constraints, dtype=np.float64), is_served)
        constraints = bounds[:, [*rows, -1]].tolist()
    own = gram[rows][:, rows]
    weights[rows] = firm_weights(own, preference=preference, constraints=constraints, **options)
    return weights


def _norms(matrix: np.ndarray) -> np.ndarray:
    """Returns the gradients' norms [..., M], with the largest norm in place of zeros."""
    norms = np.sqrt(np.maximum(np.einsum("...ii->...i", matrix), 0.0))
    longest = norms.max(axis=-1, keepdims=True)
    return np.where(norms > 0, norms, np.where(longest > 0, longest, 1.0))


def _constrained(matrix: np.ndarray, rows: np.ndarray, is_active: np.ndarray) -> np.ndarray:
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    coefficients, bounds = rows[:, :-1][:, is_active], rows[:, -1]
    solved = np.array([constrained_qp(each, coefficients, bounds) for each in flat])
    return solved.reshape(matrix.shape[:-1])


def _applicable(rows: np.ndarray, is_active: np.ndarray) -> np.ndarray:
    """Returns the constraints [R, M + 1] on active objectives; none if just one is active."""
    if is_active.sum() < 2:
        return rows[:0]
    return rows[(rows[:, :-1][:, ~is_active] == 0).all(axis=1)]


def _as_rows(
    constraints: Sequence[Sequence[float]], num_objectives: int, solver: Solver
) -> np.ndarray:
    """Returns the constraints, checked and feasible, as an array [R, M + 1]."""
    if solver not in ("exact", "cvxpy"):
        raise ValueError(f"solver must be 'exact' or 'cvxpy', got {solver!r}.")
    if len(constraints) == 0:
        return np.zeros((0, num_objectives + 1))
    if solver == "exact":
        raise ValueError("constraints require solver 'cvxpy', got 'exact'.")
    for index, row in enumerate(constraints):
        if len(row) != num_objectives + 1 or not np.isfinite(row).all():
            raise ValueError(
                f"Each constraint must have {num_objectives + 1} finite numbers, one coefficient "
                f"per objective and the bound; row {index} is {list(row)}."
            )
    check_feasible(constraints)
    return np.array(constraints, dtype=np.float64)


def _strength(name: str, value: float) -> float:
    check_strength(name, value)
    return value
