"""Compares algorithms of federated multi-objective learning on images, tables and text."""

import copy
import csv
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from firm.base.console import accept_any_text
from firm.base.devices import generator_note, named_device, threads_restored
from firm.base.errors import RoundFailed
from firm.base.inside import replace_text
from firm.base.preferences import in_order
from firm.base.sanitize import by_reason, legible, printable
from firm.base.state import State
from firm.federation.diagnostics import failure_alarms
from firm.federation.engine_registry import ENGINES
from firm.federation.partition import split_shard
from firm.federation.server import ServerState
from firm.federation.strategy_configs import FsmgdaConfig, GramConfig, ScalarConfig
from firm.fmoo.client import SupervisedClient
from firm.fmoo.config import AlgorithmConfig
from firm.fmoo.data import Splits, load_data
from firm.fmoo.federation import SupervisedFederation
from firm.fmoo.measures import evaluation, progress, share_improved
from firm.fmoo.models import build_model, num_parameters
from firm.fmoo.partition import partition
from firm.fmoo.task_data import TaskData
from firm.fmoo.workspace import Workspace
from firm.jobs.fmoo_config import FREE_KEYS, ClassicConfig, attack_on, check_participation
from firm.jobs.loop import Logbook, RoundResult, Task, train
from firm.report.criteria import comparable, criteria_of
from firm.report.page import COMPARISON_NAME, write_page
from firm.report.record import read_record
from firm.report.settings_page import alarms_of, settings_page
from firm.report.settings_tables import (
    NUM_TABLE_USERS,
    further_texts,
    summary_table,
    users_left_out,
)
from firm.report.tables import Frame, Setting, span_text
from firm.run.config import to_dict, to_yaml
from firm.run.differences import differences
from firm.run.directory import Run, check_free, set_aside
from firm.run.errors import UserError
from firm.run.files import file_errors, make_private_folder, refuse_links
from firm.run.guard import drawing
from firm.run.names import dated_folder
from firm.run.pace import Paced
from firm.run.progress import print_table
from firm.run.resuming import STUDY_NAME, continued_later, is_resumed
from firm.run.rows import Row
from firm.run.sweep import Outcome, summarise
from firm.run.tracking import open_tracker

TABLE_NAME = "summary.csv"
METHOD = (
    "With the same seed, all algorithms start from the same model and have the same clients and "
    "samples in the same order; learning rates are chosen per algorithm. {measured} A run's "
    "directory contains its configuration, every row of its metrics and its last checkpoint."
)
MEASURED = {
    "train": "Values are measured on the clients' own training samples.",
    "validation": "Values are measured on validation samples that no client has.",
    "test": "Values are measured on test samples that no client has.",
}


@dataclass(frozen=True)
class ClassicResult:
    """Result of a study of classic algorithms."""

    path: Path
    """The study's directory."""
    seeds: tuple[int, ...]
    """Seeds of the runs of each algorithm."""
    runs: list[Setting]
    """Runs by algorithm."""
    new_model: Callable[[int], nn.Module]
    """Builds the untrained model of a seed."""

    @property
    def metrics(self) -> Frame:
        """Returns every logged number as a pandas.DataFrame, one number per row.

        The columns are `firm.report.tables.COLUMNS`; the setting is the algorithm.
        """
        table = pd.concat([setting.table for setting in self.runs], ignore_index=True)
        return table.assign(seed=table["seed"].map(self.seeds.__getitem__))

    @property
    def losses(self) -> Frame:
        """Returns the losses at every evaluation of the global model, as a pandas.DataFrame.

        It has a column for each objective, and a row for each algorithm, seed and round.
        """
        table = self.metrics
        table = table[table["quantity"].str.fullmatch("(train|validation|test)/losses")]
        at = ["setting", "seed", "round"]
        return table.pivot(index=at, columns="objective", values="value")

    def parameters(self, algorithm: str, *, seed: int | None = None) -> dict[str, torch.Tensor]:
        """Returns a trained model's state dict; by default, of the first seed.

        It is complete for ``module.load_state_dict``: trained and frozen parameters, each under
        all of its names, and buffers.

        Raises:
            ValueError: The study has no such algorithm or seed.
        """
        seed = self.seeds[0] if seed is None else seed
        if algorithm not in [setting.name for setting in self.runs] or seed not in self.seeds:
            raise ValueError(
                f"the study has the algorithms {', '.join(s.name for s in self.runs)} with the "
                f"seeds {', '.join(map(str, self.seeds))}, got {algorithm!r}, seed {seed}."
            )
        checkpoint = Run(self.path / algorithm / f"seed_{seed}").latest_checkpoint()
        assert checkpoint is not None  # every finished run has one
        trained = ServerState.from_state(checkpoint[1]["server"]).adapter
        module = copy.deepcopy(self.new_model(seed))  # a user's function may return a shared object
        with torch.no_grad():
            for parameter_name, value in trained.items():
                module.get_parameter(parameter_name).copy_(value)
        return module.state_dict()


