"""Diagnostics of a round, for single solves and across clients."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch

from firm.base.quantities import CENTERED, LOG, PERCENT, Quantity, register
from firm.base.schema import (
    ByObjective,
    Correlation,
    Finite,
    Gram,
    Named,
    NonNegative,
    PerObjective,
    PerPair,
    Series,
    Share,
)
from firm.federation.client import Adapter
from firm.solvers.regularised import firm_weights

INERT_EFFECT = 0.05
"""β-effect below which the regulariser counts as inert."""
ALARM_ROUNDS = 3
"""Rounds after which an inert β, or a client that failed in all of them, raises an alarm."""


def _log_norm_ratio(row: Mapping[str, Any]) -> float | None:
    """Returns the geometric mean of a row's norm ratios: first/second, or largest/smallest."""
    ratios = []
    for norms in row.get("gradient_norms") or ():
        if len(norms) < 2 or not all(norms):
            continue  # a zero gradient has no ratio
        ratio = norms[0] / norms[1] if len(norms) == 2 else max(norms) / min(norms)
        ratios.append(math.log(ratio))
    return math.exp(fmean(ratios)) if ratios else None


_gradient = partial(Quantity, section="gradients", lines="clients and mean")
register(
    Quantity(
        "weights",
        "λ of {}",
        "mean weight λ",
        "λ is the weight of each objective's gradient in a client's step; depending on the "
        "strategy, each client solves for its own, the server solves for all, or the weights are "
        "fixed. The dashed line marks uniform weights.",
        type=Series[PerObjective[Share]],
        noisy=Series[PerObjective[Finite]],
        section="weights",
        lines="clients and mean",
        reference="1/M",
        is_share=True,
    ),
    Quantity(
        "weights_spread",
        "Spread of λ over clients",
        "SD of λ over clients",
        "A larger spread means that clients weight the objectives differently.",
        kind="round",
        type=ByObjective[NonNegative | None],
        section="weights",
        is_share=True,
    ),
    Quantity("gradient_norms", type=Series[PerObjective[NonNegative]]),
    _gradient(
        "cosines",
        "Cosine, {}",
        "cosine",
        "Gradients with a negative cosine conflict: a step along one increases the other's loss.",
        type=Series[PerPair[Correlation | None]],  # None in older logs, if a gradient is zero
        noisy=Series[PerPair[Finite]],
        reference=0.0,
        axis=CENTERED,
    ),
    _gradient(
        "norm_ratio",
        "Norm, {}",
        "norm ratio",
        reference=1.0,
        axis=LOG,
        of=_log_norm_ratio,
    ),
    _gradient(
        "beta_effect",
        "β-effect",
        "share of the distance",
        "The β-effect is the share of the distance to uniform weights by which regularisation "
        "moves λ; below 5 % (dashed) β has almost no effect.",
        type=Series[NonNegative],
        reference=INERT_EFFECT,
        axis=PERCENT,
    ),
    _gradient(
        "step_share",
        "Share of the step by objective",
        "share of the squared length",
        "An objective's share of a step's squared length is, to second order, its share of the KL "
        "that the step adds; below zero it holds the others back.",
        type=ByObjective[Finite | None],
        lines="means",
        reference=0.0,
        axis=PERCENT,
    ),
    Quantity("gram", type=Gram, needs=("weights",)),
    Quantity(
        "drift",
        "Client drift",
        "spread / server step",
        "Drift is the clients' mean distance from the mean adapter, relative to the server's step.",
        kind="round",
        type=NonNegative,
        section="gradients",
    ),
    Quantity(
        "stationarity",
        "Bound on Pareto stationarity",
        "squared norm",
        "An upper bound on the squared norm of the min-norm gradient at the global model, on the "
        "first batches of a round: near zero, no step improves all objectives on these batches. "
        "For the expected objectives it is an estimate, which is usually raised by batch noise.",
        kind="round",
        section="gradients",
    ),
    Quantity("weights", kind="round", type=Named[Finite]),
    Quantity("norm_ratio", kind="round", type=NonNegative),
    Quantity("disagreement_bound", kind="round"),
)


def gradient_norms(gram: torch.Tensor) -> torch.Tensor:
    """Returns the gradient norms from a Gram matrix, [..., M, M] to [..., M]."""
    return gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()


def cosines(gram: torch.Tensor) -> torch.Tensor:
    """Returns the cosine similarity of each pair of gradients; 0 if either gradient is zero.

    The pairs are in the order of the upper triangle, row by row (01, 02, ..., 12, ...); [..., M, M]
    to [..., M(M-1)/2], in [-1, 1].
    """
    norms = gradient_norms(gram)
    products = norms[..., None] * norms[..., None, :]
    cosine = torch.where(products > 0, gram / products, torch.zeros_like(gram)).clamp(-1, 1)
    first, second = torch.triu_indices(*gram.shape[-2:], offset=1)
    return cosine[..., first, second]


