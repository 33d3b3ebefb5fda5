"""LoRA, the base class of all kinds of adapters, and their registry.

A kind defines which parameters a layer trains, how they change the layer's output, and how they
convert to the ordinary LoRA adapter that is saved and served. It is a class in its own file that
derives from `Lora`, overrides the methods that differ, and is registered with `register_adapter`.
"""

from collections.abc import Collection
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from annotated_types import Interval, MinLen

from firm.base.fields import NOT_IN_PAPER, BoundedInt, Paper, PositiveFloat, configuration
from firm.base.registry import Registry

if TYPE_CHECKING:
    import torch

    from firm.federation.client import Adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""Attention projections of Llama and most later models, as in Appendix A.1 of the paper."""


@configuration(source=Paper("section 5"))
class LoraSettings:
    """LoRA adapter, the only part of the policy that is trained and sent."""

    r: BoundedInt = 16
    """Rank."""
    alpha: PositiveFloat = 32.0
    """Scale of the update, which is multiplied by alpha / r."""
    dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.05
    """Dropout on the adapter's input, active in updates only."""
    target_modules: Annotated[list[str] | None, MinLen(1), Paper("A.1")] = field(
        default_factory=lambda: list(ATTENTION)
    )
    """Names of the linear layers that get an adapter; null uses PEFT's default for the model
    type."""
    freeze_a: Annotated[bool, NOT_IN_PAPER] = False
    """Freeze A at its initial values, so that only B is trained and sent (FFA-LoRA, Sun
    et al. 2024, arXiv:2403.12313). This halves the adapter of square layers and makes the mean of B
    exact for B·A."""


class PassRows(Protocol):
    """Rows [b] of a forward pass, which may use different adapters.

    Kinds must multiply by their parameters through `product` only. In a joint pass it uses the
    matrices of each row's client, and it is where gradients are separated by sequence.
    """

    preferences: "torch.Tensor | None"
    """Shares of the M objectives by row, [b, M]; None for equal shares."""
    is_overwritten: bool
    """True if the preferences are a buffer whose values change."""

    @property
    def members(self) -> "torch.Tensor | None":
        """Index of each row's adapter, [b]; None if all C adapters have b / C adjacent rows."""
        ...

    def is_base(self, layer: Any) -> bool:
        """Returns whether the rows use the base model without an adapter."""
        ...

    def dropped(self, layer: Any, x: "torch.Tensor") -> "torch.Tensor":
        """Returns x [b, ..., in] after the adapter's dropout."""
        ...

    def product(self, layer: Any, name: str, x: "torch.Tensor") -> "torch.Tensor":
        """Returns x Wᵀ, [b, ..., out], with the matrix W called `name`, such as "lora_A"."""
        ...


