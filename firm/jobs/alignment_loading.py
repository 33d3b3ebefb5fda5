"""Loads the models and data of an alignment run, and builds its clients and engine."""

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
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
from firm.alignment.threads import choose, measure, short_step
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.devices import dtype_name, dtype_note, generator_note, prepare_attention
from firm.base.randomness import RandomStream
from firm.base.state import State
from firm.federation.aggregation import weighted_mean
from firm.federation.client import Adapter, Client, LazyClients
from firm.federation.engine_registry import ENGINES
from firm.federation.engines.engine import Engine
from firm.federation.engines.local import LocalEngine
from firm.federation.engines.processes import ProcessesEngine
from firm.federation.processes import Processes
from firm.fronts.merging import merged_adapter
from firm.jobs.alignment_config import (
    AlignmentConfig,
    GroupConfig,
    client_names,
    compiles_rollouts,
    reward_configs,
)
from firm.jobs.alignment_data import DataSplits, data_of
from firm.run.directory import Run
from firm.run.errors import UserError
from firm.run.shipped import with_shipped_paths
from firm.run.states import RunStates
from reward_models.registry import load_reward_models

AUTO = "auto"
"""Number of CPU threads, or dtype, that is to be measured."""
ONE_PROCESS = Processes()
"""The only process of a program."""


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
    data: DataSplits
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
    holds_out: bool = True,
    objectives: Collection[str] | None = None,
    given: Given | None = None,
    on_event: Callable[..., None] | None = None,
) -> LoadedRun:
    """Loads data, models and reward models in this process, unless they are in `given`.

    Held-out data are loaded if this process `measures`, and left out of the training data if the
    run `holds_out`. Pairs are loaded for some `objectives`, by default for all.
    """
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
        cfg,
        tokenizer,
        given.rows,
        measures=is_measured,
        holds_out=holds_out,
        objectives=objectives,
        on_note=notes.append,
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
    if cfg.policy.conditioning.kind != "none":
        own = inspect.signature(trainer.new_learner().estimator.gradients).parameters
        if "preferences" not in own:
            raise UserError(
                f"estimator {cfg.estimator.name} cannot train a conditioned policy, since its "
                "gradients has no argument preferences, by which replies are weighted; use "
                "critic_free."
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
    has_clients: bool = True,
    on_event: Callable[..., None] | None = None,
) -> dict[str, Calibration]:
    """Returns the calibrations of scores to rewards, shared by all clients.

    A resumed run keeps its calibrations. The first process broadcasts them to the others.

    Args:
        loaded: Components that all clients share.
        cfg: The run.
        out: Its folder.
        has_clients: Whether clients of this program train on the training data.
        on_event: Progress callback.

    Raises:
        UserError: A resumed run's reward models, held-out data or clients' data have changed.
    """
    if not loaded.processes.is_server:
        return as_calibrations(loaded.processes.broadcast())
    checkpoint = Run(out).latest_checkpoint() if cfg.resume else None
    if checkpoint is not None:
        _check_data(loaded, checkpoint[1], out, has_clients=has_clients)
    # also on resume: a reward model that fails is found here, before the first round
    calibrations = _calibrate(loaded, cfg, on_event)
    if checkpoint is not None:
        frozen = as_calibrations(checkpoint[1]["calibrations"])
        check_same(frozen, calibrations)  # before the run is opened, which truncates its logs
        calibrations = frozen
    loaded.processes.broadcast(as_figures(calibrations))
    return calibrations


def _check_data(loaded: LoadedRun, content: State, out: Path, *, has_clients: bool) -> None:
    """Raises `UserError` if data differ from those of a checkpoint's run."""
    data, problem = loaded.data, ""
    if has_clients and content.get("training_data", data.digest) != data.digest:
        problem = (
            f"the training data differ from those that the run in {out} began with, which its "
            "clients have shuffled and held prompts out of"
        )
    elif content.get("held_out_data", data.held_out_digest) != data.held_out_digest:
        problem = (
            f"the validation or test data differ from those on which the run in {out} has measured "
            "the base model"
        )
    if problem:
        again = f"--start '{{{out}/adapter: 1}}'"
        raise UserError(f"{problem}; restore them, or start a new run from its adapter: {again}.")


