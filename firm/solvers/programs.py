"""Convex programmes on the simplex with additional linear constraints."""

import contextlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import linprog

from firm.base.extras import install_command
from firm.solvers.checks import EPS

TOLERANCES = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
"""Clarabel's defaults of 1e-8 are too coarse for the weights of nearly collinear gradients."""
LP_TOLERANCE = 1e-7
"""Largest accepted duality gap of the linear programme, relative to the largest gain."""
QP_TOLERANCE = 1e-6
"""Largest accepted optimality gap of the quadratic programme, relative as in ``kkt_gap``."""
FEASIBILITY = 1e-6
"""Largest accepted violation of a constraint that is scaled to coefficients of at most 1."""


def linear_program(gains: np.ndarray, rows: np.ndarray, floors: np.ndarray) -> np.ndarray | None:
    """Returns argmax gainsᵀw over the simplex subject to rows @ w ≥ floors; None if infeasible.

    Args:
        gains: Shape [M].
        rows: Shape [R, M].
        floors: Shape [R]; -∞ disables a row.
    """
    size = np.abs(rows).max(axis=1)
    is_active = (size > 0) & np.isfinite(floors)
    size = np.where(is_active, size, 1.0)
    rows = np.where(is_active[:, None], rows / size[:, None], 0.0)
    floors = np.where(is_active, floors / size, -1.0)
    unit = np.abs(gains).max() or 1.0
    solution = _minimum(-gains / unit, -rows, -floors)
    if solution is None:
        return None
    weights = np.maximum(solution.x, 0.0)
    weights /= weights.sum()
    multipliers = -solution.ineqlin.marginals
    # weak duality: the multipliers bound the gain of all feasible weights
    bound = (gains / unit + multipliers @ rows).max() - multipliers @ floors
    gap = float(bound - gains @ weights / unit)
    miss = float((floors - rows @ weights).max(initial=0.0))
    if not (gap <= LP_TOLERANCE and miss <= FEASIBILITY):
        raise RuntimeError(
            f"No optimal weights found: the linear programme ended with a duality gap of {gap:.3g} "
            f"(at most {LP_TOLERANCE:g} is accepted) and a constraint violation of {miss:.3g} "
            f"(at most {FEASIBILITY:g})."
        )
    return weights


def constrained_qp(matrix: np.ndarray, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns argmin λᵀQλ over the simplex subject to rows @ λ ≤ bounds.

    Shapes are [M, M], [R, M] and [R]; Q is positive semidefinite up to rounding.
    """
    size = np.abs(rows).max(axis=1, initial=0.0)
    size = np.where(size > 0, size, 1.0)
    rows, bounds = rows / size[:, None], bounds / size
    # scaling by the gradients' norms resolves small weights of large gradients; if a constraint
    # forbids such weights, it makes the variables badly scaled, and the second try omits it
    failures = []
    for scale in (_inverse_lengths(matrix), np.ones(len(matrix))):
        weights = _interior_point(matrix, scale, rows, bounds)
        if weights is None:
            failures.append("no weights")
            continue
        miss = float((rows @ weights - bounds).max(initial=0.0))
        gap = _polytope_gap(matrix, weights, rows, bounds)
        if gap <= QP_TOLERANCE and miss <= FEASIBILITY:
            return weights
        failures.append(f"an optimality gap of {gap:.3g} and a constraint violation of {miss:.3g}")
    raise RuntimeError(
        "No optimal weights found by cvxpy. With scaling it returned "
        f"{', without scaling '.join(failures)}; at most {QP_TOLERANCE:g} and {FEASIBILITY:g} "
        "are accepted."
    )


def _inverse_lengths(matrix: np.ndarray) -> np.ndarray:
    diagonal = matrix.diagonal()
    longest = diagonal.max()
    if longest <= 0:
        return np.ones(len(matrix))
    scale = 1.0 / np.sqrt(np.maximum(diagonal, EPS**2 * longest))
    return scale / scale.max()


def _interior_point(
    matrix: np.ndarray, scale: np.ndarray, rows: np.ndarray, bounds: np.ndarray
) -> np.ndarray | None:
    """Returns the weights λ = s·y found by cvxpy, or None."""
    scaled = matrix * scale * scale[:, None]
    scaled /= scaled.diagonal().max() or 1.0
    eigenvalues, eigenvectors = np.linalg.eigh(scaled)
    root = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * eigenvectors.T
    point = _quadratic_problem(*rows.shape)(root, scale, rows * scale, bounds)
    if point is None:
        return None
    weights = np.maximum(scale * point, 0.0)
    total = weights.sum()
    return weights / total if total > 0 else None


def is_feasible(rows: np.ndarray, bounds: np.ndarray) -> bool:
    """Returns whether any weights on the simplex satisfy rows @ λ ≤ bounds, [R, M] and [R]."""
    return _minimum(np.zeros(rows.shape[1]), rows, bounds) is not None


def _polytope_gap(
    matrix: np.ndarray, weights: np.ndarray, rows: np.ndarray, bounds: np.ndarray
) -> float:
    """Returns the first-order decrease of a step to the best vertex, relative as in ``kkt_gap``.

    A decrease of the squared length by 1e-12 of the longest gradient's does not count: where the
    minimum is 0, any would be large beside it.
    """
    slope = matrix @ weights
    solution = _minimum(slope / (np.abs(slope).max() or 1.0), rows, bounds)
    if solution is None:
        return np.inf
    vertex = solution.x
    bound = np.sqrt(weights @ np.abs(matrix) @ weights)
    there = np.sqrt(vertex @ np.abs(matrix) @ vertex)
    decrease = float(slope @ weights - slope @ vertex - QP_TOLERANCE**2 * matrix.diagonal().max())
    return float(max(decrease / (bound * max(bound, there)), 0.0)) if bound > 0 else 0.0


def _minimum(costs: np.ndarray, rows: np.ndarray, bounds: np.ndarray) -> Any:
    """Returns scipy's result of min costsᵀλ subject to rows @ λ ≤ bounds; None if infeasible."""
    result = linprog(costs, rows, bounds, np.ones((1, len(costs))), np.ones(1))
    return result if result.status == 0 else None


@cache
def _quadratic_problem(num_rows: int, num_objectives: int) -> Callable[..., Any]:
    """Returns a solver for programmes of these sizes, compiled once and then reused."""
    try:
        import cvxpy  # slow to import, and most runs do not need it
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "solver cvxpy needs the package cvxpy, which is not installed: "
            f"{install_command('cvxpy')}.",
            name="cvxpy",
        ) from None

    point = cvxpy.Variable(num_objectives, nonneg=True)
    root = cvxpy.Parameter((num_objectives, num_objectives))
    scale = cvxpy.Parameter(num_objectives)
    rows = cvxpy.Parameter((num_rows, num_objectives))
    bounds = cvxpy.Parameter(num_rows)
    total: Any = scale @ point == 1
    limits: Any = rows @ point <= bounds
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(root @ point)), [total, limits])

    def solve(*data: np.ndarray) -> np.ndarray | None:
        root.value, scale.value, rows.value, bounds.value = data
        with warnings.catch_warnings(), contextlib.suppress(cvxpy.SolverError):  # leaves no value
            warnings.simplefilter("ignore", UserWarning)
            problem.solve(solver=cvxpy.CLARABEL, **TOLERANCES)
        return None if point.value is None else np.asarray(point.value)

    return solve
