"""The page and the table of a study of `firm fmoo`, from the rows of its runs."""

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from firm.fmoo.metrics import delta_m, preference_correlation, rounds_to_loss, user_summary
from firm.quantities import QUANTITIES, shown
from firm.report.classic_page import FIELDS, comparison_page, worst
from firm.report.classic_sections import (
    NUM_TABLE_USERS,
    STATIONARITY,
    further_section,
    parameter_section,
    preferences_section,
    progress_section,
    users_section,
    weights_section,
)
from firm.report.page import Block, Section, alarms, drawn_block, left_out_note, write_page
from firm.report.tables import Frame, Setting
from firm.run import to_dict
from firm.run.guard import drawing, drawn

if TYPE_CHECKING:
    from firm.jobs.fmoo_config import ClassicConfig

PAGE_NAME, TABLE_NAME = "comparison.html", "summary.csv"
METHOD = (
    "Every algorithm starts from the same model and has the same clients and samples in the order "
    "that the seed draws; learning rates are each algorithm's own. {measured} A run's directory "
    "holds its configuration, every row of its metrics and its last checkpoint."
)
MEASURED = {
    "train": "What was measured on are the clients' own training samples.",
    "validation": "What was measured on are validation samples that no client has.",
    "test": "What was measured on are test samples that no client has.",
}

Columns = dict[str, dict[str, str]]
"""Heading to setting to cell."""


def write(
    out: Path,
    cfg: "ClassicConfig",
    settings: Sequence[Setting],
    *,
    facts: Mapping[str, str],
    config: str,
) -> None:
    """Writes the page and the table of what has run so far.

    A page that cannot be written is a warning, and the study goes on.
    """
    with drawing(f"The table {TABLE_NAME}"):
        header, lines = summary(cfg, settings)
        with (out / TABLE_NAME).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["algorithm", *header[1:]], *lines])
    with drawing(f"The page {PAGE_NAME}"):
        kept, notices = readable(cfg, settings)
        page = comparison_page(
            kept,
            title=f"Algorithms on {cfg.data.name}",
            facts=facts,
            method=METHOD.format(measured=MEASURED[cfg.split]),
            config=config,
            columns=_columns(cfg, kept),
            sections=_sections(cfg, kept),
            split=cfg.split,
            is_log_loss=cfg.target_loss is not None,
            alarms=alarms_of(cfg, settings),
            notices=notices,
        )
        write_page(out / PAGE_NAME, page)


def readable(cfg: "ClassicConfig", settings: Sequence[Setting]) -> tuple[list[Setting], list[str]]:
    """Returns what can be compared of the runs, and sentences on what was left out.

    A run without an evaluation of the objectives that most rows name is left out, and so is a
    setting without runs.

    Raises:
        ValueError: Nothing is left.
    """
    rows = [row for setting in settings for run in setting.runs for row in run]
    names: dict[str, set[str]] = {}
    for field in FIELDS:
        counts = Counter(tuple(row[field]) for row in rows if row.get(field))
        names[field] = set(counts.most_common(1)[0][0]) if counts else set()
    wanted = [field for field in FIELDS[::-1] if names[field]]
    notices = [left_out_note(f"the logs of {s.name}", s.left_out) for s in settings if s.left_out]
    kept = []
    for setting in settings:
        runs = []
        for seed, run in zip(cfg.seeds, setting.runs, strict=True):
            own = [
                {
                    key: value
                    for key, value in row.items()
                    if key != "split" and (key not in names or set(value) == names[key])
                }
                for row in run
            ]
            if all(any(field in row for row in own) for field in wanted):
                runs.append(own)
            else:
                notices.append(
                    f"{setting.name}, seed {seed}, is left out: no row of its log has valid "
                    f"{' and '.join(wanted)}."
                )
        if runs:
            kept.append(replace(setting, runs=runs))
    if not wanted or not kept:
        raise ValueError("no run has a valid evaluation; run the study again under another --out.")
    return kept, notices


