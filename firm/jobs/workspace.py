"""Saves a W&B workspace with the main figures of the page of a run, study or sweep.

By default W&B draws a panel for every series. A saved workspace draws the figures of the page that
the runs have logged: the trade-off, rewards, every registered quantity in its section, the bytes
sent, the table of results and the samples. For a study or sweep, lines are means over the seeds of
a setting, ± one standard error.
"""

import logging
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain, combinations
from pathlib import Path
from threading import Thread
from typing import Any

from firm.base.extras import install_command
from firm.base.quantities import Quantity, shown
from firm.base.sanitize import printable
from firm.jobs.configs import WorkspaceConfig
from firm.report.record import Record, read_record
from firm.report.run_figures import NEED_TWO, REWARDS, quantity_title, reward_unit
from firm.report.run_page import TEXTS
from firm.report.tables import drawn_objectives
from firm.report.terminal import classic_folders
from firm.run.errors import UserError
from firm.run.sweep import SWEEP_NAME, Sweep
from firm.run.tracking import SENT, TrackingConfig, flatten, mean_name, means

logger = logging.getLogger(__name__)

LAYOUT_SECONDS = 10.0
"""Longest wait of a run for its layout; W&B's own limits and retries add up to a minute."""
MEAN_AND_ERROR = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stderr"}


@dataclass(frozen=True)
class _Logged:
    """Quantities that runs have logged to W&B."""

    record: Record
    """The first run."""
    names: frozenset[str]
    """Names of the series of all runs."""
    has_samples: bool
    is_one: bool
    """True if there is a single run, not the runs of a study or sweep."""


def save_workspace(cfg: WorkspaceConfig) -> str:
    """Saves a workspace, and returns its URL.

    Raises:
        UserError: The run does not exist or has no round yet, there is no API key, W&B cannot be
            reached or rejects the request, or the package `wandb-workspaces` is missing.
    """
    logged = _read_logged(cfg.run)
    workspaces, panels = _packages()
    import wandb

    own = logged.record.settings.get("tracking") or {}
    wandb.setup(settings=wandb.Settings(silent=True))  # raises without a key instead of prompting
    try:
        workspace = workspaces.Workspace(
            entity=cfg.entity or own.get("entity") or wandb.Api().default_entity,
            project=cfg.project or own.get("project") or TrackingConfig.project,
            name=cfg.name,
            sections=[
                workspaces.Section(name=title, panels=drawn, is_open=True)
                for title, drawn in _sections(logged, panels).items()
                if drawn
            ],
            settings=workspaces.WorkspaceSettings(x_axis="round"),
            runset_settings=workspaces.RunsetSettings(
                groupby=[] if logged.is_one else list(map(workspaces.Metric, ("Group", "JobType")))
            ),
        )
        return workspace.save().url
    except Exception as error:  # W&B raises many types
        raise UserError(f"W&B could not save the workspace: {printable(error)}") from error


def show_layout(path: Path) -> None:
    """Saves the workspace of a run, study or sweep that W&B has received, and logs its URL.

    Does nothing for runs without W&B or offline. A failure, or no answer within `LAYOUT_SECONDS`,
    is a warning with the command to repeat.
    """
    folders = ("wandb/run-*", "points/*/wandb/run-*")  # those of offline runs are offline-run-*
    if not any(chain.from_iterable(map(path.glob, folders))):
        return
    try:
        _packages()  # the seconds of their import are not W&B's
        cfg = WorkspaceConfig(run=path, name=f"FIRM: {path.resolve().name}")
        url = _within(LAYOUT_SECONDS, partial(save_workspace, cfg))
    except UserError as error:
        logger.warning(
            "W&B draws its default layout (%s); repeat with: firm workspace %s",
            printable(error).rstrip("."),
            printable(shlex.quote(str(path))),
        )
    else:
        logger.warning("W&B: the figures of the page are at %s", url)


def _within(seconds: float, call: Callable[[], str]) -> str:
    """Returns the result of a call in another thread, which later ends with the process.

    Raises:
        UserError: The call takes longer, or raises one itself.
    """
    answer = Future[str]()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise UserError(f"W&B has not answered within {seconds:.0f} s") from None


def _packages() -> tuple[Any, Any]:
    """Imports W&B's modules for workspaces and panels."""
    try:
        names = ("wandb_workspaces.workspaces", "wandb_workspaces.reports.v2.interface")
        workspaces, panels = map(import_module, names)
    except ImportError:
        raise UserError(f"workspaces need more packages: {install_command('wandb')}.") from None
    return workspaces, panels


def _read_logged(path: Path) -> _Logged:
    paths = [path]
    if is_sweep := (path / SWEEP_NAME).exists():
        sweep = Sweep(path)
        runs = map(sweep.run_path, sweep.manifest["points"])
        paths = [run for run in runs if (run / "run.json").exists()]
    elif classic_folders(path):
        raise UserError(
            f"{path} is a classic study, for which there is no workspace; see its page with `firm "
            "report`, or W&B's own panels of its runs."
        )
    records = [record for run in paths if (record := read_record(run)).rounds]
    if not records:
        raise UserError(f"{path} has no completed round to draw; rerun after the first round.")
    names = set[str]()
    for record in records:
        names |= {name for row in record.rows for name in flatten(row, record.objectives)}
        names |= means(record.rows, record.objectives).keys()
    has_samples = any(record.samples for record in records)
    return _Logged(records[0], frozenset(names), has_samples, is_one=not is_sweep)