def norm_ratio(norms: Sequence[float]) -> float:
    """Returns the ratio of the largest to the smallest of M gradient norms, at least 1.

    Infinite if some gradients are zero, and 1 if all are. If it is far from 1, the weights mostly
    compensate for a difference in scale.
    """
    smallest, largest = min(norms), max(norms)
    if smallest == largest:
        return 1.0
    return largest / smallest if smallest > 0 else float("inf")


def beta_effect(weights: torch.Tensor, unregularised: torch.Tensor) -> float:
    """Returns how far the regulariser moved the weights λ [M], ‖λ - λ(0)‖ / ‖1/M - λ(0)‖.

    0 means that β had no effect, 1 that it made the weights uniform; if λ(0), the weights at β = 0,
    are uniform already, the effect is 0.
    """
    uniform = torch.full_like(unregularised, 1 / len(unregularised))
    distance = torch.linalg.vector_norm(uniform - unregularised).item()
    if distance < 1e-9:  # rounding of λ(0), not a direction
        return 0.0
    return torch.linalg.vector_norm(weights - unregularised).item() / distance


def served_beta_effect(weights: torch.Tensor, gram: torch.Tensor, served: Sequence[int]) -> float:
    """Returns the β-effect on the weights [M] of a solve for some of the objectives."""
    rows = list(served)
    return beta_effect(weights[rows], firm_weights(gram[rows][:, rows], beta=0.0))


