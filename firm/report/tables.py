"""Runs as one tidy table, and its means over clients, objectives and seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from firm.fronts import differing_figure
from firm.report.drawing import Key, Panel, series_panel
from firm.report.record import Record
from firm.run.comparison import Measure
from firm.run.errors import UserError
from firm.run.quantities import Quantity, entries
from firm.run.rows import Row

COLUMNS = ["setting", "seed", "round", "client", "objective", "quantity", "value", "se"]
COLORS = (
    *(f"var(--objective-{place})" for place in range(5)),
    *(f"var(--client-{place})" for place in (0, 1, 7)),
)
DASHES = ("solid", "dash", "dot")
"""Settings past the number of colours are told apart by their line."""

How = Literal["mean", "worst"]
Frame = Any
"""A pandas.DataFrame: without stubs, type checkers take most of its methods for something else."""


def tidy(
    rows: Iterable[Row], objectives: Sequence[str], *, setting: str = "", seed: int = 0
) -> Frame:
    """Returns the numbers of a run's rows, one in each row of a table with the columns `COLUMNS`.

    The client is empty where a number is the server's or the global model's. A quantity of an
    evaluation on a split has the split before its name, "test/scores". Nested entries have their
    path as name and their last key as objective. A value that was not measured, or not a finite
    number, is NaN, and so is a standard error that is not known.

    Args:
        rows: Valid rows; those without a round have no numbers.
        objectives: Names of the M objectives.
        setting: Name of the run's setting.
        seed: What tells the run from the others of its setting.
    """
    lines: dict[tuple[Any, ...], list[float | None]] = {}
    for row in rows:
        if "round" not in row:
            continue
        before = f"{row['split']}/" if "split" in row else ""
        for path, value in entries(row, objectives):
            *names, last = path
            is_error = (last == "se" and len(path) > 1) or (
                len(path) == 1 and last.endswith("_se") and last.removesuffix("_se") in row
            )
            if last in ("mean", "se") and len(path) > 1:
                *names, last = names
            if is_error and len(path) == 1:
                last = last.removesuffix("_se")
            name, objective = ("/".join(names), last) if names else (last, "")
            key = row["round"], row.get("client", ""), objective, before + name
            entry = lines.setdefault(key, [None, None])
            if is_error:
                entry[1] = value
            elif name in ("bytes_up", "bytes_down") and entry[0] is not None:
                entry[0] += value or 0.0  # what belongs to a round may stand in several rows
            else:
                entry[0] = value
    values = np.array(list(lines.values()), dtype=float).reshape(-1, 2)
    values[~np.isfinite(values)] = np.nan
    at = list(zip(*lines, strict=True)) or [[], [], [], []]
    columns = [setting, seed, *(list(entry) for entry in at), values[:, 0], values[:, 1]]
    table = pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)), index=range(len(lines)))
    return table.sort_values("round", kind="stable")


def rows_of(record: Record) -> list[Row]:
    """Returns the rows of a run that have rounds."""
    groups = [*record.evaluations.values(), *record.trainings.values(), record.rounds]
    return [row for rows in groups for row in rows]


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ by their seed alone: of one algorithm, method or configuration."""

    name: str
    index: int
    """Place among colours and symbols, from 0."""
    runs: Sequence[Sequence[Row]]
    """Rows of each run. "round" is in every row; round 0 is the initial model. What belongs to a
    round may stand in one row or in several."""
    left_out: Sequence[str] = ()
    """What was not valid in the logs behind the rows."""
    records: Sequence[Record] = ()
    """The runs, where they come from directories."""

    @classmethod
    def of(cls, name: str, index: int, records: Sequence[Record]) -> "Setting":
        """Returns the setting of these runs."""
        return cls(name, index, [rows_of(record) for record in records], records=records)

    @property
    def key(self) -> Key:
        """Its entry in a legend."""
        dash = DASHES[self.index // len(COLORS) % len(DASHES)]
        return Key(self.name, COLORS[self.index % len(COLORS)], dash)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives of the runs' directories."""
        return self.records[0].objectives

    @cached_property
    def table(self) -> Frame:
        """All runs in one tidy table; the seed is the run's place."""
        objectives = self.objectives if self.records else ()
        parts = [
            tidy(rows, objectives, setting=self.name, seed=place)
            for place, rows in enumerate(self.runs)
        ]
        return pd.concat(parts, ignore_index=True) if parts else tidy([], ())

    @cached_property
    def _places(self) -> dict[Any, np.ndarray]:
        """Lines of the table by quantity, and by quantity and objective."""
        groups = (
            self.table.groupby(by, sort=False) for by in ("quantity", ["quantity", "objective"])
        )
        return {key: places for group in groups for key, places in group.indices.items()}

    def values(self, quantity: str, objective: str | None = None) -> Frame:
        """Returns the lines of the table that hold a quantity, of one objective or of all."""
        key = quantity if objective is None else (quantity, objective)
        return self.table.iloc[self._places.get(key, [])]

    def objectives_with(self, quantity: str) -> list[str]:
        """Returns the objectives that a quantity has in every run; none if no row has any.

        Raises:
            ValueError: Without runs, or when rows or runs name different objectives.
        """
        if not self.runs:
            raise ValueError(f"{self.name} has no runs.")
        lines = self.values(quantity)
        if lines.empty:
            return []
        if lines["seed"].nunique() < len(self.runs):
            raise ValueError(f"Some seeds of {self.name} have {quantity} and others none.")
        groups = lines.groupby(["seed", "round"], sort=False)["objective"]
        first, *others = [names.tolist() for _, names in groups]
        for objectives in others:
            if set(objectives) != set(first):
                raise ValueError(
                    f"The {quantity} of {self.name} name once {first}, once {objectives}."
                )
        return first

    def finals(self, quantity: str, objectives: Sequence[str] = ("",)) -> np.ndarray:
        """Returns the last values of each run that has some, shape [S, M]; NaN where it diverged.

        Args:
            quantity: Its name.
            objectives: M of them.
        """
        lines = self.values(quantity)
        last = lines[lines["round"] == lines.groupby("seed")["round"].transform("max")]
        table = last.pivot(index="seed", columns="objective", values="value")
        return table.reindex(columns=list(objectives)).to_numpy()

    def curves(self, quantity: str, objective: str | None = None, *, how: How = "mean") -> Frame:
        """Returns a quantity by rising round, a column for each seed; NaN where it is not known.

        The server's value stands for all clients; without one it is their mean.

        Args:
            quantity: Its name.
            objective: The objective, or None for all of them.
            how: Of all objectives the mean, or the worst: the largest loss or the lowest accuracy.
        """
        lines = self.values(quantity, objective)
        if (lines["client"] != "").any():
            of_server = lines[lines["client"] == ""]
            at = ["seed", "round"]
            decided = pd.MultiIndex.from_frame(of_server[at])
            is_decided = pd.MultiIndex.from_frame(lines[at]).isin(decided)
            lines: Frame = pd.concat([of_server, lines[~is_decided]])
        means = lines.groupby(["seed", "round", "objective"])["value"].mean().unstack("objective")
        if how == "mean":
            value = means.mean(axis=1, skipna=False)
        elif quantity == "losses":
            value = means.max(axis=1, skipna=False)
        else:
            value = means.min(axis=1, skipna=False)
        return value.unstack("seed").sort_index()

    def whole_curves(
        self, quantity: str, objective: str | None = None, *, how: How = "mean"
    ) -> Frame:
        """Returns the curves in the rounds in which all seeds that have the quantity do have it."""
        curves = self.curves(quantity, objective, how=how)
        return curves.dropna(axis=1, how="all").dropna()

    def bytes_so_far(self, quantity: str) -> Frame:
        """Returns the bytes sent up to each round, a column for each seed.

        Args:
            quantity: bytes_up or bytes_down.
        """
        lines = self.values(quantity)
        sent = lines[lines["client"] == ""].pivot(index="round", columns="seed", values="value")
        return sent.sort_index().cumsum().ffill()


# --- Over seeds -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Series:
    """Means over the seeds of a setting, at N places."""

    key: Key
    xs: np.ndarray
    means: np.ndarray
    ses: np.ndarray
    """Standard errors; zeros with one seed."""


def series_of(
    setting: Setting,
    quantity: str,
    objective: str | None = None,
    *,
    how: How = "mean",
    over: Literal["rounds", "megabytes"] = "rounds",
    window: int = 1,
) -> Series | None:
    """Returns a quantity's mean over the seeds, in the rounds in which all of them have it.

    A seed that has it in no round is left out.

    Args:
        setting: The runs.
        quantity: Its name.
        objective: As for `Setting.curves`.
        how: As for `Setting.curves`.
        over: What the x-axis counts: rounds, or megabytes (10⁶ bytes) uploaded so far, averaged
            over the seeds.
        window: Each point is the mean of so many values of a seed, up to its round; the error is
            that of these means.

    Returns:
        None where nothing is left to show.
    """
    curves = setting.whole_curves(quantity, objective, how=how)
    curves = curves.rolling(window).mean().dropna() if window > 1 else curves
    if curves.empty:
        return None
    xs = curves.index.to_numpy(dtype=float)
    if over == "megabytes":
        sent = setting.bytes_so_far("bytes_up").reindex(columns=curves.columns)
        if sent.isna().all().any():
            return None
        at = sent.index.union(curves.index)
        xs = sent.reindex(at).ffill().fillna(0.0).loc[curves.index].mean(axis=1).to_numpy() / 1e6
    return Series(setting.key, xs, *mean_and_error(curves.to_numpy().T))


def quantity_panel(
    name: str,
    settings: Sequence[Setting],
    quantity: Quantity,
    objective: str | None = None,
    *,
    title: str | None = None,
    how: How = "mean",
    over: Literal["rounds", "megabytes"] = "rounds",
    window: int = 1,
    num_bands: int | None = None,
) -> Panel:
    """Returns a quantity over the rounds or the uploaded megabytes, a line for each setting.

    Args:
        name: Of the panel, unique on its page.
        settings: Those without the quantity are left out.
        quantity: What is drawn.
        objective: As for `Setting.curves`.
        title: Of the panel; by default the quantity's.
        how: As for `Setting.curves`.
        over: As for `series_of`.
        window: As for `series_of`.
        num_bands: Around more lines there are no bands of their errors; by default around all.
    """
    options: dict[str, Any] = {"how": how, "over": over, "window": window}
    lines = [series_of(setting, quantity.name, objective, **options) for setting in settings]
    series = [line for line in lines if line]
    reference = quantity.reference
    if reference == "1/M":
        reference = 1 / len(settings[0].objectives)
    return series_panel(
        name,
        quantity.title.format(objective) if title is None else title,
        series,
        y_title=quantity.unit,
        over=over,
        num_bands=len(series) if num_bands is None else num_bands,
        reference=reference,
        **quantity.axis,
    )


def mean_and_error(values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard error over the seeds, [S, N] to [N]; no error from one seed."""
    table = np.asarray(values, dtype=float)
    if len(table) == 1:
        return table[0], np.zeros(table.shape[1])
    return table.mean(axis=0), table.std(axis=0, ddof=1) / len(table) ** 0.5


def measure_of(
    values: Sequence[float | None] | np.ndarray, *, ddof_error: bool = True
) -> Measure | None:
    """Returns the mean of values of each seed, [S], with its standard error or their deviation.

    Args:
        values: NaN is left out; of no value there is no mean.
        ddof_error: Whether the second number is the standard error, or the standard deviation.
    """
    known = np.asarray(values, dtype=float).ravel()
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    deviation = float(known.std(ddof=1)) if len(known) > 1 else None
    if deviation is not None and ddof_error:
        deviation /= len(known) ** 0.5
    return Measure(float(known.mean()), deviation)


def seeds_text(settings: Sequence[Setting], *, has_errors: bool = True) -> str:
    """Returns a sentence on the means over the seeds, and on the errors that a figure shows."""
    counts = [len(setting.runs) for setting in settings]
    if max(counts) == 1:
        return "One run each: nothing here tells of the noise between seeds."
    seeds = " to ".join(map(str, dict.fromkeys([min(counts), max(counts)])))
    errors = ", with one standard error to both sides" if has_errors else ""
    return f"Means over {seeds} seeds{errors}."


# --- Settings of directories ----------------------------------------------------------------------


def settings_of(runs: Mapping[str, Sequence[Record]], *, first: int = 0) -> list[Setting]:
    """Returns the settings that have runs, in order.

    Args:
        runs: Runs by setting; those without metrics are left out.
        first: Place of the first setting among colours and symbols.

    Raises:
        UserError: No setting has a run with metrics, or the runs of one do not have the same
            objectives and calibration.
    """
    settings = [
        Setting.of(name, index, known)
        for index, (name, records) in enumerate(runs.items(), start=first)
        if (known := [record for record in records if record.header])
    ]
    if not settings:
        raise UserError(f"none of {len(runs)} settings has a run with metrics; run one first.")
    for setting in settings:
        start = setting.records[0]
        for record in setting.records[1:]:
            if not is_same_scale(start, record):
                raise UserError(
                    f"rewards of {setting.name!r} mean different things: {start.name} and "
                    f"{record.name} have other objectives or calibrations; run its seeds with one "
                    "evaluation.calibration_seed."
                )
    return settings


def scales(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Returns the settings in groups whose rewards mean the same."""
    groups: list[list[Setting]] = []
    for setting in settings:
        for group in groups:
            if is_same_scale(group[0].records[0], setting.records[0]):
                group.append(setting)
                break
        else:
            groups.append([setting])
    return groups


def is_same_scale(first: Record, second: Record) -> bool:
    """Returns whether two runs have the same objectives, and a reward means the same in both."""
    if first.objectives != second.objectives:
        return False
    maps = [record.header.get("calibration") or {} for record in (first, second)]
    return not any(
        differing_figure(maps[0].get(name, {}), maps[1].get(name, {})) for name in first.objectives
    )
