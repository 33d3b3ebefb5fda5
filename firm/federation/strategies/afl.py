"""Agnostic federated learning: the model descends while the clients' weights ascend the losses.

Mohri et al. (2019), "Agnostic Federated Learning", arXiv:1902.00146, in the form of Hu et al.
(2022), arXiv:2006.11489, with local training in place of one gradient.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from firm.federation.aggregation import by_client, move_adapter, server_step
from firm.federation.engines.engine import Engine
from firm.federation.rounds import Round, losses_of
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import AflConfig
from firm.solvers.projections import project_to_simplex


@strategy
def afl(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: AflConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of AFL, and the round's rows for the log.

    θ_{t+1} = θ_t + γ_w Σ λ_k (θ_k - θ_t) and λ ← proj(λ + γ_λ F) onto the simplex over all clients,
    where F are the participants' losses at θ_t, and 0 for other clients. λ is initially uniform and
    is stored in the server's memory. Three departures: θ_k is the result of local training; in a
    round with a sample of clients their λ are scaled to sum to 1 (uniform if all are 0); and the
    model is the last iterate unless ``cfg.average_iterates`` is set, with which the state's adapter
    is (θ_1 + ... + θ_t) / t, and θ_t is stored in the memory.

    The row's "weights" are the λ used in the step, by client of the round.
    """
    model = state.adapter
    state = replace(state, adapter=state.memory.get("iterate", model))
    this_round = Round(state, clients, engine, cfg)
    replies = this_round.train(cfg.local_training())
    updates = [reply.content for reply in replies]
    names = [reply.client for reply in replies]

    before = state.memory.get("client_weights", dict.fromkeys(clients, 1 / len(clients)))
    taken = [before[name] for name in names]
    if sum(taken) == 0:
        taken = [1.0] * len(names)
    weights = [weight / sum(taken) for weight in taken]
    adapter = server_step(
        state.adapter,
        [update.adapter for update in updates],
        weights,
        learning_rate=cfg.learning_rate(state.round),
    )

    losses = by_client(updates, losses_of(updates, cfg.weights))
    climbed = torch.tensor(
        [before[name] + cfg.weights_learning_rate * losses.get(name, 0.0) for name in clients],
        dtype=torch.float64,
    )
    after = dict(zip(clients, project_to_simplex(climbed).tolist(), strict=True))
    memory = {**state.memory, "client_weights": after}
    if cfg.average_iterates:
        memory["iterate"] = adapter
    entries = {"weights": by_client(updates, weights)}
    finished, rows = this_round.finish(replies, adapter, memory=memory, entries=entries)
    if cfg.average_iterates:  # running mean: 1/t of the new iterate, the rest of the previous mean
        finished = replace(finished, adapter=move_adapter(model, [adapter], [1 / finished.round]))
    return finished, rows
