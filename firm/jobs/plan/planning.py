"""Makes a plan from a configuration, without reading weights or data from a hub."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from firm.alignment.inspection import inspect_policy
from firm.alignment.pairs import Pair
from firm.alignment.placement import bytes_by_device, devices_by_module
from firm.alignment.policy import adapter_parameters, read_architecture, read_tokenizer
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.prompts import Prompt
from firm.alignment.sharding import gathered_bytes, part_bytes
from firm.base.sanitize import first_line
from firm.federation.processes import Processes
from firm.federation.traffic import Traffic, round_traffic
from firm.jobs.alignment_config import (
    AlignmentConfig,
    compiles_rollouts,
    every_source,
    is_front_due,
    measured_preferences,
    reward_configs,
    training_sources,
)
from firm.jobs.alignment_data import data_of
from firm.jobs.alignment_loading import with_fast_dtypes
from firm.jobs.plan.costs import device_here, estimate_costs, policy_without_storage
from firm.jobs.plan.passes import num_passes, rollouts, updates
from firm.jobs.plan.record import Placement, PolicyFigures, RewardFigures, RunPlan, Work
from firm.jobs.rollout_server import server_commands
from reward_models.config import RewardModelConfig
from reward_models.registry import owners
from reward_models.sequence_classifier import adapter_base, adapter_sizes

LEFT_OUT = (
    "Memory is an estimate, for prompts and replies of maximum length. It excludes the reward "
    "models' activations, libraries and drivers (0.5 to 1 GB), workspaces of kernels, the blocks "
    "that the allocator holds back (many on a CPU), and texts."
)
LEFT_OUT_OF_TIME = (
    "Time is an estimate for this machine and the same lengths, which excludes reward models. The "
    "run itself shows the time that is left after its first round."
)


def make_plan(cfg: AlignmentConfig, clients: Sequence[str], processes: Processes) -> RunPlan:
    """Returns the plan of a run with this configuration.

    Args:
        cfg: The run's configuration.
        clients: Names of all clients.
        processes: The run's processes, which need not be connected.

    Raises:
        ValueError: A target module matches no layer of the policy, or the prompts are malformed or
            too few for the clients.
    """
    cfg = with_fast_dtypes(cfg)
    notes: list[str] = []
    policy = memory = seconds = inspection = None
    policy_bytes: dict[str, int] = {}
    hosted = max(len(processes.hosted(clients, rank)) for rank in range(processes.size))
    busiest = min(hosted, cfg.strategy.clients_per_round or hosted)
    architecture = _architecture(cfg.policy.path, "--policy.path", notes)
    model = architecture and policy_without_storage(architecture, cfg.policy, len(cfg.objectives))
    traffic = round_traffic(
        cfg.strategy,
        cfg.objectives,
        clients,
        num_passes=num_passes(cfg),
        adapter=adapter_parameters(model) if model else {},
    )
    if model is not None:
        policy = _policy_figures(model, traffic, cfg)
        try:
            devices = devices_by_module(model.get_base_model(), cfg.policy.device_map)
            policy_bytes = bytes_by_device(model.get_base_model(), devices)
        except ValueError as error:  # the devices of another machine
            notes.append(f"{error} The policy is counted on one device.")
        unknown = "the format of prompts and the ends of replies are unknown: {}".format
        inspection = inspect_policy(
            cfg.policy.path,
            cfg.rollout,
            cfg.policy.prompt,
            on_error=lambda reason: notes.append(unknown(reason)),
        )
    if cfg.rollout.engine.name == "vllm_server":
        commands = "; ".join(dict.fromkeys(server_commands(cfg)))
        notes.append(f"Replies are sampled by servers, whose memory is not counted: {commands}")
    rewards = _rewards(cfg, notes)
    if cfg.strategy.num_local_epochs is not None:
        notes.append(
            "strategy.num_local_epochs: the local steps of an epoch depend on each client's "
            "prompts; steps, replies, time and uploaded metrics are given for one step."
        )
    counts = _count_prompts(cfg, has_tokenizer=inspection is not None)
    if counts.per_client is None:
        notes.append(
            "data.train: the prompts per client are unknown, since the prompts, or the tokenizer "
            "needed for limits on tokens, are not on this machine."
        )
    work = _work(cfg, len(clients), traffic, busiest, counts)
    if compiles_rollouts(cfg, device_here(cfg.policy.device).type):
        notes.append(
            "rollout.compile: the first batch of each number of rows, a power of 2, compiles its "
            "step for up to a minute; later runs on this machine take seconds. The time leaves it "
            "out."
        )
    if architecture is not None and policy is not None:
        try:
            memory, seconds = estimate_costs(
                architecture, policy, cfg, traffic, busiest, work, notes
            )
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # operations that depend on tensors' content, or that the engine lacks
            notes.append(
                f"{cfg.policy.path}: no estimate of its memory and time without weights "
                f"({first_line(error)})."
            )
    return RunPlan(
        cfg=cfg,
        inspection=inspection,
        policy=policy,
        memory=memory,
        seconds=seconds,
        rewards=rewards,
        work=work,
        places=[
            _place(rank, clients, processes, rewards, cfg.policy.device, policy_bytes)
            for rank in range(processes.size)
        ],
        notes=[*notes, LEFT_OUT, *([LEFT_OUT_OF_TIME] * (seconds is not None))],
    )


@dataclass(frozen=True)
class _Counts:
    """Numbers of prompts, or of pairs per objective."""

    per_client: tuple[int, int] | None
    """Fewest and most for training, of a client; None if they are not on this machine."""
    validation: int
    """Evaluated after every round: those that exist, or as configured if they are not here."""
    test: int
    """Evaluated before and after the run."""


def _count_prompts(cfg: AlignmentConfig, *, has_tokenizer: bool) -> _Counts:
    data, evaluation = data_of(cfg), cfg.evaluation
    most = (evaluation.num_validation_prompts, evaluation.num_test_prompts)
    own, every = training_sources(cfg).values(), every_source(cfg).values()
    if not _can_read(own, has_tokenizer=has_tokenizer):
        return _Counts(None, *most)
    measures = _can_read(every, has_tokenizer=has_tokenizer)
    is_limited = _are_limited(every if measures else own)
    tokenizer = read_tokenizer(cfg.policy.path) if is_limited else None
    splits = data.load(cfg, tokenizer, {}, measures=measures, on_note=lambda _: None)
    sizes = [len(shard) for shard in data.shards(splits.train, cfg).values()]
    if not measures:
        return _Counts((min(sizes), max(sizes)), *most)
    return _Counts((min(sizes), max(sizes)), _size(splits.validation), _size(splits.test))


def _size(held_out: Sequence[Prompt] | Sequence[Pair]) -> int:
    """Returns the number of prompts, or the most pairs of an objective."""
    counts = Counter(getattr(each, "objective", "") for each in held_out)
    return max(counts.values(), default=0)


def _can_read(configs: Collection[PromptsConfig], *, has_tokenizer: bool) -> bool:
    """Returns whether sources of prompts, and the tokenizer to measure them, are here."""
    lists = [[own.source] if isinstance(own.source, str) else own.source for own in configs]
    are_here = all(
        Path(name).expanduser().exists() or Path(name.partition(":")[0]).expanduser().exists()
        for name in chain(*lists)
    )
    return are_here and (has_tokenizer or not _are_limited(configs))


def _are_limited(configs: Collection[PromptsConfig]) -> bool:
    """Returns whether prompts are chosen by their number of tokens."""
    return any(own.min_tokens or own.max_tokens is not None for own in configs)


def _architecture(path: str, key: str, notes: list[str]) -> PretrainedConfig | None:
    """Returns a model's configuration; if missing, appends a note with the remedy."""
    try:
        return read_architecture(path)
    except (OSError, ValueError) as error:
        notes.append(
            f"{path}: config.json could not be read, so figures that depend on this model are "
            f"omitted ({first_line(error)}). Only this file is needed: put it into a folder and "
            f"pass {key} FOLDER."
        )
        return None


