"""Paired differences of two settings over seeds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


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
        """Returns the difference with its interval; its ends keep the signs that rounding hides."""
        mean = round(self.mean, digits) + 0.0  # no -0.000
        return f"{mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def mean_difference(values: ArrayLike, *, level: float = 0.95) -> Difference:
    """Returns the mean of differences [N], one per seed, N at least 2, with its interval."""
    changes = np.asarray(values, dtype=np.float64)
    mean, error = float(changes.mean()), float(changes.std(ddof=1) / len(changes) ** 0.5)
    # Student's t, since the deviation comes from few seeds
    reach = float(stats.t.ppf((1 + level) / 2, len(changes) - 1)) * error
    return Difference(mean, mean - reach, mean + reach, len(changes))
