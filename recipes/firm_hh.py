"""FIRM end to end: one language model, several objectives, several clients, one page of results.

    accelerate launch recipes/firm_hh.py                                    # the miniature world
    accelerate launch recipes/firm_hh.py --config configs/hh_tinyllama.yaml # the paper's run
    accelerate launch recipes/firm_hh.py --strategy.beta 0.5 --rounds 10    # any key, overridden
    accelerate launch recipes/firm_hh.py --plan                             # what would run
    accelerate launch recipes/firm_hh.py --out runs/mine --resume           # go on after a stop
    accelerate launch --num_processes 4 recipes/firm_hh.py                  # clients on 4 GPUs

A run is a directory: configuration, metrics, checkpoints, the adapter, and `report.html`.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL's PPO is pinned, and we know why
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
import transformers
from rich.console import Console
from safetensors.torch import save_file

from firm.alignment import (
    AlignmentClient,
    Calibration,
    Evaluation,
    Judges,
    MultiObjectivePPOTrainer,
    PolicyConfig,
    PPOConfig,
    Prompt,
    PromptsConfig,
    RewardFn,
    RolloutConfig,
    calibrate,
    check_context,
    check_same,
    check_vocabulary,
    comparison_table,
    copy_adapter,
    evaluate,
    fill_adapter_,
    kl_alarm,
    load_adapter_,
    load_policy,
    load_prompts,
    load_tokenizer,
    logprobs_from,
    make_plan,
    mismatch_alarm,
    score,
    take_device,
    write_model_card,
)
from firm.alignment.attacks import AttackConfig, as_attacker, attacked_judges
from firm.federation import (
    Adapter,
    Client,
    Engine,
    LocalEngine,
    Processes,
    ProcessesEngine,
    RandomStream,
    ServerState,
    dirichlet_partition,
    failure_alarms,
    iid_partition,
)
from firm.federation.aggregation import weighted_mean
from firm.federation.outside import check_name, printable
from firm.federation.strategies import (
    STRATEGIES,
    StrategyConfig,
)
from firm.federation.strategies.firm import FirmConfig
from firm.report import alarms, update_report
from firm.run import (
    CheckpointConfig,
    Progress,
    Run,
    Tracker,
    TrackingConfig,
    print_table,
    run_cli,
    to_dict,
)
from firm.run.guard import drawn
from reward_models import RewardModelConfig, load_reward_model

ROOT = Path(__file__).parent.parent
SCORES_NAME = "test_scores.safetensors"
"""Scores and rewards of the final model by test prompt, in the run's directory."""
FREE_KEYS = ("name", "plugins", "resume", "out", "tracking", "plan", "client_timeout")
"""What may differ from the run's own configuration when it is resumed."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts: what clients train on, what the curves are measured on, and what is held out."""

    train: PromptsConfig = field(default_factory=PromptsConfig)
    """Divided among the clients."""
    validation: PromptsConfig = field(default_factory=lambda: PromptsConfig(split="test[:50%]"))
    """The model is measured on these after every round."""
    test: PromptsConfig = field(default_factory=lambda: PromptsConfig(split="test[50%:]"))
    """The base model and the final one are compared on these, and nothing else is."""


@dataclass(frozen=True)
class PartitionConfig:
    """How the training prompts are divided among the clients."""

    kind: Literal["iid", "dirichlet"] = "iid"
    """Equal random parts (A.1: iid), or shares of each kind of prompt that a Dirichlet distribution
    draws."""
    alpha: float = 0.3
    """Concentration of the Dirichlet distribution (A.2.2: 0.3); small is uneven."""

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and isfinite(self.alpha)):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}.")


@dataclass(frozen=True)
class GroupConfig:
    """Clients that differ from the others in their objectives' reward models, or attack."""

    clients: list[int]
    """Their numbers, from 0."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Reward models in place of those of the same objectives (A.2.1)."""
    objectives: list[str] | None = None
    """Objectives that they serve; null: all. Not in the paper; FMOL's indicator matrix A."""
    attack: AttackConfig | None = None
    """What they do instead of their part; null: nothing, they are honest. Not in the paper."""


