"""Loads the models and data of an alignment run, and builds its clients and engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from firm.alignment.adapter_files import check_settings, fill_adapter_
from firm.alignment.attacks import as_attacker, attacked_judges
from firm.alignment.build import build_trainer
from firm.alignment.calibration import Calibration
from firm.alignment.client import AlignmentClient
from firm.alignment.generation import end_token_ids, stop_strings
from firm.alignment.placement import place_
from firm.alignment.policy import (
    check_context,
    check_vocabulary,
    copy_adapter,
    load_adapter_,
    load_policy,
    load_tokenizer,
    read_tokenizer,
    take_device,
)
from firm.alignment.prompts import Prompt, check_prompts
from firm.alignment.rewards import Judges, RewardFn, calibrate, check_same, score
from firm.alignment.self_check import check_passes, check_rows
from firm.alignment.sequences import SINGLE_PROCESS
from firm.alignment.sharding import shard_
from firm.alignment.stacked.trainer import stacked_trainers
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.devices import dtype_note, generator_note, prepare_attention
from firm.base.randomness import RandomStream
from firm.federation.aggregation import weighted_mean
from firm.federation.client import Adapter, Client
from firm.federation.engine_registry import ENGINES
from firm.federation.engines.engine import Engine
from firm.federation.engines.local import LocalEngine
from firm.federation.engines.processes import Processes, ProcessesEngine
from firm.jobs.alignment_config import (
    AlignmentConfig,
    GroupConfig,
    client_names,
    compiles_rollouts,
    reward_configs,
)
from firm.jobs.alignment_data import Splits, data_of
from firm.run.directory import Run
from firm.run.errors import UserError
from firm.run.shipped import with_shipped_paths
from reward_models.registry import load_reward_models


@dataclass(frozen=True)
class LoadedRun:
    """Loaded components of a run, on the server or where clients run."""

    trainer: MultiObjectiveTrainer
    """Trainer with the policy and its adapter slot."""
    tokenizer: transformers.PreTrainedTokenizerBase
    """The policy's tokenizer, as stored in its checkpoint."""
    reward_fns: dict[str, RewardFn]
    """Reward functions by objective, or by group/objective for a group's own."""
    metrics: dict[str, RewardFn]
    """Further scores to report, by name."""
    data: Splits
    """Prompts or pairs to train and evaluate on."""
    fresh: Adapter
    """Adapter with which rewards are calibrated."""
    start: Adapter
    """Adapter that training starts from."""
    processes: Processes
    """The launcher's processes."""
    notes: list[str]
    """Notes on the data for the user."""