# --- The sections ---------------------------------------------------------------------------------


def _sections(logged: _Logged, panels: Any) -> dict[str, list[Any]]:
    """Returns the panels of every section by title, in the order of the page."""
    tables = {"test": True, "samples": logged.has_samples}  # "test" is filled when a run ends
    record = logged.record
    rewards = replace(REWARDS, unit=reward_unit(record, *record.objectives))
    what = "Accuracies" if record.learns_from_pairs else "Rewards"
    return {
        "The trade-off": _planes(logged, panels),
        "Results and samples": [
            panels.WeavePanelSummaryTable(table_name=name)
            for name, is_there in tables.items()
            if is_there
        ],
        f"{what} by round": _lines(logged, panels, [rewards]),
        **{
            title: _lines(logged, panels, shown(name))
            for name, (title, _) in TEXTS.items()
            if len(record.objectives) > 1 or name not in NEED_TWO
        },
        "Bytes and seconds": [
            _line(logged, panels, names, title=title)
            for title, names in {
                "Bytes sent so far": [f"round/{name}_so_far" for name in SENT],
                "Seconds per round": ["round/seconds"],
            }.items()
        ],
    }


def _planes(logged: _Logged, panels: Any) -> list[Any]:
    """Returns the trade-off panels: global models by round, and final models, by pair."""
    drawn = []
    objectives, is_of_pairs = logged.record.objectives, logged.record.learns_from_pairs
    for x, y in [*combinations(objectives, 2)] or [("kl", objectives[0])]:
        table = {"tableKey": f"trade-off/{x}-{y}_table"}
        drawn.append(
            panels.CustomChart(
                query={"id": None, "name": None, "_defaultColorIndex": None, "summaryTable": table},
                chart_name="wandb/scatter/v0",
                chart_fields={"x": x, "y": y},
                chart_strings={"title": f"{y} against {x}"},
            )
        )
        ends = [f"rewards/{name}/mean" if name in objectives else name for name in (x, y)]
        first, second = (panels.SummaryMetric(f"evaluation/test/{end}") for end in ends)
        what = "Accuracy on the test pairs" if is_of_pairs else "Reward on the test prompts"
        title = f"{what}: {y} against {x}"
        drawn.append(panels.ScatterPlot(title=title, x=first, y=second))
    return drawn


def _lines(logged: _Logged, panels: Any, quantities: Sequence[Quantity]) -> list[Any]:
    """Returns the panels of the quantities that the runs have logged."""
    drawn = []
    for quantity in quantities:
        options = {
            "title_y": quantity.unit,
            "range_y": tuple(quantity.axis.get("range", (None, None))),
            "log_y": quantity.axis.get("type") == "log",
        }
        for title, names in _figures(logged, quantity).items():
            if known := [name for name in names if name in logged.names]:
                drawn.append(_line(logged, panels, known, title=title, **options))
    return drawn


def _figures(logged: _Logged, quantity: Quantity) -> dict[str, list[str]]:
    """Returns the names of the series in each figure of a quantity, by figure title."""
    objectives = logged.record.objectives
    entries = {
        "": [""],
        "objective": drawn_objectives(quantity, objectives),
        "pair": ["-".join(pair) for pair in combinations(objectives, 2)],
    }[quantity.by]
    series = {entry: _series(logged, quantity, entry) for entry in entries}
    if quantity.kind == "round" or quantity.lines == "means":
        title = quantity.title.removesuffix(", {}")
        return {title: [name for names in series.values() for name in names]}
    return {quantity_title(quantity, entry, objectives): names for entry, names in series.items()}


def _series(logged: _Logged, quantity: Quantity, entry: str) -> list[str]:
    """Returns the W&B series of a quantity for an objective or pair: clients and their mean."""
    path = [entry] if entry else []
    if quantity.kind != "client":
        return ["/".join([quantity.kind, quantity.name, *path])]
    names = [mean_name(quantity.name, *path)]
    if quantity.evaluated:
        end = ["mean"] if entry else []
        names.append("/".join(["evaluation/validation", quantity.evaluated, *path, *end]))
    if logged.is_one and quantity.lines != "means":
        names += ["/".join([quantity.name, *path, client]) for client in logged.record.clients]
    return names


def _line(logged: _Logged, panels: Any, names: Sequence[str], **options: Any) -> Any:
    over_seeds = {} if logged.is_one else MEAN_AND_ERROR
    return panels.LinePlot(x="round", y=list(names), **over_seeds, **options)


def main(cfg: WorkspaceConfig) -> None:
    """Saves the configured workspace and prints its URL."""
    print(f"workspace {save_workspace(cfg)}")
