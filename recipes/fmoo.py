"""Federated multi-objective learning on images, tables and text: any algorithms, side by side.

    python recipes/fmoo.py                                       # two-digit images, a minute
    python recipes/fmoo.py --config configs/fmoo/multi_mnist.yaml --data.path mnist.npz
    python recipes/fmoo.py --rounds 60 --seeds '[0, 1, 2]' --out runs/mine
    python recipes/fmoo.py --out runs/mine --resume              # go on after a stop

A study is a directory with a run for every algorithm and seed, and `comparison.html` and
`summary.csv` over all of them. Every run has its configuration, metrics and a checkpoint, and goes
on where it was stopped.
"""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch

from firm.federation import LocalEngine, ServerState, State, failure_alarms
from firm.federation.outside import printable
from firm.federation.partition import (
    balanced_dirichlet_partition,
    dirichlet_partition,
    iid_partition,
    natural_partition,
    shard_partition,
    split_shard,
)
from firm.federation.strategies import (
    STRATEGIES,
    StrategyConfig,
)
from firm.fmoo import (
    AttackConfig,
    DataConfig,
    LocalConfig,
    ModelConfig,
    Scores,
    Splits,
    SupervisedClient,
    TaskData,
    Workspace,
    build_model,
    load_data,
    num_parameters,
)
from firm.fmoo.metrics import improved_share, local_progress
from firm.fmoo.progress import local_models
from firm.report.fmoo_figures import AlgorithmRuns
from firm.report.fmoo_sections import NUM_TABLE_USERS
from firm.run import (
    Run,
    Tracker,
    TrackingConfig,
    check_folder_name,
    make_private_folder,
    print_table,
    run_cli,
    to_dict,
    to_yaml,
)
from firm.run.directory import file_errors
from firm.run.guard import drawing
from recipes import fmoo_page

ROOT = Path(__file__).parent.parent
FREE_KEYS = ("resume", "plugins", "out", "algorithms", "seeds", "num_workers", "tracking")
"""What may differ when a study is taken up again: algorithms and seeds may join."""


@dataclass(frozen=True)
class PartitionConfig:
    """How the training samples are divided among the clients."""

    kind: Literal["iid", "dirichlet", "balanced", "shards", "natural"] = "balanced"
    """Equal random parts; shares of each composite label that a Dirichlet distribution draws; the
    same with equal sizes; shards of samples sorted by label; or the data's own users."""
    alpha: float = 0.3
    """Concentration of the Dirichlet distribution; small is uneven."""
    shards_per_client: int = 2
    """Shards that a client is given."""
    num_users: int | None = None
    """Natural users that are drawn at random to be the clients; null takes all."""
    min_samples: int = 1
    """Fewest samples of a client."""
    max_samples: int | None = None
    """Most samples of a client, a random choice of what it would have; null leaves it all."""
    objectives_per_client: int | None = None
    """Objectives that a client has losses for (FMGDA's matrix A), dealt out in turn so that each
    has as many clients as any other; null gives every client all."""
    test_fraction: float = 0.0
    """Share of its samples that every client keeps from training, to measure its user's accuracy
    on (FedMGDA+, Section 6.1, keeps 0.1). 0 keeps none; natural users may have test samples."""

    def __post_init__(self) -> None:
        for name in ("shards_per_client", "num_users", "min_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not (self.alpha > 0 and isfinite(self.alpha)):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}.")
        if not 0 <= self.test_fraction < 1:
            raise ValueError(f"test_fraction must be in [0, 1), got {self.test_fraction}.")
        if self.objectives_per_client is not None and self.objectives_per_client < 1:
            raise ValueError(
                f"objectives_per_client must be at least 1, got {self.objectives_per_client}; "
                "null gives all."
            )
        if self.max_samples is not None and self.max_samples < max(1, self.min_samples):
            raise ValueError(
                f"max_samples must be at least min_samples ({self.min_samples}), got "
                f"{self.max_samples}; null leaves all."
            )


