"""The page and the table of a study of `recipes/fmoo.py`, from the rows of its runs."""

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from firm.fmoo.metrics import delta_m, preference_correlation, rounds_to_loss, user_summary
from firm.report.fmoo_figures import AlgorithmRuns
from firm.report.fmoo_sections import (
    NUM_TABLE_USERS,
    improved_section,
    parameter_section,
    preferences_section,
    progress_section,
    stationarity_section,
    users_section,
    weights_section,
)
from firm.report.fmoo_study import comparison_study, final_values
from firm.report.page import Section, alarms, drawn_section, left_out_note, replace_file
from firm.report.study_page import render_study
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
"""Heading to algorithm to cell."""


def write(
    out: Path,
    cfg: "ClassicConfig",
    runs: Sequence[AlgorithmRuns],
    *,
    facts: Mapping[str, str],
    config: str,
) -> None:
    """Writes the page and the table of what has run so far.

    A page that cannot be written is a warning, and the study goes on.
    """
    with drawing(f"The table {TABLE_NAME}"):
        header, lines = summary(cfg, runs)
        with (out / TABLE_NAME).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["algorithm", *header[1:]], *lines])
    with drawing(f"The page {PAGE_NAME}"):
        kept, notices = readable(cfg, runs)
        study = comparison_study(
            kept,
            title=f"Algorithms on {cfg.data.name}",
            facts=facts,
            method=METHOD.format(measured=MEASURED[cfg.split]),
            config=config,
            columns=_columns(cfg, kept),
            sections=_sections(cfg, kept),
            split=cfg.split,
            is_log_loss=cfg.target_loss is not None,
            alarms=alarms_of(cfg, runs),
            notices=notices,
        )
        replace_file(out / PAGE_NAME, render_study(study))


def readable(
    cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]
) -> tuple[list[AlgorithmRuns], list[str]]:
    """Returns what can be compared of the runs, and sentences on what was left out.

    A run without an evaluation of the objectives that most rows name is left out, and so is an
    algorithm without runs.

    Raises:
        ValueError: Nothing is left.
    """
    rows = [row for one in runs for seed in one.seeds for row in seed]
    names = {}
    for field in ("losses", "accuracies"):
        told = Counter(tuple(row[field]) for row in rows if row.get(field))
        names[field] = set(told.most_common(1)[0][0]) if told else set()
    wanted = [field for field, objectives in names.items() if objectives]
    notices = [
        left_out_note(f"the logs of {one.name}", one.left_out) for one in runs if one.left_out
    ]
    kept = []
    for one in runs:
        seeds = []
        for number, rows in zip(cfg.seeds, one.seeds, strict=True):
            own = [
                {k: v for k, v in row.items() if k not in names or set(v) == names[k]}
                for row in rows
            ]
            if all(any(field in row for row in own) for field in wanted):
                seeds.append(own)
            else:
                notices.append(
                    f"{one.name}, seed {number}, is left out: no row of its log has valid "
                    f"{' and '.join(wanted)}."
                )
        if seeds:
            kept.append(replace(one, seeds=seeds))
    if not wanted or not kept:
        raise ValueError("no run has a valid evaluation; run the study again under another --out.")
    return kept, notices


