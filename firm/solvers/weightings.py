"""Weightings: functions that compute the weights of a local step, by the name in requests."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from firm.base.registry import OneOf, Registry
from firm.base.schema import Finite, Items, Name, Named, NonNegative, PerObjective
from firm.solvers.checks import ArrayT
from firm.solvers.fixed import fixed_weights
from firm.solvers.raco import raco_weights
from firm.solvers.regularised import Solver, served_weights
from firm.solvers.torchjd import METHODS, torchjd_weights

WEIGHTINGS: Registry[str, Callable[..., Any]] = Registry("weighting")
"""Functions that compute weights, by name; see ``weighting``."""
OPTION_TYPES: dict[str, Any] = {}
"""Types of the options of all weightings, by name, as requests are validated."""
STATEFUL: set[str] = set()
"""Names of the weightings that take a client's ``memory``."""

Weighting = TypeVar("Weighting", bound=Callable[..., Any])


def weighting(
    name: str, *, is_stateful: bool = False, **options: Any
) -> Callable[[Weighting], Weighting]:
    """Returns a decorator that registers a function that computes the weights in local training.

    The function takes a Gram matrix [M, M] and, by keyword, the indices of the objectives that the
    client serves, as ``served``, and options of the types given here. It returns weights [M]. A
    stateful one also takes ``memory``, a mapping that is part of the client's state; it replaces
    entries there and does not change them.

    Raises:
        ValueError: The name is taken, or another weighting has an option of the same name with a
            different type.
    """

    def register(function: Weighting) -> Weighting:
        for option, kind in options.items():
            if OPTION_TYPES.setdefault(option, kind) != kind:
                raise ValueError(f"the option {option!r} exists already; choose another name.")
        if is_stateful:
            STATEFUL.add(name)
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

weighting("raco", c=NonNegative, preference=Items[NonNegative] | None)(raco_weights)

weighting(
    "torchjd",
    is_stateful=True,
    method=Annotated[str, OneOf(METHODS)],
    options=Named[Finite | Name],
    preference=Items[NonNegative] | None,
)(torchjd_weights)