@dataclass(frozen=True)
class AlgorithmConfig:
    """An algorithm with the learning rates that suit it."""

    strategy: StrategyConfig
    """The server's side."""
    local: LocalConfig = field(default_factory=LocalConfig)
    """The clients' side."""
    num_clients: int | None = None
    """C of this algorithm alone; by default the study's."""
    is_centralised: bool = False
    """Whether one client holds the samples of all: with one local step, FSMGDA is then MGD or
    SMGD."""

    rounds: int | None = None
    """Rounds of this algorithm alone; by default the study's."""
    attack_amount: float | None = None
    """Amount of the attack on this algorithm alone, as algorithms read losses on scales of their
    own; by default the study's."""

    def __post_init__(self) -> None:
        for name in ("num_clients", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or null, got {value}.")


@dataclass(frozen=True)
class Config:
    """A study of algorithms on one data set."""

    algorithms: dict[str, AlgorithmConfig]
    """What is compared, by name. Algorithms whose names are the same up to a comma, and that differ
    in one number alone, are also drawn as a line over that number."""
    data: DataConfig = field(default_factory=DataConfig)
    """What is learned."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What learns it."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """Who holds what."""
    attack: AttackConfig = field(default_factory=AttackConfig)
    """Clients that inflate their losses, in every round; nobody by default."""
    num_clients: int = 20
    """C; a natural partition has as many as there are users."""
    rounds: int = 40
    """Rounds of every run."""
    target_loss: float | None = None
    """Loss at which a run ends, once all objectives have come down to it; the page then tells the
    rounds that each took. null runs all rounds."""
    seeds: tuple[int, ...] = (0,)
    """One run of every algorithm for each; a seed draws partition, model, clients and batches."""
    evaluate_every: int = 5
    """Rounds between evaluations; the last round always is one."""
    split: Literal["train", "validation", "test"] = "test"
    """Samples that are evaluated on: those of all clients, or others that no client has."""
    improved_share: bool = False
    """Whether every evaluated round also tells the share of its clients that it made no worse, by
    their losses before and after the server's step: two passes over their samples."""
    progress_from: str | None = None
    """An algorithm from whose global models, wherever they are evaluated, the local trainings of
    all algorithms are compared: how far each lowers its clients' losses; null compares none."""
    num_workers: int | None = None
    """Clients that are trained at a time; by default as many as there are cores. Results do not
    depend on it."""
    num_threads: int | None = 1
    """Threads of torch in each worker; null leaves them alone, but equal numbers need an equal
    count."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Weights & Biases, a run of its own for every algorithm and seed."""
    plugins: tuple[str, ...] = ()
    """Modules, or Python files, that register strategies of their own; imported before all other
    keys are read."""
    out: Path | None = None
    """The study's directory; by default runs/fmoo-TIME."""
    resume: bool = False
    """Whether a study in `out` goes on: finished runs are kept, others continue."""

    def __post_init__(self) -> None:
        for name in ("num_clients", "rounds", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("num_workers", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or null, got {value}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more different numbers, got {self.seeds}.")
        if not self.algorithms:
            raise ValueError("algorithms must name at least one, got none.")
        if self.progress_from not in (None, *self.algorithms):
            raise ValueError(
                f"progress_from must be one of {', '.join(self.algorithms)}, got "
                f"{self.progress_from!r}."
            )
        for name, algorithm in self.algorithms.items():
            check_folder_name(name, "algorithms: an algorithm's name")
            _check_participation(self, name, algorithm)
            attack_on(algorithm, self)  # checks the amount
        if self.target_loss is not None and not self.target_loss > 0:
            raise ValueError(
                f"target_loss must be positive, got {self.target_loss}; null runs all rounds."
            )


def _check_participation(cfg: Config, name: str, algorithm: AlgorithmConfig) -> None:
    """Raises ``ValueError`` where a strategy asks for more clients than the study gives it."""
    count = algorithm.num_clients or cfg.num_clients
    if cfg.partition.kind == "natural":  # all users where no number is given; the data tell then
        count = cfg.partition.num_users
    if algorithm.is_centralised:
        count = 1
    for key in ("quorum", "clients_per_round"):
        asked = getattr(algorithm.strategy, key)
        if asked is not None and count is not None and asked > count:
            raise ValueError(
                f"algorithms.{name}.strategy.{key} must be at most the number of clients, "
                f"{count}, got {asked}; lower it, or add clients."
            )


@dataclass(frozen=True, eq=False)
class Federation:
    """The clients of one algorithm, and what they are measured with."""

    cfg: StrategyConfig
    """The strategy's."""
    workspace: Workspace
    clients: list[SupervisedClient]
    engine: LocalEngine
    shards: dict[str, torch.Tensor]
    """Indices of the samples that each client trains on, into the training data."""
    held_out: dict[str, torch.Tensor]
    """Indices of the samples that each client keeps for its user's accuracy; may be empty."""

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [client.name for client in self.clients]


def main(cfg: Config) -> Path:
    """Runs what is not finished, writes the comparison, and returns the study's directory."""
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    start = time.perf_counter()
    out = cfg.out or Path("runs") / f"fmoo-{datetime.now():%Y%m%d-%H%M%S}"
    splits = load_data(cfg.data)
    runs = []
    for color, name in enumerate(cfg.algorithms):
        seeds = [run_seed(cfg, name, splits, out / name / f"seed_{s}", s) for s in cfg.seeds]
        logs = [Run(out / name / f"seed_{s}") for s in cfg.seeds]
        left_out = [text for log in logs for text in log.checked_rows()[1]]
        runs.append(AlgorithmRuns(name, color, seeds, left_out))
        write_comparison(cfg, runs, splits, out)
    title = f"{cfg.split.capitalize()} samples at the end, mean over seeds"
    with drawing("The table"):
        print_table(title, *fmoo_page.summary(cfg, runs))
    for where, text in fmoo_page.alarms_of(cfg, runs):
        print(f"note: {printable(f'{where}: {text}', max_length=5_000)}")
    print(f"page     {out / fmoo_page.PAGE_NAME}\n{time.perf_counter() - start:.0f} s")
    return out


def run_seed(cfg: Config, name: str, splits: Splits, path: Path, seed: int) -> list[dict[str, Any]]:
    """Returns the rows of one run, which is trained as far as it is not yet."""
    algorithm = cfg.algorithms[name]
    source = name if name == cfg.progress_from else None
    settings = to_dict(
        replace(cfg, algorithms={name: algorithm}, seeds=(seed,), progress_from=source)
    )
    is_there = cfg.resume and (path / "run.json").exists()
    rounds = algorithm.rounds or cfg.rounds
    if is_there and is_done(last_evaluation(rows := Run(path).rows()), rounds, cfg.target_loss):
        return rows
    federation = federate(cfg, algorithm, splits, seed)
    engine, strategy = federation.engine, STRATEGIES[algorithm.strategy.name]
    rivals = {}
    if source:
        rivals = {n: federate(cfg, a, splits, seed) for n, a in cfg.algorithms.items()}
    with file_errors(f"the study {path.parent.parent}"):
        make_private_folder(path.parent.parent)

    with (
        Run.open(path, settings, resume=is_there, ignore=FREE_KEYS) as run,
        Tracker(
            cfg.tracking,
            run.path,
            settings,
            objectives=splits.train.objectives,
            name=f"{name}, seed {seed}",
            group=path.parent.parent.name,
        ) as tracker,
        closing(engine),
    ):

        def log(row: dict[str, Any]) -> None:
            run.log(row)
            tracker.log(row)

        # start, or take up where the last checkpoint was written
        if checkpoint := run.latest_checkpoint():
            state = ServerState.from_state(checkpoint[1]["server"])
            engine.restore_client_states(checkpoint[1]["clients"])
            for row in run.rows():  # every session is a W&B run of its own
                tracker.log(row)
            measured = last_evaluation(run.rows())
        else:
            adapter = federation.clients[0].adapter()
            state = ServerState(adapter, splits.train.objectives, seed=seed)
            measured = evaluation(cfg, federation, splits, state)
            log(measured)

        # train: a round of the strategy, and now and then what it gave and a checkpoint
        history = [row for row in run.rows() if row["kind"] == "round"]
        while not is_done(measured, rounds, cfg.target_loss):
            before = state
            state, rows = strategy(state, federation.names, engine, federation.cfg)
            is_evaluated = state.round % cfg.evaluate_every == 0 or state.round == rounds
            if is_evaluated and cfg.improved_share:
                rows["round"]["improved"] = improved(federation, before, state, rows["round"])
            history.append(rows["round"])
            if alarms := failure_alarms(history):
                rows["round"]["alarms"] = alarms
                print(*(printable(f"{name}, seed {seed}: {alarm}") for alarm in alarms), sep="\n")
            log(rows["round"])
            if is_evaluated:
                clients = engine.client_states(state.accepted)
                measured = evaluation(cfg, federation, splits, state)
                if rivals:
                    falls = {n: progress(rival, state, clients) for n, rival in rivals.items()}
                    measured["progress"] = falls
                log(measured)
                content = {"server": state.to_state(), "clients": clients}
                run.save_checkpoint(state.round, content, keep_last=1)
                print(printable(progress_line(path, measured), max_length=5_000), flush=True)
        return run.rows()


def last_evaluation(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last row of an evaluation; None without any."""
    return next((row for row in reversed(rows) if row["kind"] == "evaluation"), None)


def is_done(measured: dict[str, Any] | None, rounds: int, target: float | None) -> bool:
    """Whether a run with this last evaluation has done all rounds, or reached the target loss."""
    if measured is None:
        return False
    losses = (measured.get("losses") or {}).values()
    is_reached = target is not None and all(y is not None and y <= target for y in losses)
    return measured["round"] == rounds or (is_reached and len(losses) > 0)


def federate(cfg: Config, algorithm: AlgorithmConfig, splits: Splits, seed: int) -> Federation:
    """Returns the clients of an algorithm with their samples, and one model for all of them."""
    train, fraction = splits.train, cfg.partition.test_fraction
    shards, held_out = partition(train, cfg, algorithm.num_clients or cfg.num_clients, seed), {}
    if fraction:
        for index, (name, shard) in enumerate(shards.items()):
            own, kept = split_shard(shard, (1 - fraction, fraction), seed=seed + index)
            shards[name], held_out[name] = own, torch.tensor(kept, dtype=torch.int64)
    if algorithm.is_centralised:
        shards = {"everyone": [index for shard in shards.values() for index in shard]}
    names, attack = list(shards), attack_on(algorithm, cfg)
    if strangers := set(attack.clients) - set(names):
        raise ValueError(
            f"attack.clients names {min(strangers)!r}, which is none of the clients {names[0]} to "
            f"{names[-1]}."
        )
    workspace = Workspace(build_model(cfg.model, train, seed=seed), train, algorithm.local)
    indices = {name: torch.as_tensor(shard) for name, shard in shards.items()}
    count = len(train.objectives)
    num_served = count if algorithm.is_centralised else cfg.partition.objectives_per_client or count
    if num_served > count:
        raise ValueError(
            f"partition.objectives_per_client must be at most {count}, as many as {cfg.data.name} "
            f"has, got {num_served}."
        )
    clients = [
        SupervisedClient(
            name,
            workspace,
            shard,
            seed=seed,
            served=sorted((place + step) % count for step in range(num_served)),
            attack=attack,
        )
        for place, (name, shard) in enumerate(indices.items())
    ]
    strategy = algorithm.strategy
    if attack.kind != "none":
        strategy = replace(strategy, always=attack.clients)
    engine = LocalEngine(clients, num_workers=cfg.num_workers or os.cpu_count() or 1)
    return Federation(strategy, workspace, clients, engine, indices, held_out)


def attack_on(algorithm: AlgorithmConfig, cfg: Config) -> AttackConfig:
    """The attack on an algorithm."""
    if algorithm.attack_amount is None:
        return cfg.attack
    return replace(cfg.attack, amount=algorithm.attack_amount)


def partition(data: TaskData, cfg: Config, count: int, seed: int) -> dict[str, Sequence[int]]:
    """The samples of each of so many clients, by client."""
    kind, least, most = cfg.partition.kind, cfg.partition.min_samples, cfg.partition.max_samples
    if kind == "natural":
        if data.natural is None:
            raise ValueError(f"{cfg.data.name} has no users of its own; choose another partition.")
        users = cfg.partition.num_users
        shards = natural_partition(data.natural.tolist(), users, seed=seed, min_examples=least)
    elif kind == "iid":
        shards = iid_partition(len(data), count, seed=seed, min_examples=least)
    else:
        if data.groups is None:
            raise ValueError(
                f"{cfg.data.name} has no labels to divide by; choose another partition."
            )
        groups, alpha = data.groups.tolist(), cfg.partition.alpha
        if kind == "balanced":
            shards = balanced_dirichlet_partition(groups, count, alpha=alpha, seed=seed)
        elif kind == "dirichlet":
            shards = dirichlet_partition(groups, count, alpha=alpha, seed=seed, min_examples=least)
        else:
            per_client = cfg.partition.shards_per_client
            shards = shard_partition(groups, count, shards_per_client=per_client, seed=seed)
    if most is not None:
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(len(shard), generator=generator).tolist() for shard in shards)
        shards = [
            sorted(shard[place] for place in order[:most])
            for shard, order in zip(shards, orders, strict=True)
        ]
    if kind == "natural" and data.natural_names is not None:
        natural = data.natural
        assert natural is not None
        return {data.natural_names[int(natural[shard[0]])]: shard for shard in shards}
    return {f"client_{index}": shard for index, shard in enumerate(shards)}


def evaluation(
    cfg: Config, federation: Federation, splits: Splits, state: ServerState
) -> dict[str, Any]:
    """The row of an evaluation of the global model."""
    workspace = federation.workspace
    workspace.load(state.adapter)
    if cfg.split == "train":
        scores = workspace.evaluate(splits.train, torch.cat(list(federation.shards.values())))
    else:
        scores = workspace.evaluate(getattr(splits, cfg.split))
    return {
        "kind": "evaluation",
        "round": state.round,
        "split": cfg.split,
        **by_objective(scores, splits.train),
        **by_user(federation, splits),
    }


def by_objective(scores: Scores, data: TaskData) -> dict[str, dict[str, float]]:
    """Losses, and accuracies where there are any, by objective."""
    figures = {"losses": scores.losses, "accuracies": scores.accuracies}
    return {
        name: dict(zip(data.objectives, values.tolist(), strict=True))
        for name, values in figures.items()
        if values is not None
    }


def by_user(federation: Federation, splits: Splits) -> dict[str, dict[str, float]]:
    """Each user's accuracy, mean over the objectives, on what its client kept from training.

    Where clients keep nothing, but are users of the data, on these users' test samples; without
    either there is nothing.
    """
    data, samples = splits.train, federation.held_out
    if not samples and splits.test.natural is not None and splits.test.natural_names is not None:
        data, natural = splits.test, splits.test.natural
        samples = {
            name: (natural == number).nonzero().flatten()
            for number, name in enumerate(splits.test.natural_names)
            if name in federation.shards
        }
    samples = {name: indices for name, indices in samples.items() if len(indices)}
    if not samples or "squared" in data.losses:
        return {}
    accuracies = {}
    for name, indices in samples.items():
        scores = federation.workspace.evaluate(data, indices)
        assert scores.accuracies is not None
        accuracies[name] = scores.accuracies.mean().item()
    return {"users": accuracies}


def improved(
    federation: Federation, before: ServerState, after: ServerState, row: dict[str, Any]
) -> float:
    """The share of a round's clients none of whose training losses the server's step raised."""
    workspace = federation.workspace
    losses = []
    for state in (before, after):
        workspace.load(state.adapter)
        scores = [workspace.evaluate(workspace.data, federation.shards[c]) for c in row["clients"]]
        losses.append([score.losses.tolist() for score in scores])
    return improved_share(*losses)


def progress(federation: Federation, state: ServerState, clients: State) -> dict[str, float]:
    """How far a local training from the global model lowers each objective's loss on own samples.

    The federation is any with the same clients; they begin with the states that are given.
    """
    workspace, engine = federation.workspace, federation.engine
    engine.restore_client_states(clients)
    strategy = STRATEGIES[federation.cfg.name]
    models = local_models(strategy, state, federation.names, engine, federation.cfg)
    losses = []
    for adapters in (dict.fromkeys(models, state.adapter), models):
        for name, adapter in adapters.items():
            workspace.load(adapter)
            losses.append(workspace.evaluate(workspace.data, federation.shards[name]).losses)
    falls = local_progress(losses[: len(models)], losses[len(models) :])
    return dict(zip(state.objectives, falls.tolist(), strict=True))


def progress_line(path: Path, row: dict[str, Any]) -> str:
    """How a run stands."""
    figures = row.get("accuracies") or row["losses"]
    if len(users := row.get("users") or {}) <= NUM_TABLE_USERS:
        figures = figures | users
    text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    return f"{path.parent.name}, {path.name}, round {row['round']}: {text}"


def write_comparison(cfg: Config, runs: Sequence[AlgorithmRuns], splits: Splits, out: Path) -> None:
    """Writes the page and the table of what has run so far."""
    model = build_model(cfg.model, splits.train, seed=0)
    facts = {
        "Data": f"{cfg.data.name}, {len(splits.train):,} samples",
        "Objectives": ", ".join(splits.train.objectives),
        "Model": f"{cfg.model.name}, {num_parameters(model):,} parameters",
        "Clients": f"{cfg.num_clients}, {cfg.partition.kind}",
        "Rounds": str(cfg.rounds),
        "Seeds": ", ".join(map(str, cfg.seeds)),
    }
    fmoo_page.write(out, cfg, runs, facts=facts, config=to_yaml(cfg))


def cli(argv: Sequence[str] | None = None) -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    default = ROOT / "configs/fmoo/two_digits.yaml"
    run_cli(main, Config, argv, description=__doc__ or "", default_file=default)


if __name__ == "__main__":
    cli()
