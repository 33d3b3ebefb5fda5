"""Statistics of runs over seeds: their spread, and paired differences of two settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from firm.report.record import Record

Figure = Callable[[Record], float | None]
"""Reads a number of a run; None if the run lacks it."""


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    values: tuple[float, ...]
    """One per seed."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(self.values))

    def text(self, digits: int = 3) -> str:
        """Returns mean ± standard deviation, 0 for one seed."""
        deviation = np.std(self.values, ddof=1) if len(self.values) > 1 else 0.0
        return f"{self.mean:.{digits}f} ± {deviation:.{digits}f}"


def over_seeds(records: Sequence[Record], figure: Figure) -> Spread:
    """Returns a figure of each run of a setting.

    Raises:
        ValueError: A run lacks the figure.
    """
    values = []
    for record in records:
        value = figure(record)
        if value is None:
            raise ValueError(f"the run {record.name} has no final evaluation; let it finish.")
        values.append(value)
    return Spread(tuple(values))


@dataclass(frozen=True)
class Difference:
    """Mean paired difference of two settings over seeds, with its confidence interval."""

    mean: float
    low: float
    """Lower end of the 95 % interval of Student's t."""
    high: float
    """Upper end."""
    num_seeds: int

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def text(self, digits: int = 3) -> str:
        """Returns the difference with its interval."""
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def difference(
    first: Sequence[Record], second: Sequence[Record], figure: Figure, *, level: float = 0.95
) -> Difference:
    """Returns the mean difference of a figure, first minus second setting, paired by seed.

    Raises:
        ValueError: There are fewer than two seeds, the seeds differ, or a run lacks the figure.
    """
    seeds = [[record.settings["seed"] for record in records] for records in (first, second)]
    if seeds[0] != seeds[1] or len(seeds[0]) < 2:
        raise ValueError(f"two settings need the same seeds, at least two, got {seeds}.")
    ends = [over_seeds(records, figure).values for records in (first, second)]
    return mean_difference(np.array(ends[0]) - np.array(ends[1]), level=level)


def mean_difference(values: ArrayLike, *, level: float = 0.95) -> Difference:
    """Returns the mean of differences [N], one per seed, N at least 2, with its interval."""
    changes = np.asarray(values, dtype=np.float64)
    mean, error = float(changes.mean()), float(changes.std(ddof=1) / len(changes) ** 0.5)
    # Student's t, since the deviation comes from few seeds
    reach = float(stats.t.ppf((1 + level) / 2, len(changes) - 1)) * error
    return Difference(mean, mean - reach, mean + reach, len(changes))
