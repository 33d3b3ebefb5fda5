"""FedCMOO's weights: projected gradient steps, and the linear programme of FedCMOO-Pref."""

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from firm.solvers.checks import ArrayT, as_gram, as_values, as_weights, like
from firm.solvers.programs import linear_program
from firm.solvers.projections import simplex_projection
from firm.solvers.settings import check_shares, check_steps, check_targets
from firm.solvers.simplex_qp import simplex_qp

logger = logging.getLogger(__name__)

MIN_SHARE = 1e-12
"""Replaces the share of a zero loss, whose logarithm would be infinite."""
MIN_ROOM = 1e-12
"""Share left by the smallest weights up to which all weights are equal."""
TIE = 1e-9
"""Relative tolerance within which rₖFₖ counts as the largest."""
RELEASED_TIE = 0.1
"""The same tolerance in the authors' released code."""


def fedcmoo_weights(
    weights: ArrayT,
    gram: torch.Tensor | np.ndarray,
    *,
    step_size: float,
    num_steps: int,
    normalize: bool = False,
) -> ArrayT:
    """Returns the weights after projected gradient steps: FindWeights, Algorithm 2 of FedCMOO.

    Each step is w ← proj(w - step_size · G w) onto the simplex (Eq. 5 of Askin et al.). This
    approximates ``min_norm_weights`` by a fixed number of steps, without a convergence check.

    Args:
        weights: Initial weights, usually those of the previous round, shape [..., M].
        gram: G, shape [..., M, M].
        step_size: β of the paper, positive.
        num_steps: K, at least 1; the paper's theory uses 1.
        normalize: Whether to divide G by the square of the mean gradient norm. Not in the paper,
            whose fixed step size is not scale-invariant: with small gradients the weights hardly
            move, with large ones they jump between corners of the simplex.

    >>> fedcmoo_weights(torch.tensor([0.5, 0.5]), torch.diag(torch.tensor([4.0, 1.0])),
    ...                 step_size=0.1, num_steps=100)
    tensor([0.2000, 0.8000])
    """
    matrix = as_gram(gram)
    point = as_weights(weights, matrix)
    check_steps(step_size)
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
    if normalize:
        norms = np.sqrt(np.maximum(np.einsum("...ii->...i", matrix), 0.0))
        square = np.square(norms.mean(axis=-1))[..., None, None]
        matrix = np.divide(matrix, square, out=matrix, where=square > 0)
    for _ in range(num_steps):
        slope = np.einsum("...ij,...j->...i", matrix, point)
        point = simplex_projection(point - step_size * slope)
    return like(point, weights)


