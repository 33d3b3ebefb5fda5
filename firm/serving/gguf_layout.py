"""Names and row orders of a model's tensors in GGUF files, as llama.cpp's converter writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from firm.base.extras import install_command

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
"""Supported architectures of GGUF files, by the model type of transformers."""
_PERMUTED = "llama"
"""Architecture whose query and key rows are reordered: llama.cpp rotates neighbouring rows, and
transformers rows that are half a head apart."""


def import_gguf() -> Any:
    """Returns the package gguf.

    Raises:
        ModuleNotFoundError: When it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"GGUF files need the package gguf: {install_command('serve')}.", name="gguf"
        ) from None
    return gguf


@dataclass(frozen=True)
class Layout:
    """Layout of a model's tensors in GGUF files."""

    architecture: str
    name: Callable[[str], str]
    """Returns the GGUF name of a tensor of transformers, such as "model.norm.weight"."""
    rows: Callable[[str, torch.Tensor], torch.Tensor]
    """Returns the tensor with this name of transformers, with its rows in GGUF's order."""


def layout_of(config: PretrainedConfig) -> Layout:
    """Returns the layout for a model's configuration.

    Raises:
        ValueError: When the architecture is not supported, or a tensor has no name in GGUF.
        ModuleNotFoundError: When the package gguf is not installed.
    """
    gguf = import_gguf()
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"GGUF files are written for models of type {', '.join(ARCHITECTURES)}, got "
            f"{config.model_type}: export with --to peft, and convert with llama.cpp's "
            "convert_lora_to_gguf.py."
        )
    architecture = ARCHITECTURES[config.model_type]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)

    def name(own: str) -> str:
        found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"{own} has no name in GGUF files of {architecture}.")
        return found

    def rows(own: str, tensor: torch.Tensor) -> torch.Tensor:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        layer = own.split(".")[-2]
        if architecture != _PERMUTED or layer not in heads:
            return tensor
        return permute_rows(tensor, heads[layer])

    return Layout(architecture, name, rows)


def permute_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns a tensor with the rows of each head interleaved from its two halves.

    >>> permute_rows(torch.arange(8.0), 2).tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    halves = tensor.unflatten(0, (num_heads, 2, tensor.size(0) // num_heads // 2))
    return halves.transpose(1, 2).reshape(tensor.shape)