def step_parts(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns each gradient's part of a step's squared length, λ_j (Gλ)_j, [M, M] and [M] to [M].

    The parts sum to λᵀGλ, the squared length of the direction d = Σ_j λ_j g_j. To second order the
    KL of a small step is ½ dᵀFd, so where the Fisher matrix F is near a multiple of the identity,
    a part's share of the sum is the share of the KL that its objective causes. It is a share of
    the gradients' own step: Adam's scales and the proximal term are left out. A part is negative
    where an objective's gradient opposes the direction. At the min-norm weights the share is λ_j.
    """
    return weights * (gram @ weights)


def beta_for_effect(gram: torch.Tensor, effect: float) -> float:
    """Returns the smallest β with a given effect, in (0, 1), on the weights of a Gram matrix.

    For M = 2, inside the simplex, the effect is β / (2 - 2Ĝ₁₂ + β) with Ĝ = G / mean(diag G), and
    so β = (2 - 2Ĝ₁₂) effect / (1 - effect); in general β is found by bisection. β is at most 1e6,
    and 0 if λ(0) is uniform already.
    """
    unregularised = firm_weights(gram, beta=0.0)
    if beta_effect(torch.full_like(unregularised, 1 / len(gram)), unregularised) == 0.0:
        return 0.0
    low, high = -6.0, 6.0  # of the exponent of 10
    for _ in range(50):
        middle = (low + high) / 2
        reached = beta_effect(firm_weights(gram, beta=10.0**middle), unregularised) >= effect
        low, high = (low, middle) if reached else (middle, high)
    return 10.0**high


def beta_alarm(
    rows: Sequence[Mapping[str, Any]], beta: float, *, normalize: bool = True
) -> str | None:
    """Returns an alarm if β has almost no effect on the weights; otherwise None.

    `normalize` tells whether clients divide Gram matrices by the mean of their diagonals; without
    it, the β that the alarm names is of their scale.

    The alarm is raised once, after ``ALARM_ROUNDS``, if the median β-effect of all solves in the
    log's rows is below 5 %. There is no alarm if β is 0, or if privacy hides all solves.
    """
    clients = [row for row in rows if row.get("kind") == "client" and "beta_effect" in row]
    if beta == 0 or max((row["round"] for row in clients), default=0) != ALARM_ROUNDS:
        return None
    effects = [value for row in clients for value in row["beta_effect"]]
    if not effects or (effect := median(effects)) >= INERT_EFFECT:
        return None
    grams = (
        _gram(norms, cosine)
        for row in clients
        for norms, cosine in zip(row["gradient_norms"], row["cosines"], strict=True)
    )
    solves = [
        beta_for_effect(gram, INERT_EFFECT) * (1 if normalize else gram.diagonal().mean().item())
        for gram in map(_nonzero, grams)
        if len(gram) > 1
    ]
    if not solves:
        return None
    return (
        f"strategy.beta {beta:g} is inert, with almost no effect on the weights λ: over "
        f"{ALARM_ROUNDS} rounds it moved them {effect:.1%} of the way to uniform weights; about "
        f"{median(solves):.2g} would move them {INERT_EFFECT:.0%}. To disable regularisation, set "
        "it to 0."
    )


def _gram(norms: Sequence[float], cosine: Sequence[float]) -> torch.Tensor:
    """Returns the Gram matrix [M, M] of gradients with these norms and pairwise cosines."""
    gram = torch.diag(torch.tensor(norms, dtype=torch.float64).square())
    for (i, j), value in zip(combinations(range(len(norms)), 2), cosine, strict=True):
        gram[i, j] = gram[j, i] = (value or 0.0) * norms[i] * norms[j]
    return gram


def _nonzero(gram: torch.Tensor) -> torch.Tensor:
    """Returns a Gram matrix without zero gradients, as of objectives that a client lacks."""
    rows = gram.diagonal() > 0
    return gram[rows][:, rows]


def stationarity(grams: Sequence[Sequence[Sequence[float]]]) -> float:
    """Returns the Pareto-stationarity bound min_λ λᵀ(mean_c G_c)λ over the simplex.

    By Jensen's inequality it is at least min_λ ‖(1/C) Σ_c Σ_j λ^j g^{j,c}‖², the squared norm of
    the shortest combination of the clients' mean gradients. If all gradients are at the same model,
    it bounds that model's distance from Pareto stationarity on the sampled batches, with equality
    for a single matrix. A mean of gradients at different models is the gradient of none of them.

    For the expected gradients it is an estimate, not a bound, not even in the mean over batches:
    noise adds its variance to each G_c, but the best λ is chosen after the noise was drawn.

    The Gram matrices are C nested lists of shape [M, M]; the bound is non-negative up to rounding.
    """
    mean = torch.tensor(grams, dtype=torch.float64).mean(dim=0)
    weights = firm_weights(mean, beta=0.0)
    return (weights @ mean @ weights).item()


def weights_spread(weights: Sequence[Sequence[Sequence[float]]]) -> torch.Tensor:
    """Returns the standard deviation over clients of each client's mean weights, shape [M].

    Each client's weights are a nested list with one row per solve, shape [S, M].
    """
    means = [torch.tensor(solves, dtype=torch.float64).mean(dim=0) for solves in weights]
    return torch.stack(means).std(dim=0, correction=0)


def disagreement_drift(jacobians: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> float:
    """Returns how far differences in the clients' weights [M] move their mean direction.

    This is the multi-objective disagreement drift ‖(1/C) Σ_c Σ_j g^{j,c} (λ^{j,c} - λ̄^j)‖² of Eq.
    7 of FIRM (Nourzad et al.) in a local step, with the gradients [M, d] of each client and the
    mean λ̄ of the clients' weights; 0 if the weights agree.
    """
    deviations = _deviations(weights)
    directions = [
        deviation @ jacobian.double()
        for jacobian, deviation in zip(jacobians, deviations, strict=True)
    ]
    return torch.stack(directions).mean(dim=0).square().sum().item()


def disagreement_bound(grams: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> float:
    """Returns an upper bound on ``disagreement_drift`` that needs only M² numbers per client.

    By Jensen's inequality it is (1/C) Σ_c (λ^c - λ̄)ᵀ G_c (λ^c - λ̄) ≥ 0, from each client's Gram
    matrix [M, M] and weights [M] in the same solve. It is not a bound for Gram matrices and weights
    that were averaged over solves: weights with alternating disagreements have equal means.
    """
    deviations = _deviations(weights)
    squares = [
        deviation @ gram.double() @ deviation
        for gram, deviation in zip(grams, deviations, strict=True)
    ]
    return torch.stack(squares).mean().item()


def _deviations(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the deviations of the clients' weights from their mean, shape [C, M]."""
    stacked = torch.stack(list(weights)).double()
    return stacked - stacked.mean(dim=0)


def drift(adapters: Sequence[Adapter], after: Adapter, start: Adapter) -> float:
    """Returns the spread of the clients' adapters relative to the server's step.

    This is the mean over clients of ‖θ_c - θ̄‖, with their plain mean θ̄, divided by ‖θ_{t+1} - θ_t‖;
    0 if θ_{t+1} equals θ_t.
    """
    progress = _distance(after, start)
    if progress == 0.0:
        return 0.0
    zeros = {name: torch.zeros_like(own, dtype=torch.float64) for name, own in start.items()}
    mean = {n: sum((own[n] for own in adapters), zeros[n]) / len(adapters) for n in start}
    return sum(_distance(adapter, mean) for adapter in adapters) / len(adapters) / progress


def _distance(first: Adapter, second: Adapter) -> float:
    norms = [torch.linalg.vector_norm((first[name] - second[name]).double()) for name in first]
    return torch.stack(norms).norm().item()


def failure_alarms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns alarms about clients that fail repeatedly, from the log's rows so far.

    An alarm names a client once it has failed in ``ALARM_ROUNDS`` consecutive rounds in which it
    was asked, and again whenever that number has doubled.
    """
    history = [row for row in rows if row.get("kind") == "round"]
    if not history:
        return []
    alarms = []
    for failure in history[-1]["failures"]:
        streak = []
        for row in reversed(history):
            if failure["client"] in row["clients"]:
                break
            if any(other["client"] == failure["client"] for other in row["failures"]):
                streak.append(row["round"])
        doublings = len(streak) / ALARM_ROUNDS
        if doublings >= 1 and doublings == 2 ** round(math.log2(doublings)):
            alarms.append(
                f"{failure['client']} has failed in {len(streak)} rounds in a row, from round "
                f"{streak[-1]} to {streak[0]}: {failure['reason']}"
            )
    return alarms
