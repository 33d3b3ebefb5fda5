"""MGDA's weights: the minimum-norm point of the gradients' convex hull."""

from collections.abc import Sequence

import numpy as np

from firm.solvers.checks import ArrayT, as_box, as_gram, as_start, like
from firm.solvers.simplex_qp import simplex_qp


def min_norm_weights(
    gram: ArrayT,
    *,
    center: Sequence[float] | np.ndarray | None = None,
    radius: float | None = None,
    start: ArrayT | None = None,
) -> ArrayT:
    """Returns the weights of the gradients' minimum-norm convex combination, exactly.

    That is λ = argmin λᵀGλ over the simplex (MGDA; Eq. 3 of FedCMOO, Askin et al., and Eq. 23 of
    FedMGDA+, Hu et al.). The direction λᵀJ decreases every objective unless it is zero. With a
    radius ε the weights also stay within FedMGDA+'s box ``|λ - λ₀| ≤ ε`` (its Eq. 25): ε = 0 gives
    λ₀, that is FedAvg, and ε = 1 the whole simplex.

    If several λ are optimal, one of them is returned: uniform weights for a zero matrix, equal
    weights on the zero gradients if there are any. ``kkt_gap`` of a float64 result is below 1e-12.

    Args:
        gram: G, shape [..., M, M].
        center: λ₀, shape [M]; uniform by default. Requires a radius.
        radius: ε, at least 0; no box by default.
        start: Warm start, such as the previous step's weights, shape [M]; for a single matrix. A
            good one saves a third of the time at M = 64 and half at M = 200, but costs some at M =
            8 (benchmarks/solvers.py). It does not change a unique result beyond rounding.

    >>> import torch
    >>> gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
    >>> min_norm_weights(gram)
    tensor([0.2000, 0.8000])
    >>> min_norm_weights(gram, radius=0.1)
    tensor([0.4000, 0.6000])
    """
    matrix = as_gram(gram)
    first = None if start is None else as_start(start, matrix)
    if radius is None and center is None:
        return like(simplex_qp(matrix, start=first), gram)
    lower, upper = as_box(center, radius, matrix.shape[-1])
    return like(simplex_qp(matrix, lower=lower, upper=upper, start=first), gram)
