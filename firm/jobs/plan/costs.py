"""Estimates the memory and time of a process, by rehearsing a local step without content.

On an accelerator the estimate stands for the bytes that torch allocates; whole runs are compared
with it in `benchmarks/plan_memory.py`. On a CPU the resident set grows by more, as the allocator
holds freed blocks: a run of "49k, PPO" there took 2.0 times the estimate with glibc's malloc.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from firm.alignment import threads
from firm.alignment.compiled import bucket_of_lengths, bucket_of_rows
from firm.alignment.policy import PolicyConfig, adapter_parameters, add_adapter
from firm.alignment.rehearsal import REHEARSALS, Sampled, UpdateCost
from firm.alignment.rollout import logprobs_from
from firm.alignment.rollout_engines import TransformersConfig
from firm.alignment.roofline import Speeds
from firm.base.devices import dtype_note, named_device
from firm.base.sanitize import first_line
from firm.federation.objective_training import ObjectiveTraining
from firm.federation.traffic import Traffic
from firm.jobs.alignment_config import (
    AlignmentConfig,
    compiles_rollouts,
    solves_at_preferences,
)
from firm.jobs.plan.passes import minibatch_share, preferences_of_minibatch
from firm.jobs.plan.record import Memory, PolicyFigures, Seconds, Work

EVALUATION_BATCH = 64
"""Maximum number of replies in a batch of `firm.alignment.evaluate`."""
DEPTH = 2
"""Layers of the shallowest policy from which a deeper one's costs are extrapolated."""

Figures = TypeVar("Figures", UpdateCost, Sampled, Seconds)


class Rehearsed(NamedTuple):
    """Stages of a local step, and a rollout in evaluations and calibration."""

    update: UpdateCost
    rollout: Sampled
    evaluation: Sampled


def estimate_costs(
    architecture: PretrainedConfig,
    policy: PolicyFigures,
    cfg: AlignmentConfig,
    traffic: Traffic,
    num_clients: int,
    work: Work,
    notes: list[str],
) -> tuple[Memory, Seconds | None]:
    """Returns the memory of the busiest process, which trains `num_clients`, and the run's time.

    The time is None if the policy's device is not on this machine, another engine samples, or the
    speeds cannot be measured, which `notes` then say.
    """
    device = device_here(cfg.policy.device)
    models = _models(architecture, policy, cfg)
    rehearsals = [_rehearse(each, cfg, traffic, work, device) for each in models]
    num_further = architecture.num_hidden_layers - DEPTH if len(models) > 1 else 0
    stages = (_extrapolate(each, num_further) for each in zip(*rehearsals, strict=True))
    memory = _memory(Rehearsed(*stages), policy, cfg, num_clients)
    if compiles_rollouts(cfg, device.type):
        memory = replace(memory, engine=_static_cache_bytes(memory.cache, cfg, work))
    is_here = cfg.policy.device.partition(":")[0] in ("auto", device.type)
    if not is_here or not isinstance(cfg.rollout.engine, TransformersConfig):
        return memory, None
    if note := dtype_note(device, getattr(torch, cfg.policy.dtype), "--policy.dtype"):
        notes.append(note)
    most, times = torch.get_num_threads(), dict[int, Seconds]()
    try:
        for number in _numbers_of_threads(cfg, device, most):
            torch.set_num_threads(number)
            speeds = Speeds(device)
            seconds = [_seconds(cfg, each, work, speeds) for each in rehearsals]
            times[number] = _extrapolate(seconds, num_further)
        return memory, times[threads.choose({number: own.total for number, own in times.items()})]
    except RuntimeError as error:  # the device is too full, or cannot multiply a dtype
        notes.append(f"{device}: no estimate of the time ({first_line(error)}).")
        return memory, None
    finally:
        torch.set_num_threads(most)