@dataclass(frozen=True)
class Given:
    """Objects that replace those named in a run's configuration."""

    model: transformers.PreTrainedModel | None = None
    """The policy's base model."""
    tokenizer: transformers.PreTrainedTokenizerBase | None = None
    """Its tokenizer."""
    reward_fns: Mapping[str, RewardFn] = field(default_factory=dict)
    """Reward functions, by objective."""
    rows: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Rows of data: prompts by "train", "validation" and "test"; or pairs by objective, and by
    objective/validation and objective/test if these are separate splits."""


def load(
    cfg: AlignmentConfig,
    processes: Processes,
    *,
    measures: bool = True,
    given: Given | None = None,
    on_event: Callable[..., None] | None = None,
) -> LoadedRun:
    """Loads data, models and reward models in this process, unless they are in `given`."""
    if on_event and processes.is_server:
        on_event("loading")
    given = given or Given()
    cfg = with_shipped_paths(cfg)
    _check_division(cfg, processes, given)
    device = take_device(cfg.policy.device, num_processes=processes.size)
    transformers.utils.logging.disable_progress_bar()
    if isinstance(cfg.num_threads, int):
        torch.set_num_threads(cfg.num_threads)
    check_context(
        cfg.policy,
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        max_new_tokens=cfg.rollout.max_new_tokens,
        model=given.model,
    )
    plain_tokenizer = given.tokenizer or read_tokenizer(cfg.policy.path)
    tokenizer = load_tokenizer(cfg.policy, plain_tokenizer)
    cfg.policy.prompt.check(tokenizer)
    stop_strings(cfg.rollout, cfg.policy.prompt, tokenizer)  # refused before models are loaded
    end_token_ids(tokenizer, cfg.rollout)
    dtype = getattr(torch, cfg.policy.dtype)
    notes = [generator_note(device), dtype_note(device, dtype, "policy.dtype")]
    notes = [note for note in notes if note]

    is_measured = processes.is_server and measures
    splits = data_of(cfg).load(
        cfg, tokenizer, given.rows, measures=is_measured, on_note=notes.append
    )
    check_prompts(splits.prompts, tokenizer, cfg.policy.prompt, on_note=notes.append)
    configs = reward_configs(cfg)
    named = {key: config for key, config in configs.items() if key not in given.reward_fns}
    reward_fns = {**load_reward_models(named), **given.reward_fns}
    reward_fns = {key: reward_fns[key] for key in configs}  # in the order of the configuration
    policy = load_policy(
        cfg.policy,
        stream=RandomStream(cfg.seed, "adapter"),
        num_objectives=len(cfg.objectives),
        given=given.model,
    )
    team = processes.team()
    prepare_attention(device)
    # the policy moves before anything refers to its parameters, which some backends replace
    if team and cfg.policy.shard:
        team = shard_(policy, processes, team, device)
    else:
        place_(policy, cfg.policy, device)
    check_vocabulary(policy, tokenizer, f"policy.path: the tokenizer of {cfg.policy.path}")
    with RandomStream(cfg.seed, "critic"):  # a value network is initialized randomly
        trainer = build_trainer(
            cfg.estimator,
            rollout_config=replace(cfg.rollout, compile=compiles_rollouts(cfg, device.type)),
            prompt_format=cfg.policy.prompt,
            policy=policy,
            tokenizer=tokenizer,
            reward_fns={name: reward_fns[name] for name in cfg.rewards},
            objectives=cfg.objectives,
            num_rounds=max(1, cfg.rounds),
            team=team or SINGLE_PROCESS,
        )
    check_passes(policy, cfg.policy.path)
    if cfg.estimator.needs_independent_rows or cfg.engine == "stacked":
        check_rows(policy, cfg.policy.path)
    fresh = copy_adapter(trainer.adapter_parameters)
    start = _start(trainer, cfg) if cfg.start else fresh
    load_adapter_(trainer.adapter_parameters, fresh)
    metrics = load_reward_models(cfg.evaluation.metrics) if is_measured else {}
    return LoadedRun(
        trainer, plain_tokenizer, reward_fns, metrics, splits, fresh, start, processes, notes
    )


def _check_division(cfg: AlignmentConfig, processes: Processes, given: Given) -> None:
    """Raises ``UserError`` if the policy cannot be divided or copied as configured."""
    engine = cfg.rollout.engine
    if engine.samples_itself and given.model is not None:
        raise UserError(
            f"rollout.engine.name must be transformers for a model that is passed to firm.align, "
            f"got {engine.name}; pass the path of its folder."
        )
    if not engine.serves_processes and processes.size > 1:
        raise UserError(
            f"rollout.engine.name must be transformers or vllm_server with several processes, got "
            f"{engine.name}; start one process, or servers."
        )
    if cfg.policy.device_map and (processes.size > 1 or given.model is not None):
        raise UserError(
            "policy.device_map must be null with several processes, and for a model that is passed "
            "to firm.align; shard the policy, or pass the path of its folder."
        )
    if not cfg.policy.shard:
        return
    if processes.per_client == 1:  # a site may override the checked setting
        raise UserError("policy.shard needs processes_per_client of at least 2, got 1.")
    if given.model is not None:
        raise UserError(
            "policy.shard must be false for a model that is passed to firm.align, which gets it "
            "back unchanged, got true; pass the path of its folder."
        )


def common_calibrations(
    loaded: LoadedRun,
    cfg: AlignmentConfig,
    out: Path,
    *,
    on_event: Callable[..., None] | None = None,
) -> dict[str, Calibration]:
    """Returns the calibrations of scores to rewards, shared by all clients.

    A resumed run keeps its calibrations.
    """
    # also on resume: a reward model that fails is found here, before the first round
    calibrations = _calibrate(loaded, cfg, on_event)
    if cfg.resume and (checkpoint := Run(out).latest_checkpoint()):
        frozen = as_calibrations(checkpoint[1]["calibrations"])
        check_same(frozen, calibrations)  # before the run is opened, which truncates its logs
        return frozen
    return calibrations


def shared_calibrations(
    loaded: LoadedRun,
    cfg: AlignmentConfig,
    out: Path,
    *,
    on_event: Callable[..., None] | None = None,
) -> dict[str, Calibration]:
    """Returns ``common_calibrations``, which the first process broadcasts to the others."""
    if not loaded.processes.is_server:
        return as_calibrations(loaded.processes.broadcast())
    calibrations = common_calibrations(loaded, cfg, out, on_event=on_event)
    loaded.processes.broadcast(as_figures(calibrations))
    return calibrations


def build_clients(
    loaded: LoadedRun,
    cfg: AlignmentConfig,
    calibrations: Mapping[str, Calibration],
    names: Sequence[str] | None = None,
    *,
    shards: Mapping[str, list[Any]] | None = None,
    on_event: Callable[..., None] | None = None,
    on_measured: Callable[..., None] = lambda **_: None,
) -> list[Client]:
    """Builds clients on their shards of the training data, or on other data.

    Args:
        loaded: Components that all clients share.
        cfg: The run.
        calibrations: Calibrations of scores to rewards.
        names: Clients to build; by default, the clients of this process.
        shards: Prompts or pairs by client; by default, a partition of the training data.
        on_event: Progress callback of the clients.
        on_measured: Called with the arguments of the event "measured" while pairs pass through the
            reference, which takes long with a large model.
    """
    names = loaded.processes.hosted(client_names(cfg)) if names is None else names
    common = Judges(loaded.trainer.reward_fns, {name: calibrations[name] for name in cfg.rewards})
    data = data_of(cfg)
    own: dict[str, tuple[Judges, GroupConfig]] = {}  # for clients in a group
    for group, config in cfg.groups.items():
        judges = _group_judges(cfg, group, loaded.reward_fns, calibrations)
        own |= {f"client_{index}": (judges, config) for index in config.clients}
    if shards is None:
        shards = data.shards(loaded.data.train, cfg)
    new_trainer = _trainer_factory(loaded) if cfg.engine == "stacked" else lambda: loaded.trainer
    clients = []
    for name in names:
        judges, group = own.get(name, (common, None))
        client = AlignmentClient(
            name,
            data.examples(
                loaded.trainer,
                shards[name],
                group and group.attack,
                partial(
                    lambda done, **about: on_measured(done=done, **about),
                    what=f"{name}'s pairs under the reference",
                    total=2 * len(shards[name]),
                    num_tokens=cfg.rollout.max_new_tokens,
                ),
            ),
            new_trainer(),
            seed=cfg.seed,
            judges=judges,
            preferences=cfg.policy.conditioning.preferences(
                RandomStream(cfg.seed, name, "preferences"),
                len(cfg.objectives),
                group and group.preferences,
            ),
            on_event=on_event,
        )
        clients.append(as_attacker(client, group and group.attack, seed=cfg.seed))
    return clients


def build_engine(
    clients: Sequence[Client],
    cfg: AlignmentConfig,
    processes: Processes,
    *,
    on_event: Callable[..., None] | None = None,
) -> Engine:
    """Returns the engine of this process and the launcher's other processes.

    Args:
        clients: Clients of this process.
        cfg: The run.
        processes: This process and the launcher's others.
        on_event: Called when a client starts or ends.
    """
    engine = own_engine(clients, cfg, processes, on_event=on_event)
    if processes.size > 1:
        if not isinstance(engine, LocalEngine):
            raise UserError(
                f"engine must be local or stacked with {processes.size} processes, got "
                f"{cfg.engine}."
            )
        engine = ProcessesEngine(processes, client_names(cfg), engine, on_event=on_event)
    return cfg.strategy.around(engine, cfg.num_clients) if processes.is_server else engine


def own_engine(
    clients: Sequence[Client], cfg: AlignmentConfig, processes: Processes, **options: Any
) -> Engine:
    """Returns the engine of this process's clients; `options` are passed to the engine."""
    if cfg.max_rows is not None:
        options["max_rows"] = cfg.max_rows
    return ENGINES[cfg.engine](
        clients, timeout=cfg.client_timeout, interrupt=processes.per_client == 1, **options
    )


