"""Numbers of finished runs over the seeds of a setting, and paired differences of two settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from firm.report.record import Record, final_row, score
from firm.report.seeds import Difference, mean_difference

Figure = Callable[[Record], float | None]
"""Reads a number of a run; None if the run lacks it."""


def final_reward(objective: str) -> Figure:
    """Returns the function that reads a run's final calibrated reward on the test prompts."""
    return lambda record: score(final_row(record) or {}, "rewards", objective, "mean")


def final_score(name: str) -> Figure:
    """Returns the function that reads another mean score of a run's final replies."""
    return lambda record: score(final_row(record) or {}, "scores", name, "mean")


def final_figure(key: str) -> Figure:
    """Returns the function that reads another figure of a run's final evaluation, such as kl."""
    return lambda record: (final_row(record) or {}).get(key)


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
