"""FedAvg under constraints: objectives are maximised while others keep a minimum reward.

Dual ascent on expected rewards, as in Safe RLHF (Dai et al. 2024, arXiv:2310.12773, Section 3.3),
with any number of constraints and local training on clients.
"""

from collections.abc import Sequence
from typing import Any

from firm.federation.engines.engine import Engine
from firm.federation.rewards import mean_rewards
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import ConstrainedConfig
from firm.solvers.checks import as_shares


@strategy
def constrained(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: ConstrainedConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of dual ascent, and the round's rows for the log.

    For the problem max Σ_j w_j R_j(θ) subject to R_j(θ) ≥ c_j, with multipliers ν, initially 0,

        λ = (w + ν) / Σ_j (w_j + ν_j),   ν_j ← max(0, ν_j + η (c_j - R̄_j)),

    clients train with the weights λ, and R̄_j is the mean over the clients that serve objective j of
    the rewards that their replies had in this round's training. Three departures from Safe RLHF:
    the server takes the ascent, from one number per client and objective, so that clients keep no
    multipliers; it is additive, so that a multiplier reaches 0; and local training replaces one
    gradient. With one local step it equals a step of every client whose multipliers are averaged,
    up to the projection at 0.
    """
    this_round = Round(state, clients, engine, cfg)
    multipliers = dict.fromkeys(cfg.min_rewards, 0.0) | state.memory.get("multipliers", {})
    base = as_shares(cfg.base_weights(state.objectives), len(state.objectives), name="weights")
    total = [w + multipliers.get(n, 0.0) for n, w in zip(state.objectives, base, strict=True)]
    weights = as_shares(total, len(total), name="weights").tolist()

    replies = this_round.train({**cfg.local_training(), "weighting_options": {"weights": weights}})

    updates = [reply.content for reply in replies]
    means = mean_rewards(updates, state.objectives) if multipliers else {}
    risen = {
        name: max(0.0, old + cfg.multiplier_learning_rate * (cfg.min_rewards[name] - means[name]))
        if name in means
        else old
        for name, old in multipliers.items()
    }
    memory = {**state.memory, "multipliers": risen}
    return this_round.finish(replies, memory=memory, entries={"multipliers": multipliers})
