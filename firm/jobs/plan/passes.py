"""Counts the rows in a pass of the policy, and the passes in a round."""

import math

from firm.federation.engines.stacked import MAX_ROWS
from firm.federation.traffic import Traffic
from firm.jobs.alignment_config import AlignmentConfig, solves_at_preferences
from firm.jobs.plan.record import Passes


def updates(cfg: AlignmentConfig, traffic: Traffic, num_clients: int) -> Passes:
    """Returns the forward passes with gradients of a process that trains `num_clients`."""
    share = minibatch_share(cfg, traffic)
    part = min(cfg.estimator.micro_batch_size or share, share)

    def parts(rows: int) -> int:
        return math.ceil(math.ceil(rows / cfg.processes_per_client) / part)

    count = traffic.num_trainings * num_passes(cfg) * parts(cfg.estimator.minibatch_size)
    if traffic.takes_whole_batches:
        count += max(1, traffic.num_solves) * parts(cfg.estimator.batch_size)
    return _passes(cfg, num_clients, rows=part, count=count)


def num_passes(cfg: AlignmentConfig) -> int:
    """Returns the optimizer steps of one local training."""
    num_minibatches = cfg.estimator.batch_size // cfg.estimator.minibatch_size
    return cfg.strategy.num_local_steps * cfg.estimator.num_epochs * num_minibatches


def minibatch_share(cfg: AlignmentConfig, traffic: Traffic) -> int:
    """Returns the maximum rows of a client's minibatch that one process computes gradients for."""
    estimator, is_whole = cfg.estimator, traffic.takes_whole_batches
    rows = estimator.batch_size if is_whole else estimator.minibatch_size
    return math.ceil(rows / cfg.processes_per_client)


def preferences_of_minibatch(cfg: AlignmentConfig) -> int:
    """Returns the maximum number of preferences with separate gradients in a minibatch."""
    if not solves_at_preferences(cfg) or cfg.policy.conditioning.draw_per == "step":
        return 1
    return min(cfg.estimator.num_prompts, cfg.estimator.minibatch_size)


def rollouts(cfg: AlignmentConfig, traffic: Traffic, num_clients: int) -> Passes:
    """Returns the chunks in which replies are sampled, each with one pass per token."""
    size = cfg.estimator.batch_size
    # a client's trainings start from the same state, so they share their first batch
    batches = traffic.num_trainings * (cfg.strategy.num_local_steps - 1) + 1
    rows = min(cfg.rollout.forward_batch_size, size)
    return _passes(cfg, num_clients, rows=rows, count=batches * math.ceil(size / rows))


def _passes(cfg: AlignmentConfig, num_clients: int, *, rows: int, count: int) -> Passes:
    together = 1
    if cfg.engine == "stacked":
        together = min(num_clients, max(1, (cfg.max_rows or MAX_ROWS) // rows))
    return Passes(together, together * rows, math.ceil(num_clients / together) * count)
