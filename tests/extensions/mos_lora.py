"""A kind of adapter of another package: MoSLoRA, LoRA with a trained matrix between A and B."""

from typing import Any, ClassVar

import torch
from torch import nn

from firm.alignment.adapters import Lora, PassRows, adapted_modules, register_adapter
from firm.federation import Adapter


@register_adapter
class MosLora(Lora):
    """MoSLoRA, Wu et al. (2024), arXiv:2406.11909: ΔW = (α / r) B M A with a mixer M [r, r].

    Here M starts as the identity, so that a fresh adapter is that of LoRA.
    """

    name: ClassVar[str] = "mos_lora"
    has_factors: ClassVar[bool] = False

    def prepare_(self, policy: Any) -> None:
        """Adds M to each layer."""
        super().prepare_(policy)
        for layer in adapted_modules(policy).values():
            weight = layer.lora_A["default"].weight
            mixer = nn.Linear(len(weight), len(weight), bias=False, device="meta")
            mixer.weight = nn.Parameter(torch.eye(len(weight)).to(weight))
            layer.add_module("lora_M", nn.ModuleDict({"default": mixer}))

    def update(self, layer: Any, rows: PassRows, x: torch.Tensor) -> torch.Tensor:
        """Returns B M A x, [b, ..., out]."""
        for name in ("lora_A", "lora_M", "lora_B"):
            x = rows.product(layer, name, x)
        return x

    def as_lora(self, policy: Any, adapter: Adapter) -> Adapter:
        """Returns LoRA with M A in place of A."""
        plain = {name: values for name, values in adapter.items() if "lora_M" not in name}
        for name in plain:
            if "lora_A" in name:
                plain[name] = adapter[name.replace("lora_A", "lora_M")] @ plain[name]
        return plain

    def from_lora(self, policy: Any, adapter: Adapter, problem: str) -> Adapter:
        """Returns a PEFT file's adapter with the identity for M."""
        mixers = {
            name.replace("lora_A", "lora_M"): torch.eye(len(values))
            for name, values in adapter.items()
            if "lora_A" in name
        }
        return {**adapter, **mixers}
