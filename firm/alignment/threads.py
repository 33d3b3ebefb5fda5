"""Measures short parts of a local step, to choose the number of CPU threads.

On a CPU with other work, torch's default (a thread per core) may be several times slower than one
thread, since every operator waits for its last thread; on an idle one with a large model it is the
fastest.
"""

from collections.abc import Callable, Mapping
from itertools import cycle
from statistics import fmean
from typing import Any

import torch

from firm.alignment.policy import set_mode
from firm.alignment.trainer import MultiObjectiveTrainer

GAIN = 0.9
"""Further threads must take at most this share of the time: they cost CPU time, and a smaller gain
may be noise, which would make runs differ."""
SECONDS = 1.5
"""Measurements end after this time, once each number of threads has been measured."""
LONG_ENOUGH = 0.1
"""Seconds with one thread from which a part of a step is not extended further."""


def numbers(most: int) -> list[int]:
    """Returns the numbers of threads to choose from: 1, half of `most`, and `most`.

    >>> numbers(2), numbers(8)
    ([1, 2], [1, 4, 8])
    """
    return sorted({1, most // 2, most} if most >= 4 else {1, most})


def measure(work: Callable[[], Any], most: int, *, clock: Callable[[], float]) -> dict[int, float]:
    """Returns the mean seconds of `work` for each of `numbers(most)` threads.

    The mean includes the pauses in which a thread waits for its core, which the median would hide.
    Numbers take turns, so that all meet the same other work.
    """
    seconds: dict[int, list[float]] = {number: [] for number in numbers(most)}
    end = clock() + SECONDS
    for number in cycle(seconds):
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
    chosen = min(seconds)
    for number in sorted(seconds):
        if seconds[number] <= GAIN * seconds[chosen]:
            chosen = number
    return chosen


def short_step(trainer: MultiObjectiveTrainer, clock: Callable[[], float]) -> Callable[[], None]:
    """Returns a part of a local step that is short enough to repeat, on texts as long as possible.

    It has a forward and backward pass of a minibatch, and forward passes of one token of every row,
    as in sampling, in the proportion of a local step.
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

    torch.set_num_threads(1)
    length = 4
    while length < longest:
        start = clock()
        part(length)
        if clock() - start >= LONG_ENOUGH:
            break
        length *= 4
    return lambda: part(min(length, longest))
