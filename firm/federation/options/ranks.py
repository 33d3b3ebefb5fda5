"""Ranks per client: some clients train and send only the first ranks of each LoRA layer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from annotated_types import Interval, Len
from pydantic import PlainValidator, ValidationInfo

from firm.federation.aggregation import Mean, ServerStep, Transform, flat, unflatten
from firm.federation.client import Adapter, Client, Gradients
from firm.federation.messages import MAX_CLIENTS, Update, sent_form
from firm.federation.option import Need, Option, Train, option
from firm.federation.round_config import RoundConfig
from firm.federation.schema import Invalid, Text, context, finite, invalid, shown

_FACTOR = re.compile(r".*\blora_(A|B\d*)(?:\.[^.]+)?\.weight")
Rank = Annotated[int, Interval(ge=1, le=2**20)]
_WHY = "each rank is averaged over the clients that train it"


def _numbers(value: Any, info: ValidationInfo) -> torch.Tensor:
    size = context(info).num_parameters
    is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if not is_tensor or not value.is_floating_point() or value.ndim != 1:
        raise invalid("a vector of floats", value)
    if value.numel() > size:
        raise Invalid(f" must be of at most {size} numbers, got {value.numel()}")
    return finite(value)


Numbers = Annotated[torch.Tensor, PlainValidator(_numbers)]
"""A vector of floats, no longer than θ_t."""


@sent_form
@dataclass(frozen=True)
class PartialUpdate:
    """The parameters of θ_c that a client trains, which are sent instead of θ_c."""

    partial: Numbers
    """The trained parameters, concatenated, [k]."""


@option
@dataclass(frozen=True)
class Ranks(Option):
    """Restricts clients to the first ranks of each LoRA layer."""

    key: ClassVar[str] = "ranks"
    travels: ClassVar[bool] = True
    scope: ClassVar[str] = "adapters"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("robust.rule", "none", _WHY),
        Need("lora_mean", "factors", _WHY),
        Need("normalize_updates", False, _WHY),
        Need("privacy", None, _WHY),
        Need("secure", None, _WHY),
    )

    ranks: Annotated[Mapping[Text, Rank], Len(0, MAX_CLIENTS)]
    """Number of ranks by client; other clients train all ranks."""

    def of(self, clients: Sequence[str]) -> Self:
        """Returns the ranks of these clients."""
        return replace(self, ranks={c: self.ranks[c] for c in clients if c in self.ranks})

    def trained(self, adapter: Adapter, client: str) -> torch.Tensor | None:
        """Returns a mask of the parameters that a client trains, bool [d]; None for all."""
        return rank_mask(adapter, self.ranks[client]) if client in self.ranks else None

    def wrap(self, train: Train) -> Train:
        """Returns the training restricted to the client's ranks; only these are sent."""

        def partial_training(client: Client, request: Any) -> Update:
            trained = self.trained(request.adapter, client.name)
            if trained is None:
                return train(client, request)
            limited: Any = _LimitedClient(client, trained)
            update = train(limited, request)
            if not isinstance(update.adapter, dict):  # already packed by another option
                return update
            return replace(update, adapter=PartialUpdate(flat(update.adapter, None)[trained]))

        return partial_training

    def received(self, update: Update, request: Any) -> Update:
        """Returns the full update; parameters that the client does not train equal θ_t's.

        Raises:
            Invalid: The update has other parameters than the client trains.
        """
        content, trained = update.adapter, self.trained(request.adapter, update.client)
        if trained is None or not isinstance(content, dict | PartialUpdate):
            return update
        if isinstance(content, dict):
            raise Invalid("its update must contain only its ranks, got a whole adapter")
        numbers = flat(request.adapter, None).clone()
        size = int(trained.sum())
        if content.partial.shape != (size,) or content.partial.dtype != numbers.dtype:
            raise Invalid(f"its update must be {size} numbers, got {shown(content.partial)}")
        numbers[trained] = content.partial
        return replace(update, adapter=unflatten(numbers, request.adapter))

    def steps(self, steps: Sequence[Transform], cfg: RoundConfig) -> Sequence[Transform]:
        """Returns the steps with each parameter averaged over the clients that train it."""
        return [
            RankMean(self, step.learning_rate) if isinstance(step, Mean) else step for step in steps
        ]