def _policy_figures(model: Any, traffic: Traffic, cfg: AlignmentConfig) -> PolicyFigures:
    shares = cfg.processes_per_client if cfg.policy.shard else 1
    trainable = adapter_parameters(model)
    layers = dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in trainable)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    bytes_by_dtype: Counter[str] = Counter()
    for parameter in frozen:
        bytes_by_dtype[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    num_bytes = sum(bytes_by_dtype.values())
    bytes_by_dtype["buffers"] = sum(buffer.nbytes for buffer in model.buffers())
    return PolicyFigures(
        num_parameters=sum(p.numel() for p in frozen),
        bytes_by_dtype=dict(bytes_by_dtype),
        part_bytes=num_bytes - part_bytes(model, 1) + part_bytes(model, shares),
        gathered_bytes=gathered_bytes(model) if shares > 1 else 0,
        num_trainable=sum(p.numel() for p in trainable.values()),
        layers_by_module=dict(Counter(layer.rsplit(".", 1)[-1] for layer in layers)),
        adapter_bytes=sum(p.nbytes for p in trainable.values()),
        bytes_down=traffic.bytes_down // traffic.num_clients,
        bytes_up=traffic.bytes_up // traffic.num_clients,
        uploads=traffic.uploads,
    )


def _work(
    cfg: AlignmentConfig,
    num_clients: int,
    traffic: Traffic,
    busiest: int,
    counts: _Counts,
) -> Work:
    """Counts the work of a run; `busiest` is the most clients per round in any process."""
    evaluation = cfg.evaluation
    clients_per_round = min(cfg.strategy.clients_per_round or num_clients, num_clients)
    # base and final model on both splits; after each round, the validation split
    num_fronts = sum(is_front_due(cfg, number) for number in range(1, cfg.rounds + 1))
    num_measured = len(measured_preferences(cfg))
    again = evaluation.num_refined + (cfg.rounds == 0)
    validation = (counts.validation, cfg.rounds + 1 + num_measured * num_fronts + again)
    test = (counts.test, 2 + num_measured + evaluation.num_refined)
    prompts = math.prod(validation) + math.prod(test)
    samples = cfg.estimator.learns_from == "prompts"  # otherwise passes over given replies
    # a client's trainings start from the same state, so they share their first batch
    batches = traffic.num_trainings * (cfg.strategy.num_local_steps - 1) + 1
    training = samples * cfg.rounds * clients_per_round * batches * cfg.estimator.batch_size
    evaluated = samples * prompts * evaluation.num_samples
    pairs = 0
    if not samples:  # held out by objective, and all training pairs once under the reference
        pairs = len(cfg.pairs) * prompts + num_clients * (counts.per_client or (0, 0))[1]
    judges = len(cfg.rewards) + sum(len(group.rewards) for group in cfg.groups.values())
    return Work(
        optimizer_steps=traffic.num_trainings * num_passes(cfg),
        solves=traffic.num_solves,
        server_solves=int(cfg.strategy.solves_on_server),
        clients_per_round=clients_per_round,
        rounds=cfg.rounds,
        prompts_per_client=counts.per_client,
        training_replies=training,
        evaluation_replies=evaluated,
        calibration_replies=samples * evaluation.num_calibration_prompts,
        evaluation_rows=evaluated + samples * evaluation.num_calibration_prompts + pairs,
        validation=validation,
        test=test,
        scored_replies=len(cfg.rewards) * training
        + judges * evaluation.num_calibration_prompts
        + (len(cfg.rewards) + len(evaluation.metrics)) * evaluated,
        updates=updates(cfg, traffic, busiest),
        rollouts=rollouts(cfg, traffic, busiest),
    )


def _rewards(cfg: AlignmentConfig, notes: list[str]) -> dict[str, RewardFigures]:
    """Returns the figures of all reward models; shared weights count for the first that has them.

    Metrics share none with rewards; see `reward_models.registry.load_reward_models`.
    """
    keys = {name: f"rewards.{name}" for name in cfg.rewards}
    keys |= {name: f"evaluation.metrics.{name}" for name in cfg.evaluation.metrics}
    first = {**owners(reward_configs(cfg)), **owners(cfg.evaluation.metrics)}
    figures: dict[str, RewardFigures] = {}
    for name, reward in {**reward_configs(cfg), **cfg.evaluation.metrics}.items():
        group, _, objective = name.rpartition("/")
        key = keys.get(name, f"groups.{group}.rewards.{objective}")
        own = _reward_figures(reward, f"--{key}.path", notes)
        if first[name] != name and own.num_bytes:
            own = replace(own, source=f"{own.source}, shared with {first[name]}", num_bytes=0)
        figures[name] = own
    return figures


def _reward_figures(reward: RewardModelConfig, key: str, notes: list[str]) -> RewardFigures:
    if reward.name != "sequence_classifier":
        return RewardFigures(f"the function {reward.name}", None, 0, "")
    if reward.url:
        return RewardFigures(f"{reward.path} at {reward.url}", None, 0, "")
    base = adapter_base(reward.path)
    architecture = _architecture(base or reward.path, key, notes)
    if architecture is None:
        return RewardFigures(reward.path, None, 0, reward.device)
    if reward.output is None:
        architecture.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            architecture, dtype=getattr(torch, reward.dtype)
        )
    count = sum(p.numel() for p in model.parameters())
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    if base is None:
        return RewardFigures(reward.path, count, size, reward.device)
    own = adapter_sizes(reward.path)
    return RewardFigures(
        f"{reward.path}, an adapter of {base}",
        num_parameters=count + sum(own),
        num_bytes=4 * sum(own),  # adapters are in float32
        device=reward.device,
        base=f"{base}, {reward.dtype}",
        base_bytes=size,
    )


def _place(
    rank: int,
    clients: Sequence[str],
    processes: Processes,
    rewards: Mapping[str, RewardFigures],
    device: str,
    policy_bytes: dict[str, int],
) -> Placement:
    """Returns the devices of a process's models, if all processes are on this machine."""
    accelerator, here = torch.accelerator.current_accelerator(), "cpu"
    if accelerator is not None and torch.accelerator.is_available():
        here = f"{accelerator.type}:{rank % torch.accelerator.device_count()}"
    own = here if device in ("auto", here.partition(":")[0]) else device
    if own != "cpu" and ":" not in own:
        own += ":0"  # an accelerator of another machine
    current = here if own == "cpu" else own  # meaning of "cuda" without an index
    return Placement(
        clients=processes.hosted(clients, rank),
        policy=next(iter(policy_bytes), own),
        policy_bytes=policy_bytes,
        rewards={
            name: current if reward.device in ("auto", current.partition(":")[0]) else reward.device
            for name, reward in rewards.items()
            if reward.device
        },
    )