def fedcmoo_pref_weights(
    gram: ArrayT,
    losses: torch.Tensor | np.ndarray,
    preference: Sequence[float] | np.ndarray,
    *,
    threshold: float = 0.01,
    min_weight: float = 0.0,
    variant: Literal["printed", "released"] = "printed",
) -> ArrayT:
    """Returns FedCMOO-Pref's weights: towards r₁F₁ = ... = r_M F_M without increasing the worst.

    FindWeights-Pref, Algorithms 4 and 8 of FedCMOO (Askin et al.). With û = r ∘ F / Σ rₖFₖ, its
    divergence from uniform μ = Σ ûₖ log(ûₖM), and aₖ = rₖ(log(ûₖM) - μ), Eq. 19 is::

        max over the simplex of  wᵀG a   where μ > threshold, else  wᵀG 1
        subject to  (Gw)ₖ ≥ 0  for k in J* = argmax rₖFₖ,
                    (Gw)ₖ ≥ (Ga)ₖ · [J is not empty]  for the other k in J̄,

    with J = {k: (Ga)ₖ > 0} and J̄ its complement. It is feasible for every positive semidefinite G:
    the min-norm weights satisfy (Gw)ₖ ≥ wᵀGw ≥ 0 ≥ (Ga)ₖ on J̄. They are also the fallback if
    rounding makes the programme infeasible.

    Args:
        gram: G, shape [..., M, M].
        losses: F, non-negative, shape [..., M].
        preference: r, shape [M], non-negative, not all zero; a larger rₖ requests a smaller Fₖ. Not
            normalised, since the second constraint depends on its scale. rₖ = 0 excludes objective
            k: weight 0.
        threshold: ε; at divergences up to it, the objective is the steepest decrease of the summed
            losses.
        min_weight: Lower bound of every weight, at most 1/M: the result is projected (Euclidean)
            onto the simplex with this bound. The paper's practical improvement uses 1/(5M).
        variant: "printed" is the programme as in the paper. "released" follows the authors' code,
            which differs: J* holds all k with rₖFₖ of at least 0.9 times the largest; for μ up to
            the threshold (Gw)ₖ ≥ 0 is required for every k; and the minimum is enforced by w ← (1 -
            M·min_weight) w + min_weight.

    >>> fedcmoo_pref_weights(torch.eye(2), torch.tensor([2.0, 1.0]), [1.0, 1.0]).tolist()
    [1.0, 0.0]
    """
    matrix = as_gram(gram)
    values = as_values(losses, matrix, name="losses")
    if values.min() < 0:
        raise ValueError(f"losses must be non-negative, got {values.min():.3g}.")
    check_shares(preference, matrix.shape[-1], name="preference")
    multiples = np.array(preference, dtype=np.float64)
    active = np.flatnonzero(multiples)
    check_targets(threshold, min_weight, len(active))
    if variant not in ("printed", "released"):
        raise ValueError(f"variant must be 'printed' or 'released', got {variant!r}.")
    is_released = variant == "released"
    batch = matrix[..., active[:, None], active].reshape(-1, len(active), len(active))
    rows = values[..., active].reshape(-1, len(active))
    solved = np.array(
        [
            _preferred(single, row, multiples[active], threshold, is_released=is_released)
            for single, row in zip(batch, rows, strict=True)
        ]
    )
    room = 1 - len(active) * min_weight
    if is_released:
        solved = room * solved + min_weight
    elif room <= MIN_ROOM:
        solved = np.full_like(solved, 1 / len(active))
    elif min_weight > 0:
        solved = min_weight + room * simplex_projection(solved / room)
    weights = np.zeros(values.shape)
    weights[..., active] = solved.reshape(*values.shape[:-1], len(active))
    return like(weights, gram)


def _preferred(
    gram: np.ndarray,
    losses: np.ndarray,
    multiples: np.ndarray,
    threshold: float,
    *,
    is_released: bool,
) -> np.ndarray:
    """Solves Eq. 19 for one matrix [M, M], or the released code's programme."""
    num_objectives = len(gram)
    if np.trace(gram) <= 0 or num_objectives == 1:
        return np.full(
            num_objectives, 1 / num_objectives
        )  # every weight vector gives the same direction
    wanted = multiples * losses
    total = wanted.sum()
    shares = np.maximum(
        wanted / total if total > 0 else np.full(num_objectives, 1 / num_objectives), MIN_SHARE
    )
    logs = np.log(shares * num_objectives)
    divergence = shares @ logs
    towards = multiples * (logs - divergence)  # a
    effect = gram @ towards  # Ga
    is_falling = effect > 0  # J
    is_worst = wanted >= wanted.max() * (1 - (RELEASED_TIE if is_released else TIE))  # J*
    floors = np.where(is_falling & ~is_worst, -np.inf, effect * is_falling.any())
    floors[is_worst] = 0.0
    if is_released and divergence <= threshold:
        floors[:] = 0.0
    gains = effect if divergence > threshold else gram.sum(axis=1)
    weights = linear_program(gains, gram, floors)
    if weights is None:
        logger.warning("No weights satisfy the preference's constraints; using min-norm weights.")
        return simplex_qp(gram)
    return weights