def _numbers_of_threads(cfg: AlignmentConfig, device: torch.device, most: int) -> list[int]:
    """Returns the numbers of CPU threads from which the run would choose."""
    if isinstance(cfg.num_threads, int):
        return [cfg.num_threads]
    is_measured = cfg.num_threads == "auto" and device.type == "cpu"
    return threads.numbers(most) if is_measured else [most]


def _models(architecture: Any, policy: PolicyFigures, cfg: AlignmentConfig) -> list[Any]:
    """Returns the policy, or two shallow ones if it is deeper and all its layers are equal."""
    depth, num_objectives = getattr(architecture, "num_hidden_layers", 0), len(cfg.objectives)
    kinds, models = getattr(architecture, "layer_types", None) or ["equal"], []
    if depth > DEPTH + 2 and len(set(kinds)) == 1:
        with suppress(AttributeError, LookupError, TypeError, ValueError):  # it needs its depth
            for num_layers in (DEPTH, DEPTH + 1):
                shallow = copy.deepcopy(architecture)
                if len(kinds) == depth:
                    shallow.layer_types = kinds[:num_layers]
                shallow.num_hidden_layers = num_layers
                models.append(policy_without_storage(shallow, cfg.policy, num_objectives))
            frozen = [sum(p.numel() for p in m.parameters() if not p.requires_grad) for m in models]
            trained = [sum(p.numel() for p in adapter_parameters(m).values()) for m in models]
            full = (policy.num_parameters, policy.num_trainable)
            if full == tuple(a + (depth - DEPTH) * (b - a) for a, b in (frozen, trained)):
                return models
    return [policy_without_storage(architecture, cfg.policy, num_objectives)]


def _extrapolate(figures: Sequence[Figures], num_further: int) -> Figures:
    """Returns the figures of a policy with `num_further` layers more than that of the first.

    Each layer adds as much as that between both policies: what a layer keeps for the backward pass
    or in the cache of keys and values, and its operations, do not depend on the layers before it.
    """
    numbers = {n: own for n, own in vars(figures[0]).items() if isinstance(own, int | float)}
    last = vars(figures[-1])
    changes = {name: own + num_further * (last[name] - own) for name, own in numbers.items()}
    return replace(figures[0], **changes)