class Lora:
    """LoRA: a layer adds (α / r) B A x to its output, with A [r, in] and B [out, r]."""

    name: ClassVar[str] = "lora"
    """Value of `policy.adapter` that selects the kind."""
    has_factors: ClassVar[bool] = True
    """True if the trained parameters are LoRA's factors A and B."""
    is_linear: ClassVar[bool] = True
    """True if all trained parameters are matrices used through `PassRows.product`. Other kinds
    support neither conditioning nor stacking, and need M backward passes for M gradients."""

    def __init__(self, settings: LoraSettings) -> None:
        self.settings = settings

    def check(
        self, *, lora_mean: str, ranks: Collection[str], start: Collection[str], engine: str
    ) -> None:
        """Checks that a run can train this adapter.

        Args:
            lora_mean: Value of `strategy.lora_mean`.
            ranks: Clients that train only some of the ranks.
            start: Folders of adapters that the run starts from.
            engine: Name of the engine.

        Raises:
            ValueError: When a setting is not supported with this adapter.
        """
        freezes_a = self.settings.freeze_a
        if lora_mean == "products" and (freezes_a or not self.has_factors):
            given = "policy.lora.freeze_a" if freezes_a else f"policy.adapter {self.name}"
            raise ValueError(
                f"strategy.lora_mean must be factors with {given}, which does not train A and B "
                "both, got products."
            )
        if freezes_a and start:
            raise ValueError(
                "start must be empty with policy.lora.freeze_a, which would discard the adapters' "
                f"A, got {list(start)}."
            )
        if ranks and not self.has_factors:
            raise ValueError(f"strategy.ranks requires policy.adapter lora, got {self.name}.")
        if engine == "stacked" and not self.is_linear:
            raise ValueError(
                f"engine must be local with policy.adapter {self.name}, which has parameters that "
                "cannot be stacked, got stacked."
            )

    def peft_options(self) -> dict[str, Any]:
        """Returns additional arguments of PEFT's `LoraConfig`."""
        return {}

    def prepare_(self, policy: Any) -> None:
        """Converts the fresh LoRA adapter created by PEFT to this kind.

        Raises:
            ValueError: When the adapted layers do not support it.
        """
        if self.settings.freeze_a:
            freeze_a_(policy)

    def update(self, layer: Any, rows: PassRows, x: "torch.Tensor") -> "torch.Tensor":
        """Returns the adapter's contribution to the output before scaling, for x [b, ..., in]."""
        # A first, so that [b, ..., r] is between the two products
        return rows.product(layer, "lora_B", rows.product(layer, "lora_A", x))

    def output(
        self, layer: Any, rows: PassRows, x: "torch.Tensor", result: "torch.Tensor"
    ) -> "torch.Tensor":
        """Returns a layer's output [b, ..., out].

        Args:
            layer: PEFT's LoRA layer.
            rows: The rows of x, which provide products with the parameters.
            x: The layer's input, shape [b, ..., in].
            result: The output of the base layer, shape [b, ..., out].
        """
        # float32 in a bfloat16 model
        x = rows.dropped(layer, x.to(layer.lora_A["default"].weight.dtype))
        update = self.update(layer, rows, x)
        return result.add(update, alpha=layer.scaling["default"]).to(result.dtype)

    def as_lora(self, policy: Any, adapter: "Adapter") -> "Adapter":
        """Converts the policy's adapter to an ordinary LoRA adapter for PEFT.

        Args:
            policy: The policy, which may hold fixed matrices.
            adapter: All parameters of `policy.state_dict()` with `lora_` in their names.
        """
        return adapter

    def from_lora(self, policy: Any, adapter: "Adapter", problem: str) -> "Adapter":
        """Converts a PEFT file's adapter to parameters of this kind; inverts `as_lora`.

        Raises:
            ValueError: When the adapter was not trained as this kind; the message starts with
                `problem`.
        """
        return adapter


Kind = TypeVar("Kind", bound=type[Lora])

ADAPTERS: Registry[str, type[Lora]] = Registry(
    "adapter", {"lora": Lora, "lora_xs": "firm.alignment.adapters.lora_xs"}
)
"""Kinds of adapters by the value of `policy.adapter`."""


def register_adapter(kind: Kind) -> Kind:
    """Registers a kind of adapter; a class decorator.

    Raises:
        ValueError: When the name is taken.
    """
    return ADAPTERS.add(kind.name, kind)


def adapted_modules(model: Any) -> dict[str, Any]:
    """Returns PEFT's LoRA layers in a model, by their full names."""
    from peft.tuners.lora import LoraLayer  # here, since settings are read without PEFT

    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def freeze_a_(policy: Any) -> None:
    """Freezes the A matrices of the policy's adapter.

    PEFT makes an adapter trainable whenever it enables it, except for parameters listed in
    `frozen_peft_weight_names`. Versions without this attribute unfreeze A after the first rollout.
    A is still not trained, since `adapter_parameters` has been read before, but takes memory in
    updates.
    """
    for layer in adapted_modules(policy).values():
        layer.frozen_peft_weight_names = {"default": ("lora_A",)}
        for matrix in layer.lora_A.values():
            matrix.requires_grad_(False)
