"""Compressors by name, and messages as plain dictionaries that any transport can carry.

Such a dictionary holds only tensors, integers and the shape. Reading one looks its kind up in a
fixed table and checks every field, so that no code is transferred and a malformed upload is
rejected before it is used.
"""

from typing import Any

from firm.gradients.compression import (
    Compressor,
    JacobianMessage,
    LowRankCompressor,
    RandomMaskCompressor,
    TopKCompressor,
)
from firm.gradients.quantization import QuantizingCompressor
from firm.gradients.sketch import CountSketchCompressor, HybridCompressor

COMPRESSORS: dict[str, type[Compressor]] = {
    "low_rank": LowRankCompressor,
    "top_k": TopKCompressor,
    "random_mask": RandomMaskCompressor,
    "count_sketch": CountSketchCompressor,
    "hybrid": HybridCompressor,
    "quantizing": QuantizingCompressor,
}
"""Compressors by their names in configurations."""

_MESSAGES = {name: compressor.message for name, compressor in COMPRESSORS.items()}


def message_to_dict(message: JacobianMessage) -> dict[str, Any]:
    """Returns a message's kind and fields as a dictionary; tensors are not copied."""
    (kind,) = (name for name, message_type in _MESSAGES.items() if type(message) is message_type)
    return {"kind": kind, **vars(message)}


def message_from_dict(content: dict[str, Any]) -> JacobianMessage:
    """Returns the message that `message_to_dict` converted.

    Raises:
        ValueError: When the kind is unknown, a field is missing, unexpected or of the wrong type,
            or a tensor holds NaN or infinity or does not match the other fields in dtype or shape.
    """
    fields = dict(content)
    kind = fields.pop("kind", None)
    if kind not in _MESSAGES:
        raise ValueError(f"unknown kind of message {kind!r}; choose one of {sorted(_MESSAGES)}.")
    try:
        fields["shape"] = tuple(fields.get("shape", ()))  # JSON turns tuples into lists
        return _MESSAGES[kind](**fields)
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"a message of kind {kind!r} has wrong fields: {error}") from error
