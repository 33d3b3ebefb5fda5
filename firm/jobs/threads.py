"""Chooses the number of CPU threads by measuring short parts of a local step.

On a CPU with other work, torch's default (a thread per core) may be several times slower than one
thread, since every operator waits for its last thread; on an idle one with a large model it is the
fastest.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from statistics import fmean
from typing import Any

import torch

from firm.alignment.policy import set_mode
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.randomness import RandomStream
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import LoadedRun
from firm.run.directory import Run

AUTO = "auto"
GAIN = 0.9
"""Further threads must take at most this share of the time: they cost CPU time, and a smaller gain
may be noise, which would make runs differ."""
SECONDS = 1.5
"""Measurements end after this time, once each number of threads has been measured."""
LONG_ENOUGH = 0.1
"""Seconds with one thread from which a part of a step is not extended further."""


def with_recorded_threads(cfg: AlignmentConfig) -> AlignmentConfig:
    """Returns the configuration with the number of threads of the run that it resumes, if any."""
    if cfg.num_threads != AUTO or not cfg.resume or not cfg.out:
        return cfg
    if not (cfg.out / "config.yaml").exists():
        return cfg
    settings = Run(cfg.out).settings()
    recorded = settings.get("num_threads") if isinstance(settings, Mapping) else None
    return replace(cfg, num_threads=recorded)


def set_threads(
    cfg: AlignmentConfig,
    loaded: LoadedRun,
    *,
    on_event: Callable[..., None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> AlignmentConfig:
    """Sets torch's number of CPU threads if it is to be measured.

    Several processes are left at torch's number, which launchers set to 1: they cannot all measure
    on their own, as one's choice changes another's times.

    Args:
        cfg: The run.
        loaded: Its models.
        on_event: Progress callback, called with the number and the reason if there was a choice.
        clock: Returns the time in seconds.

    Returns:
        The configuration with the number; null on an accelerator, where it is left to torch.
    """
    if cfg.num_threads != AUTO:
        return cfg
    if loaded.trainer.device.type != "cpu":
        return replace(cfg, num_threads=None)
    most = torch.get_num_threads()
    chosen, seconds = most, {}
    if most > 1 and loaded.processes.size == 1:
        with RandomStream(cfg.seed, "threads"):
            seconds = measure(_short_step(loaded.trainer, clock), most, clock=clock)
        chosen = choose(seconds)
    torch.set_num_threads(chosen)
    if seconds and on_event:
        others = "; ".join(f"with {n}: {s:.2g} s" for n, s in seconds.items() if n != chosen)
        reason = f"a short step takes {seconds[chosen]:.2g} s; {others}"
        on_event("threads", text=f"threads: {chosen} of {most} ({reason})")
    return replace(cfg, num_threads=chosen)


def measure(work: Callable[[], Any], most: int, *, clock: Callable[[], float]) -> dict[int, float]:
    """Returns the mean seconds of `work` by number of threads: 1, half of `most`, and `most`.

    The mean includes the pauses in which a thread waits for its core, which the median would hide.
    Numbers take turns, so that all meet the same other work.
    """
    numbers = sorted({1, most // 2, most} if most >= 4 else {1, most})
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    end = clock() + SECONDS
    for number in cycle(numbers):
        if number == 1 and clock() >= end:
            break
        torch.set_num_threads(number)
        start = clock()
        work()
        seconds[number].append(clock() - start)
    return {number: fmean(own) for number, own in seconds.items()}


def choose(seconds: Mapping[int, float]) -> int:
    """Returns the number of threads: more than one only for a gain.

    >>> choose({1: 0.11, 2: 0.40})
    1
    >>> choose({1: 0.11, 2: 0.105, 4: 0.06})
    4
    """
    chosen = 1
    for number in sorted(seconds):
        if seconds[number] <= GAIN * seconds[chosen]:
            chosen = number
    return chosen


def _short_step(trainer: MultiObjectiveTrainer, clock: Callable[[], float]) -> Callable[[], None]:
    """Returns the longest part of a local step that is short enough to repeat."""
    parts = _parts_of_a_step(trainer)
    part = next(parts)
    torch.set_num_threads(1)
    for longer in parts:
        start = clock()
        part()
        if clock() - start >= LONG_ENOUGH:
            break
        part = longer
    return part


def _parts_of_a_step(trainer: MultiObjectiveTrainer) -> Iterator[Callable[[], None]]:
    """Yields parts of a local step, from short texts to those of full length.

    A part has a forward and backward pass of a minibatch, and forward passes of one token of every
    row, as in sampling, in the proportion of a local step.
    """
    config, rollout, policy = trainer.config, trainer.rollout_config, trainer.policy_model
    parameters = list(trainer.adapter_parameters.values())
    num_rows = min(config.batch_size, rollout.forward_batch_size)
    minibatch = min(config.micro_batch_size or config.minibatch_size, config.batch_size)
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    sampled = rollout.max_new_tokens * config.batch_size / num_rows
    trained = config.num_epochs * config.batch_size / minibatch * longest
    size = len(policy.get_input_embeddings().weight)
    ids = torch.randint(size, (max(num_rows, minibatch), longest))

    def part(length: int) -> None:
        set_mode(policy, is_training=False)
        with torch.no_grad():
            for _ in range(max(1, round(sampled * length / trained))):
                policy(input_ids=ids[:num_rows, :1], use_cache=False)
        set_mode(policy, is_training=True)
        logits = policy(input_ids=ids[:minibatch, :length], use_cache=False).logits
        # without preferences, a conditioned adapter uses a part of its parameters
        torch.autograd.grad(logits.float().logsumexp(-1).sum(), parameters, allow_unused=True)
        set_mode(policy, is_training=False)

    length = 4
    while length < longest:
        yield lambda length=length: part(length)
        length *= 4
    yield lambda: part(longest)
