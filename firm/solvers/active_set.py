"""Active-set methods: exact minimisers of a convex quadratic form on the simplex or a box on it.

min λᵀQλ subject to Σλ = 1 and lower ≤ λ ≤ upper, in the variables y = λ/s with s = diag(Q)^-½, so
that K = SQS has a unit diagonal: unscaled, gradient norms that differ by a factor of 1e12 give
wrong weights.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import get_lapack_funcs
from scipy.optimize import nnls

from firm.solvers.checks import EPS

potrf, potrs, pstrf = get_lapack_funcs(("potrf", "potrs", "pstrf"), dtype=np.float64)

DUAL_SLACK = 16 * EPS
"""Multipliers at most this far below zero, relative to the terms they are sums of, count as
zero."""
RIDGE = 128 * EPS
"""Added to the unit diagonal if gradients are linearly dependent: larger than the rounding error of
a zero eigenvalue, and too small to cause an optimality gap of 1e-13."""
PIVOT_SIZE, PIVOT_CANCELLATION = 24, 0.2
"""Block pivoting is used above this M, if at most this share of the unconstrained weights' absolute
sum is negative: the support is then large, and NNLS adds only one index at a time. For nearly
collinear gradients half of the sum cancels, and the support is small."""
NUM_BLOCK_STEPS = 6
"""Block exchanges before falling back to a method that cannot cycle."""


class Singular(Exception):
    """Raised when the matrix of a face is singular up to rounding, or has a negative eigenvalue."""


class Box(NamedTuple):
    """Bounds of the scaled weights y = λ/s, shape [M] each."""

    lower: np.ndarray
    upper: np.ndarray


class Support(NamedTuple):
    """Masks of the free entries and of the entries at their upper bounds; bool, shape [M] each."""

    free: np.ndarray
    high: np.ndarray


def active_set(
    matrix: np.ndarray, scale: np.ndarray, *, box: Box | None = None, start: Support | None = None
) -> np.ndarray:
    """Returns the minimiser y of yᵀKy with sᵀy = 1 and y ≥ 0, or within a box.

    Without a box and a start, uses scipy's NNLS unless the support is likely to be large. Otherwise
    uses block principal pivoting, which solves on the free set and exchanges all indices that
    violate their sign conditions: a few factorisations, independent of the size of the support. It
    may cycle; NNLS then takes over, or, within a box, a primal active-set method. Linearly
    dependent gradients are solved by NNLS, or, within a box, with a ridge at rounding level, which
    picks one of the minimisers and is removed on the final face if that is regular.

    Args:
        matrix: K, shape [M, M], unit diagonal, positive semidefinite up to rounding.
        scale: s, shape [M], positive.
        box: Bounds of y, feasible with sᵀy = 1.
        start: Support to start the search from.

    Raises:
        Singular: When K has negative eigenvalues beyond rounding, within a box.
        RuntimeError: When the fallback does not terminate either.
    """
    try:
        return _search(matrix, scale, box, start, DUAL_SLACK)[0]
    except Singular:
        if box is None:
            return _nnls(_root(matrix), scale)[0]
        ridged = matrix + RIDGE * np.eye(len(matrix))
        point, support = _search(ridged, scale, box, start, 2 * RIDGE)
    try:
        polished, *_ = _solve_face(matrix, scale, box, support, DUAL_SLACK)
    except Singular:
        return point
    is_inside = (polished >= box.lower).all() and (polished <= box.upper).all()
    return polished if is_inside else point


def _search(
    matrix: np.ndarray,
    scale: np.ndarray,
    box: Box | None,
    support: Support | None,
    dual_slack: float,
) -> tuple[np.ndarray, Support]:
    if support is None:
        factor = _cholesky(matrix)
        point = potrs(factor, scale, lower=1)[0]
        support = Support(point >= 0, np.zeros(len(scale), dtype=bool))
        if support.free.all():
            return point / (scale @ point), support
        negative, total = -scale @ np.minimum(point, 0.0), scale @ np.abs(point)
        if len(scale) <= PIVOT_SIZE or negative > PIVOT_CANCELLATION * total:
            return _nnls(factor.T, scale)
    for _ in range(NUM_BLOCK_STEPS):
        if not support.free.any():
            break
        point, slope, slack = _solve_face(matrix, scale, box, support, dual_slack)
        free, high = support.free, support.high
        wrong_side = np.where(high, slope > slack, slope < -slack)
        if box is None:
            wrong, too_high = np.where(free, point < 0, wrong_side), high
        else:
            too_high = free & (point > box.upper)
            wrong = too_high | np.where(free, point < box.lower, wrong_side)
        if not wrong.any():
            return point, support
        support = Support(free ^ wrong, too_high | (high & ~wrong))
    if box is None:
        return _nnls(_cholesky(matrix).T, scale)
    return _primal(matrix, scale, box, dual_slack)


def _solve_face(
    matrix: np.ndarray, scale: np.ndarray, box: Box | None, support: Support, dual_slack: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns y, optimal in its free entries, with the slopes Ky - νs and their slack."""
    inside = support.free.nonzero()[0]
    factor = _cholesky(matrix.take(inside, 0).take(inside, 1))
    aim = scale.take(inside)
    towards = potrs(factor, aim, lower=1)[0]
    total = aim @ towards
    if box is None:
        point = np.zeros_like(scale)
        level = 1.0 / total
        point[inside] = level * towards
        return point, matrix @ point - level * scale, dual_slack * np.abs(point).sum()
    point = np.where(support.free, 0.0, np.where(support.high, box.upper, box.lower))
    # subtract the fixed entries' common level, which cancels in the sum: otherwise the weights of
    # gradients much shorter than a fixed one are lost in rounding
    pull = (matrix @ point).take(inside)
    level = (pull @ towards) / total
    shift = potrs(factor, pull - level * aim, lower=1)[0]
    shift -= (aim @ shift) / total * towards
    rest = (1.0 - scale @ point) / total
    point[inside] = rest * towards - shift
    level += rest
    slack = dual_slack * (np.abs(matrix) @ np.abs(point) + abs(level) * scale)
    return point, matrix @ point - level * scale, slack


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """Returns the lower factor; raises ``Singular`` if a pivot is at rounding level."""
    factor, info = potrf(matrix, lower=1)
    if info != 0 or factor.diagonal().min() ** 2 < RIDGE / 4:
        raise Singular
    return factor


