"""Checks of the solvers' options, without the solvers: configurations are read before them."""

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from numbers import Real
from typing import Any, Literal

from firm.base.preferences import NamedShares

Solver = Literal["exact", "cvxpy"]


def check_strength(name: str, value: float) -> None:
    """Raises ``ValueError`` unless a factor of a regulariser is non-negative and finite."""
    if not value >= 0:
        raise ValueError(f"{name} must be non-negative, got {value}.")
    if value == inf:
        raise ValueError(f"{name} must be finite, got {value}; 1e6 has the same effect.")


def check_shares(
    values: Sequence[float] | Any, objectives: int | Sequence[str], *, name: str
) -> None:
    """Raises ``ValueError`` unless there is a share per objective, and one is above zero.

    Shares by name may all be zero, since one objective may be left out, whose share is the rest.

    Args:
        values: The shares.
        objectives: Number of objectives, or their names for the message.
        name: Key of the shares for the message.
    """
    num_objectives = objectives if isinstance(objectives, int) else len(objectives)
    names = "" if isinstance(objectives, int) else f" ({', '.join(objectives)})"
    values = getattr(values, "tolist", lambda: values)()  # of an array or a tensor
    entries = list(values) if isinstance(values, Iterable) else [None]
    if len(entries) != num_objectives or not all(isinstance(each, Real) for each in entries):
        raise ValueError(
            f"{name} must have one entry for each of the {num_objectives} objectives{names}, got "
            f"{values}."
        )
    is_some = any(values) or isinstance(values, NamedShares)
    if not (all(isfinite(each) and each >= 0 for each in values) and is_some):
        raise ValueError(f"{name} must be finite, non-negative and not all zero, got {values}.")


def check_steps(step_size: float) -> None:
    """Raises ``ValueError`` unless the size of projected gradient steps is positive and finite."""
    if not 0 < step_size < inf:
        raise ValueError(f"step_size must be positive and finite, got {step_size}.")


def check_targets(threshold: float, min_weight: float, num_active: int) -> None:
    """Raises ``ValueError`` unless the options of FedCMOO-Pref allow weights of the objectives."""
    if not threshold >= 0:
        raise ValueError(f"threshold must be non-negative, got {threshold}.")
    if not 0 <= min_weight <= 1 / num_active:
        raise ValueError(
            f"min_weight must be between 0 and 1/{num_active}, one over the number of objectives, "
            f"got {min_weight}."
        )
