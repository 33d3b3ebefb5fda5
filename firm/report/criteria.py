"""Criteria, the evaluated quantities by which settings are compared, and their final values."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from firm.base.quantities import QUANTITIES, Quantity
from firm.report.plane import ACCURACY
from firm.report.record import Record
from firm.report.tables import Frame, How, Setting, scales
from firm.run.comparison import score_label
from firm.run.errors import UserError

SPLITS = ("test", "validation", "train")
"""The split that final values come from is the first of these that was evaluated."""
LOG_TICKS = {"type": "log", "tickformat": "~g", "dtick": "D2"}
"""Ticks at 1, 2, 5."""


@dataclass(frozen=True)
class Criterion:
    """An evaluated quantity for which higher or lower values are better, one per objective."""

    quantity: Quantity
    final: str
    """Name of the final values with their split, such as "test/rewards"."""
    curve: str
    """Name of the values over the rounds: of evaluations, or of clients while they train."""
    objectives: tuple[str, ...]

    @property
    def sign(self) -> int:
        """1 where higher values are better, else -1."""
        return 1 if self.quantity.better == "higher" else -1

    @property
    def worst_how(self) -> How:
        """Description of how the worst objective is found."""
        return "lowest" if self.sign > 0 else "highest"

    @property
    def split(self) -> str:
        """The split of the final values; empty where rows do not name it."""
        return self.final.rpartition("/")[0]

    def beside(self, name: str) -> str:
        """Returns the name of another quantity of the final evaluations."""
        return f"{self.split}/{name}" if self.split else name

    def has_kl(self, settings: Sequence[Setting]) -> bool:
        """Returns whether the KL from a base model was measured."""
        return any(setting.objectives_with(self.beside("kl")) for setting in settings)

    def finals(self, setting: Setting) -> np.ndarray:
        """Returns the final values of the runs that logged any, shape [S, M]."""
        return setting.finals(self.final, self.objectives)

    def mean(self, setting: Setting) -> np.ndarray | None:
        """Returns the mean final values over the seeds, [M]; None if a run diverged."""
        finals = self.finals(setting)
        return finals.mean(axis=0) if len(finals) and np.isfinite(finals).all() else None


def criteria_of(settings: Sequence[Setting]) -> list[Criterion]:
    """Returns the measured criteria, the main one first.

    The objectives are the most frequent ones, so that one log with other names has no effect.
    """
    criteria = []
    records = [record for setting in settings for record in setting.records]
    is_log = any(record.settings.get("target_loss") for record in records)
    learns_from_pairs = bool(records) and all(record.learns_from_pairs for record in records)
    for quantity in (quantity for quantity in QUANTITIES.values() if quantity.better):
        names = [*(f"{split}/{quantity.name}" for split in SPLITS), quantity.name]
        final = next((n for n in names if any(s.objectives_with(n) for s in settings)), None)
        if final is None:
            continue
        # A test split beside a validation split is evaluated at the end only: it has no curve.
        candidates = (f"validation/{quantity.name}", quantity.name)
        curve = next((n for n in candidates if all(s.num_rounds(n) > 1 for s in settings)), final)
        runs = Counter(names for s in settings for names in s.objectives_by_run(final) if names)
        own = quantity
        if is_log and quantity.better == "lower":
            own = replace(quantity, axis=LOG_TICKS)  # losses that approach a target
        if quantity.name == "rewards" and learns_from_pairs:
            own = replace(quantity, title="accuracy on pairs", unit=ACCURACY, help="")
        elif quantity.name == "rewards" and not all(_are_bounded(record) for record in records):
            own = replace(quantity, unit="mean reward", help="")
        criteria.append(Criterion(own, final, curve, runs.most_common(1)[0][0]))
    return criteria


def _are_bounded(record: Record) -> bool:
    return all(record.is_bounded(name) for name in record.objectives)


def comparable(settings: Sequence[Setting]) -> tuple[list[Setting], list[str]]:
    """Returns the settings without runs that cannot be compared, and a sentence on each such run.

    A run counts if its evaluations name all objectives of every criterion.

    Raises:
        UserError: No run is left.
    """
    criteria, kept, notices = criteria_of(settings), [], []
    names = " and ".join(criterion.quantity.name for criterion in criteria)
    for setting in settings:
        has_all = np.ones(len(setting.runs), dtype=bool)
        for criterion in criteria:
            own = setting.objectives_by_run(criterion.final)
            has_all &= [set(criterion.objectives) <= set(objectives) for objectives in own]
        notices += [
            f"{setting.name}, seed {setting.seeds[place]}, is left out: no row of its log has "
            f"valid {names}."
            for place in np.flatnonzero(~has_all)
        ]
        if has_all.any():
            kept.append(setting.at(np.flatnonzero(has_all).tolist()))
    if not kept or not criteria:
        raise UserError(
            "no run has a valid evaluation; run the study again in another folder (--out)."
        )
    return kept, notices


def comparable_groups(settings: Sequence[Setting]) -> tuple[list[list[Setting]], list[str]]:
    """Returns `comparable` settings by group of equal objectives and calibrations, and sentences.

    Raises:
        UserError: No run is left in any group.
    """
    groups, notices, problem = [], list[str](), None
    for group in scales(settings):
        try:
            kept, own = comparable(group)
        except UserError as error:
            problem = error
            notices += [f"{setting.name} is left out: it has no valid rows." for setting in group]
            continue
        groups.append(kept)
        notices += own
    if not groups and problem is not None:
        raise problem
    return groups, notices


# --- Final values ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A number of the final models: an evaluated value, or the mean or worst over objectives."""

    name: str
    quantity: str
    objectives: Sequence[str]
    reduce: Callable[[Frame], Frame] = lambda table: table.iloc[:, 0]
    """Maps values by seed and objective to values by seed."""

    def ends(self, setting: Setting) -> Frame:
        """Returns the values by seed; NaN for logged values that are not finite."""
        return self.reduce(setting.ends(self.quantity, self.objectives))

    def start(self, settings: Sequence[Setting]) -> float | None:
        """Returns the initial model's value, the mean over all runs that have it."""
        tables = [setting.starts(self.quantity, self.objectives) for setting in settings]
        values = [value for table in tables for value in self.reduce(table).dropna().tolist()]
        return fmean(values) if values else None


def final_columns(settings: Sequence[Setting], criterion: Criterion) -> list[Column]:
    """Returns the columns of final values: each objective, mean, worst, other scores and the KL."""
    objectives, sign = criterion.objectives, criterion.sign
    columns = [Column(name, criterion.final, [name]) for name in objectives]
    if len(objectives) > 1:
        reductions: dict[str, Callable[[Frame], Frame]] = {
            "mean": lambda table: table.mean(axis=1, skipna=False),
            "worst": lambda table: sign * (sign * table).min(axis=1, skipna=False),
        }
        columns += [
            Column(name, criterion.final, objectives, reduce) for name, reduce in reductions.items()
        ]
    scores = criterion.beside("scores")
    columns += [Column(score_label(n), scores, [n]) for n in further_scores(settings, criterion)]
    has_kl = criterion.has_kl(settings)
    return columns + ([Column("KL", criterion.beside("kl"), [""])] if has_kl else [])


def further_scores(settings: Sequence[Setting], criterion: Criterion) -> list[str]:
    """Returns the names of the final models' scores other than the objectives."""
    name = criterion.beside("scores")
    scores = dict.fromkeys(score for s in settings for score in s.objectives_with(name))
    return [
        score
        for score in scores
        if score not in criterion.objectives and any(len(s.ends(name, [score])) for s in settings)
    ]