def _root(matrix: np.ndarray) -> np.ndarray:
    """Returns R with RᵀR = K, shape [rank of K, M], by a pivoted Cholesky factorisation."""
    factor, order, rank, _ = pstrf(matrix, tol=RIDGE, lower=1)
    rows = np.zeros((rank, len(matrix)))
    rows[:, order - 1] = np.tril(factor)[:, :rank].T
    return rows


def _nnls(root: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, Support]:
    """Returns the minimiser without a box, y ∝ argmin ‖Ry‖² + (sᵀy - 1)² over y ≥ 0."""
    num_rows, size = root.shape
    rows, target = np.empty((num_rows + 1, size)), np.zeros(num_rows + 1)
    rows[:num_rows], rows[num_rows], target[num_rows] = root, scale, 1.0
    point, _ = nnls(rows, target)
    point /= scale @ point
    return point, Support(point > 0, np.zeros(size, dtype=bool))


def _primal(
    matrix: np.ndarray, scale: np.ndarray, box: Box, dual_slack: float
) -> tuple[np.ndarray, Support]:
    """Returns the minimiser by a primal active-set method: always feasible, one index at a time."""
    num_steps = 20 * len(scale) + 100
    point, support = _vertex(scale, box)
    free, high = support.free, support.high
    for _ in range(num_steps):
        target, slope, slack = _solve_face(matrix, scale, box, support, dual_slack)
        direction = np.where(free, target - point, 0.0)
        room = np.where(direction < 0, box.lower - point, box.upper - point)
        steps = np.divide(room, direction, out=np.full_like(room, np.inf), where=direction != 0)
        blocking = int(steps.argmin())
        if steps[blocking] < 1.0 and free.sum() > 1:
            point = point + max(steps[blocking], 0.0) * direction
            free[blocking], high[blocking] = False, direction[blocking] > 0
            point[blocking] = (box.upper if high[blocking] else box.lower)[blocking]
            continue
        point = target
        violation = np.where(free, 0.0, np.where(high, slope, -slope)) - slack
        worst = int(violation.argmax())
        if violation[worst] <= 0:
            return point, support
        free[worst], high[worst] = True, False
    raise RuntimeError(f"No optimal weights found within {num_steps} steps for M = {len(scale)}.")


def _vertex(scale: np.ndarray, box: Box) -> tuple[np.ndarray, Support]:
    """Returns a feasible point: entries at their upper bounds, shortest gradients first."""
    point = box.lower.copy()
    free, high = np.zeros(len(scale), dtype=bool), np.zeros(len(scale), dtype=bool)
    order = np.argsort(-scale, kind="stable")
    for index in order:
        rest = 1.0 - scale @ point
        free[index] = True  # takes the remainder; one entry must be free to determine the level ν
        if scale[index] * (box.upper[index] - box.lower[index]) >= rest or index == order[-1]:
            point[index] += rest / scale[index]
            break
        point[index], free[index], high[index] = box.upper[index], False, True
    return point, Support(free, high)
