"""Aligns a language model to several objectives across several clients."""

import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors.torch import save, save_file

from firm.alignment.adapter_files import save_adapter, save_folded
from firm.alignment.best_adapter import BestAdapter, utility
from firm.alignment.calibration import Calibration
from firm.alignment.evaluation import Evaluation, MetricComparison, evaluate
from firm.alignment.generation import generation_settings
from firm.alignment.kl_guard import KLGuard
from firm.alignment.pair_evaluation import PairEvaluation, evaluate_pairs, reference_logprobs
from firm.alignment.pair_tokens import EncodedPair
from firm.alignment.policy import load_adapter_
from firm.base.devices import threads_restored
from firm.base.inside import remove, replace_bytes, whole_folder
from firm.base.preferences import FRONT_NAME, preference_folder
from firm.base.randomness import RandomStream
from firm.base.sanitize import legible, printable
from firm.base.state import State
from firm.federation.client import Adapter
from firm.federation.engines.engine import Engine
from firm.federation.engines.processes import ProcessesEngine
from firm.federation.processes import Processes
from firm.federation.server import ServerState
from firm.fronts.confidence import share_interval
from firm.fronts.reach import widest_gap
from firm.jobs.alarms import alarms_at_start, alarms_of_rounds
from firm.jobs.alignment_config import (
    SERVER_KEYS,
    AlignmentConfig,
    client_names,
    is_front_due,
    measured_preferences,
)
from firm.jobs.alignment_loading import (
    Given,
    LoadedRun,
    as_figures,
    build_clients,
    build_engine,
    common_calibrations,
    load,
    reporter,
    set_threads,
    with_fast_dtypes,
    with_recorded,
)
from firm.jobs.fetch import about_policy, fetch_policy
from firm.jobs.hub import push
from firm.jobs.loop import Logbook, RoundResult, Task, train
from firm.jobs.plan.tables import print_plan
from firm.jobs.sources import check_sources
from firm.jobs.workspace import show_layout
from firm.report import formats
from firm.report.page import alarms
from firm.report.record import read_record
from firm.report.run_front import SCORES_NAME, front_of_run, front_rows, split_at
from firm.report.run_page import update_report
from firm.report.tables import Frame, Setting
from firm.run.comparison import prompts_text
from firm.run.config import to_dict
from firm.run.directory import Run
from firm.run.errors import UserError
from firm.run.files import file_errors
from firm.run.guard import drawing
from firm.run.names import dated_folder
from firm.run.pace import Paced
from firm.run.progress import Progress, print_table
from firm.run.resuming import continued_later
from firm.run.rows import Row, as_one_training
from firm.run.sweep import sweep_folder
from firm.run.tracking import check_installed, open_tracker
from firm.serving.model_card import markdown_table, markdown_text, model_card, model_name

FREE_KEYS = (
    *("client_timeout", "engine", "hub", "max_rows", "name"),
    *("out", "paper", "plan", "plugins", "resume", "tracking"),
    *SERVER_KEYS,
)
"""Keys that may differ from the run's saved configuration on resume."""
RENEWED_KEYS = ("rounds", "guard")
"""Keys that may also differ if `check_continues` allows it; the saved configuration is updated."""


AnyEvaluation = Evaluation | PairEvaluation


def mean_kl(evaluation: AnyEvaluation) -> float | None:
    """Returns the KL from the base model in nats per reply; None without replies."""
    return evaluation.kl.mean().item() if isinstance(evaluation, Evaluation) else None


class Chosen(NamedTuple):
    """The adapter that a run leaves."""

    adapter: Adapter
    round: int
    """Round after which it was reached; 0 for the start."""
    reason: str
    """Why this round, in words."""


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Result of an alignment run; prints as its table of rewards."""

    path: Path
    """The run's directory."""
    adapter: Path
    """PEFT folder of the aligned adapter."""
    page: Path
    """HTML page of the run."""
    base: Evaluation | PairEvaluation
    """Evaluation of the base model on the held-out prompts or pairs."""
    aligned: Evaluation | PairEvaluation
    """Evaluation of the aligned model on the same data."""

    @property
    def comparison(self) -> list[MetricComparison]:
        """Returns comparisons of aligned and base model, for each objective and further metric."""
        return self.aligned.comparison(self.base)  # type: ignore[arg-type]  # of the same kind

    @property
    def rows(self) -> list[Row]:
        """Returns the rows of metrics.jsonl."""
        return Run(self.path).rows()

    @property
    def rewards(self) -> Frame:
        """Returns the rewards on the held-out prompts, in [0, 1]: a pandas.DataFrame.

        If the run learned from pairs, these are the shares of held-out pairs that the model ranks
        as people did.

        There is a column per objective. The rows are base, base_se, aligned, aligned_se, change and
        change_se (means and their standard errors; the change is paired by row), num_prompts
        (number of prompts evaluated) and z, as in `MetricComparison`. Unknown values are NaN.
        """
        table = self.aligned.reward_comparison(self.base)  # type: ignore[arg-type]
        columns = {name: {**asdict(row), "z": row.z} for name, row in table.items()}
        return pd.DataFrame(columns).drop(index=["name", "is_partial"]).astype(float)

    def to_pandas(self) -> Frame:
        """Returns every logged number as a pandas.DataFrame, one number per row.

        The columns are `firm.report.tables.COLUMNS`.
        """
        record = read_record(self.path)
        return Setting.of(self.path.name, 0, [record]).table.assign(seed=record.seed)

    def __repr__(self) -> str:
        """Returns the table of rewards, and the run's directory."""
        table = self.rewards.to_string(float_format=lambda x: f"{x:.3f}".removesuffix(".000"))
        return f"{table}\n{self.path}"

    def report(self) -> "Report":
        """Returns the page; a notebook displays it below the calling cell."""
        return Report(self.page)


