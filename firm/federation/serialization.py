"""Messages and states as data: tensors in one safetensors file, everything else in JSON.

Nothing is ever unpickled: what is read can hold numbers and texts, never code.
"""

import json
import math
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from firm.federation.client import Update

_LENGTH_BYTES = 8

_MALFORMED = (
    SafetensorError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading bytes that are no message can raise on the way."""


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
        return _update(decode(content, tensors))
    if tag == "float":
        return float(content)
    if tag == "tensor":
        return tensors[content]
    raise ValueError(f"unknown tag {tag!r}")


def pack(message: Any) -> bytes:
    """Returns a message as it travels: the length of its JSON, the JSON, and a safetensors file.

    Raises:
        ValueError: The message holds what `encode` refuses.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(message, "message", tensors), separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text + safetensors.torch.save(tensors)


def unpack(packed: bytes) -> Any:
    """Returns the message that `pack` was given.

    Whatever the bytes are, this ends in a message or in one error. A tensor takes the bytes that
    came for it and no more: safetensors checks names, types, shapes and offsets against the length
    of what is there before it makes any of them.

    Raises:
        ValueError: The bytes are no message.
    """
    try:
        end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "big")
        if not _LENGTH_BYTES <= end <= len(packed):
            raise ValueError(f"its text is said to end at byte {end}")
        content = json.loads(packed[_LENGTH_BYTES:end])
        return decode(content, safetensors.torch.load(packed[end:]))
    except _MALFORMED as error:
        raise ValueError(
            f"{len(packed)} bytes are no message ({type(error).__name__}: {str(error)[:200]}); "
            "they were damaged on the way, or are not from this program."
        ) from error


def _update(content: Any) -> Update:
    update = Update(**content)
    adapter, metrics = update.adapter, update.metrics
    if not (
        isinstance(update.client, str)
        and isinstance(adapter, dict)
        and all(isinstance(name, str) for name in adapter)
        and all(isinstance(value, torch.Tensor) for value in adapter.values())
        and isinstance(update.num_examples, int)
        and not isinstance(update.num_examples, bool)
        and isinstance(metrics, dict)
    ):
        raise TypeError("an update is a name, an adapter, a number of examples and metrics")
    return update
