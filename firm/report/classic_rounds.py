"""What the settings of a classic study have come to at given rounds, with differences by seed."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from firm.report.tables import Frame, measured, tidy
from firm.run import Run, UserError, print_table


def print_rounds(study: Path, rounds: Sequence[int], *, against: str | None = None) -> None:
    """Prints a study's accuracies, or its losses where there are none, at given rounds.

    Each is the mean over the seeds with its standard error. A second table has the differences to
    one setting, seed by seed, and in brackets, for each seed, the measurements since the previous
    of the given rounds at which a setting was level or behind.

    Args:
        study: Folder of the study, with runs as SETTING/seed_NUMBER.
        rounds: Rounds at which every run was evaluated.
        against: The setting that the others are compared with; None prints no second table.

    Raises:
        UserError: The folder has no evaluations, or a round or the setting is not among them.
    """
    quantity, table = _evaluations(study)
    rounds = sorted(rounds)
    if missing := [str(number) for number in rounds if number not in table.index]:
        raise UserError(
            f"{study} was not evaluated at round {', '.join(missing)}; choose among "
            f"{', '.join(map(str, table.index))}."
        )
    is_accuracy = quantity.endswith("accuracies")
    factor, digits = (100, 1) if is_accuracy else (1, 3)
    header, names = ["", *map(str, rounds)], table.columns.unique("setting")
    lines = [
        [", ".join(pair), *_cells(seeds.loc[rounds] * factor, digits)]
        for pair, seeds in _by_objective(table)
    ]
    unit = ", per cent" if is_accuracy else ""
    print_table(f"{quantity}{unit}, mean ± standard error over seeds", header, lines)
    if against is None:
        return
    if against not in names:
        raise UserError(f"{study} has no setting {against!r}; choose among {', '.join(names)}.")
    lines = []
    for (setting, objective), seeds in _by_objective(table.drop(columns=against, level="setting")):
        gains = (seeds - table[against][objective]).dropna(axis="columns", how="all")
        is_behind = gains <= 0 if is_accuracy else gains >= 0
        starts = [0, *rounds]
        spans = [is_behind.loc[a + 1 : b] for a, b in zip(starts, rounds, strict=False)]
        counts = [f"({', '.join(map(str, span.sum()))} of {len(span)})" for span in spans]
        cells = zip(_cells(gains.loc[rounds] * factor, digits), counts, strict=True)
        lines.append([f"{setting}, {objective}", *(" ".join(cell) for cell in cells)])
    print_table(f"\nThe same less {against}, by seed (measurements not better)", header, lines)


def _evaluations(study: Path) -> tuple[str, Frame]:
    """Returns the quantity that was measured, and its values by round, setting, objective, seed."""
    parts = [
        tidy(
            measured([row for row in Run(folder).rows() if row["kind"] == "evaluation"], ()),
            setting=folder.parent.name,
            seed=int(folder.name.removeprefix("seed_")),
        )
        for folder in sorted(study.glob("*/seed_[0-9]*"))
    ]
    table = pd.concat(parts) if parts else tidy({})
    quantities = table["quantity"].unique().tolist()
    for name in ("accuracies", "losses"):
        for quantity in quantities:
            if quantity.rpartition("/")[2] == name:
                chosen = table[table["quantity"] == quantity]
                at = ["setting", "objective", "seed"]
                return quantity, chosen.pivot(index="round", columns=at, values="value")
    raise UserError(f"{study} has no evaluations of a classic study; name the folder of one.")


def _by_objective(table: Frame) -> list[tuple[tuple[str, str], Frame]]:
    """Returns the values of every setting and objective, a column for each seed."""
    groups = table.T.groupby(level=["setting", "objective"], sort=False)
    return [(pair, seeds.droplevel(["setting", "objective"]).T) for pair, seeds in groups]


def _cells(seeds: Frame, digits: int) -> list[str]:
    """Returns mean and standard error of each line; without the error where there is one seed."""
    errors = seeds.sem(axis="columns")
    return [
        f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if pd.notna(error) else "")
        for mean, error in zip(seeds.mean(axis="columns"), errors, strict=True)
    ]
