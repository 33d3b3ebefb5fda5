"""LoRA, the adapter that every kind derives from, and the registry of kinds.

A kind decides which parameters a layer trains, how they change the layer's output, and how they
fold into the ordinary LoRA adapter that is saved and served. It is one class in one file that
derives from `Lora`, overrides the methods that differ, and registers by `register_adapter`.
"""

from collections.abc import Collection
from dataclasses import field
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import torch
from annotated_types import Interval, MinLen
from peft.tuners.lora import LoraLayer

from firm.alignment.adapters.target_modules import ATTENTION
from firm.federation.client import Adapter
from firm.fields import NOT_IN_PAPER, BoundedInt, Paper, PositiveFloat, configuration
from firm.registry import Registry


@configuration(source=Paper("section 5"))
class LoraSettings:
    """The adapter, the only thing that is trained and sent."""

    r: BoundedInt = 16
    """Rank."""
    alpha: PositiveFloat = 32.0
    """Scale: the update is multiplied by alpha / r."""
    dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.05
    """Dropout on the adapter's input, active in updates and off in rollouts."""
    target_modules: Annotated[list[str] | None, MinLen(1), Paper("A.1")] = field(
        default_factory=lambda: list(ATTENTION)
    )
    """Names of the linear layers of the language model that get an adapter; null takes PEFT's
    choice for the model type."""
    freeze_a: Annotated[bool, NOT_IN_PAPER] = False
    """Whether A keeps its initial values, so that only B is trained and sent: half the adapter
    where layers are square, and the mean of B is the mean of B·A: FFA-LoRA, Sun et al. (2024),
    arXiv:2403.12313."""


class PassRows(Protocol):
    """The rows [b] of a forward pass, each of which may use a different adapter.

    Kinds multiply by their parameters through `product` alone. That gives each row the matrices of
    its client in a joint pass, and is where gradients are taken apart by sequence.
    """

    preferences: torch.Tensor | None
    """Shares of the M objectives by row, [b, M]; None is equal shares."""

    def is_base(self, layer: Any) -> bool:
        """Returns whether the rows go through the base model, without an adapter."""
        ...

    def dropped(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns x [b, ..., in] after the adapter's dropout."""
        ...

    def product(self, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        """Returns x Wᵀ, [b, ..., out], with the matrix W of this name, such as "lora_A"."""
        ...


class Lora:
    """LoRA: a layer adds (α / r) B A x to its output, with A [r, in] and B [out, r]."""

    name: ClassVar[str] = "lora"
    """The value of `policy.adapter` that chooses the kind."""
    has_factors: ClassVar[bool] = True
    """Whether the trained parameters are LoRA's A and B, which have ranks and a product."""
    is_linear: ClassVar[bool] = True
    """Whether all trained parameters are matrices that act by `PassRows.product`. Other kinds can
    neither be conditioned nor stacked, and their M gradients take M backward passes."""

    def __init__(self, settings: LoraSettings) -> None:
        self.settings = settings

    def check(
        self, *, lora_mean: str, ranks: Collection[str], start: Collection[str], engine: str
    ) -> None:
        """Checks that a run can train this adapter.

        Args:
            lora_mean: The mean that the server takes, `strategy.lora_mean`.
            ranks: Clients that train some of the ranks.
            start: Folders of adapters that the run starts from.
            engine: Name of the engine.

        Raises:
            ValueError: It cannot.
        """
        freezes_a = self.settings.freeze_a
        if lora_mean == "products" and (freezes_a or not self.has_factors):
            given = "policy.lora.freeze_a" if freezes_a else f"policy.adapter {self.name}"
            raise ValueError(
                f"strategy.lora_mean must be factors with {given}, which does not train both A and "
                "B, got products."
            )
        if freezes_a and start:
            raise ValueError(
                "start must be empty with policy.lora.freeze_a, since the adapters' own A would be "
                f"lost, got {list(start)}."
            )
        if ranks and not self.has_factors:
            raise ValueError(
                f"strategy.ranks are of LoRA layers; policy.adapter must be lora, got {self.name}."
            )
        if engine == "stacked" and not self.is_linear:
            raise ValueError(
                f"engine must be local with policy.adapter {self.name}, whose parameters are not "
                "all matrices that a joint pass could stack, got stacked."
            )

    def peft_options(self) -> dict[str, Any]:
        """Returns further arguments of PEFT's `LoraConfig`."""
        return {}

    def prepare_(self, policy: Any) -> None:
        """Changes the fresh LoRA adapter that PEFT has made into one of this kind.

        Raises:
            ValueError: The adapted layers cannot have one.
        """
        if self.settings.freeze_a:
            freeze_a_(policy)

    def update(self, layer: Any, rows: PassRows, x: torch.Tensor) -> torch.Tensor:
        """Returns the adapter's part of a layer's output before scaling, for x [b, ..., in]."""
        return rows.product(layer, "lora_B", rows.product(layer, "lora_A", x))

    def output(
        self, layer: Any, rows: PassRows, x: torch.Tensor, result: torch.Tensor
    ) -> torch.Tensor:
        """Returns a layer's output [b, ..., out].

        Args:
            layer: PEFT's LoRA layer.
            rows: The rows of x, which provide products with the parameters.
            x: The layer's input, shape [b, ..., in].
            result: The output of the base layer, shape [b, ..., out].
        """
        x = rows.dropped(layer, x.to(layer.lora_A["default"].weight.dtype))
        update = self.update(layer, rows, x)
        return (result + update * layer.scaling["default"]).to(result.dtype)

    def as_lora(self, policy: Any, adapter: Adapter) -> Adapter:
        """Converts the policy's adapter to an ordinary LoRA adapter, as PEFT reads it.

        Args:
            policy: The policy, which may hold fixed matrices.
            adapter: All parameters of `policy.state_dict()` with `lora_` in their names.
        """
        return adapter

    def from_lora(self, policy: Any, adapter: Adapter, problem: str) -> Adapter:
        """Converts a PEFT file's adapter to parameters of this kind; inverts `as_lora`.

        Raises:
            ValueError: The adapter was not trained as this kind; the message opens with `problem`.
        """
        return adapter


Kind = TypeVar("Kind", bound=type[Lora])

ADAPTERS: Registry[str, type[Lora]] = Registry("adapter", {"lora": Lora})
"""Kinds of adapters, by the name that `policy.adapter` chooses them by."""


def register_adapter(kind: Kind) -> Kind:
    """Adds a kind of adapters; a decorator of the class.

    Raises:
        ValueError: The name is taken.
    """
    return ADAPTERS.add(kind.name, kind)


def adapted_modules(model: Any) -> dict[str, Any]:
    """Returns the LoRA layers that PEFT has put into a model, by their full names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def freeze_a_(policy: Any) -> None:
    """Freezes the A matrices of the policy's adapter.

    PEFT makes an adapter trainable again whenever it switches it on, but for the names that a layer
    declares. Versions that know no such names thaw A after the first rollout. A is not trained even
    then, since `adapter_parameters` is read before, but takes memory in updates.
    """
    for layer in adapted_modules(policy).values():
        layer.frozen_peft_weight_names = {"default": ("lora_A",)}
        for matrix in layer.lora_A.values():
            matrix.requires_grad_(False)