class _LimitedClient:
    """Wraps a client, with zero gradients for the parameters that it does not train."""

    def __init__(self, client: Client, trained: torch.Tensor) -> None:
        self._client, self._trained = client, trained

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def gradients(self, minibatch: Any) -> Gradients:
        return self._within(self._client.gradients(minibatch))

    def gradients_by_preference(self, minibatch: Any) -> Gradients:
        return self._within(self._client.gradients_by_preference(minibatch))

    def weighted_gradients(self, minibatch: Any, weights: torch.Tensor) -> Gradients:
        return self._within(self._client.weighted_gradients(minibatch, weights))

    def weighted_steps(self, num_steps: int, weights: torch.Tensor, *, proximal: float) -> int:
        return 0  # the client's own ``weighted_steps`` would ignore the ranks

    def _within(self, gradients: Gradients) -> Gradients:
        rows = gradients.jacobian
        return replace(gradients, jacobian=rows * self._trained.to(rows))


@dataclass(frozen=True)
class RankMean:
    """Averages each parameter over the clients that train it."""

    ranks: Ranks
    learning_rate: float
    """η, inside the sum."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with θ_{t+1}."""
        adapter = mean_where_trained(
            step.start,
            [update.adapter for update in step.updates],
            step.weights,
            [self.ranks.trained(step.start, update.client) for update in step.updates],
            learning_rate=self.learning_rate,
        )
        return replace(step, adapter=adapter, learning_rate=self.learning_rate)


def rank_mask(adapter: Adapter, rank: int) -> torch.Tensor:
    """Returns a mask of the parameters in the first ``rank`` ranks of their layers, bool [d].

    These are rows of A, and columns of B and of a conditioned adapter's further matrices.

    Raises:
        ValueError: A parameter is not a LoRA factor, or its layer has fewer ranks.
    """
    parts = []
    for name, parameter in adapter.items():
        factor = _FACTOR.fullmatch(name)
        if factor is None:
            raise ValueError(f"{name!r} is not a LoRA factor; ranks apply to LoRA adapters only.")
        axis = 0 if factor[1] == "A" else 1
        if parameter.size(axis) < rank:
            raise ValueError(
                f"{name!r} has {parameter.size(axis)} ranks; a client cannot train {rank} of them."
            )
        mask = torch.zeros(parameter.shape, dtype=torch.bool)
        mask.narrow(axis, 0, rank).fill_(True)
        parts.append(mask.reshape(-1))
    return torch.cat(parts)


def mean_where_trained(
    start: Adapter,
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    trained: Sequence[torch.Tensor | None],
    *,
    learning_rate: float = 1.0,
) -> Adapter:
    """Returns θ_t + η Σ wᵢ mᵢ (θᵢ - θ_t) / Σ wᵢ mᵢ, coordinate by coordinate.

    Each parameter is averaged over the clients that train it, as in HeteroFL (Diao et al. 2021,
    arXiv:2010.01264); a parameter that no client trains is unchanged. Padding missing parameters
    with zeros, as in HetLoRA (Cho et al. 2024, arXiv:2401.06432), would pull the mean back towards
    its previous value.

    Args:
        start: θ_t.
        adapters: θᵢ, at least one.
        weights: w, non-negative.
        trained: mᵢ, bool [d] over the adapter's parameters; None if a client trains all.
        learning_rate: η.
    """
    sizes = [parameter.numel() for parameter in start.values()]
    masks = [torch.ones(sum(sizes), dtype=torch.bool) if mask is None else mask for mask in trained]
    total = torch.stack([w * mask.double() for w, mask in zip(weights, masks, strict=True)]).sum(0)
    result, place = {}, 0
    for (name, parameter), size in zip(start.items(), sizes, strict=True):
        part = slice(place, place + size)
        origin = parameter.double().reshape(-1)
        moves = torch.zeros_like(origin)
        for adapter, weight, mask in zip(adapters, weights, masks, strict=True):
            delta = adapter[name].double().reshape(-1) - origin
            moves += weight * mask[part] * delta
        step = moves / total[part].where(total[part] > 0, 1.0)
        result[name] = (origin + learning_rate * step).view_as(parameter).to(parameter.dtype)
        place += size
    return result
