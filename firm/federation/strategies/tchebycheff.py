"""Smooth Tchebycheff scalarisation: the objective farthest from its ideal counts most.

Lin et al. (2024), arXiv:2402.19078, whose minima cover the whole Pareto front, concave parts
included, which no weighted sum does.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from firm.federation.engines.engine import Engine
from firm.federation.rewards import mean_rewards
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import TchebycheffConfig
from firm.solvers.checks import as_shares


@strategy
def tchebycheff(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: TchebycheffConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round, and the round's rows for the log.

    For losses z - R_j, the scalarisation

        g(θ) = μ log Σ_j exp(p_j (z - R_j(θ)) / μ)

    has the gradient Σ_j λ_j ∇(-R_j) with λ_j ∝ p_j exp(p_j (z - R_j) / μ), here scaled to sum 1.
    Clients train with these λ. One departure from the paper: R_j is the mean of the last round's
    training rewards of the clients that serve objective j, in place of this batch's. A round
    without any known rewards, such as the first, has λ = p.
    """
    this_round = Round(state, clients, engine, cfg)
    names = state.objectives
    shares = as_shares(cfg.weights or (1.0,) * len(names), len(names), name="weights").tolist()
    rewards: dict[str, float] = state.memory.get("rewards", {})
    weights = tchebycheff_weights(shares, names, rewards, cfg)

    replies = this_round.train({**cfg.local_training(), "weighting_options": {"weights": weights}})

    known = {**rewards, **mean_rewards([reply.content for reply in replies], names)}
    return this_round.finish(replies, memory={**state.memory, "rewards": known})


def tchebycheff_weights(
    shares: Sequence[float],
    objectives: Sequence[str],
    rewards: Mapping[str, float],
    cfg: TchebycheffConfig,
) -> list[float]:
    """Returns λ, shape [M], by the rewards that are known; without all of them, the shares."""
    if any(name not in rewards for name in objectives):
        return list(shares)
    exponents = [
        share * (cfg.ideal - rewards[name]) / cfg.smoothing
        for share, name in zip(shares, objectives, strict=True)
    ]
    largest = max(exponents)
    terms = [p * math.exp(e - largest) for p, e in zip(shares, exponents, strict=True)]
    return [term / sum(terms) for term in terms]