def _trainer_factory(loaded: LoadedRun) -> Callable[[], MultiObjectiveTrainer]:
    """Returns a factory of trainers that share forward passes."""
    if (per_client := loaded.processes.per_client) > 1:  # a site may override the checked setting
        raise UserError(f"processes_per_client must be 1 with engine stacked, got {per_client}.")
    return stacked_trainers(loaded.trainer)


def _group_judges(
    cfg: AlignmentConfig,
    group: str,
    reward_fns: Mapping[str, RewardFn],
    calibrations: Mapping[str, Calibration],
) -> Judges:
    """Returns a group's reward models and calibrations, which replace the common ones."""
    config = cfg.groups[group]
    keys = {
        name: f"{group}/{name}" if name in config.rewards else name
        for name in cfg.rewards
        if config.objectives is None or name in config.objectives
    }
    judges = Judges(
        {name: reward_fns[key] for name, key in keys.items()},
        {name: calibrations[key] for name, key in keys.items()},
    )
    return attacked_judges(judges, config.attack)


def _calibrate(
    loaded: LoadedRun, cfg: AlignmentConfig, on_event: Callable[..., None] | None
) -> dict[str, Calibration]:
    """Returns the calibrations: as configured, or fitted to replies of the base model."""
    if not loaded.reward_fns:
        return {}
    seed = cfg.evaluation.calibration_seed
    prompts = loaded.data.train[: cfg.evaluation.num_calibration_prompts]

    def report_progress(num_done: float) -> None:
        if on_event:
            on_event(
                "measured",
                what="calibration",
                done=num_done,
                total=len(prompts),
                num_tokens=cfg.rollout.max_new_tokens,
            )

    report_progress(0)
    with RandomStream(cfg.seed if seed is None else seed, "calibration"):
        replies = loaded.trainer.replies(prompts, on_progress=report_progress)
    report_progress(len(prompts))
    scores = score(loaded.reward_fns, prompts, replies.completions, replies.completion_ids)
    return {
        key: cfg.evaluation.calibrations.get(key) or calibrate(config.normalization, row, name=key)
        for (key, config), row in zip(reward_configs(cfg).items(), scores, strict=True)
    }


def as_figures(calibrations: Mapping[str, Calibration]) -> dict[str, Any]:
    """Returns calibrations as plain data, which ``as_calibrations`` reads."""
    return {key: calibration.to_dict() for key, calibration in calibrations.items()}


def as_calibrations(figures: Mapping[str, Any]) -> dict[str, Calibration]:
    """Returns the calibrations that ``as_figures`` wrote."""
    return {name: Calibration.from_dict(values) for name, values in figures.items()}


def _start(trainer: MultiObjectiveTrainer, cfg: AlignmentConfig) -> Adapter:
    """Returns the mean of the adapters that the run starts from."""
    policy: Any = trainer.policy_model
    adapters = []
    for folder in cfg.start:
        check_settings(Path(folder), policy, cfg.policy.path)
        fill_adapter_(policy, Path(folder), cfg.policy.path, preference=cfg.start_preference)
        adapters.append(copy_adapter(trainer.adapter_parameters))
    return weighted_mean(adapters, list(cfg.start.values()))
