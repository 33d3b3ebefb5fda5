"""The server's step from a round's updates, composed of transformations as in optax.

Some transformations select or weight updates, one averages them, others modify the mean. Options
add their own (``Option.steps``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol

from firm.federation.aggregation import (
    Aggregation,
    by_client,
    server_step,
    shares,
    update_lengths,
)
from firm.federation.client import Adapter, State
from firm.federation.messages import Update


@dataclass(frozen=True)
class ServerStep:
    """A server's step in progress, from a round's accepted updates to θ_{t+1}."""

    start: Adapter
    """θ_t."""
    updates: Sequence[Update]
    """The updates that count; at least one."""
    round: int
    """The round, from 1."""
    sampled: Sequence[str]
    """Names of all clients that were asked."""
    num_clients: int
    """Clients in all, C."""
    num_refused: int
    """Clients whose answers were refused."""
    memory: State
    """The strategy's memory from round to round."""
    weights: Sequence[float] = ()
    """Weight of each update, not scaled."""
    lengths: Sequence[float] | None = None
    """Divisor of each update; None leaves them as they are."""
    adapter: Adapter = field(default_factory=dict)
    """θ_{t+1}, once there is a mean."""
    learning_rate: float = 1.0
    """η that the step was taken with."""
    entries: State = field(default_factory=dict)
    """Entries of the round's row, JSON-able."""
    hidden: tuple[str, ...] = ()
    """Entries of the round's row that must not be logged."""


class Transform(Protocol):
    """One transformation of a server's step."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the transformation applied."""
        ...


def chain(*transforms: Transform) -> Callable[[ServerStep], ServerStep]:
    """Composes transformations from left to right."""
    return lambda step: reduce(lambda so_far, transform: transform(so_far), transforms, step)


@dataclass(frozen=True)
class UnitLengths:
    """Normalises every update to norm 1; a zero update has no direction and stays zero."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the updates' norms, and "zero_updates" in the row if any."""
        lengths = update_lengths(step.start, step.updates)
        entries = {**step.entries, **zero_updates(step.updates, lengths)}
        return replace(step, lengths=lengths, entries=entries)


@dataclass(frozen=True)
class Count:
    """Weights updates equally, or by their clients' numbers of examples."""

    by: Aggregation

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the updates' weights."""
        return replace(step, weights=shares(step.updates, by=self.by))


@dataclass(frozen=True)
class Mean:
    """Takes the weighted mean of the updates; see ``server_step``."""

    learning_rate: float = 1.0
    """η, inside the sum."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with θ_{t+1}."""
        adapter = server_step(
            step.start,
            [update.adapter for update in step.updates],
            step.weights,
            learning_rate=self.learning_rate,
            lengths=step.lengths,
        )
        return replace(step, adapter=adapter, learning_rate=self.learning_rate)


@dataclass(frozen=True)
class Rate:
    """Steps from θ_t towards the mean with a server learning rate η: θ_t + η (θ̄ - θ_t)."""

    learning_rate: float

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with θ_{t+1} moved by η."""
        rate = self.learning_rate
        adapter = server_step(step.start, [step.adapter], [1.0], learning_rate=rate)
        return replace(step, adapter=adapter, learning_rate=rate)


def zero_updates(
    updates: Sequence[Update], lengths: Sequence[float] | None
) -> dict[str, list[str]]:
    """Returns an entry of the round's row with the names of clients that sent zero updates.

    It is empty if there are none, or if updates are not normalised and ``lengths`` is None.
    """
    if lengths is None:
        return {}
    names = [name for name, length in by_client(updates, lengths).items() if length == 0]
    return {"zero_updates": names} if names else {}