@dataclass(frozen=True)
class Report:
    """The page of a run; `os.fspath` gives its path."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """Returns HTML that displays the complete page in a notebook, in an iframe."""
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 48rem; border: 0"></iframe>'


def main(cfg: AlignmentConfig) -> Path | None:
    """Runs or plans the alignment; returns the run's directory, or None after a plan."""
    if cfg.plan:
        return print_plan(cfg)
    fetch_policy(cfg.policy.path)
    check_sources(cfg)
    out = run_folder(cfg)
    with continued_later(out):
        result = align(replace(cfg, out=out))
    if result is None:  # the first process prints the result
        return None
    print_result(cfg, result)
    return result.path


@threads_restored()
def align(cfg: AlignmentConfig, given: Given | None = None) -> Result | None:
    """Runs an alignment from the start, or from the run's last checkpoint.

    Objects in `given` replace those named in `cfg`; `firm.align` prepares both.

    Returns:
        The result; None in a launcher's processes other than the first, which only serve it.

    Raises:
        UserError: A model, file or other resource in the configuration is not available, or the
            run's directory is in use.
    """
    processes = Processes.join(per_client=cfg.processes_per_client)
    cfg = with_fast_dtypes(with_recorded(cfg), processes)
    out = claim_folder(cfg, processes)
    progress = progress_of(cfg)
    loaded = load(cfg, processes, given=given, on_event=progress.event)
    if processes.is_server:
        progress.event("started", alarms=notes_at_start(cfg, loaded))
    cfg = set_threads(cfg, loaded, on_event=progress.event)
    calibrations = common_calibrations(loaded, cfg, out, on_event=progress.event)
    on_stage = progress.event if progress.is_live else None
    clients = build_clients(
        loaded, cfg, calibrations, on_event=on_stage, on_measured=progress.event
    )
    engine = build_engine(clients, cfg, processes, out=out, on_event=progress.event)
    if not processes.is_server:
        assert isinstance(engine, ProcessesEngine)
        with closing(loaded.trainer.rollout_engine):
            engine.serve()  # until the first process ends the run
        return None
    return run_rounds(loaded, cfg, calibrations, engine, progress, out)


def notes_at_start(cfg: AlignmentConfig, loaded: LoadedRun) -> list[str]:
    """Returns what the user should read before the first reply is sampled, which may take long."""
    return [*alarms_at_start(cfg), *loaded.notes]


def run_rounds(
    loaded: LoadedRun,
    cfg: AlignmentConfig,
    calibrations: Mapping[str, Calibration],
    engine: Engine,
    progress: Progress,
    out: Path,
) -> Result:
    """Trains and evaluates, and writes the results, wherever the engine's clients run."""
    with open_task(loaded, cfg, calibrations, engine, progress, out) as task:
        state = train(task, engine, client_names(cfg), cfg.strategy)
        base, aligned = task.finish(state)
    return write_result(cfg, out, base, aligned)


@contextmanager
def open_task(
    loaded: LoadedRun,
    cfg: AlignmentConfig,
    calibrations: Mapping[str, Calibration],
    engine: Engine,
    progress: Progress,
    out: Path,
) -> Iterator["_LanguageTask"]:
    """Opens the run's folder, tracker and progress display, and closes the engines on exit."""
    settings = to_dict(cfg)
    with (
        Paced(partial(update_report, out)) as page,  # first, so that it shows how the run ended
        Run.open(out, settings, resume=cfg.resume, ignore=FREE_KEYS, renew=RENEWED_KEYS) as run,
        open_tracker(
            cfg.tracking,
            run.path,
            settings,
            objectives=cfg.objectives,
            job_type=cfg.strategy.name,
            tags=(cfg.strategy.name, f"seed {cfg.seed}"),
        ) as tracker,
        progress,
        closing(engine),
        closing(loaded.trainer.rollout_engine),
    ):
        yield LANGUAGE_TASKS[cfg.estimator.learns_from](
            Logbook(run, tracker), loaded, cfg, calibrations, progress, page
        )


