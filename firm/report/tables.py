"""Puts runs into one tidy table, with means over clients, objectives and seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pandas as pd

from firm.base.quantities import Quantity
from firm.fronts.front import differing_figure
from firm.fronts.smoothing import exponential_average
from firm.report.drawing import LegendEntry, Over, Panel, Series, series_panel
from firm.report.record import Record, is_base
from firm.run.errors import UserError
from firm.run.rows import Points, Row, entries, mean_over_clients

COLUMNS = ["setting", "seed", "round", "client", "objective", "quantity", "value", "se"]
COLORS = (
    *(f"var(--objective-{place})" for place in range(5)),
    *(f"var(--client-{place})" for place in (0, 1, 7)),
)
DASHES = ("solid", "dash", "dot")
"""Dash styles, which distinguish lines once all colours are used."""

How = Literal["mean", "lowest", "highest"]
REDUCTIONS: dict[str, Callable[[list[float]], float]]
REDUCTIONS = {"mean": fmean, "lowest": min, "highest": max}
Frame = Any
"""A pandas.DataFrame; Any, since type checkers infer wrong types of most methods without stubs."""
SeriesKey = tuple[int, str, str, str]
"""Round, client, objective and quantity of a value."""


# --- One run --------------------------------------------------------------------------------------


def measured(rows: Iterable[Row], objectives: Sequence[str]) -> dict[SeriesKey, list[float | None]]:
    """Returns value and standard error of every number in valid rows, by rising round.

    The client is empty for numbers of the server or the global model. The name of an evaluated
    quantity starts with its split: "test/scores". Nested entries have their path as name and their
    last key as objective; the number of prompts of an objective's mean is a quantity of its own,
    "test/scores/num_prompts". Rows without a round are skipped.
    """
    numbers: dict[SeriesKey, list[float | None]] = {}
    # rows are grouped by kind; after sorting, the last value of a round overrides earlier ones
    for row in sorted((row for row in rows if "round" in row), key=lambda row: row["round"]):
        before = f"{row['split']}/" if "split" in row else ""
        for path, value in entries(row, objectives):
            *names, last = path
            is_error = (last == "se" and len(path) > 1) or (
                len(path) == 1 and last.endswith("_se") and last.removesuffix("_se") in row
            )
            if last in ("mean", "se") and len(path) > 1:
                *names, last = names
            elif last == "num_prompts" and len(path) > 2:  # of an objective's entry
                *names, last = *names[:-1], "num_prompts", names[-1]
            if is_error and len(path) == 1:
                last = last.removesuffix("_se")
            name, objective = ("/".join(names), last) if names else (last, "")
            place = row["round"], row.get("client", ""), objective, before + name
            entry = numbers.setdefault(place, [None, None])
            if is_error:
                entry[1] = value
            elif name in ("bytes_up", "bytes_down") and entry[0] is not None:
                entry[0] += value or 0.0  # a round may have several rows, whose bytes add up
            else:
                entry[0] = value
    return numbers


# --- Runs of one setting --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs of one configuration that differ only in their seed."""

    name: str
    index: int
    """Index among colours and symbols, from 0."""
    runs: Sequence[Sequence[Row]]
    """Rows of each run. Every row has a "round", 0 for the initial model; a round may have several
    rows."""
    records: Sequence[Record] = ()
    """The runs, if they come from directories."""

    @classmethod
    def of(cls, name: str, index: int, records: Sequence[Record]) -> "Setting":
        """Returns the setting of these runs."""
        return cls(name, index, [record.rows for record in records], records=records)

    @property
    def key(self) -> LegendEntry:
        """Its entry in a legend."""
        dash = DASHES[self.index // len(COLORS) % len(DASHES)]
        return LegendEntry(self.name, COLORS[self.index % len(COLORS)], dash)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives that the runs' directories name."""
        return self.records[0].objectives if self.records else ()

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each run; runs without a directory are numbered."""
        return [record.seed for record in self.records] or list(range(len(self.runs)))

    @property
    def method(self) -> Mapping[str, Any]:
        """The configuration in which the settings of a study differ, that of the first run."""
        return self.records[0].method if self.records else {}

    def at(self, places: Sequence[int]) -> "Setting":
        """Returns the setting with some of its runs."""
        kept = [[own[place] for place in places if own] for own in (self.runs, self.records)]
        return replace(self, runs=kept[0], records=kept[1])

    @cached_property
    def _numbers(self) -> list[dict[SeriesKey, list[float | None]]]:
        return [measured(rows, self.objectives) for rows in self.runs]

    @cached_property
    def table(self) -> Frame:
        """All runs in one table with the columns `COLUMNS`, a number per row.

        The seed is the run's index. Numbers that were not measured or are not finite are NaN, and
        so are unknown standard errors.
        """
        return self._table(self._numbers)

    @cached_property
    def _initial(self) -> Frame:
        """The same of the initial models alone, also in runs without rounds."""
        bases = ([row for row in rows if is_base(row)] for rows in self.runs)
        return self._table([measured(rows, self.objectives) for rows in bases])

    def _table(self, runs: Sequence[Mapping[SeriesKey, Sequence[float | None]]]) -> Frame:
        rows = [
            (self.name, seed, *place, *own)
            for seed, numbers in enumerate(runs)
            for place, own in numbers.items()
        ]
        table = pd.DataFrame(rows, columns=COLUMNS)
        return table.assign(
            **{key: table[key].astype(float).where(np.isfinite) for key in ("value", "se")}
        )

    @cached_property
    def _lines(self) -> list[dict[str, dict[str, dict[str, Points]]]]:
        """The finite values of each run by quantity, objective, client and round."""
        runs = []
        for numbers in self._numbers:
            lines: dict[str, dict[str, dict[str, Points]]] = {}
            for (at, client, objective, quantity), (value, _) in numbers.items():
                own = lines.setdefault(quantity, {}).setdefault(objective, {})
                points = own.setdefault(client, {})
                if value is not None and isfinite(value):
                    points[at] = value
            runs.append(lines)
        return runs

    def lines(self, quantity: str, objective: str = "", *, seed: int = 0) -> dict[str, Points]:
        """Returns a quantity of one run by client, "" for the server."""
        return self._lines[seed].get(quantity, {}).get(objective, {})

    def errors(self, quantity: str, objective: str, *, seed: int = 0) -> dict[int, float | None]:
        """Returns the standard errors of the server's values by round."""
        numbers = self._numbers[seed]
        points = self.lines(quantity, objective, seed=seed).get("", {})
        return {at: numbers[at, "", objective, quantity][1] for at in points}

    def quantities(self, opening: str) -> list[str]:
        """Returns the quantities whose names start with `opening`."""
        names = dict.fromkeys(name for run in self._lines for name in run)
        return [name for name in names if name.startswith(opening)]

    def objectives_with(self, quantity: str) -> list[str]:
        """Returns the objectives for which any run has a quantity."""
        return list(dict.fromkeys(name for run in self._lines for name in run.get(quantity, ())))

    def values(self, quantity: str) -> Frame:
        """Returns the rows of the table with a quantity."""
        return self.table[self.table["quantity"] == quantity]

    def num_rounds(self, quantity: str) -> int:
        """Returns the number of rounds in which any run has a quantity."""
        return self.values(quantity)["round"].nunique()

    def objectives_by_run(self, quantity: str) -> list[tuple[str, ...]]:
        """Returns the objectives for which each run has a quantity."""
        return [tuple(run.get(quantity, ())) for run in self._lines]

    def ends(self, quantity: str, objectives: Sequence[str] = ("",)) -> Frame:
        """Returns the last values of the runs that log all these objectives, by seed and objective.

        Logged values that are not finite are NaN. An initial model counts as final only in a run
        with zero rounds.
        """
        lines = self.values(quantity)
        # a run in training was evaluated at round 0, which is not its end
        waits = {place for place, record in enumerate(self.records) if record.num_rounds}
        lines = lines[(lines["round"] > 0) | ~lines["seed"].isin(waits)]
        rounds = lines[lines["objective"].isin(objectives)].groupby("seed")["round"]
        return self._at(lines[lines["round"] == lines["seed"].map(rounds.max())], objectives)

    def starts(self, quantity: str, objectives: Sequence[str] = ("",)) -> Frame:
        """Returns the values of the initial models, like `ends`."""
        return self._at(self._initial[self._initial["quantity"] == quantity], objectives)

    def _at(self, lines: Frame, objectives: Sequence[str]) -> Frame:
        own = lines[(lines["client"] == "") & lines["objective"].isin(objectives)]
        # NaN is for values that diverged, so a run that lacks an objective is left out
        own = own[own.groupby("seed")["objective"].transform("size") == len(objectives)]
        table = own.pivot(index="seed", columns="objective", values="value")
        return table.reindex(columns=list(objectives)).rename(index=dict(enumerate(self.seeds)))

    def finals(self, quantity: str, objectives: Sequence[str] = ("",)) -> np.ndarray:
        """Returns `ends` as an array, shape [S, M]."""
        return self.ends(quantity, objectives).to_numpy(dtype=float)

    def curves(self, quantity: str, objective: str | None = None, *, how: How = "mean") -> Frame:
        """Returns a quantity by rising round, a column for each seed that has it in any round.

        Only rounds in which all these seeds have it are kept. The server's value is used if there
        is one, otherwise the mean of the clients' values.

        Args:
            quantity: Its name.
            objective: The objective, or None for all of them.
            how: Reduction over all objectives.
        """
        combine, by_seed = REDUCTIONS[how], {}
        for seed, run in enumerate(self._lines):
            own = run.get(quantity, {})
            names = own if objective is None else [objective] if objective in own else []
            lines = [mean_over_clients(own[name]) for name in names]
            # a mean over fewer objectives in some rounds would jump there
            rounds = [at for at in lines[0] if all(at in line for line in lines)] if lines else []
            if rounds:
                by_seed[seed] = {at: combine([line[at] for line in lines]) for at in rounds}
        return pd.DataFrame(by_seed).sort_index().dropna()

    def bytes_so_far(self, quantity: str) -> Frame:
        """Returns the bytes sent up to each round, a column for each seed."""
        runs = {seed: self.lines(quantity, seed=seed) for seed in range(len(self.runs))}
        sent = pd.DataFrame({seed: lines[""] for seed, lines in runs.items() if "" in lines})
        # a seed that ended early keeps its total in later rounds
        return sent.sort_index().cumsum().ffill()

    @property
    def megabytes_up(self) -> float | None:
        """Mean upload of a whole run over the seeds; None if a run did not log it."""
        sent = self.bytes_so_far("bytes_up")
        if sent.empty or len(sent.columns) < len(self.runs):
            return None
        return float(sent.iloc[-1].mean()) / 1e6


# --- Over seeds -----------------------------------------------------------------------------------


def series_of(
    setting: Setting,
    quantity: str,
    objective: str | None = None,
    *,
    over: Over = "rounds",
    half_life: float | None = None,
    key: LegendEntry | None = None,
    how: How = "mean",
) -> Series | None:
    """Returns a quantity's mean over the seeds, in rounds in which all of them have it.

    Returns None if no such round exists.

    Args:
        setting: The runs; seeds without the quantity are skipped.
        quantity: Its name.
        objective: The objective, or None for all of them.
        over: Uploaded megabytes are averaged over the seeds.
        half_life: Half-life, in values, of a running average of each seed's values; None: none.
        key: Legend entry of the line; by default the setting's.
        how: As for `Setting.curves`.
    """
    curves = setting.curves(quantity, objective, how=how)
    if curves.empty:
        return None
    xs = curves.index.to_numpy(dtype=float)
    if over == "megabytes":
        sent = setting.bytes_so_far("bytes_up").reindex(columns=curves.columns)
        if sent.isna().all().any():
            return None
        # rounds without traffic keep the bytes of the round before
        at = sent.index.union(curves.index)
        xs = sent.reindex(at).ffill().fillna(0.0).loc[curves.index].mean(axis=1).to_numpy() / 1e6
    values = curves.to_numpy()  # [T, S]
    if half_life is not None:
        values = exponential_average(values, half_life=half_life)
    return Series.of(key or setting.key, xs, values.T)


def quantity_panel(
    name: str,
    settings: Sequence[Setting],
    quantity: Quantity,
    objective: str | None = None,
    *,
    title: str | None = None,
    over: Over = "rounds",
    **options: Any,
) -> Panel:
    """Returns a quantity over the rounds or the uploaded megabytes, a line for each setting.

    Settings without the quantity are skipped; `series_of` takes the further options. The title
    defaults to the quantity's.
    """
    lines = [series_of(s, quantity.name, objective, over=over, **options) for s in settings]
    return series_panel(
        name,
        quantity.title.format(objective) if title is None else title,
        [line for line in lines if line],
        y_title=quantity.unit,
        over=over,
        reference=reference_of(quantity, settings[0].objectives),
        **quantity.axis,
    )


def reference_of(quantity: Quantity, objectives: Sequence[str]) -> float | None:
    """Returns the height of a quantity's dashed reference line."""
    return 1 / len(objectives) if quantity.reference == "1/M" else quantity.reference


def drawn_objectives(quantity: Quantity, objectives: Sequence[str]) -> Sequence[str]:
    """Returns the objectives to draw: the second of two shares is redundant."""
    return objectives[:1] if quantity.is_share and len(objectives) == 2 else objectives


def seeds_text(settings: Sequence[Setting]) -> str:
    """Returns a sentence on the means over the seeds and the errors that a figure shows."""
    counts = [len(setting.runs) for setting in settings]
    if max(counts) == 1:
        return "One run each: the variation between seeds is unknown."
    return f"Means over {span_text(counts)} seeds ± one standard error."


def span_text(counts: Iterable[int]) -> str:
    """Returns the range of some counts as text."""
    counts = sorted(counts)
    return " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))


# --- Settings of directories ----------------------------------------------------------------------


def settings_of(runs: Mapping[str, Sequence[Record]], *, first: int = 0) -> list[Setting]:
    """Returns the settings with runs, in order.

    Args:
        runs: Runs by setting; runs without metrics are skipped.
        first: Index of the first setting among colours and symbols.

    Raises:
        UserError: No setting has a run with metrics, or the runs of one do not have the same
            objectives and calibration.
    """
    settings = [
        Setting.of(name, index, known)
        for index, (name, records) in enumerate(runs.items(), start=first)
        if (known := [record for record in records if record.rows])
    ]
    if not settings:
        raise UserError(f"none of {len(runs)} settings has a run with metrics; run one first.")
    for setting in settings:
        start = setting.records[0]
        for record in setting.records[1:]:
            if not is_same_scale(start, record):
                raise UserError(
                    f"runs of {setting.name!r} cannot be averaged, since {start.name} and "
                    f"{record.name} differ in objectives or calibration; run all seeds with the "
                    "same evaluation.calibration_seed."
                )
    return settings


def scales(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Groups settings with the same objectives and calibrations."""
    groups: list[list[Setting]] = []
    for setting in settings:
        for group in groups:
            pairs = zip(group[0].records[:1], setting.records[:1], strict=True)
            if all(is_same_scale(first, second) for first, second in pairs):
                group.append(setting)
                break
        else:
            groups.append([setting])
    return groups


def is_same_scale(first: Record, second: Record) -> bool:
    """Returns whether two runs have the same objectives and the same calibrations of rewards."""
    if first.objectives != second.objectives:
        return False
    maps = [record.header.get("calibration") or {} for record in (first, second)]
    return not any(
        differing_figure(maps[0].get(name, {}), maps[1].get(name, {})) for name in first.objectives
    )
