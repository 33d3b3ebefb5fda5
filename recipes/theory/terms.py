"""The terms of the convergence proof, measured: Eq. 5 to 8, 13, 14 and 23 of FIRM (Nourzad et al.).

Two slips of Eq. 6 are mended as the paper's own Appendix F does (Eq. 13 and 14): T₁,₁ compares with
the clients' exact gradients along the *common* weights λ̄, without which the two parts do not add up
to T₁; and the appendix's sums of squares need the factors 2 that Eq. 6 and 7 have.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from firm.federation.diagnostics import disagreement_bound, disagreement_drift
from firm.solvers import firm_weights
from recipes.theory.exact import gradient_bound, return_gradients
from recipes.theory.mdp import Mdp


@dataclass(frozen=True, eq=False)
class Trace:
    """Trace of all clients over T consecutive local steps."""

    thetas: np.ndarray
    """θ_t^c, before the step, shape [T, C, d]."""
    gradients: np.ndarray
    """g_t^{j,c} of Eq. 10, ascending, shape [T, C, M, d]."""
    solved: np.ndarray
    """λ*_t^c of Eq. 11, shape [T, C, M]."""
    weights: np.ndarray
    """λ_t^c, the average that the client stepped along, shape [T, C, M]."""


@dataclass(frozen=True, eq=False)
class Terms:
    """The proof's terms in each of T local steps, shape [T] each.

    Always ``t1 <= 2 (t11 + t12)`` and ``t11 <= 2 (gradient_error + drift)``,
    and ``drift_solved <= bound_solved``.
    """

    stationarity: np.ndarray
    """‖∇J(θ̄) λ̄‖², whose mean Theorem 1 bounds."""
    min_norm: np.ndarray
    """min_λ ‖∇J(θ̄) λ‖², Pareto stationarity itself (Definition 3)."""
    t1: np.ndarray
    """T₁ = ‖(1/C) Σ g^c - ∇J(θ̄) λ̄‖² of Eq. 5."""
    t11: np.ndarray
    """T₁,₁ = ‖(1/C) Σ (g^c - ∇J(θ^c) λ̄)‖² of Eq. 13, the local error."""
    t12: np.ndarray
    """T₁,₂ = ‖(1/C) Σ (∇J(θ^c) - ∇J(θ̄)) λ̄‖² of Eq. 6, the classical client drift."""
    gradient_error: np.ndarray
    """‖(1/C) Σ_c Σ_j λ̄^j (g^{j,c} - ∇J^j(θ^c))‖², the first part of Eq. 7."""
    drift: np.ndarray
    """The second part of Eq. 7, the disagreement drift, with the clients' λ_t. As the deviations
    λ^c - λ̄ sum to zero, it is the square of a *covariance* of gradients and weights over the
    clients: of second order in each of the two."""
    drift_solved: np.ndarray
    """The disagreement drift with the clients' λ*_t, before averaging."""
    bound_solved: np.ndarray
    """(1/C) Σ (λ*^c - λ̄*)ᵀ G_c (λ*^c - λ̄*) above it, where the proof leaves the covariance (after
    Jensen's inequality in F.1.2): of second order in the weights alone."""
    spread: np.ndarray
    """Root mean square over clients of ‖λ*^c - λ̄*‖, of first order. The proof ends with it (Eq. 19
    to 22, by S² <= 2S), Lemma 1 bounds it, and Theorem 1's exponents are its exponents."""
    spread_steps: np.ndarray
    """The spread of λ* solved from *exact* gradients at each client's θ: the part due to local
    steps, without sampling noise."""
    drift_steps: np.ndarray
    """The drift of these weights on these gradients."""


@dataclass(frozen=True, eq=False)
class Lemma1:
    """Both sides of Lemma 1 (Lemma 8), for every pair of clients in every local step, [T, pairs].

    That is ‖λ*^c - λ*^c'‖ <= (4 R M / β) max_j ‖g^{j,c} - g^{j,c'}‖.
    """

    left: np.ndarray
    right: np.ndarray
    """With R the largest norm among this pair's own gradients, the smallest that the proof
    allows."""
    right_prior: np.ndarray
    """With Lemma 7's a-priori R."""


