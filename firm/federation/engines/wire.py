"""How many bytes a message has when it travels."""

import dataclasses
import json
from typing import Any

import safetensors.torch
import torch


def num_bytes(message: Any) -> int:
    """Returns the serialized size of nested dicts, lists and records of tensors and scalars.

    That is the length of one safetensors file with all tensors, header included, and of the UTF-8
    JSON of everything else, in which a tensor's place is null. Transport adds its own few bytes.

    >>> num_bytes({"round": 1})
    12
    """
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach().contiguous()
            return None
        if dataclasses.is_dataclass(value):
            value = vars(value)
        if isinstance(value, dict):
            return {key: plain(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}/{index}") for index, item in enumerate(value)]
        return value

    text = json.dumps(plain(message, ""))
    return len(text.encode()) + (len(safetensors.torch.save(tensors)) if tensors else 0)