@dataclass(frozen=True)
class EvaluationConfig:
    """How much is measured. Nothing of this is in the paper."""

    num_calibration_prompts: int = 256
    """Training prompts whose base-model replies fix the maps from scores to rewards."""
    calibration_seed: int | None = None
    """Seed of those replies; null takes the run's. Runs whose rewards are to be compared need the
    same maps, whatever their seeds."""
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """Maps that were fixed beforehand, by objective, such as {helpful: {method: sigmoid, mean: 0.4,
    scale: 1.1}}, as the first row of a run's metrics.jsonl has them; the others are measured."""
    num_validation_prompts: int = 64
    """Prompts per round; 0 leaves the rounds unmeasured."""
    num_test_prompts: int = 256
    """Held-out prompts at the start and the end."""
    num_samples: int = 2
    """Replies per held-out prompt."""
    num_shown_samples: int = 12
    """Replies that the report shows, before and after; 0 keeps all texts out of the run."""
    metrics: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further scores that are reported and never trained on."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_calibration_prompts", 1),
            ("num_validation_prompts", 0),
            ("num_test_prompts", 2),
            ("num_samples", 1),
            ("num_shown_samples", 0),
        ):
            if (count := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {count}.")
        if self.num_validation_prompts == 1:
            raise ValueError(
                "num_validation_prompts must be 0 or at least 2, got 1: a standard error needs two."
            )


@dataclass(frozen=True)
class Config:
    """One run."""

    policy: PolicyConfig
    """The model that is aligned."""
    rewards: dict[str, RewardModelConfig]
    """The objectives: one reward model each."""
    name: str = "firm_hh"
    """Opens the run directory's name."""
    plugins: tuple[str, ...] = ()
    """Modules, or Python files, that register strategies of their own; imported before all other
    keys are read."""
    out: Path | None = None
    """Run directory; by default runs/NAME-TIME."""
    plan: bool = False
    """Print what would run (sizes, bytes, memory, steps, what is not in the paper) and stop; no
    weight and no data are read."""
    resume: bool = False
    """Continue the run in `out` from its last checkpoint, if there is one."""
    seed: int = 0
    """Everything random comes from it."""
    num_threads: int | None = None
    """CPU threads; by default as many as torch takes."""
    processes_per_client: int = 1
    """Processes that work as one on a client, each on its share of a batch. How many there are at
    all is the launcher's to say; the clients are divided among them."""
    start: dict[str, float] = field(default_factory=dict)
    """Adapter folders that the training starts from, and the share of each in their mean; none: a
    fresh adapter. With no rounds that mean is what the run measures: Rewarded Soups
    (arXiv:2306.04488). Not in the paper."""
    client_timeout: float | None = None
    """Seconds that a client has for its part of a round; whoever needs more is left out of it, or
    with several processes per client ends the run. null: as long as it takes."""
    rounds: int = 16
    """Communication rounds T (A.1: 16)."""
    num_clients: int = 8
    """Clients C (A.1: 8)."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """Who has which."""
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Clients with other reward models or fewer objectives, or attackers, by a name of the
    group."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """A local step."""
    strategy: StrategyConfig = field(default_factory=FirmConfig)
    """A round."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept to resume from."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Weights & Biases."""

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        if self.rounds < (0 if self.start else 1) or self.num_clients < 1:
            raise ValueError(
                f"rounds and num_clients must be at least 1, got {self.rounds} and "
                f"{self.num_clients}; 0 rounds need a start."
            )
        shares = self.start.values()
        if self.start and not (all(map(isfinite, shares)) and min(shares) >= 0 and sum(shares) > 0):
            raise ValueError(
                f"start must have finite, non-negative shares, not all zero, got {self.start}."
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(
                f"num_threads must be at least 1, got {self.num_threads}; null leaves it to torch."
            )
        if self.processes_per_client < 1:
            raise ValueError(
                f"processes_per_client must be at least 1, got {self.processes_per_client}."
            )
        if self.client_timeout is not None and not 0 < self.client_timeout < float("inf"):
            raise ValueError(
                f"client_timeout must be positive and finite, got {self.client_timeout:g}; null "
                "sets no limit."
            )
        _check_participation(self)
        if self.strategy.robust.min_updates > self.num_clients:
            raise ValueError(
                f"strategy.robust.rule {self.strategy.robust.rule} with num_attackers "
                f"{self.strategy.robust.num_attackers} needs num_clients of at least "
                f"{self.strategy.robust.min_updates}, got {self.num_clients}."
            )
        if not self.rewards:
            raise ValueError("rewards must name at least one objective, got none.")
        if self.policy.lora.freeze_a and self.strategy.lora_mean == "products":
            raise ValueError(
                "strategy.lora_mean must be factors with policy.lora.freeze_a, whose mean of B is "
                "exact already, got products."
            )
        if self.policy.lora.freeze_a and self.start:
            raise ValueError(
                "start must be empty with policy.lora.freeze_a, since the adapters' own A would be "
                f"lost, got {list(self.start)}."
            )
        for name in self.rewards:
            check_name(name, "rewards: the name of an objective")
        for name in self.evaluation.metrics:
            check_name(name, "evaluation.metrics: the name of a score")
        if shared := self.rewards.keys() & self.evaluation.metrics.keys():
            raise ValueError(
                f"evaluation.metrics has {min(shared)!r}, which is an objective too; rename one."
            )
        self.strategy.check(list(self.rewards))
        self.strategy.check_clients(AlignmentClient)
        _check_groups(self)
        _check_calibrations(self)


def main(cfg: Config) -> Path | None:
    """Runs everything that `cfg` asks for; returns the run directory, None after a plan."""
    if cfg.plan:
        return _print_plan(cfg)
    processes = Processes.join(per_client=cfg.processes_per_client)
    out = run_folder(cfg)
    if processes.is_server:  # before minutes of loading
        Run.check(out, to_dict(cfg), resume=cfg.resume, ignore=FREE_KEYS)
    world = load(cfg, processes)
    if processes.is_server:
        calibrations = common_calibrations(world, cfg, out)
        processes.broadcast({key: c.to_dict() for key, c in calibrations.items()})
    else:
        calibrations = as_calibrations(processes.broadcast())
    progress = progress_of(cfg)
    engine = engine_of(world, cfg, calibrations, on_event=progress.event)
    if isinstance(engine, ProcessesEngine) and not processes.is_server:
        engine.serve()
        return out
    return train(world, cfg, calibrations, engine, progress, out)


# --- What a run is made of ------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """All that is loaded, at the server and wherever clients are."""

    trainer: MultiObjectivePPOTrainer
    """The policy with one adapter, and how it is trained."""
    judges: dict[str, RewardFn]
    """Reward models: by objective, and those of groups by group/objective."""
    metrics: dict[str, RewardFn]
    """Further scores that are reported."""
    prompts: list[Prompt]
    """Those to train on."""
    validation: list[str]
    """Those that every round is measured on; at the server alone."""
    test: list[str]
    """Those that are held out to the end; at the server alone."""
    fresh: Adapter
    """The adapter that rewards are calibrated with."""
    start: Adapter
    """The adapter that training starts from."""
    processes: Processes
    """Those that work together here."""


def load(cfg: Config, processes: Processes, *, measures: bool = True) -> World:
    """Loads prompts, models and reward models in this process."""
    take_device(cfg.policy.device, num_processes=processes.size)
    transformers.utils.logging.disable_progress_bar()
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    check_context(
        cfg.policy,
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        max_new_tokens=cfg.rollout.max_new_tokens,
    )
    tokenizer = load_tokenizer(cfg.policy)
    prompts = load_prompts(**asdict(cfg.data.train), tokenizer=tokenizer)
    validation, test = [], []
    if processes.is_server and measures:
        validation = _texts(cfg.data.validation, cfg.evaluation.num_validation_prompts, tokenizer)
        test = _texts(cfg.data.test, cfg.evaluation.num_test_prompts, tokenizer)
    judges = {key: load_reward_model(c, key) for key, c in _reward_configs(cfg).items()}
    policy = load_policy(cfg.policy, stream=RandomStream(cfg.seed, "adapter"))
    check_vocabulary(policy, tokenizer, cfg.policy.path)
    trainer = MultiObjectivePPOTrainer(
        cfg.ppo,
        rollout_config=cfg.rollout,
        prompt_format=cfg.policy.prompt,
        policy=policy,
        tokenizer=tokenizer,
        reward_fns={name: judges[name] for name in cfg.rewards},
        num_rounds=max(1, cfg.rounds),
        team=processes.team(),
        use_cpu=cfg.policy.device == "cpu",
        seed=cfg.seed,
    )
    fresh = copy_adapter(trainer.adapter_parameters)
    start = _start(trainer, cfg) if cfg.start else fresh
    load_adapter_(trainer.adapter_parameters, fresh)
    metrics = {
        name: load_reward_model(config, name)
        for name, config in cfg.evaluation.metrics.items()
        if processes.is_server and measures
    }
    return World(trainer, judges, metrics, prompts, validation, test, fresh, start, processes)


def common_calibrations(world: World, cfg: Config, out: Path) -> dict[str, Calibration]:
    """The server fixes the maps from scores to rewards, for all; of a run that goes on, its own."""
    calibrations = _calibrate(world, cfg)  # tries every reward model, too
    if cfg.resume and (checkpoint := Run(out).latest_checkpoint()):
        frozen = as_calibrations(checkpoint[1]["calibrations"])
        check_same(frozen, calibrations)  # before the run is opened, which cuts its logs
        return frozen
    return calibrations


def client_names(cfg: Config) -> list[str]:
    """All clients, in the order in which their updates are summed."""
    return [f"client_{index}" for index in range(cfg.num_clients)]


def clients_of(
    world: World,
    cfg: Config,
    calibrations: Mapping[str, Calibration],
    names: Sequence[str],
    *,
    prompts: Mapping[str, list[Prompt]] | None = None,
    on_event: Callable[..., None] | None = None,
) -> list[Client]:
    """Builds the clients of these names, on their shards of the training prompts or on others."""
    world.trainer.calibrations = {name: calibrations[name] for name in cfg.rewards}
    own_judges, attacks = _own_judges(cfg, world.judges, calibrations), _attacks(cfg)
    shards = prompts or dict(zip(client_names(cfg), _partition(world.prompts, cfg), strict=True))
    return [
        as_attacker(
            AlignmentClient(
                name,
                shards[name],
                world.trainer,
                seed=cfg.seed,
                judges=own_judges.get(name),
                on_event=on_event,
            ),
            attacks.get(name),
            seed=cfg.seed,
        )
        for name in names
    ]


def engine_of(
    world: World,
    cfg: Config,
    calibrations: Mapping[str, Calibration],
    *,
    on_event: Callable[..., None] | None = None,
) -> LocalEngine | ProcessesEngine:
    """The engine of this process and of those that a launcher started beside it."""
    names, processes = client_names(cfg), world.processes
    own = processes.hosted(names)
    clients = clients_of(world, cfg, calibrations, own, on_event=on_event)
    local = LocalEngine(
        clients,
        timeout=cfg.client_timeout,
        interrupt=processes.per_client == 1,
        on_event=on_event,
    )
    if processes.size == 1:
        return local
    return ProcessesEngine(processes, names, local, on_event=on_event)


def run_folder(cfg: Config) -> Path:
    """The run's directory."""
    return cfg.out or Path("runs") / f"{cfg.name}-{datetime.now():%Y%m%d-%H%M%S}"


def progress_of(cfg: Config, *, console: Console | None = None) -> Progress:
    """What the terminal shows, or another console."""
    return Progress(
        cfg.rounds,
        client_names(cfg),
        tuple(cfg.rewards),
        clients_per_round=cfg.strategy.clients_per_round,
        console=console,
    )


# --- The server's part ----------------------------------------------------------------------------


def train(
    world: World,
    cfg: Config,
    calibrations: Mapping[str, Calibration],
    engine: Engine,
    progress: Progress,
    out: Path,
) -> Path:
    """Trains, measures, writes and shows, wherever the engine's clients are."""
    settings, objectives, names = to_dict(cfg), tuple(cfg.rewards), client_names(cfg)
    trainer = world.trainer
    trainer.calibrations = {name: calibrations[name] for name in cfg.rewards}
    validation, test = world.validation, world.test

    def measure(prompts: list[str], split: str) -> Evaluation:
        load_adapter_(trainer.adapter_parameters, state.adapter)
        return evaluate(
            trainer.replies,
            prompts,
            {name: world.judges[name] for name in objectives},
            calibrations=trainer.calibrations or {},
            stream=RandomStream(cfg.seed, "evaluation", split),
            extra_fns=world.metrics,
            num_samples=cfg.evaluation.num_samples,
        )

    with (
        Run.open(out, settings, resume=cfg.resume, ignore=FREE_KEYS) as run,
        Tracker(cfg.tracking, run.path, settings, objectives=objectives) as tracker,
        progress,
        closing(engine),
    ):

        def log(row: dict[str, Any]) -> None:
            run.log(row)
            tracker.log(row)

        def log_samples(evaluation: Evaluation) -> None:
            rows = evaluation.sample_rows(round=state.round, limit=cfg.evaluation.num_shown_samples)
            run.log_samples(rows)
            tracker.log_samples(rows)

        def save(measured: Evaluation | None) -> None:
            score = None
            if measured and cfg.checkpoints.keep_best:
                score = fmean(values.mean().item() for values in measured.normalized.values())
            run.save_checkpoint(
                state.round,
                _checkpoint(state, engine, calibrations, base),
                keep_last=cfg.checkpoints.keep_last,
                score=score,
            )

        # start, or take up where the last checkpoint was written
        progress.event("started", alarms=_alarms_at_start(cfg))
        if checkpoint := run.latest_checkpoint():
            state = ServerState.from_state(checkpoint[1]["server"])
            engine.restore_client_states(checkpoint[1]["clients"])
            base = {k: Evaluation(**e) for k, e in checkpoint[1]["base"].items()}
            for row in run.rows():  # every session is a W&B run of its own
                tracker.log(row)
            tracker.log_samples(run.samples())
        else:
            state = ServerState(world.fresh, objectives=objectives, seed=cfg.seed)
            log(_run_row(cfg, names, world, calibrations))
            base = {"test": measure(test, "test")}
            if validation:
                base["validation"] = measure(validation, "validation")
            for split, evaluation in base.items():
                log(evaluation.row(round=0, split=split))
            log_samples(base["test"])
            state = replace(state, adapter=world.start)
            save(base.get("validation"))
        update_report(run.path)
        progress.event("resumed", round=state.round)

        # train: a round of the strategy, what it gave, and a checkpoint
        strategy = STRATEGIES[cfg.strategy.name]
        while state.round < cfg.rounds:
            state, rows = strategy(state, names, engine, cfg.strategy)
            rows["round"]["alarms"] = _alarms(cfg, [*run.rows(), *rows["clients"], rows["round"]])
            for row in [*rows["clients"], rows["round"]]:
                log(row)
            measured, scores = None, {}
            if validation:
                measured = measure(validation, "validation")
                row = measured.row(base["validation"], round=state.round, split="validation")
                log(row)
                scores = {name: score["mean"] for name, score in row["scores"].items()}
            save(measured)
            update_report(run.path)
            progress.event("round_finished", row=rows["round"], scores=scores)

        # finish: compare with the base model on held-out prompts, and save the adapter
        final = measure(test, "test")
        log(final.row(base["test"], round=state.round, split="test"))
        log_samples(final)
        save_file(final.by_prompt(), run.path / SCORES_NAME)
        comparison = comparison_table(base["test"], final)
        trainer.policy_model.save_pretrained(str(run.path / "adapter"))
        write_model_card(
            run.path / "adapter",
            base_model=cfg.policy.path,
            objectives=objectives,
            comparison=comparison,
            facts=_facts(cfg, final, run),
        )
    report = update_report(run.path, final=True)
    print_table(
        f"{len(test)} held-out prompts, {cfg.evaluation.num_samples} replies each, "
        "mean ± standard error",
        ["", "base", "aligned", "change", "z"],
        [row.cells() for row in comparison],
    )
    for alarm in alarms(row for row in run.rows() if row["kind"] in ("run", "round")):
        print(f"note: {alarm.when}: {printable(alarm.text, max_length=5_000)}")
    print(f"report   {report}\nadapter  {run.path / 'adapter'}")
    return run.path


def _print_plan(cfg: Config) -> None:
    """Prints what would run, from the first of the launcher's processes."""
    if int(os.environ.get("RANK", 0)):
        return
    processes = Processes(0, int(os.environ.get("WORLD_SIZE", 1)), cfg.processes_per_client)
    plan = make_plan(cfg, [f"client_{index}" for index in range(cfg.num_clients)], processes)
    for table in plan.tables():
        print_table(table.title, table.header, table.rows)
    for note in [*plan.notes, *_alarms_at_start(cfg)]:
        print(printable(note, max_length=5_000))


def _texts(
    config: PromptsConfig, limit: int, tokenizer: transformers.PreTrainedTokenizerBase
) -> list[str]:
    """The first prompts of a held-out source, as dialogues."""
    prompts = load_prompts(**asdict(config), tokenizer=tokenizer)[:limit] if limit else []
    return [prompt.text for prompt in prompts]


def _partition(prompts: list[Prompt], cfg: Config) -> list[list[Prompt]]:
    """The clients' shards, each large enough for a batch of different prompts."""
    size = cfg.ppo.batch_size
    if cfg.partition.kind == "iid":
        shards = iid_partition(len(prompts), cfg.num_clients, seed=cfg.seed, min_examples=size)
    else:
        shards = dirichlet_partition(
            [prompt.kind for prompt in prompts],
            cfg.num_clients,
            alpha=cfg.partition.alpha,
            seed=cfg.seed,
            min_examples=size,
        )
    return [[prompts[index] for index in shard] for shard in shards]


def _check_participation(cfg: Config) -> None:
    """Raises ``ValueError`` on a strategy that asks for clients that there are not."""
    for key in ("quorum", "clients_per_round"):
        count = getattr(cfg.strategy, key)
        if count is not None and count > cfg.num_clients:
            raise ValueError(
                f"strategy.{key} must be at most num_clients ({cfg.num_clients}), got {count}; "
                "lower it, or add clients."
            )
    names = client_names(cfg)
    for name in cfg.strategy.always:
        if name not in names:
            raise ValueError(
                f"strategy.always must name clients, {names[0]} to {names[-1]}, got {name!r}."
            )


def _check_groups(cfg: Config) -> None:
    """Raises ``ValueError`` on groups that do not fit clients and objectives."""
    taken: dict[int, str] = {}
    for group, config in cfg.groups.items():
        key = f"groups.{check_name(group, 'groups: the name of a group')}"
        for client in config.clients:
            if not 0 <= client < cfg.num_clients:
                raise ValueError(
                    f"{key}.clients must be numbers from 0 to {cfg.num_clients - 1}, got {client}."
                )
            if client in taken:
                raise ValueError(
                    f"{key}.clients: client {client} is in the group {taken[client]} already."
                )
            taken[client] = group
        for name in [*config.rewards, *(config.objectives or [])]:
            if name not in cfg.rewards:
                raise ValueError(
                    f"{key} names the objective {name!r}; there are {', '.join(cfg.rewards)}."
                )
        if not config.clients or config.objectives == []:
            raise ValueError(f"{key} needs clients, and an objective for them, got none.")
        attacked = config.attack.objective if config.attack else None
        served = list(cfg.rewards) if config.objectives is None else config.objectives
        if attacked is not None and attacked not in served:
            raise ValueError(
                f"{key}.attack.objective must be one that they serve ({', '.join(served)}), got "
                f"{attacked!r}."
            )


def _check_calibrations(cfg: Config) -> None:
    """Raises ``ValueError`` on fixed calibrations that no reward model has a use for."""
    configs = _reward_configs(cfg)
    for key, calibration in cfg.evaluation.calibrations.items():
        if key not in configs:
            raise ValueError(
                f"evaluation.calibrations has {key!r}; there are {', '.join(configs)}."
            )
        if calibration.method != configs[key].normalization:
            raise ValueError(
                f"evaluation.calibrations.{key}.method must be the reward's normalization "
                f"{configs[key].normalization!r}, got {calibration.method!r}."
            )


def _reward_configs(cfg: Config) -> dict[str, RewardModelConfig]:
    """All reward models: by objective, and those of groups by group/objective."""
    return {
        **cfg.rewards,
        **{
            f"{group}/{name}": config
            for group, clients in cfg.groups.items()
            for name, config in clients.rewards.items()
        },
    }


def _own_judges(
    cfg: Config, judges: Mapping[str, RewardFn], calibrations: Mapping[str, Calibration]
) -> dict[str, Judges]:
    """Reward models and their maps by client, of those who have others than the trainer's."""
    found = {}
    for group, config in cfg.groups.items():
        keys = {
            name: f"{group}/{name}" if name in config.rewards else name
            for name in cfg.rewards
            if config.objectives is None or name in config.objectives
        }
        own = Judges(
            {name: judges[key] for name, key in keys.items()},
            {name: calibrations[key] for name, key in keys.items()},
        )
        own = attacked_judges(own, config.attack)
        found |= {f"client_{index}": own for index in config.clients}
    return found


def _attacks(cfg: Config) -> dict[str, AttackConfig]:
    """The attacks by client, of those who attack."""
    return {
        f"client_{index}": config.attack
        for config in cfg.groups.values()
        if config.attack
        for index in config.clients
    }


def _calibrate(world: World, cfg: Config) -> dict[str, Calibration]:
    """The frozen maps from scores to rewards, fixed beforehand or from the base model's replies."""
    seed = cfg.evaluation.calibration_seed
    texts = [prompt.text for prompt in world.prompts[: cfg.evaluation.num_calibration_prompts]]
    with RandomStream(cfg.seed if seed is None else seed, "calibration"):
        replies = world.trainer.replies(texts)
    scores = score(world.judges, texts, replies.completions)
    return {
        key: cfg.evaluation.calibrations.get(key) or calibrate(config.normalization, row, name=key)
        for (key, config), row in zip(_reward_configs(cfg).items(), scores, strict=True)
    }


def as_calibrations(figures: Mapping[str, Any]) -> dict[str, Calibration]:
    """The maps that ``Calibration.to_dict`` wrote."""
    return {name: Calibration.from_dict(values) for name, values in figures.items()}


def _start(trainer: MultiObjectivePPOTrainer, cfg: Config) -> Adapter:
    """The mean of the adapters that the run starts from."""
    policy: Any = trainer.policy_model
    adapters = []
    for folder in cfg.start:
        fill_adapter_(policy, Path(folder), cfg.policy.path)
        adapters.append(copy_adapter(trainer.adapter_parameters))
    return weighted_mean(adapters, list(cfg.start.values()))


def _checkpoint(
    state: ServerState,
    engine: Engine,
    calibrations: Mapping[str, Calibration],
    base: Mapping[str, Evaluation],
) -> dict[str, Any]:
    """All that a run needs to go on as if it had never stopped."""
    return {
        "server": state.to_state(),
        "clients": engine.client_states(state.accepted),
        "calibrations": {key: c.to_dict() for key, c in calibrations.items()},
        "base": {split: asdict(evaluation) for split, evaluation in base.items()},
    }


def _run_row(
    cfg: Config, names: list[str], world: World, calibrations: Mapping[str, Calibration]
) -> dict[str, Any]:
    """The first row of metrics.jsonl: what the run is made of."""
    processes, parameters = world.processes, world.trainer.adapter_parameters.values()
    return {
        "kind": "run",
        "objectives": list(cfg.rewards),
        "clients": names,
        "rounds": cfg.rounds,
        "alarms": _alarms_at_start(cfg),
        "calibration": {key: c.to_dict() for key, c in calibrations.items()},
        "num_trainable": sum(p.numel() for p in parameters),
        "processes": [processes.hosted_by(rank, names) for rank in range(processes.size)],
        "adapter_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }


def _alarms_at_start(cfg: Config) -> list[str]:
    """What the user should know of the configuration alone."""
    texts = [] if cfg.strategy.privacy is None else cfg.strategy.privacy.notes()
    if cfg.strategy.num_local_epochs is not None:  # whose local steps only the prompts tell
        return texts
    num_steps = cfg.rounds * cfg.strategy.num_local_steps
    alarm = kl_alarm(cfg.ppo.kl, batch_size=cfg.ppo.batch_size, num_steps=num_steps)
    return [*texts, alarm] if alarm else texts


def _alarms(cfg: Config, rows: list[dict[str, Any]]) -> list[str]:
    """What the user should know of the rounds so far and has not been told.

    Args:
        cfg: The run.
        rows: Its rows, that of the round that just ended last.
    """
    texts = failure_alarms(rows)
    if logprobs_from(cfg.policy.dtype, cfg.rollout) == "generation":
        alarm = drawn(
            "Whether rounding is small beside the KL",
            lambda: mismatch_alarm(rows, cfg.ppo.kl),
            instead=str,
        )
        texts += [alarm] if alarm else []
    return texts + drawn(
        "What the strategy warns of",
        lambda: cfg.strategy.alarms(rows),
        instead=lambda text: [text],
    )


def _facts(cfg: Config, final: Evaluation, run: Run) -> dict[str, Any]:
    """What the model card says of how the adapter was made."""
    return {
        "strategy": cfg.strategy.name,
        "clients": cfg.num_clients,
        "rounds": cfg.rounds,
        **_local_work(cfg),
        "seed": cfg.seed,
        "reward models": ", ".join(f"{n}: {c.path or c.name}" for n, c in cfg.rewards.items()),
        "held-out prompts": final.num_prompts,
        "replies per prompt": final.num_samples,
        "commit": run.record()["commit"],
    }


def _local_work(cfg: Config) -> dict[str, int]:
    """How long a client trains in a round."""
    if cfg.strategy.num_local_epochs is not None:
        return {"local epochs per round": cfg.strategy.num_local_epochs}
    return {"local steps per round": cfg.strategy.num_local_steps}


if __name__ == "__main__":
    run_cli(main, Config, description=__doc__ or "", default_file=ROOT / "configs/miniature.yaml")
