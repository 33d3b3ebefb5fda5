"""RACO's weights: conflict-averse gradients, clipped by a preference."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from firm.solvers.checks import ArrayT, as_gram, as_shares, like

TOLERANCE = 1e-6
"""Largest distance from the optimal value, for gradients of root mean square norm 1."""
SHORTEST = 1e-8
"""Norm below which a combination of such gradients counts as zero."""


def raco_weights(
    gram: ArrayT,
    *,
    preference: Sequence[float] | None = None,
    c: float = 0.4,
    served: Sequence[int] | None = None,
) -> ArrayT:
    """Returns the weights of CAGrad-Clip, the direction of RACO (Chen et al., arXiv:2602.02495).

    With the preference w and g₀ = Σ wᵢgᵢ, the correction's coefficients

        p* = argmin over the simplex of Gₚᵀg₀ + c ‖g₀‖ ‖Gₚ‖,  Gₚ = Σ pᵢgᵢ,

    are those of CAGrad (Liu et al. 2021). Clipped to p̃ᵢ = min(p*ᵢ, wᵢ), so that no objective gains
    more than its share, they give the direction g₀ + c ‖g₀‖ Gₚ̃ / ‖Gₚ̃‖. The paper applies it to
    DPO's losses; it applies to any. The formulas are those of summaries of the paper, and were not
    compared with its text or code.

    Args:
        gram: Gram matrix, shape [M, M].
        preference: w, shape [M], non-negative, not all zero; scaled to sum 1. Uniform by default.
        c: Radius of the correction relative to ‖g₀‖, in [0, 1); 0 is the weighted sum. 0.4 is from
            the authors' released scripts.
        served: Indices of the objectives to weight; the others have weight 0. All by default.

    Returns:
        Non-negative weights, shape [M]; their sum is 1 or more.

    Raises:
        ValueError: c or an argument's shape or range is invalid.
        RuntimeError: The result fails its optimality check.

    >>> raco_weights(np.diag([1.0, 1.0]), c=0.5).tolist()
    [0.75, 0.75]
    """
    if not 0 <= c < 1:
        raise ValueError(f"c must be at least 0 and less than 1, got {c}.")
    whole = as_gram(gram)
    rows = list(range(len(whole)) if served is None else served)
    weights = np.zeros(len(whole))
    asked = np.ones(len(whole)) if preference is None else preference
    shares = as_shares(asked, len(whole), name="preference")[rows]
    if shares.any():
        weights[rows] = _clipped(whole[np.ix_(rows, rows)], shares / shares.sum(), c)
    return like(weights, gram)


def _clipped(gram: np.ndarray, shares: np.ndarray, c: float) -> np.ndarray:
    """Returns the weights for a Gram matrix in float64 [M, M] and shares w [M]."""
    scale = gram.trace() / len(gram)
    gram = gram / scale if scale > 0 else gram
    radius = c * _norm(gram, shares)
    clipped = np.minimum(_correction(gram, shares, radius), shares)
    length = _norm(gram, clipped)
    return shares + radius / length * clipped if length > SHORTEST else shares


def _correction(gram: np.ndarray, shares: np.ndarray, radius: float) -> np.ndarray:
    """Returns p*, the minimiser of pᵀGw + radius ‖Gₚ‖ on the simplex."""
    slopes = gram @ shares

    def value(p: np.ndarray) -> tuple[float, np.ndarray]:
        norm = _norm(gram, p)
        slope = slopes + (radius / norm * (gram @ p) if norm > 0 else 0.0)
        return float(slopes @ p + radius * norm), slope

    found = minimize(
        value,
        shares,
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * len(shares),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 1000},
    ).x
    point = np.maximum(found, 0.0)
    point /= point.sum()
    slope = value(point)[1]
    gap = slope @ point - slope.min()  # bounds the distance from the optimal value
    if not gap <= TOLERANCE and _norm(gram, point) > SHORTEST:
        raise RuntimeError(
            f"RACO's coefficients {point.tolist()} for the Gram matrix {gram.tolist()} are not "
            f"optimal, by {gap:.3g}; choose another solver."
        )
    return point


def _norm(gram: np.ndarray, weights: np.ndarray) -> float:
    return float(np.sqrt(max(weights @ gram @ weights, 0.0)))
