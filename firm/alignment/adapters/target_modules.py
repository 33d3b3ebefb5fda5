"""Selects the layers of a language model that get an adapter."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from firm.alignment.adapters.lora import ATTENTION

_READ_BY_KERNELS = {"dt_proj", "out_proj"}
"""Layers of state-space models whose weights fused kernels read directly, bypassing adapters."""


def default_target_modules(config: PretrainedConfig) -> list[str]:
    """Returns the names of the layers that get an adapter if `target_modules` is null.

    In order of preference: the four attention projections if the model has all of them; PEFT's
    default for the model type; the linear layers of attention; all linear layers except the head
    and layers that share a name with stacked experts.

    Args:
        config: A model's configuration; no weights are created.
    """
    return usual_names(empty_model(config))


def empty_model(config: PretrainedConfig) -> Any:
    """Returns a language model without weights."""
    with torch.device("meta"):  # shapes without memory
        return AutoModelForCausalLM.from_config(config)


def usual_names(model: Any) -> list[str]:
    """Returns `default_target_modules` of a model."""
    head, layers = model.get_output_embeddings(), text_layers(model)
    linear = {n: _last(n) for n, layer in layers.items() if _is_linear(layer) and layer is not head}
    names = set(linear.values())
    if names.issuperset(ATTENTION):  # as in the paper
        return list(ATTENTION)
    for config in (model.config.get_text_config(), model.config):
        by_peft = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(config.model_type)
        if isinstance(by_peft, list) and names.issuperset(by_peft):
            return list(by_peft)
    in_attention = {
        last
        for name, last in linear.items()
        if "attention" in type(layers[name.rpartition(".")[0]]).__name__.lower()
    }
    if any(_last(name) == "conv1d" for name in layers):
        names -= _READ_BY_KERNELS  # an adapter there would have no effect
    names = {name for name in names - _names_of_experts(model) if not name.isdigit()}
    return sorted(in_attention or names)


def _names_of_experts(model: Any) -> set[str]:
    """Returns the layer names of experts before their weights were stacked.

    PEFT maps such a name to the stacked weight, which is a parameter, not a layer. For instance,
    the weight `gate_up_proj` [E, in, out] combines `gate_proj` and `up_proj`.
    """
    # [E, in, out]
    stacked = {_last(name) for name, weight in model.named_parameters() if weight.ndim == 3}
    parts = (name.removesuffix("_proj").split("_") for name in stacked if name.endswith("_proj"))
    return stacked | {f"{part}_proj" for each in parts for part in each}


def check_layers(settings: LoraConfig) -> None:
    """Checks that PEFT has adapted only layers with these settings.

    Raises:
        ValueError: When a target module is the name of stacked experts.
    """
    if settings.target_parameters:
        raise ValueError(
            f"the experts' weights {', '.join(sorted(settings.target_parameters))} are not layers"
        )


def text_layers(model: Any) -> dict[str, torch.nn.Module]:
    """Returns the modules of a model by name, without image or audio encoders.

    Such encoders have projections with the same names as the language model's, but do not process
    text.
    """
    apart = _other_modalities(model)
    return {name: m for name, m in model.named_modules() if not _is_in(name, apart)}


def adapted_layers(
    model: Any, target_modules: Sequence[str], path: str
) -> dict[str, torch.nn.Module]:
    """Returns the layers matched by target modules, by their full names.

    Args:
        model: The language model.
        target_modules: Names, or suffixes of dotted names, as in PEFT.
        path: Name of the model for messages.

    Raises:
        ValueError: When a name matches no layer, or one that cannot be adapted because it is not
            linear or shares its weight with another layer.
    """
    layers = text_layers(model)
    by_target = {
        target: {name: m for name, m in layers.items() if f".{name}".endswith(f".{target}")}
        for target in target_modules
    }
    shared = _shared_weights(model)
    if missing := sorted(target for target, matching in by_target.items() if not matching):
        linear = {
            _last(name)
            for name, layer in layers.items()
            if _is_linear(layer) and id(layer.weight) not in shared
        }
        raise ValueError(
            f"policy.lora.target_modules: {missing} match no layer of {path}: choose among "
            f"{sorted(linear)}, or give null, which takes {usual_names(model)}."
        )
    for target, matching in by_target.items():
        for name, layer in matching.items():
            if not _is_linear(layer):
                raise ValueError(
                    f"policy.lora.target_modules: {target!r} must name linear layers, but {name} "
                    f"of {path} is of type {type(layer).__name__}: leave it out."
                )
            if id(layer.weight) in shared:
                raise ValueError(
                    f"policy.lora.target_modules: {target!r} is tied to another layer of {path}, "
                    "whose weight is the same tensor, so an adapter merged into it would change "
                    "both: leave it out, or save the model with untied embeddings."
                )
    return {name: layer for matching in by_target.values() for name, layer in matching.items()}


def excluded_modules(model: Any, target_modules: Iterable[str]) -> str | None:
    """Returns a pattern of modules outside of `text_layers` that target modules match, if any.

    It is used as PEFT's `exclude_modules`, which is saved with the adapter.
    """
    apart = _other_modalities(model)
    ends = tuple(f".{target}" for target in target_modules)
    found = {
        root
        for name, _ in model.named_modules()
        for root in apart
        if _is_in(name, [root]) and f".{name}".endswith(ends)
    }
    return "|".join(rf"{re.escape(root)}\..*" for root in sorted(found)) or None


def _other_modalities(model: Any) -> list[str]:
    """Returns the names of the submodules for images or audio.

    These are pretrained submodels whose configuration type differs from the model's and its text
    model's, and, if the text model is nested, the siblings of the modules that contain it.
    """
    config, text = model.config, model.config.get_text_config()
    own_kinds = type(config), type(text)
    named = dict(model.named_modules())
    apart = [
        name
        for name, module in named.items()
        if isinstance(module, PreTrainedModel) and type(module.config) not in own_kinds
    ]
    if text is not config:  # a model with images or audio nests its text model
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        inside = next(name for name, module in named.items() if module is decoder)
        while inside:
            inside, _, last = inside.rpartition(".")
            for name, module in named[inside].named_children():
                if name != last and module is not head:
                    apart.append(f"{inside}.{name}" if inside else name)
    return apart


def _is_in(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear | Conv1D)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _shared_weights(model: Any) -> set[int]:
    """Returns the ids of the weights that several modules share."""
    weights = [id(w) for m in model.modules() if (w := getattr(m, "weight", None)) is not None]
    return {weight for weight, uses in Counter(weights).items() if uses > 1}
