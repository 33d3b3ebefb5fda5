"""The server's step from a round's updates, composed of transformations as in optax.

Some transformations select or weight updates, one averages them, others modify the mean. Options
add their own (``Option.steps``). The functions below them compute with adapters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from firm.base.state import State
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.round_config import Aggregation


@dataclass(frozen=True)
class ServerStep:
    """A server's step in progress, from a round's accepted updates to θ_{t+1}."""

    start: Adapter
    """θ_t."""
    updates: Sequence[Update]
    """Updates to average; at least one."""
    round: int
    """The round, from 1."""
    sampled: Sequence[str]
    """Names of all clients that received a request."""
    num_clients: int
    """Total number of clients, C."""
    num_refused: int
    """Number of clients that count as attackers, because of a rejected answer or by an option."""
    memory: State
    """State of the strategy between rounds."""
    weights: Sequence[float] = ()
    """Unnormalised weight of each update."""
    lengths: Sequence[float] | None = None
    """Norms by which updates are divided; None leaves updates unchanged."""
    adapter: Adapter = field(default_factory=dict)
    """θ_{t+1}, once the mean has been taken."""
    learning_rate: float = 1.0
    """Learning rate η of the step."""
    entries: State = field(default_factory=dict)
    """Entries of the round's row, JSON-able."""
    hidden: tuple[str, ...] = ()
    """Entries of the round's row that must not be logged."""


Transform = Callable[[ServerStep], ServerStep]
"""One transformation of a server's step."""


def chain(*transforms: Transform) -> Transform:
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


def shares(updates: Sequence[Any], *, by: Aggregation) -> list[int]:
    """Returns each client's unnormalised weight: 1, or the update's ``num_examples``."""
    return [1 if by == "uniform" else update.num_examples for update in updates]


def weighted_mean(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """Returns Σ wᵢ θᵢ / Σ wᵢ, summed in float64 in the given order, in the first adapter's dtypes.

    The mean of identical adapters is bitwise equal to them, and the mean of the same adapters in
    the same order is deterministic.

    Args:
        adapters: At least one; all with the same parameter names and shapes.
        weights: Non-negative, with a positive sum.
    """
    total = sum(weights)
    mean = {}
    for name, parameter in adapters[0].items():
        accumulator = torch.zeros(parameter.shape, dtype=torch.float64)
        for adapter, weight in zip(adapters, weights, strict=True):
            accumulator += weight * adapter[name].double()
        mean[name] = (accumulator / total).to(parameter.dtype)
    return mean


def server_step(
    start: Adapter,
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    *,
    learning_rate: float = 1.0,
    lengths: Sequence[float] | None = None,
) -> Adapter:
    """Returns θ_{t+1} = θ_t + η Σ λᵢ uᵢ with λ = w / Σw: the server's step along weighted updates.

    uᵢ is θᵢ - θ_t, divided by its norm if ``lengths`` are given; a zero update stays zero. Without
    lengths, a step with η = 1 is bitwise equal to ``weighted_mean``.

    Args:
        start: θ_t.
        adapters: θᵢ, at least one.
        weights: w, non-negative, with a positive sum.
        learning_rate: η.
        lengths: Norms by which the updates are divided.
    """
    if lengths is None and learning_rate == 1.0:
        return weighted_mean(adapters, weights)
    total = sum(weights)
    factors = [learning_rate * weight / total for weight in weights]
    return move_adapter(start, adapters, per_length(factors, lengths))


def per_length(factors: Sequence[float], lengths: Sequence[float] | None) -> list[float]:
    """Returns the factors divided by the updates' norms, if given; 0 for zero updates."""
    if lengths is None:
        return list(factors)
    pairs = zip(factors, lengths, strict=True)
    return [factor / length if length > 0 else 0.0 for factor, length in pairs]


def move_adapter(start: Adapter, adapters: Sequence[Adapter], factors: Sequence[float]) -> Adapter:
    """Returns θ_t + Σ aᵢ (θᵢ - θ_t), summed in float64 in the given order."""
    result = {}
    for name, parameter in start.items():
        origin = parameter.double()
        accumulator = origin.clone()
        for adapter, factor in zip(adapters, factors, strict=True):
            accumulator += factor * (adapter[name].double() - origin)
        result[name] = accumulator.to(parameter.dtype)
    return result


def update_matrix(start: Adapter, adapters: Sequence[Adapter]) -> torch.Tensor:
    """Returns the updates θᵢ - θ_t as rows, float32 [N, d], the columns in the adapter's order."""
    origin = flat(start)
    return torch.stack([flat(adapter) - origin for adapter in adapters])


def update_length(start: Adapter, adapter: Adapter) -> float:
    """Returns the norm ‖θ_c - θ_t‖ of an update, summed in float64."""
    squares = (
        (adapter[name].double() - parameter.double()).square().sum().item()
        for name, parameter in start.items()
    )
    return sum(squares) ** 0.5


def update_lengths(start: Adapter, updates: Sequence[Any]) -> list[float]:
    """Returns the norms ‖θ_c - θ_t‖ of the updates, summed in float64."""
    return [update_length(start, update.adapter) for update in updates]


def by_client(updates: Sequence[Any], values: Sequence[float]) -> dict[str, float]:
    """Returns a mapping from the updates' client names to values."""
    return {update.client: value for update, value in zip(updates, values, strict=True)}


def flat(adapter: Adapter, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
    """Returns an adapter's parameters as one vector [d]; a ``dtype`` of None keeps their dtype."""
    whole = torch.cat([parameter.reshape(-1) for parameter in adapter.values()])
    return whole if dtype is None else whole.to(dtype)


def unflatten(vector: torch.Tensor, like: Adapter) -> Adapter:
    """Returns a vector [d] as an adapter with the names, shapes and dtypes of ``like``."""
    parts = vector.split([parameter.numel() for parameter in like.values()])
    return {
        name: part.view(parameter.shape).to(parameter.dtype)
        for (name, parameter), part in zip(like.items(), parts, strict=True)
    }