def alarms_of(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> list[tuple[str, str]]:
    """What the runs warned of: algorithm, seed and rounds, and the text."""
    return [
        (f"{one.name}, seed {seed}, {alarm.when.lower()}", alarm.text)
        for one in runs
        for seed, rows in zip(cfg.seeds, one.seeds, strict=True)
        for alarm in alarms(rows)
    ]


def summary(
    cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]
) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the final figures, means over the seeds."""
    runs, _ = readable(cfg, runs)
    objectives = _objectives(runs)
    is_regression = not _last(runs[0].seeds[0]).get("accuracies")
    columns = _columns(cfg, runs)
    lines = []
    for one in runs:
        values = final_values(one, "losses" if is_regression else "accuracies", objectives)
        means = values.mean(axis=0)  # [M]
        worst = means.max() if is_regression else means.min()
        cells = [f"{value:.3f}" for value in [*means, means.mean(), worst]]
        upload = fmean(sum(row.get("bytes_up") or 0 for row in rows) for rows in one.seeds) / 1e6
        more = [column.get(one.name, "") for column in columns.values()]
        lines.append([one.name, *cells, *more, f"{upload:.1f}"])
    return ["", *objectives, "mean", "worst", *columns, "MB up"], lines


def _columns(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> Columns:
    """What some studies measure beside: Δ_M, users, rounds to the target loss."""
    groups: dict[str, Callable[[], Columns]] = {
        "Δ_M": lambda: _relative_loss(cfg, runs),
        "users": lambda: _users(runs),
        "rounds to the target loss": lambda: _rounds(cfg, runs),
    }
    columns: Columns = {}
    for what, draw in groups.items():
        columns |= drawn(f"The column of {what}", draw, instead=lambda note: {})
    return columns


def _relative_loss(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> Columns:
    """Δ_M against the objectives trained alone, where the study has trained each of them alone."""
    objectives = _objectives(runs)
    field = "accuracies" if _last(runs[0].seeds[0]).get("accuracies") else "losses"
    alone = _alone(cfg, runs)
    if len(alone) < len(objectives):
        return {}
    means = {one.name: final_values(one, field, objectives).mean(axis=0) for one in runs}
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


def _users(runs: Sequence[AlgorithmRuns]) -> Columns:
    """The users' final accuracies in per cent, one by one or, where they are many, their spread."""
    found = {}
    for one in runs:
        users = [
            {
                user: share
                for user, share in (_last(rows).get("users") or {}).items()
                if share is not None
            }
            for rows in one.seeds
        ]
        if all(users):
            found[one.name] = users
    if not found:
        return {}
    # a seed's partition may leave a user without a sample
    everyone = [seed for seeds in found.values() for seed in seeds]
    shared = [user for user in everyone[0] if all(user in seed for seed in everyone)]
    if len(shared) <= NUM_TABLE_USERS:
        return {
            user: {
                name: f"{100 * fmean(seed[user] for seed in seeds):.1f}"
                for name, seeds in found.items()
            }
            for user in shared
        }
    spreads = {
        name: [user_summary(list(seed.values())) for seed in seeds] for name, seeds in found.items()
    }
    headings = {"users": "mean", "SD": "std", "worst 5 %": "worst", "best 5 %": "best"}
    return {
        heading: {
            name: f"{100 * fmean(getattr(seed, attribute) for seed in seeds):.1f}"
            for name, seeds in spreads.items()
        }
        for heading, attribute in headings.items()
    }