def write_result(
    cfg: AlignmentConfig, out: Path, base: AnyEvaluation, aligned: AnyEvaluation
) -> Result:
    """Writes a finished run's page and front, and pushes its adapter if a hub is configured.

    Args:
        cfg: The run.
        out: Its directory.
        base: Evaluation of the base model on the held-out prompts.
        aligned: Evaluation of the aligned model on the same prompts.
    """
    report = update_report(out, final=True)
    with drawing("The front of the run"):
        if front := front_of_run(read_record(out)):
            front.save(out / FRONT_NAME)
    if cfg.hub.repo:
        beside = (FRONT_NAME, report.name) if measured_preferences(cfg) else ()
        push(cfg.hub, out / "adapter", out, beside)
    return Result(out, out / "adapter", report, base, aligned)


def print_result(cfg: AlignmentConfig, result: Result) -> None:
    """Prints the comparison with the base model, warnings, and paths of page and adapter."""
    aligned = result.aligned
    spread = "mean ± standard error"
    if isinstance(aligned, PairEvaluation):
        data = f"{aligned.num_rows} held-out pairs of replies to {aligned.num_prompts} prompts"
        spread += ", or exact 95 % interval"
    else:
        data = f"{prompts_text(aligned.num_prompts, aligned.num_rows, 'held-out')}, "
        data += f"{cfg.evaluation.num_samples} replies each"
    print_table(
        f"{data}, {spread}",
        ["", "base", "aligned", "change", "z"],
        [row.cells() for row in result.comparison],
    )
    record = read_record(result.path)
    if rows := front_rows(record):
        names, shown = list(cfg.objectives), LANGUAGE_TASKS[cfg.estimator.learns_from].shown
        kl = ["kl"] if "kl" in rows[0] else []
        print_table(
            f"the same {cfg.estimator.learns_from} at each measured preference, {spread}",
            [", ".join(names), *names, *kl],
            [
                [
                    formats.shares(row["preference"]),
                    *(_figure(row[shown][name], shown) for name in names),
                    *(f"{row[key]:.3f} ± {row[f'{key}_se']:.3f}" for key in kl),
                ]
                for row in rows
            ],
        )
    for outcome in record.constraint_outcomes:
        print(f"constraint {printable(outcome, max_length=5_000)}")
    for sign in record.hacking_signs:
        print(f"note: sign of reward hacking: {printable(sign, max_length=5_000)}")
    for alarm in alarms(row for row in result.rows if row["kind"] in ("run", "round")):
        print(f"note: {alarm.when}: {printable(alarm.text, max_length=5_000)}")
    print(legible(f"report   {result.page}\nadapter  {result.adapter}"))
    if record.kept_adapter:
        print(printable(f"         of {record.kept_adapter}", max_length=5_000))


def _figure(entry: Mapping[str, Any], field: str) -> str:
    """Returns a score with its standard error, or an accuracy on pairs with its exact interval."""
    if field == "scores":
        return f"{entry['mean']:.3f} ± {entry['se']:.3f}"
    low, high = share_interval(entry["mean"], entry["num_prompts"])
    return f"{entry['mean']:.3f} [{low:.3f}, {high:.3f}]"


def claim_folder(cfg: AlignmentConfig, processes: Processes) -> Path:
    """Returns the run's directory after checking that the run may start or continue there.

    Raises:
        UserError: It holds another run, or a run that cannot continue with this configuration.
    """
    out = run_folder(cfg)
    if processes.is_server:  # fail before loading, which takes minutes
        check_installed(cfg.tracking)
        check_continues(out, cfg)
    return Path(processes.broadcast(str(out)))  # a folder named after the time differs


def check_continues(out: Path, cfg: AlignmentConfig) -> None:
    """Raises `UserError` if `out` holds another run, or one that cannot continue with `cfg`."""
    Run.check(out, to_dict(cfg), resume=cfg.resume, ignore=(*FREE_KEYS, *RENEWED_KEYS))
    run = Run(out)
    if not (cfg.resume and (out / "config.yaml").exists()):
        return
    was = run.settings().get("rounds", cfg.rounds)
    checkpoint = run.latest_checkpoint() if was != cfg.rounds else None
    done = checkpoint[0] if checkpoint else 0
    if cfg.rounds < done:
        raise UserError(
            f"rounds must be at least {done}, the rounds that the run at {out} has completed, got "
            f"{cfg.rounds}; increase it, or start a new run."
        )
    if done and (schedule := cfg.estimator.learning_rate_schedule) != "constant":
        raise UserError(
            f"rounds must remain {was} for the run at {out}, since its learning rates so far "
            f"depend on it (estimator.learning_rate_schedule {schedule}), got {cfg.rounds}; resume "
            f"with rounds {was}, or start a new run."
        )


