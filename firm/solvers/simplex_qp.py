"""Exact minimiser of a convex quadratic form on the simplex, shared by all min-norm weightings."""

from collections.abc import Callable
from contextlib import suppress
from math import inf, sqrt

import numpy as np

from firm.solvers.active_set import DUAL_SLACK, RIDGE, Box, Singular, Support, active_set
from firm.solvers.checks import EPS
from firm.solvers.kkt import box_gap, relative_gap, scaled_gap

GAP_TOLERANCE = 1e-12
"""Largest accepted ``kkt_gap``; the solvers' rounding errors stay below 1e-13."""
NUM_BATCH_STEPS = 20
"""Exchanges before the unfinished members of a batch are solved one by one."""
BATCH_SIZE = 12
"""Largest M at which a batch is solved jointly, since joint factorisations are always full-size."""


def simplex_qp(
    matrix: np.ndarray,
    *,
    lower: np.ndarray | None = None,
    upper: np.ndarray | None = None,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Returns a minimiser of λᵀQλ over the simplex, or over its part between two bounds.

    M = 2 has a closed form, M = 3 checks the edges and then the interior. Larger M use scipy's NNLS
    on the scaled matrix, or block pivoting where NNLS is slow or not applicable: for large supports
    above M = 24, with a start, within bounds and in batches. Exact up to rounding for any gradient
    norms. benchmarks/solvers.py compares it to NNLS alone.

    Args:
        matrix: Q, symmetric and positive semidefinite up to rounding, float64, [..., M, M].
        lower: Lower bounds, shape [M], at least 0; give both bounds or none.
        upper: Upper bounds, shape [M]; the box must intersect the simplex.
        start: Weights whose support the search starts from, shape [M]; for a single matrix.

    Raises:
        RuntimeError: When the optimality gap exceeds ``GAP_TOLERANCE``.
    """
    num_objectives = matrix.shape[-1]
    if num_objectives == 1:
        return np.ones(matrix.shape[:-1])
    if lower is None or upper is None:
        if matrix.ndim == 2:
            return _single(matrix, start)
        flat = matrix.reshape(-1, num_objectives, num_objectives)
        return _batch(flat).reshape(matrix.shape[:-1])
    flat = matrix.reshape(-1, num_objectives, num_objectives)
    weights = np.array([_boxed(each, lower, upper, start) for each in flat])
    return weights.reshape(matrix.shape[:-1])


def _single(matrix: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    """Solves one matrix on the whole simplex."""
    num_objectives = len(matrix)
    if num_objectives == 2:
        (first, product), (_, second) = matrix.tolist()
        return np.array(_edge(first, product, second))
    diagonal = matrix.diagonal()
    if diagonal.min() <= 0.0:  # a zero gradient alone is optimal; several share the weight equally
        is_zero = diagonal <= 0.0
        return is_zero / is_zero.sum()
    if num_objectives == 3 and (weights := _three(matrix.tolist())) is not None:
        return np.array(weights)
    scale = 1.0 / np.sqrt(diagonal)
    support = None if start is None else Support(start > 0, np.zeros(num_objectives, dtype=bool))
    scaled = matrix * scale * scale[:, None]
    scale /= scale.max()

    def finish(scaled: np.ndarray, point: np.ndarray) -> tuple[np.ndarray, float]:
        return scale * point, scaled_gap(scaled, scale, point)

    return _certified(scaled, scale, finish, start=support)


def _certified(
    matrix: np.ndarray,
    scale: np.ndarray,
    finish: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]],
    *,
    box: Box | None = None,
    start: Support | None = None,
) -> np.ndarray:
    """Returns weights that pass the optimality check, for K = SQS or its projection to PSD.

    ``finish`` computes weights and their gap from K and y. The second try clips eigenvalues of K
    that rounding has made negative.
    """
    gap = inf
    for is_repaired in (False, True):
        if is_repaired:
            values, vectors = np.linalg.eigh(matrix)
            matrix = (vectors * np.maximum(values, 0.0)) @ vectors.T
        with suppress(Singular):
            weights, gap = finish(matrix, active_set(matrix, scale, box=box, start=start))
            if gap <= GAP_TOLERANCE:
                return weights
    raise RuntimeError(
        f"No optimal weights found: the optimality gap is {gap:.3g}, above {GAP_TOLERANCE:g}."
    )


def _boxed(
    matrix: np.ndarray, lower: np.ndarray, upper: np.ndarray, start: np.ndarray | None
) -> np.ndarray:
    """Solves one matrix between two bounds."""
    if len(matrix) == 2:
        (first, product), (_, second) = matrix.tolist()
        weights = np.array(_edge(first, product, second))
        if (weights >= lower).all() and (weights <= upper).all():
            return weights
        least, most = max(lower[0], 1.0 - upper[1]), min(upper[0], 1.0 - lower[1])
        share = min(max(weights[0], least), most)
        return np.clip((share, 1.0 - share), lower, upper)
    diagonal = matrix.diagonal()
    shortest = diagonal[diagonal > 0].min(initial=inf)
    if shortest == inf:
        shortest = 1.0
    # zero gradients get a norm below rounding of the other products
    scale = 1.0 / np.sqrt(np.maximum(diagonal, EPS**2 * shortest))
    scaled = matrix * scale * scale[:, None]
    scale = scale / scale.max()
    np.fill_diagonal(scaled, 1.0)
    if start is None:
        start = np.clip(scale * scale / (scale @ scale), lower, upper)
    support = Support((start > lower) & (start < upper), start >= upper)

    def finish(scaled: np.ndarray, point: np.ndarray) -> tuple[np.ndarray, float]:
        weights = np.clip(scale * point, lower, upper)
        # bounds are rounded, so the sum misses 1: correct the largest weight that has room
        rest = 1.0 - weights.sum()
        has_room = (weights + rest >= lower) & (weights + rest <= upper)
        if has_room.any():
            weights[np.where(has_room, weights, -1.0).argmax()] += rest
        return weights, float(box_gap(scaled / scale / scale[:, None], weights, lower, upper))

    bounds = Box(lower / scale, upper / scale)
    return _certified(scaled, scale, finish, box=bounds, start=support)


def _batch(matrices: np.ndarray) -> np.ndarray:
    """Solves several matrices [N, M, M] on the whole simplex by masked block pivoting."""
    num_objectives = matrices.shape[-1]
    if num_objectives == 2:
        first = np.maximum(matrices[:, 1, 1] - matrices[:, 0, 1], 0.0)
        second = np.maximum(matrices[:, 0, 0] - matrices[:, 0, 1], 0.0)
        total = first + second  # 0 if both gradients are equal: every λ is optimal
        towards = np.stack([first, second], axis=-1)
        return np.divide(
            towards, total[:, None], out=np.full_like(towards, 0.5), where=total[:, None] > 0
        )
    weights = np.full(matrices.shape[:-1], np.nan)
    diagonal = np.einsum("...ii->...i", matrices)
    regular = np.flatnonzero((diagonal > 0).all(axis=-1))
    if num_objectives <= BATCH_SIZE and len(regular) > 1:
        scale = 1.0 / np.sqrt(diagonal[regular])
        scale /= scale.max(axis=-1, keepdims=True)
        scaled = matrices[regular] * scale[:, None] * scale[..., None]
        scaled /= np.einsum("...ii->...i", scaled)[:, :1, None]  # a common factor, up to rounding
        weights[regular] = scale * _pivot_together(scaled, scale)
        weights[regular] /= weights[regular].sum(axis=-1, keepdims=True)
        gaps = relative_gap(matrices[regular], np.nan_to_num(weights[regular]))
        weights[regular[~(gaps <= GAP_TOLERANCE)]] = np.nan
    for index in np.flatnonzero(np.isnan(weights).any(axis=-1)):
        weights[index] = _single(matrices[index], None)
    return weights


def _pivot_together(matrices: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Block-pivots K [N, M, M]; NaN where not finished. Solutions are not normalised."""
    count, size = scale.shape
    ridge = 4 * EPS * np.eye(size)
    points = np.full((count, size), np.nan)
    left = np.arange(count)
    free = np.ones((count, size), dtype=bool)
    for _ in range(NUM_BATCH_STEPS):
        matrix, aim = matrices[left], scale[left]
        face = np.where(free[:, None] & free[..., None], matrix, np.eye(size)) + ridge
        try:
            point = np.linalg.solve(face, (aim * free)[..., None])[..., 0] * free
        except np.linalg.LinAlgError:
            return points
        slope = (matrix @ point[..., None])[..., 0] - aim
        slack = DUAL_SLACK * np.abs(point).sum(axis=-1, keepdims=True)
        wrong = np.where(free, point < 0, slope < -slack)
        is_done = ~wrong.any(axis=-1)
        points[left[is_done]] = point[is_done]
        left, free = left[~is_done], (free ^ wrong)[~is_done]
        if len(left) == 0:
            break
    return points


def _edge(first: float, product: float, second: float) -> tuple[float, float]:
    """Returns the weights of two objectives from the slopes at the two corners."""
    towards, back = max(second - product, 0.0), max(first - product, 0.0)
    total = towards + back
    # two divisions, since 1 - share would cancel the digits of a small weight
    return (towards / total, back / total) if total > 0 else (0.5, 0.5)


def _three(rows: list[list[float]]) -> list[float] | None:
    """Solves M = 3: an edge if it is optimal, else the interior; None if neither is.

    The interior uses a Cholesky factorisation of the scaled matrix; Cramer's rule would lose half
    of the digits for nearly equal gradients. Plain floats avoid numpy's overhead.
    """
    for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        share, rest = _edge(rows[i][i], rows[i][j], rows[j][j])
        first = rows[i][i] * share + rows[i][j] * rest
        second = rows[i][j] * share + rows[j][j] * rest
        if share * rows[i][k] + rest * rows[j][k] >= share * first + rest * second:
            weights = [0.0, 0.0, 0.0]
            weights[i], weights[j] = share, rest
            return weights
    r, s, t = (1.0 / sqrt(rows[i][i]) for i in range(3))
    a, b, c = rows[0][1] * r * s, rows[0][2] * r * t, rows[1][2] * s * t
    pivot = 1.0 - a * a
    if pivot < RIDGE:
        return None
    coupling = c - a * b
    last = 1.0 - b * b - coupling * coupling / pivot
    if last < RIDGE:
        return None
    z = (t - b * r - coupling * (s - a * r) / pivot) / last
    y = (s - a * r - coupling * z) / pivot
    x = r - a * y - b * z
    total = x * r + y * s + z * t
    if min(x, y, z) < 0:
        return None
    slopes = x + a * y + b * z - r, a * x + y + c * z - s, b * x + c * y + z - t
    if max(map(abs, slopes)) > GAP_TOLERANCE * max(x, y, z):  # in the interior all three are zero
        return None
    return [x * r / total, y * s / total, z * t / total]
