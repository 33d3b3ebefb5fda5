"""Prints the values that a study's settings reached, and their differences by seed."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd

from firm.report.criteria import comparable_groups, criteria_of
from firm.report.record import Record, read_record, study_records
from firm.report.settings_tables import difference_table
from firm.report.tables import Frame, Setting, scales, settings_of
from firm.run.errors import UserError
from firm.run.progress import print_table
from firm.run.resuming import STUDY_NAME, study_to_resume
from firm.run.sweep import SWEEP_NAME, Sweep


def settings_in(study: Path, *, are_finished: bool = False) -> list[Setting]:
    """Returns the settings of a study's folder that have runs.

    Args:
        study: The folder.
        are_finished: Whether to leave out runs of classic studies that have not ended, and say so;
            those of others always are.

    Raises:
        UserError: The folder holds no runs of a study.
    """
    runs: dict[str, list[Record]] = {}
    if (study / SWEEP_NAME).is_file():
        sweep = Sweep(study)
        if not all("setting" in point for point in sweep.manifest["points"].values()):
            raise UserError(
                f"{study} is a sweep, without settings to compare; pass a study's folder."
            )
        runs = study_records(sweep)
    else:  # a classic study has SETTING/seed_NUMBER and no manifest
        for folder in classic_folders(study):
            record = read_record(folder)
            if record.is_finished or not are_finished:
                runs.setdefault(folder.parent.name, []).append(record)
            else:
                name = f"{folder.parent.name}, {folder.name}"
                sys.stdout.write(f"not compared, since it has not ended: {name}\n")
    if not runs:
        raise UserError(f"{study} contains no evaluated runs of a study; pass a study's folder.")
    groups, _ = comparable_groups(settings_of(runs))
    return [setting for group in groups for setting in group]


def classic_folders(study: Path) -> list[Path]:
    """Returns the folders of a classic study's runs, in the order of its algorithms."""
    folders = sorted(path.parent for path in study.glob("*/seed_[0-9]*/run.json"))
    if not folders or not (study / STUDY_NAME).is_file():
        return folders
    saved = study_to_resume(study)
    order = saved.get("algorithms") if isinstance(saved, Mapping) else None
    # a study that was resumed may have left some out
    places: dict[str, int] = {name: place for place, name in enumerate(order or ())}
    return sorted(folders, key=lambda folder: places.get(folder.parent.name, len(places)))


def print_differences(study: Path, against: str) -> None:
    """Prints the differences of a study's final values from one setting, paired by seed.

    Settings with other objectives or calibrations are named instead.

    Raises:
        UserError: The folder contains no study, or no finished run of that setting.
    """
    settings = settings_in(study, are_finished=True)
    _check_setting(study, settings, against)
    for group in scales(settings):
        named = [setting for setting in group if setting.name == against]
        others = [setting for setting in group if setting not in named]
        if named and others:
            ordered = [*named, *others]
            main = criteria_of(group)[0]
            table = difference_table(ordered, main)
            title = f"{table.title} on the {main.split} split, by seed, with 90 % intervals"
            if table.rows:
                print_table(title, table.headings, table.rows)
            else:
                sys.stdout.write(
                    f"no differences from {against}: they need two seeds that it shares with "
                    "another setting; run the study with more --seeds.\n"
                )
        elif others:
            names = ", ".join(dict.fromkeys(setting.name for setting in others))
            sys.stdout.write(f"not compared, since objectives or calibrations differ: {names}\n")


def print_rounds(study: Path, rounds: Sequence[int], *, against: str | None = None) -> None:
    """Prints the values of a study's main criterion, such as accuracy, at given rounds.

    Each value is the mean over the seeds with its standard error; settings with other objectives or
    calibrations have a table of their own. A second table has the
    differences from one setting, paired by seed. Its brackets count, for each seed, the
    measurements since the previous given round at which the setting was not better.

    Args:
        study: Folder of the study.
        rounds: Rounds at which every run was evaluated.
        against: Setting to compare the others with; None prints no second table.

    Raises:
        UserError: The folder has no evaluations, or none of a given round or of the setting.
    """
    settings = settings_in(study)
    if against is not None:
        _check_setting(study, settings, against)
    for group in scales(settings):
        is_compared = any(setting.name == against for setting in group)
        _print_rounds(study, group, sorted(rounds), against=against if is_compared else None)


def _print_rounds(
    study: Path, settings: Sequence[Setting], rounds: Sequence[int], *, against: str | None
) -> None:
    """Prints the values of settings with the same objectives and calibrations."""
    criterion = criteria_of(settings)[0]
    curves = {
        (setting.name, name): setting.curves(criterion.curve, name).rename(
            columns=dict(enumerate(setting.seeds))
        )
        for setting in settings
        for name in criterion.objectives
    }
    evaluated = sorted(set.intersection(*(set(curve.index) for curve in curves.values())))
    if missing := [str(number) for number in rounds if number not in evaluated]:
        raise UserError(
            f"{study} was not evaluated at round {', '.join(missing)}; choose from "
            f"{', '.join(map(str, evaluated))}."
        )
    header = ["", *map(str, rounds)]
    lines = [[", ".join(pair), *_cells(seeds.loc[rounds])] for pair, seeds in curves.items()]
    print_table(f"{criterion.curve}, mean ± standard error over seeds", header, lines)
    if against is None:
        return
    lines = []
    for (setting, objective), seeds in curves.items():
        if setting == against:
            continue
        gains = (seeds - curves[against, objective]).dropna(axis="columns", how="all")
        is_behind = criterion.sign * gains <= 0
        spans = [is_behind.loc[a + 1 : b] for a, b in pairwise([0, *rounds])]
        counts = [f"({', '.join(map(str, span.sum()))} of {len(span)})" for span in spans]
        cells = zip(_cells(gains.loc[rounds]), counts, strict=True)
        lines.append([f"{setting}, {objective}", *(" ".join(cell) for cell in cells)])
    print_table(f"\nDifference from {against}, by seed (measurements not better)", header, lines)


def _check_setting(study: Path, settings: Sequence[Setting], name: str) -> None:
    names = [setting.name for setting in settings]
    if name not in names:
        raise UserError(
            f"{study} has no finished runs of {name!r}; choose from {', '.join(names)}."
        )


def _cells(seeds: Frame) -> list[str]:
    """Returns mean and standard error of each line; without the error where there is one seed."""
    errors = seeds.sem(axis="columns")
    return [
        f"{mean:.3f}" + (f" ± {error:.3f}" if pd.notna(error) else "")
        for mean, error in zip(seeds.mean(axis="columns"), errors, strict=True)
    ]