def run_folder(cfg: AlignmentConfig) -> Path:
    """Returns the run's directory."""
    return cfg.out or dated_folder(cfg.name)


def progress_of(cfg: AlignmentConfig, *, console: Console | None = None) -> Progress:
    """Returns a run's progress display, on the terminal or on `console`."""
    return Progress(
        cfg.rounds,
        client_names(cfg),
        cfg.objectives,
        clients_per_round=cfg.strategy.clients_per_round,
        console=console,
    )


class _LanguageTask(Task):
    """Evaluates replies: after each round, and on held-out prompts before and after training."""

    evaluation: type[AnyEvaluation] = Evaluation
    shown = "scores"
    """Field of evaluations that the terminal shows after a round."""
    mean = "mean reward"
    """Name of the mean of the evaluated rewards over the objectives."""

    def __init__(
        self,
        book: Logbook,
        loaded: LoadedRun,
        cfg: AlignmentConfig,
        calibrations: Mapping[str, Calibration],
        progress: Progress,
        page: Paced,
    ) -> None:
        super().__init__(book, keep_last=cfg.checkpoints.keep_last)
        self._loaded, self._cfg, self._progress, self._page = loaded, cfg, progress, page
        self._calibrations = calibrations
        self._base: dict[str, Any] = {}
        self.preferences = measured_preferences(cfg)
        """Preferences at which a conditioned policy is evaluated."""
        self._by_row: dict[tuple[str, tuple[float, ...]], dict[str, Any]] = {}
        """Newest metrics by row, by split and preference."""
        self._guard = KLGuard(cfg.guard, is_fresh=not cfg.start)
        self._best = BestAdapter()
        self._stopped = ""
        """The rule that has ended the run before its last round."""
        self._is_out = False
        """Whether the last adapter is outside the guard's trust region."""

    def start(self) -> tuple[ServerState, float | None]:
        loaded, cfg = self._loaded, self._cfg
        state = ServerState(loaded.fresh, objectives=cfg.objectives, seed=cfg.seed)
        self.book.log(_run_row(cfg, loaded, self._calibrations))
        self._base = self._evaluate_base()
        for split, evaluation in self._base.items():
            self.book.log(evaluation.row(round=0, split=split))
        self._log_samples(self._base["test"], state)
        quality = None
        if "validation" in self._base and not cfg.start:
            own: Any = self._base["validation"].by_row()
            asked = self.preferences if self._measures_front else [self._equal_shares]
            quality = self._note_utility(0, {preference: own for preference in asked})  # noqa: C420
        return replace(state, adapter=loaded.start), quality

    def _evaluate_base(self) -> dict[str, Any]:
        splits = [split for split in ("test", "validation") if getattr(self._loaded.data, split)]
        return {split: self._evaluate(self._loaded.fresh, split) for split in splits}

    def restore(self, content: State) -> None:
        stored = content["base"].items()
        self._base = {split: self.evaluation(**figures) for split, figures in stored}
        self._base = self._base or self._evaluate_base()
        was = next((row.get("rounds") for row in self.book.rows if row.get("kind") == "run"), None)
        if was not in (None, self._cfg.rounds):
            note = f"rounds changed from {was} to {self._cfg.rounds}; the run continues."
            self._progress.event("started", alarms=[note])
            self.book.log(_run_row(self._cfg, self._loaded, self._calibrations))
        self._guard.restore(content["guard"])
        self._best.restore(content["best"])
        self._stopped, self._is_out = content["stopped"], content["is_out"]
        if why := self._guard.stopped or self._stopped:
            if content["limits"] == asdict(self._cfg.guard):
                note = f"the run has ended before, because {why}; other limits let it continue."
                self._progress.event("started", alarms=[note])
            else:
                self._guard.stopped = self._stopped = ""
        if content["limits"] != asdict(self._cfg.guard):
            self._is_out = not all(
                self._guard.is_inside(row.get("kl"))
                for row in self.book.rows
                if row.get("round") == content["server"]["round"]
                and str(row.get("split")).startswith("validation")
            )

    def content(self) -> State:
        return {
            "guard": self._guard.state(),
            "best": self._best.state(),
            "stopped": self._stopped,
            "is_out": self._is_out,
            "limits": asdict(self._cfg.guard),
            "calibrations": as_figures(self._calibrations),
            "training_data": self._loaded.data.digest,
            "held_out_data": self._loaded.data.held_out_digest,
            # its replies are texts, which a run may not keep
            "base": {split: asdict(own) for split, own in self._base.items()}
            if self._cfg.evaluation.num_shown_samples
            else {},
        }

    def is_done(self, state: ServerState) -> bool:
        return state.round >= self._cfg.rounds or bool(self._guard.stopped or self._stopped)

    def measure(
        self, before: ServerState, after: ServerState, metrics: dict[str, Any]
    ) -> RoundResult:
        rows = [*metrics["clients"], metrics["round"]]
        after, alarms = self._guard.judge(metrics["clients"], before, after)
        if alarms:  # what the round started from has run away
            self._best.drop(before.round)
            self.book.run.forget_quality(before.round)
        quality = None
        self._by_row = {}
        if self._loaded.data.validation:
            measured = self._evaluate(after.adapter, "validation")
            rows.append(self._row(measured, after, "validation"))
            self._is_out = not self._guard.is_inside(mean_kl(measured))
            self._stop_by_rules(rows, after.round, alarms)
            is_last = self.is_done(after)
            if is_front_due(self._cfg, after.round) or (is_last and self._measures_front):
                front = self._at_preferences(after, "validation")
                rows += front
                self._is_out |= not all(self._guard.is_inside(row.get("kl")) for row in front)
                if not self._is_out and self._measures_front:
                    at = {p: self._by_row["validation", p] for p in self.preferences}
                    quality = self._note_utility(after.round, at)
            if not self._is_out and not self._measures_front:
                quality = self._note_utility(after.round, {self._equal_shares: measured.by_row()})
        else:
            self._stop_by_rules(rows, after.round, alarms)
        metrics["round"]["alarms"] = [
            *alarms,
            *(self._guard.blind_alarms(metrics["clients"]) if before.round == 0 else ()),
            *alarms_of_rounds(self._cfg, [*self.book.rows, *rows]),
        ]
        return RoundResult(rows, quality=quality, state=after)

    def _stop_by_rules(self, rows: Sequence[Row], round: int, alarms: list[str]) -> None:
        """Ends the run if one of the user's rules holds; adds alarms."""
        if not (rules := self._cfg.guard.rules):
            return
        seen = [as_one_training(row) for row in [*self.book.rows, *rows]]
        for rule in rules:
            if round == 1 and not rule.reads(seen):
                alarms.append(f"guard.stop_when {rule.text!r}: this run has no such quantity.")
            if rule.holds(seen, round):
                self._stopped = f"guard.stop_when {rule.text!r} holds"
                alarms.append(f"the run ends, because {self._stopped}.")
                return

    @property
    def _measures_front(self) -> bool:
        """Whether adapters are compared by the front of a conditioned policy."""
        return bool(self.preferences) and self._cfg.evaluation.front_every is not None

    @property
    def _equal_shares(self) -> tuple[float, ...]:
        return (1.0,) * len(self._cfg.objectives)

    def _note_utility(
        self, round: int, measured: Mapping[tuple[float, ...], Mapping[str, torch.Tensor]]
    ) -> float | None:
        """Notes an adapter's utility on the validation data; returns it if checkpoints have it."""
        value = self._best.note(round, utility(list(measured.items())))
        return value if self._cfg.checkpoints.keep_best else None

    def show(self, state: ServerState, rows: Sequence[Row]) -> None:
        self._page()
        if not rows:
            self._progress.event("resumed", round=state.round)
            return
        by_kind = {row["kind"]: row for row in rows if "preference" not in row}
        scores = by_kind.get("evaluation", {}).get(self.shown, {})
        means = {name: score["mean"] for name, score in scores.items()}
        self._progress.event("round_finished", row=by_kind["round"], scores=means)
        if state.round == 1 and sweep_folder(self.book.run.path) is None:
            show_layout(self.book.run.path)

    def finish(self, state: ServerState) -> tuple[AnyEvaluation, AnyEvaluation]:
        """Returns the evaluations of base and aligned model on the held-out data.

        Logs both, and saves the aligned adapter, which stays loaded in the policy.
        """
        is_out = self._is_out or bool(self._guard.stopped)
        if self._loaded.data.validation and not is_out:
            self._measure_last(state)
        base, chosen = self._base["test"], self._chosen(state, is_out=is_out)
        aligned = self._evaluate(chosen.adapter, "test")
        is_blind = not self._loaded.data.validation
        if is_blind and chosen.round == state.round and not self._guard.is_inside(mean_kl(aligned)):
            chosen = self._chosen(state, is_out=True)
            aligned = self._evaluate(chosen.adapter, "test")
        state = replace(state, adapter=chosen.adapter)
        origin = {"adapter_round": chosen.round, "adapter_reason": chosen.reason}
        self.book.log({**self._row(aligned, state, "test"), **origin})
        is_last = self._cfg.rounds > 0 and chosen.round == state.round
        if self._loaded.data.validation:
            self._measure_again(state, None if is_last else chosen.round)
        for row in self._final_front(state):
            is_old = not is_last and row["split"].startswith("validation")
            self.book.log({**row, **({"adapter_round": chosen.round} if is_old else {})})
        self._log_samples(aligned, state)
        with file_errors(f"the adapter in {self.book.run.path}", "the checkpoints are intact: "):
            replace_bytes(self.book.run.path / SCORES_NAME, save(aligned.by_row()))
            self._save_adapters(base, aligned, chosen)
        return base, aligned

    def _measure_last(self, state: ServerState) -> None:
        """Measures the last adapter, where its round has not: it was not the last then, or out."""
        if self._best.newest is not None and self._best.newest.round == state.round:
            return
        if self._measures_front:
            logged = {(row.get("round"), row.get("split")) for row in self.book.rows}
            for row in self._at_preferences(state, "validation"):
                if (state.round, row["split"]) not in logged:
                    self.book.log(row)
            at = {tuple(p): self._by_row["validation", tuple(p)] for p in self.preferences}
        else:
            at = {self._equal_shares: self._evaluate(state.adapter, "validation").by_row()}
        self._note_utility(state.round, at)

    def _measure_again(self, state: ServerState, adapter_round: int | None) -> None:
        """Measures the chosen adapter on the validation prompts, where this is still to be done.

        Args:
            state: The state with the chosen adapter.
            adapter_round: Its round; None: the last, whose rows are in the log.
        """
        is_new, origin = adapter_round is not None, {"adapter_round": adapter_round}
        if is_new:
            measured = self._evaluate(state.adapter, "validation")
            self.book.log({**self._row(measured, state, "validation"), **origin})
        for preference in self.preferences if self._measures_front else ():
            # a run that was resumed after its last round has not kept them
            if is_new or ("validation", tuple(preference)) not in self._by_row:
                row = self._at_preference(state, "validation", preference)
                if is_new:
                    self.book.log({**row, **origin})

    def _chosen(self, state: ServerState, *, is_out: bool) -> Chosen:
        """Returns the adapter that the run leaves, its round and the reason.

        Args:
            state: The state after the last round.
            is_out: Whether its adapter is outside the guard's trust region, and no choice.
        """
        best, guard = self._best, self._guard
        what = "expected utility" if self._measures_front else self.mean
        base = self._base.get("validation")
        groups = None if base is None else base.prompt_of_row
        earlier, why = best.earlier(state.round, what, groups=groups, is_out=is_out)
        if earlier is not None:
            if (found := self.book.run.best_checkpoint()) and found[0] == earlier:
                return Chosen(found[1]["server"]["adapter"], earlier, why)
            why = "the last; the best one's checkpoint is not kept (checkpoints.keep_best)"
        is_undone = guard.undone_round == state.round  # whose state has the good adapter
        if (is_out or is_undone) and guard.good_round is not None:
            why = "the last whose KL was inside the guard's trust region"
            return Chosen(guard.good(state).adapter, guard.good_round, why)
        return Chosen(state.adapter, state.round, why)

    def _save_adapters(self, base: AnyEvaluation, aligned: AnyEvaluation, chosen: Chosen) -> None:
        """Saves the adapter and, if it is conditioned, its folds at the measured preferences."""
        run, loaded = self.book.run, self._loaded
        policy, tokenizer = loaded.trainer.policy_model, loaded.tokenizer
        generation = generation_settings(loaded.trainer.end_ids, self._cfg.rollout)
        with whole_folder(run.path / "adapter", may_exist=True) as folder:
            save_adapter(policy, folder)
            tokenizer.save_pretrained(str(folder))
            generation.save_pretrained(folder)
            _card(self._cfg, base, aligned, run, chosen).save(folder / "README.md")
        if not self.preferences:
            remove(run.path / "front")  # left by a session of fewer rounds
            return
        with whole_folder(run.path / "front", may_exist=True) as front:
            for preference in self.preferences:
                folder = front / preference_folder(preference)
                save_folded(policy, folder, preference)
                tokenizer.save_pretrained(str(folder))
                generation.save_pretrained(folder)
                for split in ("test", "validation"):
                    if rows := self._by_row.get((split, tuple(preference))):
                        save_file(rows, folder / f"{split}_scores.safetensors")
                _fold_card(self._cfg, preference).save(folder / "README.md")

    def _at_preferences(self, state: ServerState, split: str) -> list[Row]:
        """Returns the evaluation of a conditioned policy at each preference."""
        return [self._at_preference(state, split, preference) for preference in self.preferences]

    def _at_preference(self, state: ServerState, split: str, preference: Sequence[float]) -> Row:
        measured = self._evaluate(state.adapter, split, preference)
        self._by_row[split, tuple(preference)] = measured.by_row()
        if split == "test":
            self._log_samples(measured, state, preference)
        row = self._row(measured, state, split)
        return {**row, "split": split_at(split, preference), "preference": list(preference)}

    def _row(self, measured: Any, state: ServerState, split: str) -> Row:
        """Returns the row of an evaluation, with changes from the base model."""
        return measured.row(
            self._base[split],
            round=state.round,
            split=split,
            has_quotes=self._cfg.evaluation.num_shown_samples > 0,
        )

    def _final_front(self, state: ServerState) -> list[Row]:
        """Returns the rows on the test prompts, including new ones in the widest gaps of the front.

        Appends the new preferences to `preferences`. Stops when a gap is too narrow for a distinct
        name.
        """
        rows, extra = self._at_preferences(state, "test"), list[Row]()
        names = self._cfg.objectives
        for _ in range(self._cfg.evaluation.num_refined):
            rewards = [[row["rewards"][name]["mean"] for name in names] for row in rows]
            gap = widest_gap(np.array(self.preferences), np.array(rewards))
            if split_at("test", gap) in {row["split"] for row in rows}:
                break
            rows.append(self._at_preference(state, "test", gap))
            if self._loaded.data.validation:
                extra.append(self._at_preference(state, "validation", gap))
            self.preferences.append(gap)
        return [*rows, *extra]

    def _evaluate(
        self,
        adapter: Adapter,
        split: str,
        preference: Sequence[float] | None = None,
    ) -> Any:
        trainer, cfg = self._loaded.trainer, self._cfg
        load_adapter_(trainer.adapter_parameters, adapter)
        report = partial(reporter, self._progress.event, cfg, f"{split} prompts")
        return evaluate(
            partial(trainer.replies, preference=preference),
            getattr(self._loaded.data, split),
            {name: self._loaded.reward_fns[name] for name in cfg.rewards},
            calibrations={name: self._calibrations[name] for name in cfg.rewards},
            stream=RandomStream(cfg.seed, "evaluation", split),
            extra_fns=self._loaded.metrics,
            num_samples=cfg.evaluation.num_samples,
            on_progress=lambda done, total: report(total)(done),
        )

    def _log_samples(
        self,
        evaluation: AnyEvaluation,
        state: ServerState,
        preference: Sequence[float] | None = None,
    ) -> None:
        """Logs replies, without white space around them; rewards have seen them with it."""
        limit = self._cfg.evaluation.num_shown_samples
        rows = self._samples(evaluation, limit, state.adapter, preference)
        own = {} if preference is None else {"preference": list(preference)}
        self.book.log_samples(
            [
                {"round": state.round, **row, "completion": row["completion"].strip(), **own}
                for row in rows
            ]
        )

    def _samples(
        self,
        evaluation: Any,
        limit: int,
        adapter: Adapter,
        preference: Sequence[float] | None,
    ) -> list[dict[str, Any]]:
        """Returns prompts with the policy's replies and their scores, at most `limit`."""
        return evaluation.samples[:limit]