def _rounds(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> Columns:
    """Rounds in which each objective came down to the target loss, means over the seeds."""
    if cfg.target_loss is None:
        return {}
    columns: Columns = {}
    for objective in _objectives(runs):
        cells = columns[f"rounds to {cfg.target_loss:g}, {objective}"] = {}
        for one in runs:
            reached = []
            for rows in one.seeds:
                measured = [row for row in rows if "losses" in row]
                losses = np.array([row["losses"][objective] for row in measured], dtype=float)
                if not np.isfinite(losses).all():
                    reached.append(None)
                    continue
                at = [row["round"] for row in measured]
                reached.append(rounds_to_loss(at, losses.tolist(), cfg.target_loss))
            known = [count for count in reached if count is not None]
            is_reached = len(known) == len(reached)
            rounds = cfg.algorithms[one.name].rounds or cfg.rounds
            cells[one.name] = f"{fmean(known):.0f}" if is_reached else f"> {rounds}"
    return columns


def _sections(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> list[Section]:
    quantities: dict[str, Callable[[], Section | None]] = {
        **{
            options["name"]: partial(parameter_section, lines, **options)
            for lines, options in _settings(cfg, runs)
        },
        "preferences": lambda: _preferences(cfg, runs),
        "users": lambda: users_section(runs),
        "improved": lambda: improved_section(runs),
        "progress": lambda: progress_section(runs),
        "weights": lambda: weights_section(runs),
        "stationarity": lambda: stationarity_section(runs),
    }
    return [
        drawn_section(
            name.capitalize(),
            lambda name=name, draw=draw: draw() or Section(name, "", "", [], []),
            name=name,
        )
        for name, draw in quantities.items()
    ]


def _preferences(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> Section | None:
    """The section on preferences, with the least losses of each objective trained alone."""
    objectives = _objectives(runs)
    wishes = {
        one.name: tuple(wish)
        for one in runs
        if (wish := getattr(cfg.algorithms[one.name].strategy, "preference", None))
    }
    ends = {one.name: final_values(one, "losses", objectives) for one in runs}
    pairs = [
        (wishes[name], row)
        for name, losses in ends.items()
        for row in losses
        if name in wishes and np.isfinite(row).all()
    ]
    correlation = None
    if len({wish for wish, _ in pairs}) > 1:
        correlation = preference_correlation(*zip(*pairs, strict=True))
    alone, limits = _alone(cfg, runs), None
    if len(alone) == len(objectives) == 2:
        least = [ends[alone[name]].mean(axis=0)[i] for i, name in enumerate(objectives)]
        limits = (least[0], least[1]) if np.isfinite(least).all() else None
    return preferences_section(runs, wishes, limits=limits, correlation=correlation)


def _settings(
    cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]
) -> list[tuple[dict[str, dict[float, AlgorithmRuns]], dict[str, Any]]]:
    """The settings that are swept: numbers in which alone the algorithms of a family differ.

    A family has one name up to a comma. Of each setting, the lines by family, and what titles its
    section.
    """
    families: dict[str, list[AlgorithmRuns]] = {}
    for one in runs:
        families.setdefault(one.name.partition(",")[0], []).append(one)
    found: dict[str, dict[str, dict[float, AlgorithmRuns]]] = {}
    for name, members in families.items():
        leaves = [_leaves(to_dict(cfg.algorithms[one.name])) for one in members]
        changed = [key for key in leaves[0] if len({leaf.get(key) for leaf in leaves}) > 1]
        if len(changed) == 1 and all(isinstance(leaf[changed[0]], int | float) for leaf in leaves):
            (key,) = changed
            line = {float(leaf[key]): one for one, leaf in zip(members, leaves, strict=True)}
            found.setdefault(key, {})[name] = line
    return [
        (
            lines,
            {
                "title": f"The setting {key}",
                "x_title": key.rpartition(".")[2].replace("_", " "),
                "name": f"setting-{place}",
                "is_log_loss": cfg.target_loss is not None,
            },
        )
        for place, (key, lines) in enumerate(found.items())
    ]


def _leaves(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key; those that are no numbers as text."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{path}{key}.")
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            leaves[f"{path}{key}"] = value if is_number else str(value)
    return leaves


def _alone(cfg: "ClassicConfig", runs: Sequence[AlgorithmRuns]) -> dict[str, str]:
    """The algorithm that trains an objective alone, by objective: a weighted sum of one weight."""
    objectives, alone = _objectives(runs), {}
    for one in runs:
        strategy = cfg.algorithms[one.name].strategy
        weights = getattr(strategy, "weights", None)
        if strategy.name == "fedavg" and weights and sum(weight > 0 for weight in weights) == 1:
            alone[objectives[int(np.argmax(weights))]] = one.name
    return alone


def _objectives(runs: Sequence[AlgorithmRuns]) -> list[str]:
    return list(_last(runs[0].seeds[0])["losses"])


def _last(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A run's last evaluation."""
    return next(row for row in reversed(rows) if "losses" in row)
