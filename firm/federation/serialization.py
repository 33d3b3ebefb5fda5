"""Messages and states as data: tensors in one safetensors file, everything else in JSON.

Nothing is ever unpickled: what is read can hold numbers and texts, never code.
"""

import json
import math
from typing import Any

import safetensors.torch
import torch

from firm.federation.client import Update

_LENGTH_BYTES = 8


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns a value as JSON in which every object is a tag; its tensors are added to `tensors`.

    Args:
        value: Nested dictionaries (keys: strings or integers), lists, tuples and updates of dense
            tensors, numbers, strings, bools and None.
        where: What the value is called in messages.
        tensors: Receives a copy of every tensor on the CPU, by the name that stands in its place.

    Raises:
        ValueError: The value holds something else; the message says where.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f"{where} is a {value.layout} tensor; make it dense before saving.")
        name = str(len(tensors))
        # A copy, because safetensors refuses tensors that share memory.
        tensors[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise ValueError(f"{where} has the key {key!r}; use strings or integers.")
        entries = {key: encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
        all_texts = all(isinstance(key, str) for key in entries)
        return {"dict": entries} if all_texts else {"items": [list(e) for e in entries.items()]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Update):
        return {"update": encode(vars(value), f"{where} of {value.client}", tensors)}
    raise ValueError(
        f"{where} is a {type(value).__name__}; "
        "a state holds tensors, numbers, strings, bools, None, dictionaries, lists and tuples."
    )


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns what `encode` was given, bit for bit; subclasses come back as plain types."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "dict":
        return {key: decode(item, tensors) for key, item in content.items()}
    if tag == "items":
        return {key: decode(item, tensors) for key, item in content}
    if tag == "tuple":
        return tuple(decode(item, tensors) for item in content)
    if tag == "update":
        return Update(**decode(content, tensors))
    return float(content) if tag == "float" else tensors[content]


def pack(message: Any) -> bytes:
    """Returns a message as it travels: the length of its JSON, the JSON, and a safetensors file.

    Raises:
        ValueError: The message holds what `encode` refuses.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(message, "message", tensors), separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text + safetensors.torch.save(tensors)


def unpack(packed: bytes) -> Any:
    """Returns the message that `pack` was given."""
    end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "big")
    tensors = safetensors.torch.load(packed[end:])
    return decode(json.loads(packed[_LENGTH_BYTES:end]), tensors)
