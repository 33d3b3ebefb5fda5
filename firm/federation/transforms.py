"""The server's step from a round's updates: transformations that are composed, as in optax.

Some change which updates count and for how much, one takes their mean, others change the mean.
Options add their own (``Option.steps``).
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
    """A server's step under way, from a round's accepted updates to θ_{t+1}."""

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
    """Returns the composition of transformations, from left to right."""
    return lambda step: reduce(lambda so_far, transform: transform(so_far), transforms, step)


@dataclass(frozen=True)
class UnitLengths:
    """Divides every update by its length; a zero update has no direction and stays zero."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the lengths, and the row's "zero_updates" where there are any."""
        lengths = update_lengths(step.start, step.updates)
        entries = {**step.entries, **zero_updates(step.updates, lengths)}
        return replace(step, lengths=lengths, entries=entries)


@dataclass(frozen=True)
class Count:
    """Says what each update counts for: the same, or its client's number of examples."""

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
    """Steps from θ_t towards the mean by a server learning rate η: θ_t + η (θ̄ - θ_t)."""

    learning_rate: float

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with θ_{t+1} moved."""
        rate = self.learning_rate
        adapter = server_step(step.start, [step.adapter], [1.0], learning_rate=rate)
        return replace(step, adapter=adapter, learning_rate=rate)


def zero_updates(
    updates: Sequence[Update], lengths: Sequence[float] | None
) -> dict[str, list[str]]:
    """Returns an entry of the round's row that names the clients whose updates have no direction.

    It is empty where all have one, and where there are no lengths because they do not matter.
    """
    if lengths is None:
        return {}
    names = [name for name, length in by_client(updates, lengths).items() if length == 0]
    return {"zero_updates": names} if names else {}
