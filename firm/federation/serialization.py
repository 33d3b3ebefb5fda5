"""Serialization of messages and states: tensors in one safetensors file, the rest in JSON.

Pickle is never used: serialized data can contain numbers and strings, but no code.
"""

import json
import math
import re
from dataclasses import is_dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from firm.base.sanitize import printable

_LENGTH_BYTES = 8
_PLAIN = (type(None), bool, int, str)
MAX_TEXT_BYTES = 16 * 2**20
"""Maximum size of a message's JSON from another party, excluding tensors."""
_FLOATS = ("nan", "inf", "-inf")
_FLOAT_BYTES = len("-2.2250738585072014e-308")
"""Maximum length of a finite float in JSON."""

_NUMBERS = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d+(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+))')
"""Strings of a JSON text, and in a group its floats."""

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

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names of dtypes in safetensors files, in reverse order of the tensors there."""


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns a value as JSON in which every object is a tag; its tensors are added to `tensors`.

    The value consists of nested dictionaries (keys: strings or integers), lists, tuples and records
    of dense tensors, numbers, strings, bools and None. Tensors are copied to the CPU.

    Raises:
        ValueError: The value contains an unsupported type; the message names its location.
    """
    encoded = _encode(value, where, tensors, has_tuples=True)
    for name, tensor in tensors.items():
        # a copy, because safetensors rejects tensors that share memory
        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return encoded


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor], has_tuples: bool) -> Any:
    """Returns the result of `encode`, with the tensors themselves instead of copies.

    Without `has_tuples`, as in the fields of a record, tuples become lists.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f"{where} is a {value.layout} tensor; make it dense before saving.")
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {"tensor": name}
    if is_dataclass(value) and not isinstance(value, type):
        value, has_tuples = vars(value), False
    if not isinstance(value, dict | list | tuple):
        raise ValueError(
            f"{where} is a {type(value).__name__}; a state holds tensors, numbers, strings, bools, "
            "None, dictionaries, lists and tuples."
        )
    items = value.items() if isinstance(value, dict) else enumerate(value)
    entries, all_texts = {}, True
    for key, item in items:
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise ValueError(f"{where} has the key {key!r}; use strings or integers.")
        all_texts = all_texts and isinstance(key, str)
        # most items are numbers or texts, which need no call of their own
        is_plain = type(item) in _PLAIN or (type(item) is float and math.isfinite(item))
        entries[key] = item if is_plain else _encode(item, f"{where}[{key!r}]", tensors, has_tuples)
    if isinstance(value, dict):
        return {"dict": entries} if all_texts else {"items": list(map(list, entries.items()))}
    encoded = list(entries.values())
    return {"tuple": encoded} if isinstance(value, tuple) and has_tuples else encoded


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
    text = _padded_text(encode(message, "message", tensors))
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text + safetensors.torch.save(tensors)


def packed_size(message: Any) -> int:
    """Returns ``len(pack(message))`` without a copy of its tensors, for messages that stay here.

    Raises:
        ValueError: As for ``pack``.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = _padded_text(_encode(message, "message", tensors, has_tuples=True))
    dtypes = list(_DTYPES)
    # the order decides the number of digits of the offsets
    order = sorted([(-dtypes.index(t.dtype), name) for name, t in tensors.items()])
    header, end = {}, 0
    for _, name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    num_header_bytes = len(json.dumps(header, separators=(",", ":")))
    num_header_bytes += -num_header_bytes % _LENGTH_BYTES  # safetensors pads it
    return 2 * _LENGTH_BYTES + len(text) + num_header_bytes + end


def _padded_text(encoded: Any) -> bytes:
    text = json.dumps(encoded, separators=(",", ":"))
    digits = [len(number) for number in _NUMBERS.findall(text) if number]
    return text.encode() + b" " * (_FLOAT_BYTES * len(digits) - sum(digits))


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
