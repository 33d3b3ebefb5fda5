"""Checks that an adapter is plain LoRA, which is all that engines besides PEFT apply."""

from peft import LoraConfig

from firm.federation.client import Adapter

PREFIX = "base_model.model."
"""Prefix of PEFT's names before those of transformers."""


def check_plain(adapter: Adapter, settings: LoraConfig, engine: str) -> None:
    """Checks that an adapter is two factors per linear layer with one scale for all layers.

    Args:
        adapter: The adapter by PEFT's names, such as `base_model.model.[...].lora_A.weight`.
        settings: Settings in PEFT's folder.
        engine: Name of the engine for messages.

    Raises:
        ValueError: When the adapter is DoRA, or has biases, embeddings, whole modules or tokens, or
            its scale differs between layers.
    """
    remedy = f"{engine} takes plain LoRA adapters of linear layers alone: export with --to peft."
    others = ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias")
    scales = ("rank_pattern", "alpha_pattern", "fan_in_fan_out")
    for name in (*others, *scales):
        if value := getattr(settings, name, None):
            raise ValueError(f"the adapter has {name} {value!r}, and {remedy}")
    if settings.bias != "none":
        raise ValueError(f"the adapter has bias {settings.bias!r}, and {remedy}")
    for name in adapter:
        layer, _, factor = name.removesuffix(".weight").rpartition(".lora_")
        if not layer.startswith(PREFIX) or factor not in ("A", "B"):
            raise ValueError(f"the adapter has {name}, no factor of a linear layer, and {remedy}")
