"""An exported front in PEFT: all adapters in one model, whose scales follow the preference."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.lora import LoraLayer

from firm.alignment.policy import load_base_model, without_needless_warnings
from firm.alignment.policy_config import PolicyConfig
from firm.run.shipped import with_shipped_paths
from firm.serving.front import ServedFront


def load_served(folder: str | Path, model: Any = None) -> tuple[PeftModel, ServedFront]:
    """Returns a base model with the adapters of `firm export --to peft`, and their front.

    The adapters are all active, at equal shares; `set_scales_` sets another preference.

    Args:
        folder: Folder of the export.
        model: The base model, of transformers; by default the run's is loaded in float32.

    Raises:
        ValueError: When the folder has no export for PEFT, or the base model cannot be loaded.
    """
    served = ServedFront.load(folder)
    places = {_slot(name): Path(folder) / place for name, place in served.adapters.items()}
    if missing := [str(place) for place in places.values() if not place.is_dir()]:
        raise ValueError(f"there is no PEFT folder {missing[0]}: export with --to peft.")
    if model is None:
        model = load_base_model(with_shipped_paths(PolicyConfig(path=served.base_model)))
    policy: Any = None
    with without_needless_warnings():
        for slot, place in places.items():
            if policy is None:
                policy = PeftModel.from_pretrained(model, str(place), adapter_name=slot)
            else:
                policy.load_adapter(str(place), adapter_name=slot)
    policy.base_model.set_adapter(list(places), inference_mode=True)
    if served.end_ids:
        policy.generation_config.eos_token_id = list(served.end_ids)
    set_scales_(policy, served.scales())
    return policy.eval(), served


def set_scales_(model: Any, scales: Mapping[str, float]) -> None:
    """Sets the scales of the adapters of `load_served`, by objective; the others keep theirs.

    Raises:
        ValueError: There is no adapter for an objective.
    """
    for name in scales:
        if _slot(name) not in getattr(model, "peft_config", {}):
            raise ValueError(f"there is no adapter for {name!r}.")
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, scale in scales.items():
                layer.set_scale(_slot(name), scale)


def _slot(objective: str) -> str:
    """Returns the name of an adapter: torch's modules may not be called "a.b", or "keys"."""
    return f"adapter_{objective.replace('.', '·')}"