class RunFailed(RuntimeError):
    """Raised when a run of a study cannot continue, such as one that diverged; others can."""


@threads_restored()
def run_classic(cfg: ClassicConfig) -> ClassicResult:
    """Runs the unfinished runs of a study, and writes the comparison as algorithms finish.

    A run that fails, such as one that diverges, does not stop the others.

    Raises:
        UserError: The data do not match the configuration, the study's directory is in use, a run
            has completed more rounds than configured, there is no study to continue, or, after all
            others have ended, some runs failed; the message names them.
    """
    accept_any_text()  # names of algorithms and objectives are printed
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    out = cfg.out or dated_folder("fmoo")
    refuse_links(out)
    runs_of_study = "*/seed_*/run.json"
    has_study = (out / STUDY_NAME).exists() or any(out.glob(runs_of_study))
    if not is_resumed(out, cfg.resume, runs_of_study) and has_study:
        check_free(out, to_dict(cfg))  # fail before the data are loaded
    try:
        device = named_device(cfg.device)
    except ValueError as error:
        raise UserError(f"device: {error}") from error
    if note := generator_note(device):
        print(f"note: {note}", flush=True)
    splits = load_data(cfg.data).to(device)
    if not len(getattr(splits, cfg.split)):
        raise ValueError(
            f"{cfg.data.name} has no {cfg.split} samples to evaluate on; choose another split."
        )
    named = in_order(cfg.algorithms, splits.train.objectives, "algorithms")
    for name, own in named.items():
        try:
            own.strategy.check(list(splits.train.objectives))
            own.strategy.check_clients("SupervisedClient", SupervisedClient.capabilities)
        except ValueError as error:
            raise UserError(f"algorithms.{name}: {error}") from error
        for note in (note for option in own.strategy.options for note in option.notes()):
            print(f"note: {name}: {printable(note)}", flush=True)
    if cfg.partition.kind == "natural":  # the number of users is known only now
        num_users = len(_shards(cfg, splits.train, cfg.num_clients, cfg.seeds[0]))
        for name, own in named.items():
            check_participation(cfg, name, own, num_users=num_users)
    cfg, runs, outcomes = replace(cfg, algorithms=named), list[Setting](), list[Outcome]()
    folders = {(n, seed): out / n / f"seed_{seed}" for n in cfg.algorithms for seed in cfg.seeds}
    pending = {each: f for each, f in folders.items() if not is_finished(cfg, *each, f)}
    for (name, seed), folder in pending.items():  # once all are checked
        if cfg.resume and (folder / "run.json").exists() and changes(cfg, name, seed, folder):
            aside = set_aside(folder, out / "replaced" / name / folder.name)
            line = f"{name}, seed {seed} starts again; its unfinished run is now {aside}"
            print(printable(line), flush=True)

    def compare() -> None:
        problems = [(each.name, each.problem) for each in outcomes if each.problem]
        lines = "; ".join(by_reason(problems))
        notes = [f"Runs that are not finished, and not shown: {lines}"] if problems else []
        write_comparison(cfg, runs, splits, out, notes=notes)

    with continued_later(out), Paced(compare) as page:
        for color, name in enumerate(cfg.algorithms):
            finished = []
            for seed in cfg.seeds:
                folder, start, problem = folders[name, seed], time.perf_counter(), None
                try:
                    if (name, seed) in pending:
                        run_seed(cfg, name, splits, folder, seed)
                    finished.append(read_record(folder))
                except RunFailed as error:
                    problem = str(error)
                    line = f"{name}, seed {seed}: {problem}"
                    print(printable(line, max_length=5_000), flush=True)
                seconds = time.perf_counter() - start
                outcomes.append(Outcome(f"{name}, seed {seed}", seconds, problem))
            if finished:
                runs.append(Setting.of(name, color, finished))
            if runs:
                page() if color + 1 < len(cfg.algorithms) else compare()
    summarise(outcomes, out)

    def new_model(seed: int) -> nn.Module:
        return build_model(cfg.model, splits.train, seed=seed)

    return ClassicResult(out, cfg.seeds, runs, new_model)


