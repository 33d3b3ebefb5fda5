"""Federated multi-objective learning on images, tables and text: algorithms, side by side."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from firm.federation import ServerState, State, failure_alarms
from firm.federation.outside import printable
from firm.fmoo import Splits, build_model, load_data, num_parameters
from firm.jobs import fmoo_page
from firm.jobs.fmoo_config import FREE_KEYS, ClassicConfig
from firm.jobs.fmoo_loading import Federation, federate
from firm.jobs.fmoo_measures import evaluation, improved, progress
from firm.jobs.loop import Logbook, Measurement, Wing, train
from firm.report.classic_sections import NUM_TABLE_USERS
from firm.report.tables import Setting
from firm.run import Run, Tracker, dated_folder, make_private_folder, to_dict, to_yaml
from firm.run.files import file_errors
from firm.run.rows import Row


@dataclass(frozen=True)
class ClassicResult:
    """What a study has come to."""

    path: Path
    """The study's directory."""
    runs: list[Setting]
    """The rows of every run, by algorithm."""


def run_classic(cfg: ClassicConfig) -> ClassicResult:
    """Runs what is not finished of a study, and writes the comparison after every algorithm.

    Raises:
        UserError: The data do not fit the configuration, or the study's directory is taken.
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    out = cfg.out or dated_folder("fmoo")
    splits = load_data(cfg.data)
    runs = []
    for color, name in enumerate(cfg.algorithms):
        seeds = [run_seed(cfg, name, splits, out / name / f"seed_{s}", s) for s in cfg.seeds]
        logs = [Run(out / name / f"seed_{s}") for s in cfg.seeds]
        left_out = [text for log in logs for text in log.checked_rows()[1]]
        runs.append(Setting(name, color, seeds, left_out))
        write_comparison(cfg, runs, splits, out)
    return ClassicResult(out, runs)


def run_seed(cfg: ClassicConfig, name: str, splits: Splits, path: Path, seed: int) -> list[Row]:
    """Returns the rows of one run, which is trained as far as it is not yet."""
    algorithm = cfg.algorithms[name]
    source = name if name == cfg.progress_from else None
    settings = to_dict(
        replace(cfg, algorithms={name: algorithm}, seeds=(seed,), progress_from=source)
    )
    wing = _ClassicWing(cfg, name, splits, seed)
    is_there = cfg.resume and (path / "run.json").exists()
    if is_there and is_done(
        last_evaluation(rows := Run(path).rows()), algorithm.rounds or cfg.rounds, cfg.target_loss
    ):
        return rows
    wing.load()
    study = path.parent.parent
    with file_errors(f"the study {study}"):
        make_private_folder(study)
    with (
        Run.open(path, settings, resume=is_there, ignore=FREE_KEYS) as run,
        Tracker(
            cfg.tracking,
            run.path,
            settings,
            objectives=splits.train.objectives,
            name=f"{name}, seed {seed}",
            group=study.name,
        ) as tracker,
        closing(wing.federation.engine) as engine,
    ):
        names, strategy = wing.federation.names, wing.federation.cfg
        train(wing, Logbook(run, tracker), engine, names, strategy, keep_last=1)
        return run.rows()


class _ClassicWing(Wing):
    """Measures losses and accuracies on samples, every so many rounds."""

    def __init__(self, cfg: ClassicConfig, name: str, splits: Splits, seed: int) -> None:
        self._cfg, self._name, self._splits, self._seed = cfg, name, splits, seed
        self._num_rounds = cfg.algorithms[name].rounds or cfg.rounds
        self._rivals: dict[str, Federation] = {}
        self._measured: Row | None = None

    def load(self) -> None:
        """Builds the clients, and those of the algorithms whose local progress is compared."""
        cfg = self._cfg
        self.federation = federate(cfg, cfg.algorithms[self._name], self._splits, self._seed)
        if self._name == cfg.progress_from:
            self._rivals = {
                name: federate(cfg, algorithm, self._splits, self._seed)
                for name, algorithm in cfg.algorithms.items()
            }

    def start(self, book: Logbook) -> tuple[ServerState, Measurement]:
        adapter = self.federation.clients[0].adapter()
        state = ServerState(adapter, self._splits.train.objectives, seed=self._seed)
        self._measured = evaluation(self._cfg, self.federation, self._splits, state)
        book.log(self._measured)
        return state, Measurement()

    def restore(self, content: State, book: Logbook) -> None:
        self._measured = last_evaluation(book.rows)

    def is_done(self, state: ServerState) -> bool:
        return is_done(self._measured, self._num_rounds, self._cfg.target_loss)

    def round_rows(
        self, before: ServerState, after: ServerState, metrics: dict[str, Any], book: Logbook
    ) -> Sequence[Row]:
        row = metrics["round"]
        if self._cfg.improved_share and self._is_due(after):
            row["improved"] = improved(self.federation, before, after, row)
        if alarms := failure_alarms([*book.rows, row]):
            row["alarms"] = alarms
        return [row]

    def measure(self, state: ServerState) -> Measurement | None:
        if not self._is_due(state):
            return None
        row = evaluation(self._cfg, self.federation, self._splits, state)
        if self._rivals:
            clients = self.federation.engine.client_states(state.accepted)
            row["progress"] = {
                name: progress(rival, state, clients) for name, rival in self._rivals.items()
            }
        self._measured = row
        return Measurement((row,))

    def show(
        self,
        state: ServerState,
        rows: Sequence[Row],
        measurement: Measurement | None,
        book: Logbook,
    ) -> None:
        for alarm in (alarm for row in rows for alarm in row.get("alarms", ())):
            print(printable(f"{self._name}, seed {self._seed}: {alarm}"))
        for row in measurement.rows if measurement else ():
            print(printable(progress_line(book.run.path, row), max_length=5_000), flush=True)

    def _is_due(self, state: ServerState) -> bool:
        return state.round % self._cfg.evaluate_every == 0 or state.round == self._num_rounds


def last_evaluation(rows: Sequence[Row]) -> Row | None:
    """Returns the last row of an evaluation; None without any."""
    return next((row for row in reversed(rows) if row["kind"] == "evaluation"), None)


def is_done(measured: Row | None, rounds: int, target: float | None) -> bool:
    """Whether a run with this last evaluation has done all rounds, or reached the target loss."""
    if measured is None:
        return False
    losses = (measured.get("losses") or {}).values()
    is_reached = target is not None and all(y is not None and y <= target for y in losses)
    return measured["round"] == rounds or (is_reached and len(losses) > 0)


def progress_line(path: Path, row: dict[str, Any]) -> str:
    """Returns how a run stands, in a line."""
    figures = row.get("accuracies") or row["losses"]
    if len(users := row.get("users") or {}) <= NUM_TABLE_USERS:
        figures = figures | users
    text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    return f"{path.parent.name}, {path.name}, round {row['round']}: {text}"


def write_comparison(
    cfg: ClassicConfig, runs: Sequence[Setting], splits: Splits, out: Path
) -> None:
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
