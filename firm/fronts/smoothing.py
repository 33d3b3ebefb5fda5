"""Smoothing of training curves, and a measure of oscillation."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from firm.solvers.checks import check_finite


def exponential_average(values: ArrayLike, *, half_life: float) -> np.ndarray:
    """Returns the exponential moving average with the given half-life in steps.

    That is y_t = Σ_i d^i x_{t-i} / Σ_i d^i over i = 0 to t, with d = 2^(-1 / half_life). Dividing
    by the sum of the weights removes the bias towards zero, so that the first average equals the
    first value. The figures of the FIRM paper are smoothed with half-life 20; the paper does not
    specify the initialisation. Values are numbers or arrays per step, [T, ...].

    >>> exponential_average([0.0, 3.0], half_life=1).tolist()
    [0.0, 2.0]
    """
    if not 0 < half_life < np.inf:
        raise ValueError(f"half_life must be positive and finite, got {half_life}.")
    steps = _as_steps(values)
    columns = pd.DataFrame(steps.reshape(len(steps), -1))
    return columns.ewm(halflife=half_life).mean().to_numpy().reshape(steps.shape)


def total_variation(values: ArrayLike) -> np.ndarray:
    """Returns the total variation ``Σ_t |x_t - x_{t-1}|`` over steps, [T, ...] to [...].

    For the weights λ [T, M] of a run, it measures their oscillation by objective. It is 0 for a
    single step.

    >>> total_variation([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]]).tolist()
    [0.5, 0.5]
    """
    return np.abs(np.diff(_as_steps(values), axis=0)).sum(axis=0)


def _as_steps(values: ArrayLike) -> np.ndarray:
    steps = np.asarray(values, dtype=np.float64)
    if steps.ndim == 0 or steps.size == 0:
        raise ValueError(f"values must have at least one step, got shape {list(steps.shape)}.")
    check_finite(steps, name="values")
    return steps