def run_settings(cfg: ClassicConfig, name: str, seed: int) -> dict[str, Any]:
    """Returns the configuration of one run, as plain data."""
    algorithms, source = {name: cfg.algorithms[name]}, name if name == cfg.progress_from else None
    return to_dict(replace(cfg, algorithms=algorithms, seeds=(seed,), progress_from=source))


def free_keys(name: str) -> list[str]:
    """Returns the keys of an algorithm's run that may differ on resume."""
    return [*FREE_KEYS, f"algorithms.{name}.rounds", "rounds"]


def changes(cfg: ClassicConfig, name: str, seed: int, path: Path) -> list[str]:
    """Returns the differences of a run's settings from those that it is to have now."""
    return differences(Run(path).settings(), run_settings(cfg, name, seed), free_keys(name))


def is_finished(cfg: ClassicConfig, name: str, seed: int, path: Path) -> bool:
    """Returns whether a run has completed its rounds or reached the target loss.

    Raises:
        UserError: A finished run had other settings, or has completed more rounds than configured.
    """
    if not cfg.resume or not (path / "run.json").exists():
        return False
    run, rounds = Run(path), cfg.algorithms[name].rounds or cfg.rounds
    measured, kept = last_evaluation(run.rows()), run.latest_checkpoint()
    is_kept = measured is not None and kept is not None and kept[0] == measured["round"]
    has_ended = is_kept and is_done(measured, rounds, cfg.target_loss)
    if has_ended or run.record().get("status") == "finished":
        run.check_same(run_settings(cfg, name, seed), ignore=free_keys(name))
    elif changes(cfg, name, seed, path):
        return False  # it starts again
    if not has_ended and measured is not None and measured["round"] > rounds:
        raise UserError(
            f"rounds must be at least {measured['round']}, the rounds that the run at {path} "
            f"has completed, got {rounds}; increase it, or start a new study."
        )
    return has_ended


def run_seed(cfg: ClassicConfig, name: str, splits: Splits, path: Path, seed: int) -> None:
    """Trains one run, from its last checkpoint if there is one.

    Raises:
        RunFailed: Too few clients finished a round, or a loss is not finite; names the round.
    """
    is_there = bool(cfg.resume) and (path / "run.json").exists()
    settings = run_settings(cfg, name, seed)
    federation = federate(cfg, cfg.algorithms[name], splits, seed)
    study = path.parent.parent
    with file_errors(f"the study {study}"):
        make_private_folder(study)
    with (
        Run.open(path, settings, resume=is_there, ignore=free_keys(name), renew=["rounds"]) as run,
        open_tracker(
            cfg.tracking,
            run.path,
            settings,
            objectives=splits.train.objectives,
            name=f"{name}, seed {seed}",
            group=study.name,
            job_type=name,
            tags=(federation.cfg.name, name, f"seed {seed}"),
        ) as tracker,
        closing(federation.cfg.around(federation.engine, len(federation.names))) as engine,
    ):
        replace_text(study / STUDY_NAME, to_yaml(cfg))
        passes = "of all clients in one pass" if federation.has_joint_passes else "client by client"
        print(printable(f"{name}, seed {seed}: {cfg.model.name}, gradients {passes}"), flush=True)
        task = _ClassicTask(Logbook(run, tracker), cfg, name, splits, seed, federation)
        try:
            train(task, engine, federation.names, federation.cfg)
        except (RoundFailed, ValueError) as error:
            if isinstance(error, UserError):  # of the folder, which all runs share
                raise
            # neither a round that failed nor one whose evaluation did has been logged
            number = max((row["round"] for row in task.book.rows), default=-1) + 1
            reason = error.reason if isinstance(error, RoundFailed) else str(error)
            raise RunFailed(f"ended in round {number}: {reason.rstrip('.')}.") from error


