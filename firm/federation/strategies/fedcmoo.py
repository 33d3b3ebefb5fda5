"""FedCMOO: the server computes the weights once per round, and clients train on the weighted sum.

Askin et al. (2024), "Federated Communication-Efficient Multi-Objective Optimization",
arXiv:2410.16398: Algorithms 1 to 3 and 6, 9 and 10 as in the theory.
"""

from collections.abc import Sequence
from typing import Any

import torch

from firm.federation.diagnostics import stationarity
from firm.federation.engines.engine import Engine
from firm.federation.fedcmoo.gram_estimate import (
    Estimate,
    estimate_gram,
    estimate_two_sample_gram,
    train_on_sum,
)
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FedCmooConfig
from firm.solvers.fedcmoo import fedcmoo_weights
from firm.solvers.projections import project_to_simplex
from firm.solvers.regularised import firm_weights
from firm.solvers.torchjd import torchjd_weights


@strategy
def fedcmoo(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedCmooConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedCMOO, and the round's rows for the log.

    A client that fails in the first phase is excluded from the second. Its gradients are computed
    on the batch that it draws first in the second phase, so that it may reuse them there; only with
    two_sample communication the batches differ, as required by the theory.

    An objective has weight 0 if none of the round's clients serves it, or if none of their first
    batches has a loss for it; otherwise it is averaged over the clients that have it. Without any
    such objective the weights are unchanged. The row's "weights" are w by objective;
    "stationarity" is min wᵀGw of the mean gradients of the drawn batches, estimated from compressed
    messages.

    UPGrad's weights sum to 1 or more, and are used without normalisation in the local loss Σ wⱼfⱼ:
    after one local SGD step the server has moved by the local learning rate times UPGrad's
    direction.
    """
    this_round = Round(state, clients, engine, cfg)

    # phase 1: the Gram matrix of the mean Jacobian, from compressed messages
    if cfg.communication == "two_sample":
        count = cfg.gram_clients or cfg.clients_per_round
        estimate = estimate_two_sample_gram(this_round, state, cfg, count=count)
    else:
        estimate = estimate_gram(this_round, state, cfg)

    # FindWeights, starting from the previous round's weights
    last = state.memory.get("weights", [1 / len(state.objectives)] * len(state.objectives))
    weights, next_start = _next_weights(last, estimate, cfg)

    # phase 2: local training on Σ w_j f_j, and the server's step
    # the matrix of two samples is not symmetric, so there is no minimum
    has_minimum = cfg.communication != "two_sample" and bool(estimate.active)
    entries = {"stationarity": stationarity([estimate.gram.tolist()])} if has_minimum else {}
    memory = {**state.memory, "weights": next_start}
    scale = sum(weights) if cfg.solver == "upgrad" else 1.0
    return train_on_sum(
        this_round, state, cfg, estimate, weights, scale=scale, memory=memory, entries=entries
    )


def _next_weights(
    last: list[float], estimate: Estimate, cfg: FedCmooConfig
) -> tuple[list[float], list[float]]:
    """Returns the round's weights [M], and the initial weights of the next round.

    Objectives without gradients have weight 0 in this round and keep their weight for later rounds.
    """
    active = estimate.active
    if not active:
        return last, last
    mass = sum(last[j] for j in active)
    first = [last[j] / mass if mass > 0 else 1 / len(active) for j in active]
    solved = _find_weights(torch.tensor(first, dtype=torch.float64), estimate.gram, cfg)
    weights = estimate.spread(solved)
    if len(active) == len(last):
        return weights, weights
    return weights, [mass * weights[j] if j in active else last[j] for j in range(len(last))]


def _find_weights(last: torch.Tensor, gram: torch.Tensor, cfg: FedCmooConfig) -> list[float]:
    """Returns the weights of a matrix [A, A] by Algorithm 2, Eq. 3 or UPGrad."""
    if cfg.solver == "exact":
        return firm_weights(gram, beta=cfg.beta, normalize=cfg.normalize_gram).tolist()
    if cfg.solver == "upgrad":
        return torchjd_weights(gram, "upgrad").tolist()
    if cfg.communication == "two_sample":  # not symmetric, which Algorithm 2 allows
        for _ in range(cfg.num_steps):
            last = project_to_simplex(last - cfg.step_size * gram @ last)
        return last.tolist()
    return fedcmoo_weights(
        last, gram, step_size=cfg.step_size, num_steps=cfg.num_steps, normalize=cfg.normalize_gram
    ).tolist()
