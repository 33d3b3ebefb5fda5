"""Forward pass of adapted layers, shared by all kinds of adapters and by joint passes.

PEFT's layers compute plain LoRA. For other kinds, and if rows of several clients share a batch,
`AdapterForward` computes their output: the base layer's output, modified by the kind for the rows
of the pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from firm.alignment.adapters.folded import FoldedAdapters, folds
from firm.alignment.adapters.lora import Lora, LoraSettings, PassRows, adapted_modules


class OwnRows:
    """Rows that all use the policy's own adapter, with PEFT's modules."""

    def __init__(self, preferences: torch.Tensor | None = None) -> None:
        self.preferences = preferences
        self.members: torch.Tensor | None = None  # one adapter
        self.is_overwritten = False

    def is_base(self, layer: Any) -> bool:
        """Returns whether the adapter is disabled in PEFT; see `PassRows`."""
        return layer.disable_adapters

    def dropped(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns x after the adapter's dropout; see `PassRows`."""
        return layer.lora_dropout["default"](x)

    def product(self, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        """Returns x Wᵀ; see `PassRows`. Calls the module, so that its hooks see the input."""
        return getattr(layer, name)["default"](x)


class AdapterForward:
    """The kind of a policy's adapter, and the rows of the current pass.

    Args:
        kind: The kind of the adapter.
    """

    def __init__(self, kind: Lora) -> None:
        self.kind = kind
        self.rows: PassRows = OwnRows()
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None  # an input, and it widened
        self._folded: FoldedAdapters | None = None
        self._methods: dict[Any, Any] = {}  # of the layers; the same ones, for compiled passes

    def install_(self, policy: Any) -> None:
        """Replaces the forward methods of the policy's adapted layers."""
        for layer in adapted_modules(policy).values():
            layer.forward = partial(self, layer)

    @contextmanager
    def of(self, rows: PassRows) -> Iterator[None]:
        """Sets the rows of passes inside the context."""
        outer, self.rows = self.rows, rows  # contexts may be nested
        try:
            yield
        finally:
            self.rows, self._latest = outer, None

    @contextmanager
    def using(self, policy: Any, folded: FoldedAdapters) -> Iterator[None]:
        """Uses converted adapters in passes inside the context."""
        layers = [m for m in adapted_modules(policy).values() if "forward" not in vars(m)]
        for layer in layers:  # PEFT computes them otherwise
            layer.forward = self._methods.setdefault(layer, partial(self, layer))
        outer, self._folded = self._folded, folded  # contexts may be nested
        try:
            yield
        finally:
            self._folded = outer
            for layer in layers:
                del layer.forward

    def __call__(self, layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Returns a layer's output for x [b, ..., in]; other arguments go to the base layer."""
        result = layer.base_layer(x, *args, **options)
        if self.rows.is_base(layer):
            return result
        if self._folded is not None:
            return self._folded.output(layer, self.rows, x, result)
        return self.kind.output(layer, self.rows, self._widen(layer, x), result)

    def _widen(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns x in the dtype of a layer's adapter, for joint passes.

        Layers in a row that share their input, as those of queries, keys and values, share the copy
        too: the graph would keep one of each. Other passes have no end at which to release it.
        """
        dtype = layer.lora_A["default"].weight.dtype
        if x.dtype == dtype or isinstance(self.rows, OwnRows):
            return x
        if self._latest is None or self._latest[0] is not x:
            self._latest = x, x.to(dtype)
        return self._latest[1]


def adapt_(policy: Any, kind: Lora) -> None:
    """Converts the fresh LoRA adapter of a policy to a kind.

    Raises:
        ValueError: As in `Lora.prepare_`.
    """
    kind.prepare_(policy)
    policy.adapter_forward = forward = AdapterForward(kind)
    is_peft_own = type(kind).update is Lora.update and type(kind).output is Lora.output
    if not is_peft_own:  # PEFT's own layers already compute plain LoRA
        forward.install_(policy)


def cast_once(
    policy: Any, adapters: Sequence[Mapping[str, torch.Tensor] | None] = (None,)
) -> AbstractContextManager[None]:
    """Returns a context for sampling, whose passes use adapters in the base model's precision.

    It has no effect on adapters that already have it, and on kinds that no LoRA adapter equals.

    Args:
        policy: A policy, or a model without an adapter.
        adapters: Parameters of the adapters of the rows; None for those in the slot.
    """
    is_lower = any(
        layer.get_base_layer().weight.dtype != own.weight.dtype
        for layer in adapted_modules(policy).values()
        for own in layer.lora_A.values()  # `firm evaluate` names adapters in its own way
    )
    if not is_lower or not folds(policy, forward_of(policy).kind):
        return nullcontext()
    forward = forward_of(policy)
    return forward.using(policy, FoldedAdapters(policy, forward.kind, adapters))


def forward_of(policy: Any) -> AdapterForward:
    """Returns the forward pass of a policy's adapted layers; LoRA if created by PEFT alone."""
    forward = getattr(policy, "adapter_forward", None)
    if forward is None:
        policy.adapter_forward = forward = AdapterForward(Lora(LoraSettings()))
    return forward