def federate(
    cfg: ClassicConfig, algorithm: AlgorithmConfig, splits: Splits, seed: int
) -> SupervisedFederation:
    """Returns an algorithm's clients with their samples, and the model that they share."""
    train, fraction = splits.train, cfg.partition.test_fraction
    shards, held_out = _shards(cfg, train, algorithm.num_clients or cfg.num_clients, seed), {}
    if fraction:
        for index, (name, shard) in enumerate(shards.items()):
            own, kept = split_shard(shard, (1 - fraction, fraction), seed=seed + index)
            shards[name], held_out[name] = own, torch.tensor(kept, dtype=torch.int64)
    if algorithm.is_centralised:
        shards = {"everyone": [index for shard in shards.values() for index in shard]}
    names, attack = list(shards), attack_on(algorithm, cfg)
    if strangers := set(attack.clients) - set(names):
        raise ValueError(
            f"attack.clients must be among the clients {names[0]} to {names[-1]}, got "
            f"{min(strangers)!r}."
        )
    algorithm.strategy.check_names(names)
    workspace = Workspace(build_model(cfg.model, train, seed=seed), train, algorithm.local)
    indices = {name: torch.as_tensor(shard) for name, shard in shards.items()}
    count = len(train.objectives)
    num_served = count if algorithm.is_centralised else cfg.partition.objectives_per_client or count
    if num_served > count:
        raise ValueError(
            f"partition.objectives_per_client must be at most {count}, the number of objectives of "
            f"{cfg.data.name}, got {num_served}."
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
    if not workspace.shared.stop and isinstance(strategy, GramConfig | FsmgdaConfig):
        raise ValueError(
            f"strategy {strategy.name} compares gradients of parameters that the objectives share, "
            f"and model.name {cfg.model.name} has none: choose mlp, or another strategy."
        )
    if attack.kind != "none":
        always = dict.fromkeys((*strategy.always, *attack.clients))
        strategy = replace(strategy, always=tuple(always))
    # weighted-sum training of a linear model runs as one loop over arrays (``weighted_steps``)
    is_loop = workspace.linear_heads is not None and isinstance(strategy, ScalarConfig)
    name = cfg.engine or ("stacked" if workspace.is_stackable and not is_loop else "local")
    engine = ENGINES[name](clients, num_workers=cfg.num_workers or os.cpu_count() or 1)
    return SupervisedFederation(strategy, workspace, clients, engine, indices, held_out)


def _shards(cfg: ClassicConfig, data: TaskData, count: int, seed: int) -> dict[str, Sequence[int]]:
    return partition(data, cfg.partition, count, seed=seed, name=cfg.data.name)


class _ClassicTask(Task):
    """Evaluates losses and accuracies on samples, at intervals of rounds."""

    def __init__(
        self,
        book: Logbook,
        cfg: ClassicConfig,
        name: str,
        splits: Splits,
        seed: int,
        federation: SupervisedFederation,
    ) -> None:
        super().__init__(book, keep_last=1)
        self._cfg, self._name, self._splits, self._seed = cfg, name, splits, seed
        self._federation = federation
        self._num_rounds = cfg.algorithms[name].rounds or cfg.rounds
        self._measured: Row | None = None
        compared = cfg.algorithms.items() if name == cfg.progress_from else ()
        self._rivals = {rival: federate(cfg, own, splits, seed) for rival, own in compared}

    def start(self) -> tuple[ServerState, None]:
        adapter = self._federation.clients[0].adapter()
        state = ServerState(adapter, self._splits.train.objectives, seed=self._seed)
        self._measured = evaluation(self._federation, self._splits, self._cfg.split, state)
        self.book.log(self._measured)
        return state, None

    def restore(self, content: State) -> None:
        self._measured = last_evaluation(self.book.rows)

    def is_done(self, state: ServerState) -> bool:
        return is_done(self._measured, self._num_rounds, self._cfg.target_loss)

    def measure(
        self, before: ServerState, after: ServerState, metrics: dict[str, Any]
    ) -> RoundResult:
        cfg, row = self._cfg, metrics["round"]
        is_due = after.round % cfg.evaluate_every == 0 or after.round == self._num_rounds
        if is_due and cfg.improved_share:
            row["improved"] = share_improved(self._federation, before, after, row)
        if alarms := failure_alarms([*self.book.rows, row]):
            row["alarms"] = alarms
        if not is_due:
            return RoundResult([row], is_kept=False)
        self._measured = evaluation(self._federation, self._splits, cfg.split, after)
        if self._rivals:
            clients = self._federation.engine.client_states(after.accepted)
            self._measured["progress"] = {
                name: progress(rival, after, clients) for name, rival in self._rivals.items()
            }
        return RoundResult([row, self._measured])

    def show(self, state: ServerState, rows: Sequence[Row]) -> None:
        for row in rows:
            for alarm in row.get("alarms", ()):
                print(printable(f"{self._name}, seed {self._seed}: {alarm}"))
            if row["kind"] == "evaluation":
                line = progress_line(f"{self._name}, seed {self._seed}", row)
                print(printable(line, max_length=5_000), flush=True)


def last_evaluation(rows: Sequence[Row]) -> Row | None:
    """Returns the last evaluation row, or None."""
    return next((row for row in reversed(rows) if row["kind"] == "evaluation"), None)


def is_done(measured: Row | None, rounds: int, target: float | None) -> bool:
    """Returns whether a run has completed its rounds or reached the target loss."""
    if measured is None:
        return False
    losses = (measured.get("losses") or {}).values()
    is_reached = target is not None and all(y is not None and y <= target for y in losses)
    return measured["round"] == rounds or (is_reached and len(losses) > 0)


def progress_line(run: str, row: dict[str, Any]) -> str:
    """Returns a line that reports the progress of a run with this name."""
    figures = row.get("accuracies") or row["losses"]
    if len(users := row.get("users") or {}) <= NUM_TABLE_USERS:
        figures = figures | users
    text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    return f"{run}, round {row['round']}: {text}"


def write_comparison(
    cfg: ClassicConfig,
    runs: Sequence[Setting],
    splits: Splits,
    out: Path,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Writes the page and the table of the runs so far.

    If the page cannot be written, warns and lets the study continue. `notes` are sentences on what
    the page does not show.
    """
    with drawing(f"The table {TABLE_NAME}"):
        header, lines = summary(runs)
        table = io.StringIO(newline="")
        csv.writer(table).writerows([["algorithm", *header[1:]], *lines])
        replace_text(out / TABLE_NAME, table.getvalue())
    with drawing(f"The page {COMPARISON_NAME}"):
        model = build_model(cfg.model, splits.train, seed=0)
        asked = {own.num_clients or cfg.num_clients for own in cfg.algorithms.values()}
        counts = [len(_shards(cfg, splits.train, each, cfg.seeds[0])) for each in asked]
        facts = {
            "Data": f"{cfg.data.name}, {len(splits.train):,} samples",
            "Objectives": ", ".join(splits.train.objectives),
            "Model": f"{cfg.model.name}, {num_parameters(model):,} parameters",
            "Clients": f"{span_text(counts)}, {cfg.partition.kind}",
        }
        page = settings_page(
            runs,
            folder=out,
            title=f"Algorithms on {cfg.data.name}",
            facts=facts,
            method=METHOD.format(measured=MEASURED[cfg.split]),
            config=to_yaml(cfg),
            notes=notes,
        )
        write_page(out / COMPARISON_NAME, page)


def summary(runs: Sequence[Setting]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of the final metrics, as means over seeds."""
    settings, _ = comparable(runs)
    criteria = criteria_of(settings)
    texts = further_texts(settings, criteria)
    return summary_table(settings, criteria[0], texts, has_spread=False)


def main(cfg: ClassicConfig) -> Path:
    """Runs the unfinished runs of a study, prints the table, and returns the directory."""
    start = time.perf_counter()
    result = run_classic(cfg)
    title = f"{cfg.split.capitalize()} samples at the end, mean over seeds"
    with drawing("The table"):
        print_table(title, *summary(result.runs))
        settings, _ = comparable(result.runs)
        if note := users_left_out(settings, criteria_of(settings)[0]):
            print(f"note: {printable(note)}")
    for where, text in alarms_of(result.runs):
        print(f"note: {printable(f'{where}: {text}', max_length=5_000)}")
    page = result.path / COMPARISON_NAME
    print(legible(f"page     {page}\n{time.perf_counter() - start:.0f} s"))
    return result.path
