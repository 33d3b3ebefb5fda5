"""Weights that do not look at the gradients: the weighted-sum baseline."""

from collections.abc import Sequence

import numpy as np

from firm.solvers.checks import ArrayT, as_gram, as_shares, like


def fixed_weights(gram: ArrayT, *, weights: Sequence[float] | np.ndarray | None = None) -> ArrayT:
    """Returns the given weights scaled to sum 1, in the form in which a solver returns its own.

    Args:
        gram: Gram matrix of the objectives' gradients, shape [..., M, M].
        weights: Non-negative, not all zero, shape [M]; uniform by default.

    Returns:
        Weights, shape [..., M], in the type, dtype and device of ``gram``.

    Raises:
        ValueError: On a bad Gram matrix or weights.
    """
    shape = as_gram(gram).shape[:-1]
    shares = as_shares(
        np.ones(shape[-1]) if weights is None else weights, shape[-1], name="weights"
    )
    return like(np.broadcast_to(shares, shape).copy(), gram)