def alarms_of(cfg: "ClassicConfig", settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Returns the warnings of the runs: setting, seed and rounds, and the text."""
    return [
        (f"{setting.name}, seed {seed}, {alarm.when.lower()}", alarm.text)
        for setting in settings
        for seed, rows in zip(cfg.seeds, setting.runs, strict=True)
        for alarm in alarms(rows)
    ]


def summary(cfg: "ClassicConfig", settings: Sequence[Setting]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of the final figures, means over the seeds."""
    settings, _ = readable(cfg, settings)
    objectives, field = settings[0].objectives_with("losses"), _main_field(settings)
    columns = _columns(cfg, settings)
    lines = []
    for setting in settings:
        means = setting.finals(field, objectives).mean(axis=0)  # [M]
        cells = [f"{value:.3f}" for value in [*means, means.mean(), *worst(means[None], field)]]
        more = [column.get(setting.name, "") for column in columns.values()]
        lines.append([setting.name, *cells, *more, f"{setting.megabytes_up or 0.0:.1f}"])
    return ["", *objectives, "mean", "worst", *columns, "MB up"], lines


def _main_field(settings: Sequence[Setting]) -> str:
    return "accuracies" if settings[0].objectives_with("accuracies") else "losses"


def _columns(cfg: "ClassicConfig", settings: Sequence[Setting]) -> Columns:
    """Returns what some studies measure beside: Δ_M, users, rounds to the target loss."""
    groups: dict[str, Callable[[], Columns]] = {
        "Δ_M": lambda: _relative_loss(cfg, settings),
        "users": lambda: _users(settings),
        "rounds to the target loss": lambda: _rounds(cfg, settings),
    }
    columns: Columns = {}
    for what, draw in groups.items():
        columns |= drawn(f"The column of {what}", draw, instead=lambda note: {})
    return columns


def _relative_loss(cfg: "ClassicConfig", settings: Sequence[Setting]) -> Columns:
    """Returns Δ_M against the objectives trained alone, where the study has trained each so."""
    objectives = settings[0].objectives_with("losses")
    field = _main_field(settings)
    alone = _alone(cfg, settings)
    if len(alone) < len(objectives):
        return {}
    means = {s.name: s.finals(field, objectives).mean(axis=0) for s in settings}
    reference = [means[alone[name]][index] for index, name in enumerate(objectives)]
    if not np.isfinite(reference).all():
        return {}
    is_higher_better = field == "accuracies"
    return {
        "Δ_M, %": {
            name: f"{100 * delta_m(values, reference, is_higher_better=is_higher_better):.1f}"
            for name, values in means.items()
            if name not in alone.values() and np.isfinite(values).all()
        }
    }


def _users(settings: Sequence[Setting]) -> Columns:
    """Returns the users' final accuracies in per cent, or their spread where they are many."""
    accuracies: dict[str, Frame] = {}  # [S, C] in per cent, NaN where a seed has no such user
    for setting in settings:
        names = setting.objectives_with("users")
        users = pd.DataFrame(100 * setting.finals("users", names), columns=names)
        if len(users) == len(setting.runs) and users.notna().any(axis=1).all():
            accuracies[setting.name] = users
    if not accuracies:
        return {}
    # a seed's partition may leave a user without a sample
    everyone = pd.concat(accuracies)
    shared = everyone.columns[everyone.notna().all()]
    if len(shared) <= NUM_TABLE_USERS:
        means = {name: users[shared].mean() for name, users in accuracies.items()}
        return {user: {name: f"{own[user]:.1f}" for name, own in means.items()} for user in shared}
    spreads = {
        name: [user_summary(seed.dropna().tolist()) for _, seed in users.iterrows()]
        for name, users in accuracies.items()
    }
    headings = {"users": "mean", "SD": "std", "worst 5 %": "worst", "best 5 %": "best"}
    return {
        heading: {
            name: f"{fmean(getattr(seed, attribute) for seed in seeds):.1f}"
            for name, seeds in spreads.items()
        }
        for heading, attribute in headings.items()
    }


def _rounds(cfg: "ClassicConfig", settings: Sequence[Setting]) -> Columns:
    """Rounds in which each objective came down to the target loss, means over the seeds."""
    if cfg.target_loss is None:
        return {}
    columns: Columns = {}
    for objective in settings[0].objectives_with("losses"):
        cells = columns[f"rounds to {cfg.target_loss:g}, {objective}"] = {}
        for setting in settings:
            losses = setting.values("losses")
            losses = losses[losses["objective"] == objective]
            reached = [
                rounds_to_loss(own["round"].tolist(), own["value"].tolist(), cfg.target_loss)
                if np.isfinite(own["value"]).all()
                else None
                for _, own in losses.groupby("seed")
            ]
            known = [count for count in reached if count is not None]
            is_reached = len(known) == len(reached)
            rounds = cfg.algorithms[setting.name].rounds or cfg.rounds
            cells[setting.name] = f"{fmean(known):.0f}" if is_reached else f"> {rounds}"
    return columns


def _sections(cfg: "ClassicConfig", settings: Sequence[Setting]) -> list[Block]:
    draws: dict[str, Callable[[], Section | None]] = {
        **{
            options["name"]: partial(parameter_section, lines, **options)
            for lines, options in _parameters(cfg, settings)
        },
        "preferences": lambda: _preferences(cfg, settings),
        "users": lambda: users_section(settings),
        "improved": lambda: further_section(settings, QUANTITIES["round", "improved"]),
        "progress": lambda: progress_section(settings),
        "weights": lambda: weights_section(settings),
        "stationarity": lambda: further_section(settings, STATIONARITY),
        **{
            entry.name: partial(further_section, settings, entry)
            for entry in shown("further")
            if not entry.by
        },
    }
    return [
        drawn_block(name, lambda name=name, draw=draw: draw() or Section(name, "", "", []))
        for name, draw in draws.items()
    ]


def _preferences(cfg: "ClassicConfig", settings: Sequence[Setting]) -> Section | None:
    """Returns the section on preferences, with the least losses of each objective trained alone."""
    objectives = settings[0].objectives_with("losses")
    wishes = {
        setting.name: tuple(wish)
        for setting in settings
        if (wish := getattr(cfg.algorithms[setting.name].strategy, "preference", None))
        and min(wish) > 0
    }
    ends = {setting.name: setting.finals("losses", objectives) for setting in settings}
    pairs = [
        (wishes[name], row)
        for name, losses in ends.items()
        for row in losses
        if name in wishes and np.isfinite(row).all()
    ]
    correlation = preference_correlation(*zip(*pairs, strict=True)) if pairs else None
    alone, limits = _alone(cfg, settings), None
    if len(alone) == len(objectives) == 2:
        least = [ends[alone[name]].mean(axis=0)[i] for i, name in enumerate(objectives)]
        limits = (least[0], least[1]) if np.isfinite(least).all() else None
    return preferences_section(settings, wishes, limits=limits, correlation=correlation)


def _parameters(
    cfg: "ClassicConfig", settings: Sequence[Setting]
) -> list[tuple[dict[str, dict[float, Setting]], dict[str, Any]]]:
    """Returns the parameters that are swept: numbers that alone differ in a family of settings.

    A family has one name up to a comma. Of each parameter, the lines by family, and what titles its
    section.
    """
    families: dict[str, list[Setting]] = {}
    for setting in settings:
        families.setdefault(setting.name.partition(",")[0], []).append(setting)
    lines: dict[str, dict[str, dict[float, Setting]]] = {}
    for name, members in families.items():
        leaves = [_leaves(to_dict(cfg.algorithms[setting.name])) for setting in members]
        changed = [key for key in leaves[0] if len({leaf.get(key) for leaf in leaves}) > 1]
        if len(changed) == 1 and all(isinstance(leaf[changed[0]], int | float) for leaf in leaves):
            (key,) = changed
            line = {float(leaf[key]): s for s, leaf in zip(members, leaves, strict=True)}
            lines.setdefault(key, {})[name] = line
    return [
        (
            by_family,
            {
                "title": f"The setting {key}",
                "x_title": key.rpartition(".")[2].replace("_", " "),
                "name": f"setting-{place}",
                "is_log_loss": cfg.target_loss is not None,
            },
        )
        for place, (key, by_family) in enumerate(lines.items())
    ]


def _leaves(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns a configuration's values by dotted key; those that are no numbers as text."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{path}{key}.")
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            leaves[f"{path}{key}"] = value if is_number else str(value)
    return leaves


def _alone(cfg: "ClassicConfig", settings: Sequence[Setting]) -> dict[str, str]:
    """Returns the setting that trains an objective alone, by objective: one weight of 1."""
    objectives, alone = settings[0].objectives_with("losses"), {}
    for setting in settings:
        strategy = cfg.algorithms[setting.name].strategy
        weights = getattr(strategy, "weights", None)
        if strategy.name == "fedavg" and weights and sum(weight > 0 for weight in weights) == 1:
            alone[objectives[int(np.argmax(weights))]] = setting.name
    return alone
