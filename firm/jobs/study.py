"""Runs a study: compares several settings of a run, with several seeds each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from firm.base.sanitize import legible, printable
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import StudyConfig
from firm.jobs.plan.tables import print_plans
from firm.jobs.points import point_config, run_points
from firm.jobs.workspace import show_layout
from firm.report.criteria import criteria_of
from firm.report.ledger import total_bytes
from firm.report.page import PAGE_NAME, Table
from firm.report.record import Record, final_row, score, study_records
from firm.report.settings_page import (
    scale_name,
    scales_text,
    study_figures,
    write_settings_page,
)
from firm.report.settings_tables import difference_table, summary_table
from firm.report.static import save_figure
from firm.report.tables import scales, settings_of
from firm.run.config import compose, to_yaml
from firm.run.files import write_csv
from firm.run.guard import drawing
from firm.run.names import dated_folder, slug
from firm.run.progress import print_table
from firm.run.sweep import Sweep

FINALS_NAME = "finals.csv"
FREE_KEYS = ("figures", "half_life")
"""Keys that may differ on resume, in addition to `points.FREE_KEYS`."""


@dataclass(frozen=True)
class StudyResult:
    """Result of a study."""

    path: Path
    """The study's folder."""
    groups: list[str]
    """Names of the groups of settings with equal calibrations."""
    values: list[tuple[list[str], list[list[str]]]]
    """Headings and rows of the settings' final values, mean ± standard deviation over the seeds,
    for each group of settings with equal calibrations."""
    differences: list[Table]
    """Differences from the first setting, for each group of settings with equal calibrations in
    which another setting shares two seeds with it."""
    report: Path
    """HTML page of the study."""


def study_configs(cfg: StudyConfig) -> dict[str, AlignmentConfig]:
    """Returns the validated configurations of all runs, by name."""
    # composed once for each setting, as there may be thousands of seeds
    first = {name: run_config(cfg, setting=name, seed=cfg.seeds[0]) for name in cfg.settings}
    return {
        name: replace(first[point["setting"]], seed=point["seed"])
        for name, point in _points(cfg).items()
    }


def study(cfg: StudyConfig) -> StudyResult | None:
    """Runs the unfinished runs of a study, and writes its page and figures.

    Returns:
        The result; None while other processes execute some of the runs.

    Raises:
        UserError: A key is invalid, the folder is in use, or some runs failed.
    """
    out = cfg.out or dated_folder(cfg.name)
    points, runs = _points(cfg), study_configs(cfg)
    sweep = run_points(
        cfg,
        out,
        points,
        runs,
        kind="study",
        own_keys={name: ("settings", point["setting"]) for name, point in points.items()},
        show_finished=partial(_show_finished, cfg),
        free_keys=FREE_KEYS,
    )
    if sweep is None:
        return None
    by_setting, page = _write_results(cfg, sweep)
    show_layout(out)
    settings = settings_of(by_setting)
    groups = scales(settings)
    values = [summary_table(g, criteria_of(g)[0], {}, has_spread=True) for g in groups]
    names = [scale_name(g, at) for at, g in enumerate(groups, start=1)]
    tables = [difference_table(g, criteria_of(g)[0]) for g in groups]
    return StudyResult(out, names, values, [table for table in tables if table.rows], page)


def _show_finished(cfg: StudyConfig, sweep: Sweep, note: str) -> None:
    _, page = _write_results(cfg, sweep, [note])
    print(legible(f"report   {page}"))


def _write_results(
    cfg: StudyConfig, sweep: Sweep, notes: Sequence[str] = ()
) -> tuple[dict[str, list[Record]], Path]:
    """Writes page, table and figures of the finished runs; returns the runs and the page's path."""
    out, by_setting = sweep.path, study_records(sweep)
    page = write_settings_page(
        out / PAGE_NAME,
        by_setting,
        title=cfg.name,
        config=to_yaml(cfg),
        sets=cfg.figures,
        notes=notes,
    )
    write_csv(out / FINALS_NAME, final_rows(by_setting))
    sets = {slug(name): labels for name, labels in cfg.figures.items()}
    figures = study_figures(by_setting, sets=sets, half_life=cfg.half_life, folder=out)
    for name, figure in figures.items():
        with drawing(f"The figure {name}"):
            save_figure(figure, out / "figures" / name)
    return by_setting, page


def final_rows(by_setting: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """Returns the figures of base and aligned model on the test prompts, a row per run and figure.

    They are what a claim about the study follows from: keep the table beside the claim.
    """
    rows = []
    for setting, records in by_setting.items():
        for record in records:
            base = next(iter(record.evaluations.get("test", [])), {})
            aligned = final_row(record) or {}
            prefixes = ("accuracy ", "margin ") if record.learns_from_pairs else ("reward ", "")
            figures: dict[str, tuple[float | None, float | None]] = {
                prefix + name: (score(base, kind, name, "mean"), score(aligned, kind, name, "mean"))
                for kind, prefix in zip(("rewards", "scores"), prefixes, strict=True)
                for name in aligned.get(kind) or ()
            }
            figures["KL"] = 0.0, aligned.get("kl")
            figures["bytes up"] = 0, total_bytes(record, "bytes_up")
            run = {"setting": setting, "seed": record.seed}
            rows += [
                {**run, "figure": name, "base": own, "aligned": end}
                for name, (own, end) in figures.items()
                if own is not None and end is not None
            ]
    return rows


def _points(cfg: StudyConfig) -> dict[str, dict[str, Any]]:
    """Returns setting and seed of each run, by name."""
    return {
        point_name(setting, seed): {"setting": setting, "seed": seed}
        for seed in cfg.seeds
        for setting in cfg.settings
    }


def point_name(setting: str, seed: int) -> str:
    """Returns the folder name of a setting's run with this seed."""
    return f"{slug(setting)}-seed_{seed}"


def study_of(sweep: Sweep) -> StudyConfig:
    """Returns the configuration of a started study, with defaults for keys that may change."""
    settings = list(sweep.manifest["config"].items())
    return compose(StudyConfig, [], settings, source=f"the study {sweep.path}")


def run_config(cfg: StudyConfig, *, setting: str, seed: int) -> AlignmentConfig:
    """Returns the configuration of a setting's run with this seed."""
    own, source = cfg.settings[setting], f"settings.{setting}.overrides"
    return point_config(cfg, own.overrides, seed, setting=setting, source=source, base=own.base)


def main(cfg: StudyConfig) -> Path | None:
    """Runs or plans a study; returns its folder, or None after a plan or with runs elsewhere."""
    if cfg.plan:
        return print_plans(study_configs(cfg), "run")
    result = study(cfg)
    if result is None:
        return None
    title = "aligned model on the test prompts, mean ± standard deviation over"
    for group, (header, rows) in zip(result.groups, result.values, strict=True):
        own = f", {printable(group)}" if len(result.groups) > 1 else ""
        print_table(f"{cfg.name}{own}: {title} {len(cfg.seeds)} seeds", header, rows)
    if len(result.groups) > 1:
        print(scales_text(len(result.groups)))
    for table in result.differences:
        print_table(f"{table.title}: {table.text}", table.headings, table.rows)
    print(legible(f"report   {result.report}"))
    return result.path