class _PairsTask(_LanguageTask):
    """Evaluates the ranking of held-out pairs instead of replies."""

    evaluation = PairEvaluation
    shown = "rewards"
    mean = "mean accuracy"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pairs: dict[str, list[EncodedPair]] = {}

    def _evaluate(
        self, adapter: Adapter, split: str, preference: Sequence[float] | None = None
    ) -> PairEvaluation:
        trainer, cfg = self._loaded.trainer, self._cfg
        pairs = getattr(self._loaded.data, split)
        what, event = f"{split} pairs", self._progress.event
        if split not in self._pairs:
            report = reporter(event, cfg, f"{what} under the reference", 2 * len(pairs))
            self._pairs[split] = trainer.encode_pairs(pairs, is_alone=True, on_progress=report)
        load_adapter_(trainer.adapter_parameters, adapter)
        on_progress = reporter(event, cfg, what, 2 * len(pairs))
        own = partial(
            trainer.reply_logprobs, preference=preference, is_alone=True, on_progress=on_progress
        )
        is_base = adapter is self._loaded.fresh
        return evaluate_pairs(
            reference_logprobs if is_base else own,
            self._pairs[split],
            cfg.objectives,
            beta=getattr(cfg.estimator, "beta", 1.0),  # an own estimator may have none
        )

    def _samples(
        self,
        evaluation: PairEvaluation,
        limit: int,
        adapter: Adapter,
        preference: Sequence[float] | None,
    ) -> list[dict[str, Any]]:
        """Returns replies sampled to show them: rankings need none, and nothing scores them."""
        trainer, test = self._loaded.trainer, self._loaded.data.test
        prompts = list({each.prompt.transcript: each.prompt for each in test}.values())[:limit]
        if not prompts:
            return []
        load_adapter_(trainer.adapter_parameters, adapter)
        with RandomStream(self._cfg.seed, "evaluation", "samples"):
            replies = trainer.replies(prompts, preference=preference)
        return [
            {"prompt": own.transcript, "messages": own.turns, "completion": text, "scores": {}}
            for own, text in zip(prompts, replies.completions, strict=True)
        ]


