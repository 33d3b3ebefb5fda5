"""FedMGDA and FedMGDA+: each client is an objective, and the server takes the min-norm update.

Hu et al. (2022), "Federated Learning Meets Multi-objective Optimization", arXiv:2006.11489:
Algorithm 1 with Eq. 22, 23 and 25; MGDA-Prox with a proximal term in the local training.
"""

from collections.abc import Sequence
from typing import Any

import torch

from firm.federation.aggregation import (
    by_client,
    per_length,
    server_step,
    shares,
    update_lengths,
    update_matrix,
    zero_updates,
)
from firm.federation.engines.engine import Engine
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FedMgdaConfig
from firm.gradients.jacobian import gram_matrix
from firm.solvers.min_norm import min_norm_weights


@strategy
def fedmgda(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedMgdaConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedMGDA+, and the round's rows for the log.

    A client with a zero update has reached its own minimum; it is listed in the row's
    "zero_updates". If its weight is unconstrained, the server's model does not change, because zero
    is the shortest combination. The row's "weights" are λ by client.
    """
    this_round = Round(state, clients, engine, cfg)

    # every client trains locally and sends g_i = θ_t - θ_i, which is normalised
    replies = this_round.train(cfg.local_training())
    updates = [reply.content for reply in replies]
    adapters = [update.adapter for update in updates]
    lengths = update_lengths(state.adapter, updates) if cfg.normalize_updates else None

    # λ* = argmin ‖Σ λ_i g_i‖² within ε of λ₀
    counts = shares(updates, by=cfg.aggregation)
    weights = [count / sum(counts) for count in counts]
    if cfg.epsilon == 0:
        step_weights: Sequence[float] = counts  # bitwise equal to FedAvg's sum
    else:
        gram = gram_matrix(update_matrix(state.adapter, adapters))
        scale = torch.tensor(per_length([1.0] * len(updates), lengths)).double()
        gram = scale[:, None] * gram * scale
        weights = min_norm_weights(gram, center=weights, radius=cfg.epsilon).tolist()
        step_weights = weights

    # θ_{t+1} = θ_t - η_t Σ λ_i g_i
    adapter = server_step(
        state.adapter,
        adapters,
        step_weights,
        learning_rate=cfg.learning_rate(state.round),
        lengths=lengths,
    )
    entries = {"weights": by_client(updates, weights), **zero_updates(updates, lengths)}
    return this_round.finish(replies, adapter, entries=entries)
