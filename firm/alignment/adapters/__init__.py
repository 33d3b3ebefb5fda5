"""Kinds of adapters, one per file, with a common forward pass.

`lora` has the base class of all kinds and their registry, `lora_xs` and `conditioned` are further
kinds, `forward` computes adapted layers, and `target_modules` selects the layers.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.alignment.adapters.conditioned import (
        Conditioned,
        PreferenceStream,
        preference_sampler,
    )
    from firm.alignment.adapters.forward import adapt_, forward_of
    from firm.alignment.adapters.lora import (
        Lora,
        LoraSettings,
        PassRows,
        adapted_modules,
        register_adapter,
    )

__all__ = [
    "Conditioned",
    "Lora",
    "LoraSettings",
    "PassRows",
    "PreferenceStream",
    "adapt_",
    "adapted_modules",
    "forward_of",
    "preference_sampler",
    "register_adapter",
]

__getattr__, __dir__ = lazy(__name__)
