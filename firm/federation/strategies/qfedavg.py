"""q-FedAvg: clients with larger losses get larger weights.

Li et al. (2020), "Fair Resource Allocation in Federated Learning", arXiv:1905.10497, Algorithm 2.
"""

from collections.abc import Sequence
from typing import Any

from firm.federation.aggregation import (
    by_client,
    move_adapter,
    per_length,
    update_lengths,
    zero_updates,
)
from firm.federation.engines.engine import Engine
from firm.federation.rounds import Round, losses_of
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import QFedAvgConfig

MIN_LOSS = 1e-10
"""Lower bound of losses, since the power q - 1 of a zero loss is infinite for q < 1."""


@strategy
def qfedavg(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: QFedAvgConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of q-FedAvg, and the round's rows for the log.

    With F_k client k's loss at θ_t, its mean or its total, and Δw_k = L(θ_t - θ_k),

        θ_{t+1} = θ_t - η Σ F_k^q Δw_k / Σ h_k,  h_k = q F_k^(q-1) ‖Δw_k‖² + L F_k^q.

    Numerator and denominator are divided by the largest F_k^q, which avoids overflow for losses of
    1e4 at q = 10. η, decay and normalisation are not in the paper; η = 1 is the paper's algorithm.

    The row's "weights" are F_k^q L / Σ h_k by client: the factors of the updates. They sum to 1 at
    q = 0, and to less otherwise.
    """
    this_round = Round(state, clients, engine, cfg)
    replies = this_round.train(cfg.local_training())
    updates = [reply.content for reply in replies]
    sizes = [1 if cfg.losses == "mean" else update.num_examples for update in updates]
    means = losses_of(updates, cfg.weights)
    losses = [max(size * mean, MIN_LOSS) for size, mean in zip(sizes, means, strict=True)]
    norms = update_lengths(state.adapter, updates)
    lengths = norms if cfg.normalize_updates else None

    largest = max(losses)
    powers = [(loss / largest) ** cfg.q for loss in losses]
    steps = norms if lengths is None else [float(norm > 0) for norm in norms]
    total = sum(
        cfg.q * power / loss * (cfg.lipschitz * step) ** 2 + cfg.lipschitz * power
        for power, loss, step in zip(powers, losses, steps, strict=True)
    )
    weights = [power * cfg.lipschitz / total for power in powers]
    factors = [cfg.learning_rate(state.round) * weight for weight in weights]
    adapters = [update.adapter for update in updates]
    adapter = move_adapter(state.adapter, adapters, per_length(factors, lengths))
    entries = {"weights": by_client(updates, weights), **zero_updates(updates, lengths)}
    return this_round.finish(replies, adapter, entries=entries)
