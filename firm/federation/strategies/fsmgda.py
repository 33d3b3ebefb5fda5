"""FMGDA and FSMGDA: one local training per objective, and min-norm weights for their updates.

Yang et al. (2023), "Federated Multi-Objective Learning", arXiv:2310.09866, Algorithm 1. The two
differ only on the clients: with batches that are the whole shard, clients take full local gradient
steps, which is FMGDA. With one client and one local step they are the centralised MGD and SMGD.

A run returns its last iterate, which is not covered by the paper's theorems. For strongly convex
objectives (Theorems 3 and 7) the paper returns an x_t drawn at random with weights proportional to
(1 - μη/2)^(1-t); for others (Theorems 1 and 5) its bound applies to the best x_t. The weights
require μ, which neural networks do not have, and the paper's experiments show curves over all
rounds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from firm.federation.aggregation import (
    move_adapter,
    server_step,
    shares,
    update_matrix,
    weighted_mean,
)
from firm.federation.client import Reply
from firm.federation.engines.engine import Engine
from firm.federation.messages import Update
from firm.federation.objective_training import ObjectiveTraining, ObjectiveUpdates
from firm.federation.rounds import Round
from firm.federation.server import ServerState, too_long
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FsmgdaConfig
from firm.gradients.jacobian import gram_matrix
from firm.solvers.min_norm import min_norm_weights


@strategy
def fsmgda(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FsmgdaConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FSMGDA, and the round's rows for the log.

    An objective that none of the round's clients serves has weight 0. The row's "weights" are λ by
    objective; its "drift" is computed from each client's updates combined with these weights.
    """
    this_round = Round(state, clients, engine, cfg)

    # every client trains once for each of its objectives, always from θ_t, and sends Δ_{s,i}
    request = this_round.request(ObjectiveTraining, cfg.local_work())

    def check(content: ObjectiveUpdates) -> str | None:
        limit = cfg.max_update_norm
        reasons = (too_long(each, request.adapter, limit) for each in content.updates.values())
        return next(filter(None, reasons), None)

    replies = this_round.ask(
        request, this_round.sampled, check=check, common=lambda content: content.num_shared
    )

    # Δ_s is the mean over R_s, the clients that serve s
    contents = [reply.content for reply in replies]
    means = {}
    for name in state.objectives:
        if serving := [content for content in contents if name in content.updates]:
            counts = shares(serving, by=cfg.aggregation)
            means[name] = weighted_mean([content.updates[name] for content in serving], counts)

    # λ* = argmin ‖Σ λ_s Δ_s‖² over the simplex
    rows = update_matrix(state.adapter, list(means.values()))
    if cfg.gram_columns == "shared":
        rows = rows[:, : contents[0].num_shared]
    solved = min_norm_weights(gram_matrix(rows)).tolist()
    weights = dict.fromkeys(state.objectives, 0.0) | dict(zip(means, solved, strict=True))

    # θ_{t+1} = θ_t + η Σ λ_s Δ_s
    adapter = server_step(
        state.adapter, list(means.values()), solved, learning_rate=cfg.server_learning_rate
    )
    combined = [_as_update(reply, state, weights) for reply in replies]
    return this_round.finish(combined, adapter, entries={"weights": weights})


def _as_update(reply: Reply, state: ServerState, weights: dict[str, float]) -> Reply:
    """Returns the reply with its objectives' updates combined by the server's weights."""
    content = reply.content
    names = list(content.updates)
    adapter = move_adapter(
        state.adapter, list(content.updates.values()), [weights[name] for name in names]
    )
    update = Update(reply.client, adapter, content.num_examples, content.metrics)
    return replace(reply, content=update)
