"""FAMO: weights under which all objectives improve at like rates, from their rewards alone.

Liu et al. (2023), arXiv:2306.03792, Algorithm 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import softmax

from firm.federation.engines.engine import Engine
from firm.federation.rewards import mean_rewards
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FamoConfig

MIN_LOSS = 1e-3
"""Smallest loss of an objective, so that one at its ideal does not take all of the weight."""


@strategy
def famo(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FamoConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FAMO, and the round's rows for the log.

    With logits ξ, initially 0, z = softmax(ξ) and losses l_j = z* - R_j > 0, clients train with

        λ_j = (z_j / l_j) / Σ_i (z_i / l_i),

    and ξ takes a step of Adam along Jᵀ(log l(t-1) - log l(t)), J the Jacobian of the softmax, with
    decay γ: objectives that improved less than others gain weight. Two departures from the paper,
    whose losses are those of one batch before and after a step: R_j is the mean of a round's
    training rewards over the clients that serve objective j, so that λ and ξ follow the last two
    rounds; and a loss is at least ``MIN_LOSS``. A round without known rewards, such as the first,
    has equal weights.
    """
    this_round = Round(state, clients, engine, cfg)
    names = state.objectives
    memory = state.memory.get("famo", {})
    losses: dict[str, float] = memory.get("losses", {})
    logits: Sequence[float] = memory.get("logits", [0.0] * len(names))
    weights = famo_weights(logits, [losses.get(name) for name in names])

    replies = this_round.train({**cfg.local_training(), "weighting_options": {"weights": weights}})

    means = mean_rewards([reply.content for reply in replies], names)
    new = {**losses, **{name: max(cfg.ideal - mean, MIN_LOSS) for name, mean in means.items()}}
    kept = {**memory, "losses": new}
    if losses.keys() == set(names):
        kept |= step_logits(memory, [math.log(losses[n] / new[n]) for n in names], cfg)
    return this_round.finish(replies, memory={**state.memory, "famo": kept})


def famo_weights(logits: Sequence[float], losses: Sequence[float | None]) -> list[float]:
    """Returns λ, shape [M]; equal weights while a loss is unknown."""
    if any(loss is None for loss in losses):
        return [1 / len(losses)] * len(losses)
    ratios = softmax(np.asarray(logits)) / np.asarray(losses, dtype=float)
    return (ratios / ratios.sum()).tolist()


def step_logits(
    memory: Mapping[str, Any], progress: Sequence[float], cfg: FamoConfig
) -> dict[str, Any]:
    """Returns the logits and the state of Adam after a step.

    Args:
        memory: ``logits``, ``first``, ``second`` (Adam's moments) and ``steps``, if there are any.
        progress: log l_j(t-1) - log l_j(t), shape [M].
        cfg: Options of FAMO.
    """
    zeros = [0.0] * len(progress)
    logits, first, second = (
        np.array(memory.get(name, zeros)) for name in ("logits", "first", "second")
    )
    steps = memory.get("steps", 0) + 1
    z = softmax(logits)
    gradient = z * (np.array(progress) - z @ progress) + cfg.weights_decay * logits
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    scale = np.sqrt(second / (1 - 0.999**steps)) + 1e-8
    logits = logits - cfg.weights_learning_rate * first / (1 - 0.9**steps) / scale
    moments = {"logits": logits, "first": first, "second": second}
    return {**{name: values.tolist() for name, values in moments.items()}, "steps": steps}
