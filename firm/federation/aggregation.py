"""The server's step, which computes the next adapter from the clients' adapters."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from firm.federation.client import Adapter

Aggregation = Literal["uniform", "by_examples"]


def shares(updates: Sequence[Any], *, by: Aggregation) -> list[int]:
    """Returns each client's unnormalised weight: 1, or the update's ``num_examples``.

    Raises:
        ValueError: A size is negative, or all are zero.
    """
    counts = [1 if by == "uniform" else update.num_examples for update in updates]
    if min(counts) < 0 or sum(counts) <= 0:
        raise ValueError(f"Clients need examples to be weighed by, got counts {counts}.")
    return counts


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
    return moved(start, adapters, per_length(factors, lengths))


def per_length(factors: Sequence[float], lengths: Sequence[float] | None) -> list[float]:
    """Returns the factors divided by the updates' norms, if given; 0 for zero updates."""
    if lengths is None:
        return list(factors)
    pairs = zip(factors, lengths, strict=True)
    return [factor / length if length > 0 else 0.0 for factor, length in pairs]


def moved(start: Adapter, adapters: Sequence[Adapter], factors: Sequence[float]) -> Adapter:
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


def unflattened(vector: torch.Tensor, like: Adapter) -> Adapter:
    """Returns a vector [d] as an adapter with the names, shapes and dtypes of ``like``."""
    parts = vector.split([parameter.numel() for parameter in like.values()])
    return {
        name: part.view(parameter.shape).to(parameter.dtype)
        for (name, parameter), part in zip(like.items(), parts, strict=True)
    }
