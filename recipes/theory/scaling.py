"""Slopes on log-log axes, compared with the exponents of a theorem."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 0.05
"""Relative distance from an exponent that still counts as equal: the exponents are asymptotic."""
CLEAR = 2.0
"""Standard errors beyond which chance is an unlikely cause."""


@dataclass(frozen=True)
class Slope:
    """A slope fitted for each seed by itself."""

    mean: float
    se: float
    """Standard error of the mean over seeds."""


def fit_slope(xs: Sequence[float] | np.ndarray, ys: np.ndarray) -> Slope:
    """Returns the mean slope of log y in log x, least squares within each seed.

    At least two different positive xs [N], and positive ys [S, N] of at least two seeds.

    >>> fit_slope([1, 10, 100], np.array([[3, 30, 300], [5, 50, 500]]))
    Slope(mean=1.0, se=0.0)
    """
    positions = np.asarray(xs, dtype=np.float64)
    if ys.ndim != 2 or ys.shape[1] != len(positions) or len(np.unique(positions)) < 2:
        raise ValueError(
            f"a slope needs two points and one value of every seed at each, got {len(positions)} "
            f"points and values of shape {list(ys.shape)}."
        )
    if len(ys) < 2:
        raise ValueError(f"a standard error needs at least two seeds, got {len(ys)}.")
    if not (positions.min() > 0 and ys.min() > 0):
        raise ValueError(
            f"a slope on log-log axes needs positive numbers, got {positions.min():g} and "
            f"{ys.min():g} as the smallest; leave such points out."
        )
    centered = np.log(positions) - np.log(positions).mean()
    slopes = np.log(ys) @ centered / (centered @ centered)  # [S]
    se = slopes.std(ddof=1) / len(slopes) ** 0.5
    return Slope(round(float(slopes.mean()), 12), round(float(se), 12))


def verdict(slope: Slope, exponent: float) -> str:
    """Compares a slope with a theorem's exponent, in words.

    "unclear" means that the errors allow both the exponent and no dependence at all.

    >>> verdict(Slope(-0.51, 0.01), -0.5), verdict(Slope(-2.0, 0.1), -1.0)
    ('as the theorem', 'falls faster')
    >>> verdict(Slope(0.6, 0.01), 1.0), verdict(Slope(0.01, 0.01), 1.0)
    ('rises slower', 'flat')
    """
    slack = max(CLEAR * slope.se, TOLERANCE * abs(exponent))
    is_equal, is_flat = abs(slope.mean - exponent) <= slack, abs(slope.mean) <= slack
    if is_equal:
        return "unclear" if is_flat and exponent else "as the theorem"
    if is_flat:
        return "flat"
    word = "falls" if slope.mean < 0 else "rises"
    if exponent == 0:
        return word
    if slope.mean * exponent < 0:
        return f"{word} instead"
    return f"{word} {'faster' if abs(slope.mean) > abs(exponent) else 'slower'}"


def geometric_mean(ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the geometric mean over seeds [S, N] and the standard error of its logarithm."""
    logs = np.log(ys)
    return np.exp(logs.mean(axis=0)), logs.std(axis=0, ddof=1) / len(logs) ** 0.5