def build_clients(
    loaded: LoadedRun,
    cfg: AlignmentConfig,
    calibrations: Mapping[str, Calibration],
    names: Sequence[str] | None = None,
    *,
    shards: Mapping[str, list[Any]] | None = None,
    on_event: Callable[..., None] | None = None,
    on_measured: Callable[..., None] | None = None,
) -> LazyClients:
    """Returns the clients on their shards of the training data, or on other data.

    A client is built when it is needed. Its pairs, if it learns from pairs, pass through the
    reference only once.

    Args:
        loaded: Components that all clients share.
        cfg: The run.
        calibrations: Calibrations of scores to rewards.
        names: Names of the clients; by default, those of this process.
        shards: Prompts or pairs by client; by default, a partition of the training data.
        on_event: Progress callback of the clients.
        on_measured: Receives the event "measured" while pairs pass through the reference, which
            takes long with a large model.
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
    examples: dict[str, Sequence[Any]] = {}

    def build(name: str) -> Client:
        judges, group = own.get(name, (common, None))
        if name not in examples:
            examples[name] = data.examples(
                loaded.trainer,
                shard := shards[name],
                group and group.attack,
                reporter(on_measured, cfg, f"{name}'s pairs under the reference", 2 * len(shard)),
            )
        client = AlignmentClient(
            name,
            examples[name],
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
        return as_attacker(client, group and group.attack, seed=cfg.seed)

    return LazyClients(names, build)


def build_engine(
    clients: Sequence[Client],
    cfg: AlignmentConfig,
    processes: Processes,
    *,
    out: Path | None = None,
    on_event: Callable[..., None] | None = None,
) -> Engine:
    """Returns the engine of this process and the launcher's other processes.

    Args:
        clients: Clients of this process.
        cfg: The run.
        processes: This process and the launcher's others.
        out: The run's directory, to which clients' states are saved; by default, they remain in
            memory.
        on_event: Called when a client starts or ends.
    """
    states = RunStates(out, writes=processes.leads(processes.rank)) if out else None
    engine = own_engine(clients, cfg, processes, states=states, on_event=on_event)
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

    report_progress = reporter(on_event, cfg, "calibration", len(prompts))
    report_progress(0)
    with RandomStream(cfg.seed if seed is None else seed, "calibration"):
        replies = loaded.trainer.replies(prompts, on_progress=report_progress)
    report_progress(len(prompts))
    scores = score(loaded.reward_fns, prompts, replies.completions, replies.completion_ids)
    return {
        key: cfg.evaluation.calibrations.get(key) or calibrate(config.normalization, row, name=key)
        for (key, config), row in zip(reward_configs(cfg).items(), scores, strict=True)
    }


def reporter(
    on_event: Callable[..., None] | None, cfg: AlignmentConfig, what: str, total: int
) -> Callable[[float], None]:
    """Returns a function of the number of replies done, which reports it as event "measured".

    Args:
        on_event: Receives the event; None: nobody does.
        cfg: The run.
        what: Purpose of the replies.
        total: Their number.
    """
    options = {"what": what, "total": total, "num_tokens": cfg.rollout.max_new_tokens}
    return lambda done: on_event("measured", done=done, **options) if on_event else None


def as_figures(calibrations: Mapping[str, Calibration]) -> dict[str, Any]:
    """Returns calibrations as plain data, which ``as_calibrations`` reads."""
    return {key: calibration.to_dict() for key, calibration in calibrations.items()}


def as_calibrations(figures: Mapping[str, Any]) -> dict[str, Calibration]:
    """Returns the calibrations that ``as_figures`` wrote."""
    return {name: Calibration.from_dict(values) for name, values in figures.items()}


def without_start(cfg: AlignmentConfig) -> AlignmentConfig:
    """Returns the configuration of clients that receive the adapter to start from."""
    return replace(cfg, start={}, start_merge="mean", start_preference=None)


def _start(trainer: MultiObjectiveTrainer, cfg: AlignmentConfig) -> Adapter:
    """Returns the adapter that the run starts from, merged from those in the configuration."""
    policy: Any = trainer.policy_model
    adapters = []
    for name in cfg.start:
        folder = Path(name).expanduser()
        check_settings(folder, policy, cfg.policy.path)
        fill_adapter_(policy, folder, cfg.policy.path, preference=cfg.start_preference)
        adapters.append(copy_adapter(trainer.adapter_parameters))
    shares = list(cfg.start.values())
    if cfg.start_merge == "mean":
        return weighted_mean(adapters, shares)
    with RandomStream(cfg.seed, "merge"):  # DARE drops values at random
        return merged_adapter(adapters, shares, merge=cfg.start_merge, density=cfg.start_density)


def with_recorded(cfg: AlignmentConfig) -> AlignmentConfig:
    """Returns the configuration with what the run that it resumes, if any, has chosen for auto.

    These are the number of threads and the dtypes of the policy and of reward models.
    """
    if not cfg.resume or not cfg.out or not (cfg.out / "config.yaml").exists():
        return cfg
    settings = Run(cfg.out).settings()
    with suppress(ValueError):  # a value that no run records, and that `Run.check` names
        own = _with_dtypes(cfg, lambda keys, _: _value_at(settings, *keys, "dtype") or AUTO)
        threads = _value_at(settings, "num_threads") if cfg.num_threads == AUTO else cfg.num_threads
        return replace(own, num_threads=threads)
    return cfg


def _value_at(settings: Any, *keys: str) -> Any:
    """Returns a value of nested settings, as a file has them; None if there is none."""
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def with_fast_dtypes(cfg: AlignmentConfig, processes: Processes = ONE_PROCESS) -> AlignmentConfig:
    """Returns the configuration with the dtypes that are faster here, where they are auto.

    All processes take the first one's.
    """
    return _with_dtypes(cfg, lambda _, own: processes.broadcast(dtype_name(AUTO, own.device)))


def _with_dtypes(own: Any, choose: Callable[[Sequence[str], Any], str], *keys: str) -> Any:
    """Returns settings in which each dtype that is auto is the chosen one.

    Args:
        own: The settings: a configuration, a mapping of them, or a value.
        choose: Returns the dtype of a configuration, given its keys and itself.
        *keys: Those that lead to it.
    """
    if isinstance(own, Mapping):
        return {key: _with_dtypes(value, choose, *keys, key) for key, value in own.items()}
    if not is_dataclass(own) or isinstance(own, type):
        return own
    values = {each.name: getattr(own, each.name) for each in fields(own)}
    chosen = {name: _with_dtypes(value, choose, *keys, name) for name, value in values.items()}
    if values.get("dtype") == AUTO:
        chosen["dtype"] = choose(keys, own)
    return own if chosen == values else replace(own, **chosen)


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
            seconds = measure(short_step(loaded.trainer, clock), most, clock=clock)
        chosen = choose(seconds)
    torch.set_num_threads(chosen)
    if seconds and on_event:
        others = "; ".join(f"with {n}: {s:.2g} s" for n, s in seconds.items() if n != chosen)
        reason = f"a short step takes {seconds[chosen]:.2g} s; {others}"
        on_event("threads", text=f"threads: {chosen} of {most} ({reason})")
    return replace(cfg, num_threads=chosen)