def policy_without_storage(
    architecture: PretrainedConfig, config: PolicyConfig, num_objectives: int
) -> Any:
    """Builds the policy on the meta device, as `load_policy` does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=getattr(torch, config.dtype))
        return add_adapter(model, config, num_objectives=num_objectives)


def _rehearse(
    model: Any, cfg: AlignmentConfig, traffic: Traffic, work: Work, device: torch.device
) -> Rehearsed:
    """Rehearses a local step of the busiest process; replaces the model's parameters."""
    joint, sampled = work.updates, work.rollouts
    rehearsal = REHEARSALS[cfg.estimator.learns_from](
        model,
        cfg.estimator,
        cfg.rollout,
        cfg.objectives,
        device=device,
        num_stacked=max(joint.clients, sampled.clients) if cfg.engine == "stacked" else 0,
        max_rows=cfg.max_rows,
        is_conditioned=cfg.policy.conditioning.kind != "none",
    )
    num_preferences = preferences_of_minibatch(cfg) if solves_at_preferences(cfg) else None
    update = rehearsal.update(minibatch_share(cfg, traffic), num_preferences)
    own_rows = -(-sampled.rows // sampled.clients // cfg.processes_per_client)
    samplers, evaluator = rehearsal.samplers[: sampled.clients], rehearsal.evaluator
    evaluation = rollout = rehearsal.sampling(samplers, own_rows)
    if samplers != [evaluator] or own_rows != evaluated_rows(cfg):
        evaluation = rehearsal.sampling([evaluator], evaluated_rows(cfg))
    return Rehearsed(update, rollout, evaluation)


def _memory(
    stages: Rehearsed, policy: PolicyFigures, cfg: AlignmentConfig, num_clients: int
) -> Memory:
    update, rollout, evaluation = stages
    critic, is_stacked = update.critic, cfg.engine == "stacked"
    moments = 2 * policy.adapter_bytes if cfg.estimator.actor_optimizer == "adam" else 0
    learner = 3 * critic + moments  # Adam trains all parameters outside the adapter
    if ObjectiveTraining in cfg.strategy.requests(cfg.objectives):
        # the common learner never steps: no moments
        learner = len(cfg.objectives) * learner + critic
    # the state before the first round has no moments
    oldest = critic if cfg.rounds == 1 else learner
    own_adapter = policy.adapter_bytes if is_stacked else 0
    frozen_bytes = sum(policy.bytes_by_dtype.values()) - policy.bytes_by_dtype["buffers"]
    return Memory(
        training=learner + oldest + own_adapter,
        waiting=2 * learner + critic + own_adapter,
        num_training=num_clients if is_stacked else 1,
        jacobian=update.jacobian,
        update=update.peak,
        saved=update.saved,
        values=update.values,
        cache=rollout.cache,
        rollout=rollout.peak,
        evaluation=evaluation.peak,
        engine=cfg.rollout.engine.num_bytes(frozen_bytes, policy.adapter_bytes),
        engine_devices=cfg.rollout.engine.own_devices,
    )


def _static_cache_bytes(cache: int, cfg: AlignmentConfig, work: Work) -> int:
    """Returns the bytes of the keys and values of compiled steps, which are kept between rollouts.

    Args:
        cache: Bytes of those of the same rows and tokens.
        cfg: The run.
        work: Its work.
    """
    clients = work.rollouts.clients
    rows = -(-work.rollouts.rows // clients)
    length = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    most = max(clients * bucket_of_rows(rows), bucket_of_rows(evaluated_rows(cfg)))
    return cache * most * bucket_of_lengths(length) // (clients * rows * length)


def evaluated_rows(cfg: AlignmentConfig) -> int:
    """Returns the maximum rows of a pass in evaluations and calibration."""
    evaluation = cfg.evaluation
    num_prompts = max(evaluation.num_validation_prompts, evaluation.num_test_prompts)
    replies = min(EVALUATION_BATCH, num_prompts * evaluation.num_samples)
    return min(cfg.rollout.forward_batch_size, max(evaluation.num_calibration_prompts, replies))


def _seconds(cfg: AlignmentConfig, rehearsal: Rehearsed, work: Work, speeds: Speeds) -> Seconds:
    """Returns the time of a run on this machine, if all rows have the maximum length."""
    update, rollout = rehearsal.update, cfg.rollout
    trained = work.updates.count * speeds.seconds(update.operations) / update.num_passes
    num_scorings = 2  # a pair has two replies
    if work.training_replies:
        # of the base model, and of the policy unless sampling gives its log-probabilities
        num_scorings = 1 + (logprobs_from(cfg.policy.dtype, rollout) == "forward")

    def rollout_seconds(sampled: Sampled) -> float:
        """Returns the seconds of a rollout, with its log-probabilities."""
        share = rollout.max_prompt_tokens / (rollout.max_prompt_tokens + rollout.max_new_tokens)
        prompts = share * speeds.seconds(sampled.whole)
        tokens = rollout.max_new_tokens * speeds.seconds(sampled.token)
        return prompts + tokens + num_scorings * speeds.seconds(sampled.scoring)

    sampling = 0.0
    if work.training_replies:
        advantages = speeds.seconds(update.advantages)
        sampling = work.rollouts.count * (rollout_seconds(rehearsal.rollout) + advantages)
    num_evaluated = work.evaluation_rows / evaluated_rows(cfg)
    evaluated = num_evaluated * rollout_seconds(rehearsal.evaluation)
    return Seconds(sampling, trained, evaluated, work.rounds)


def device_here(name: str) -> torch.device:
    """Returns the policy's device, or the CPU if the device is not on this machine."""
    try:
        device = named_device(name)
    except ValueError:
        return torch.device("cpu")
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
