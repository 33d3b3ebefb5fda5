"""Serialization of messages and states: tensors in one safetensors file, the rest in JSON.

Pickle is never used: serialized data can contain numbers and strings, but no code.
"""

import json
import math
from dataclasses import is_dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from firm.base.sanitize import printable

_LENGTH_BYTES = 8
MAX_TEXT_BYTES = 16 * 2**20
"""Maximum size of a message's JSON from another party, excluding tensors."""
_FLOATS = ("nan", "inf", "-inf")
_FLOAT_BYTES = len("-2.2250738585072014e-308")
"""Maximum length of a finite float in JSON."""

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
"""Errors that parsing invalid messages can raise."""


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns a value as JSON in which every object is a tag; its tensors are added to `tensors`.

    The value consists of nested dictionaries (keys: strings or integers), lists, tuples and records
    of dense tensors, numbers, strings, bools and None. Tensors are copied to the CPU.

    Raises:
        ValueError: The value contains an unsupported type; the message names its location.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f"{where} is a {value.layout} tensor; make it dense before saving.")
        name = str(len(tensors))
        # a copy, because safetensors rejects tensors that share memory
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
    if is_dataclass(value) and not isinstance(value, type):
        return encode(_with_lists(vars(value)), where, tensors)
    raise ValueError(
        f"{where} is a {type(value).__name__}; "
        "a state holds tensors, numbers, strings, bools, None, dictionaries, lists and tuples."
    )


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def decode(value: Any, tensors: dict[str, torch.Tensor], *, only_text_keys: bool = False) -> Any:
    """Inverts `encode` bit for bit, except that records are returned as dictionaries.

    With `only_text_keys`, dictionaries with integer keys are refused: a malicious sender could
    choose colliding keys, with which decoding takes quadratic time.
    """

    def read(value: Any) -> Any:
        return decode(value, tensors, only_text_keys=only_text_keys)

    if isinstance(value, list):
        return [read(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "dict":
        return {key: read(item) for key, item in content.items()}
    if tag == "items" and not only_text_keys:
        return {key: read(item) for key, item in content}
    if tag == "tuple":
        return tuple(read(item) for item in content)
    if tag == "float" and content in _FLOATS:
        return float(content)
    if tag == "tensor":
        return tensors[content]
    raise ValueError(f"unknown tag {str(tag)[:40]!r}")


def pack(message: Any) -> bytes:
    """Returns a message as bytes: the length of its JSON, the JSON, and a safetensors file.

    The JSON is padded with spaces as if all floats had the maximum number of digits. Messages
    contain durations in seconds, so that equal runs would otherwise send different numbers of
    bytes.

    Raises:
        ValueError: The message contains a type that `encode` does not support.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(message, "message", tensors)
    text = json.dumps(encoded, separators=(",", ":")).encode() + b" " * _missing_digits(encoded)
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text + safetensors.torch.save(tensors)


def _missing_digits(encoded: Any) -> int:
    """Returns the number of bytes by which floats in a JSON text fall short of the maximum."""
    if isinstance(encoded, float):
        return _FLOAT_BYTES - len(repr(encoded))
    if isinstance(encoded, dict):
        return sum(map(_missing_digits, encoded.values()))
    return sum(map(_missing_digits, encoded)) if isinstance(encoded, list) else 0


def unpack(packed: bytes, *, max_bytes: int | None = None) -> Any:
    """Returns the message serialized by `pack`.

    Any input results in a message or a ``ValueError``, in time that grows with the number of bytes.
    A tensor takes no more memory than its serialized bytes: safetensors checks names, types, shapes
    and offsets before it creates tensors.

    With ``max_bytes``, for messages of other parties, larger inputs are refused, and so are more
    than ``MAX_TEXT_BYTES`` of text and dictionaries with integer keys.

    Raises:
        ValueError: The bytes are not a valid message.
    """
    try:
        end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "big")
        if max_bytes is not None and (len(packed) > max_bytes or end > MAX_TEXT_BYTES):
            raise ValueError(f"more than {max_bytes} in all or {MAX_TEXT_BYTES} of text")
        if not _LENGTH_BYTES <= end <= len(packed):
            raise ValueError(f"its text is said to end at byte {end}")
        content = json.loads(packed[_LENGTH_BYTES:end])
        tensors = safetensors.torch.load(packed[end:])
        return decode(content, tensors, only_text_keys=max_bytes is not None)
    except _MALFORMED as error:
        reason = printable(f"{type(error).__name__}: {error}", max_length=200)
        raise ValueError(
            f"{len(packed)} bytes are not a valid message ({reason}); they were corrupted in "
            "transit or do not come from this program."
        ) from error