def measure_terms(mdp: Mdp, trace: Trace, *, beta: float) -> Terms:
    """Returns the proof's terms of every local step, with exact gradients of J."""
    mean_theta, mean_weights = trace.thetas.mean(axis=1), trace.weights.mean(axis=1)
    at_mean = return_gradients(mdp, mean_theta)  # [T, M, d]
    at_clients = return_gradients(mdp, trace.thetas)  # [T, C, M, d]

    def along(gradients: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.einsum("...jd,...j->...d", gradients, weights)

    goal = along(at_mean, mean_weights)  # [T, d]
    step = along(trace.gradients, trace.weights).mean(axis=1)
    common = along(at_clients.mean(axis=1), mean_weights)
    noise = along((trace.gradients - at_clients).mean(axis=1), mean_weights)
    exact_weights = firm_weights(_grams(at_clients), beta=beta, normalize=False)
    min_norm = firm_weights(_grams(at_mean), beta=0.0, normalize=False)
    return Terms(
        stationarity=_square(goal),
        min_norm=_square(along(at_mean, min_norm)),
        t1=_square(step - goal),
        t11=_square(step - common),
        t12=_square(common - goal),
        gradient_error=_square(noise),
        drift=_drifts(trace.gradients, trace.weights),
        drift_solved=_drifts(trace.gradients, trace.solved),
        bound_solved=_bounds(trace.gradients, trace.solved),
        spread=_spread(trace.solved),
        spread_steps=_spread(exact_weights),
        drift_steps=_drifts(at_clients, exact_weights),
    )


def measure_lemma_1(mdp: Mdp, trace: Trace, *, beta: float) -> Lemma1:
    """Returns both sides of Lemma 1, with Lemma 7's R of the MDP's constants.

    Raises:
        ValueError: With a single client, or without regularisation, β > 0.
    """
    num_clients = trace.solved.shape[1]
    if num_clients < 2:
        raise ValueError("Lemma 1 compares clients, got a single one; take num_clients >= 2.")
    if not beta > 0:
        raise ValueError(f"Lemma 1 needs a positive beta, got {beta}.")
    first, second = np.array(list(combinations(range(num_clients), 2))).T
    norms = np.linalg.norm(trace.gradients, axis=-1).max(axis=-1)  # [T, C]
    gaps = np.linalg.norm(trace.gradients[:, first] - trace.gradients[:, second], axis=-1)
    factor = 4 * trace.solved.shape[2] / beta * gaps.max(axis=-1)
    return Lemma1(
        left=np.linalg.norm(trace.solved[:, first] - trace.solved[:, second], axis=-1),
        right=factor * np.maximum(norms[:, first], norms[:, second]),
        right_prior=factor * gradient_bound(mdp),
    )


def largest_ratio(left: np.ndarray, right: np.ndarray) -> float:
    """Returns the largest left / right; 0 / 0 counts as 0."""
    return float(np.divide(left, right, out=np.zeros_like(left), where=left > 0).max())


def _square(vectors: np.ndarray) -> np.ndarray:
    return (vectors**2).sum(axis=-1)


def _grams(gradients: np.ndarray) -> np.ndarray:
    return gradients @ gradients.swapaxes(-1, -2)


def _spread(weights: np.ndarray) -> np.ndarray:
    return np.sqrt(_square(weights - weights.mean(axis=1, keepdims=True)).mean(axis=1))


def _drifts(gradients: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns Eq. 7's second part in every local step, [T, C, M, d] and [T, C, M] to [T]."""
    steps = zip(torch.from_numpy(gradients), torch.from_numpy(weights), strict=True)
    return np.array([disagreement_drift(list(g), list(w)) for g, w in steps])


def _bounds(gradients: np.ndarray, weights: np.ndarray) -> np.ndarray:
    steps = zip(torch.from_numpy(_grams(gradients)), torch.from_numpy(weights), strict=True)
    return np.array([disagreement_bound(list(g), list(w)) for g, w in steps])