LANGUAGE_TASKS = {"prompts": _LanguageTask, "pairs": _PairsTask}
"""Tasks by the value of `EstimatorConfig.learns_from`."""


def _run_row(
    cfg: AlignmentConfig, loaded: LoadedRun, calibrations: Mapping[str, Calibration]
) -> Row:
    """Returns the first row of metrics.jsonl, which describes the run."""
    names, processes = client_names(cfg), loaded.processes
    parameters = loaded.trainer.adapter_parameters.values()
    return {
        "kind": "run",
        "objectives": list(cfg.objectives),
        "clients": names,
        "rounds": cfg.rounds,
        "alarms": notes_at_start(cfg, loaded),
        "calibration": as_figures(calibrations),
        "about": about_policy(cfg.policy.path),
        "num_trainable": sum(p.numel() for p in parameters),
        "processes": [processes.hosted(names, rank) for rank in range(processes.size)],
        "adapter_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }


def _fold_card(cfg: AlignmentConfig, preference: Sequence[float]) -> ModelCard:
    """Returns the model card of a conditioned adapter folded at one preference."""
    shares = zip(cfg.objectives, preference, strict=True)
    aim = ", ".join(f"{name} {share / sum(preference):.3f}" for name, share in shares)
    text = f"""A LoRA adapter, folded at this preference from a conditioned adapter trained with
{cfg.strategy.name} (seed {cfg.seed}). `{FRONT_NAME}` of its run contains its rewards."""
    return model_card(cfg.policy.path, aim, text, *cfg.estimator.tags)


def _card(
    cfg: AlignmentConfig, base: AnyEvaluation, aligned: AnyEvaluation, run: Run, chosen: Chosen
) -> ModelCard:
    """Returns the model card of the aligned adapter."""
    work = {"local steps per round": cfg.strategy.num_local_steps}
    if cfg.strategy.num_local_epochs is not None:
        work = {"local epochs per round": cfg.strategy.num_local_epochs}
    facts = {
        "strategy": cfg.strategy.name,
        "clients": cfg.num_clients,
        "rounds": cfg.rounds,
        "adapter": f"round {chosen.round}: {chosen.reason}",
        **work,
        "seed": cfg.seed,
        **_judges(cfg),
        "held-out prompts": prompts_text(aligned.num_prompts, aligned.num_rows),
        **({} if cfg.pairs else {"replies per prompt": aligned.num_samples}),
        "commit": run.record()["commit"],
    }
    rows = [row.cells() for row in aligned.comparison(base)]  # type: ignore[arg-type]
    estimator, strategy = map(markdown_text, (cfg.estimator.name, cfg.strategy.name))
    spread = "Mean ± standard error over prompts; the change is paired by row. Scores are raw."
    if cfg.pairs:
        spread = (
            "Accuracies with their exact 95 % intervals, counted by prompts, and margins "
            "β log(π / π_ref) of the pairs ± standard error."
        )
    text = f"""A LoRA adapter trained with the toolkit FIRM, by clients that keep their data, with
the estimator {estimator} and the strategy {strategy}.

## Figures on held-out {"pairs" if cfg.pairs else "prompts"}

{spread}

{markdown_table(["", "base", "aligned", "change", "z"], rows)}

## How it was made

{markdown_table(["", ""], list(facts.items()))}"""
    return model_card(cfg.policy.path, ", ".join(cfg.objectives), text, *cfg.estimator.tags)


def _judges(cfg: AlignmentConfig) -> dict[str, str]:
    """Returns the source of the objectives, for a model card."""
    if cfg.pairs:
        sources = {name: own.source for name, own in cfg.pairs.items()}
        shown = {n: [s] if isinstance(s, str) else s for n, s in sources.items()}
        text = ", ".join(f"{n}: {' and '.join(map(model_name, s))}" for n, s in shown.items())
        return {"pairs of ranked replies": text}
    models = (
        f"{name}: {model_name(own.path) if own.path else own.name}"
        for name, own in cfg.rewards.items()
    )
    return {"reward models": ", ".join(models)}
