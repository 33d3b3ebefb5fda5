"""FIRM's weights: the min-norm problem with a regulariser or a preference."""

from collections.abc import Sequence

import numpy as np

from firm.solvers.checks import ArrayT, as_gram, as_shares, like
from firm.solvers.simplex_qp import simplex_qp


def firm_weights(
    gram: ArrayT,
    *,
    beta: float = 0.01,
    preference: Sequence[float] | np.ndarray | None = None,
    preference_strength: float = 1.0,
    normalize: bool = True,
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
        gram: Gram matrix of the objectives' gradients, shape [..., M, M]. Never changed.
        beta: Strength β of the pull towards uniform weights, at least 0. Unused with a preference.
        preference: p, shape [M], non-negative, not all zero.
        preference_strength: Factor of the preference term, at least 0; the paper's is 1.
        normalize: Whether to divide the Gram matrix by the mean of its diagonal.

    Returns:
        λ, shape [..., M], in the type, dtype and device of ``gram``: non-negative, sums to 1.

    Raises:
        ValueError: On a bad Gram matrix (see ``as_gram``), beta, preference or strength.
        RuntimeError: When no weights pass the optimality check.

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
    matrix = matrix[..., is_active, :][..., is_active]
    if normalize:
        mean_square = np.einsum("...ii->...", matrix)[..., None, None] / len(regulariser)
        matrix = np.divide(matrix, mean_square, out=matrix, where=mean_square > 0)
    weights = np.zeros((*matrix.shape[:-2], num_objectives))
    weights[..., is_active] = simplex_qp(matrix + np.diag(regulariser))
    return like(weights, gram)


def _check_strength(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} must be non-negative, got {value}.")
    if np.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}; 1e6 is as good as infinite.")
