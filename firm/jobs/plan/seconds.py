"""Estimates the time of a run from the operations of its rehearsal."""

from collections.abc import Callable

import torch

from firm.alignment.rollout import logprobs_from
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.plan.record import Seconds, Work
from firm.jobs.plan.rehearsal import Rehearsed, Sampled, evaluated_rows
from firm.jobs.plan.roofline import Operation, Speeds


def estimated_seconds(
    cfg: AlignmentConfig, rehearsed: Rehearsed, work: Work, device: torch.device
) -> Seconds:
    """Returns the time of a run on this machine, if all rows have the maximum length.

    Args:
        cfg: The run.
        rehearsed: Operations of a local step.
        work: The numbers of passes.
        device: Device of the policy.

    Raises:
        RuntimeError: The device is too full for the measurements, or cannot multiply a dtype.
    """
    threads = torch.get_num_threads()
    if isinstance(cfg.num_threads, int):
        torch.set_num_threads(cfg.num_threads)
    try:
        return _seconds(cfg, rehearsed, work, Speeds(device).seconds)
    finally:
        torch.set_num_threads(threads)


def _seconds(
    cfg: AlignmentConfig,
    rehearsed: Rehearsed,
    work: Work,
    seconds: Callable[[list[Operation]], float],
) -> Seconds:
    update = rehearsed.update
    trained = work.updates.count * seconds(update.operations) / update.num_passes
    rollout = cfg.rollout
    if work.training_replies:
        # of the base model, and of the policy unless sampling gives its log-probabilities
        num_scorings = 1 + (logprobs_from(cfg.policy.dtype, rollout) == "forward")
    else:
        num_scorings = 2  # a pair has two replies

    def taken(sampled: Sampled) -> float:
        """Returns the seconds of a rollout, with its log-probabilities."""
        share = rollout.max_prompt_tokens / (rollout.max_prompt_tokens + rollout.max_new_tokens)
        prompts = share * seconds(sampled.whole)
        tokens = rollout.max_new_tokens * seconds(sampled.token)
        return prompts + tokens + num_scorings * seconds(sampled.scoring)

    batches = work.rollouts.count * bool(work.training_replies)
    sampling = batches * (taken(rehearsed.rollout) + seconds(update.advantages))
    evaluated = work.evaluation_rows / evaluated_rows(cfg) * taken(rehearsed.evaluation)
    return Seconds(trained + sampling, work.rounds * (trained + sampling) + evaluated)
