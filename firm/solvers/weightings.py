"""Weightings: functions that compute the weights of a local step, by the name in requests."""

from collections.abc import Callable
from typing import Any, TypeVar

from firm.base.registry import Registry
from firm.base.schema import Finite, Items, NonNegative, PerObjective
from firm.solvers.checks import ArrayT
from firm.solvers.fixed import fixed_weights
from firm.solvers.regularised import Solver, served_weights

WEIGHTINGS: Registry[str, Callable[..., Any]] = Registry("weighting")
"""Functions that compute weights, by name; see ``weighting``."""
OPTION_TYPES: dict[str, Any] = {}
"""Types of the options of all weightings, by name, as requests are validated."""

Weighting = TypeVar("Weighting", bound=Callable[..., Any])


def weighting(name: str, **options: Any) -> Callable[[Weighting], Weighting]:
    """Returns a decorator that registers a function that computes the weights in local training.

    The function takes a Gram matrix [M, M] and, by keyword, the indices of the objectives that the
    client serves, as ``served``, and options of the types given here. It returns weights [M].

    Raises:
        ValueError: The name is taken, or another weighting has an option of the same name with a
            different type.
    """

    def register(function: Weighting) -> Weighting:
        for option, kind in options.items():
            if OPTION_TYPES.setdefault(option, kind) != kind:
                raise ValueError(f"the option {option!r} exists already; choose another name.")
        return WEIGHTINGS.add(name, function)

    return register


@weighting("fixed", weights=PerObjective[NonNegative] | None)
def _fixed(gram: ArrayT, *, served: Any, weights: Any = None) -> ArrayT:
    return fixed_weights(gram, weights=weights)


weighting(
    "firm",
    beta=NonNegative,
    preference=Items[NonNegative] | None,
    preference_strength=NonNegative,
    normalize=bool,
    norm_power=Finite,
    solver=Solver,
    constraints=Items[Items[Finite]],
)(served_weights)
