"""Weights that do not depend on the gradients: the weighted-sum baseline."""

from collections.abc import Sequence

import numpy as np

from firm.solvers.checks import ArrayT, as_gram, as_shares, like


def fixed_weights(gram: ArrayT, *, weights: Sequence[float] | np.ndarray | None = None) -> ArrayT:
    """Returns the given non-negative weights [M], by default uniform, scaled to sum 1."""
    shape = as_gram(gram).shape[:-1]
    shares = as_shares(
        np.ones(shape[-1]) if weights is None else weights, shape[-1], name="weights"
    )
    return like(np.broadcast_to(shares, shape).copy(), gram)
