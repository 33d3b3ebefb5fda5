"""Types and validation of the fields of messages.

All data from other parties is validated by this module before use. Validation checks type, shape,
range and finiteness with pydantic types (`firm.base.schema`, and the tensor types below), and
returns plain values; errors name the path of the field. The conformance suite generates its
mutated messages from the same types.
"""

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from annotated_types import Len
from pydantic import AfterValidator, PlainValidator, ValidationError, ValidationInfo

from firm.base.quantities import of_clients
from firm.base.sanitize import printable
from firm.base.schema import MAX_TEXT, adapter, in_words

LARGEST_ENTRY = 1e18
"""Largest magnitude of a tensor's entry; its square is finite in float32."""


Record = TypeVar("Record")


class Invalid(ValueError):
    """Raised when a value does not conform to its type; the message names the field."""


@dataclass
class Reading:
    """Context of the validation of a message, and the names of its dropped fields."""

    objectives: Sequence[str]
    adapter: Mapping[str, torch.Tensor]
    dropped: list[str] = field(default_factory=list)

    @property
    def num_parameters(self) -> int:
        """Number of the adapter's parameters, d."""
        return sum(parameter.numel() for parameter in self.adapter.values())


def read(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    """Returns a value validated against a type; ``path`` names it in error messages.

    Raises:
        Invalid: The value does not conform to the type.
    """
    try:
        return adapter(kind).validate_python(value, context=reading)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = path + "".join(
        f"[{step}]" if isinstance(step, int) else f".{printable(step, max_length=40)}"
        for step in first["loc"]
    )
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Invalid):  # from a nested check, which extends the path
        raise Invalid(f"{place}{cause}")
    raise invalid(in_words(first), first["input"], at=place)


def read_fields(
    kinds: Mapping[str, Any],
    value: Any,
    reading: Reading,
    *,
    required: Collection[str] = (),
    path: str | None = None,
) -> dict[str, Any]:
    """Returns a mapping with each field validated against its type; unknown fields are refused.

    Args:
        kinds: The types by field name.
        value: The mapping.
        reading: Context of the validation.
        required: Names of required fields.
        path: Path of the mapping: None for the message itself, empty in a check of a type.

    Raises:
        Invalid: The mapping or a field does not conform to its type.
    """
    what, opening = ("the message", "") if path is None else (path, f"{path}.")
    if not isinstance(value, Mapping):
        raise invalid("a mapping", value, at=what)
    for name in value:
        if name not in kinds:
            raise Invalid(f"{what} has the unknown field {shown(name)}")
    for name in required:
        if name not in value:
            raise Invalid(f"{what} lacks the field {name!r}")
    return {
        name: read(kinds[name], item, f"{opening}{name}", reading) for name, item in value.items()
    }


def read_record(form: type[Record], value: Any, path: str, reading: Reading) -> Record:
    """Returns a self-validating frozen dataclass, from an instance or a mapping of its fields.

    Raises:
        Invalid: The value is neither.
    """
    if isinstance(value, form):
        return value
    kinds, required = fields_of(form)
    values = read_fields(kinds, value, reading, required=required, path=path)
    try:
        return form(**values)
    except ValueError as error:
        raise Invalid(f"{path}: {error}") from error


@cache
def fields_of(form: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the types of a dataclass' fields, and the names of fields without a default."""
    hints = get_type_hints(form, include_extras=True)
    required = (
        each.name
        for each in fields(form)
        if each.default is MISSING and each.default_factory is MISSING
    )
    return {each.name: hints[each.name] for each in fields(form)}, tuple(required)


def shown(value: Any) -> str:
    """Returns a short printable representation of any value."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}, {value.dtype}"
    try:
        return printable(reprlib.repr(value), max_length=80)
    except Exception:  # the repr of an untrusted object may raise any error
        return f"a {type(value).__name__}"


def invalid(wanted: str, value: Any, *, at: str = "") -> Invalid:
    """Returns an error about a value that is not as expected.

    Args:
        wanted: Description of the expected value.
        value: The value received.
        at: Path of the value; in a check of a type, empty or relative to the checked value.
    """
    return Invalid(f"{at} must be {wanted}, got {shown(value)}")


def context(info: ValidationInfo) -> Reading:
    """Returns the validation context of a check of a type."""
    assert isinstance(info.context, Reading)
    return info.context


def finite(tensor: torch.Tensor, at: str = "") -> torch.Tensor:
    """Returns the tensor itself, not a copy, if it is dense and its entries are finite floats.

    Raises:
        Invalid: The tensor is sparse, or an entry is not a finite float.
    """
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        raise invalid("a dense tensor of floats", tensor, at=at)
    if not tensor.isfinite().all():
        raise Invalid(f"{at} is not finite")
    if tensor.numel() and tensor.abs().max() > LARGEST_ENTRY:
        raise Invalid(f"{at} has entries beyond {LARGEST_ENTRY:g}")
    return tensor


# --- Checks of types ------------------------------------------------------------------------------


def _printable(value: str) -> str:
    return printable(value, max_length=MAX_TEXT)


def _matrix(value: Any, info: ValidationInfo) -> torch.Tensor:
    count = len(context(info).objectives)
    if not isinstance(value, torch.Tensor) or value.shape != (count, count):
        raise invalid(f"a matrix of {count} rows and columns", value)
    return finite(value)


def _jacobian(value: Any, info: ValidationInfo) -> torch.Tensor:
    count, most = len(context(info).objectives), context(info).num_parameters
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.size(0) != count:
        raise invalid(f"a matrix of {count} rows", value)
    if not 1 <= value.size(1) <= most:
        raise invalid(f"a matrix of at most {most} columns", value)
    return finite(value)


def _parameters(value: Any, info: ValidationInfo) -> dict[str, torch.Tensor]:
    expected = context(info).adapter
    if not isinstance(value, Mapping):
        raise invalid("an adapter", value)
    for name in value:
        if name not in expected:
            raise Invalid(f" has the unknown parameter {shown(name)}")
    parameters = {}
    for name, sent in expected.items():
        if name not in value:
            raise Invalid(f" lacks the parameter {name!r}")
        tensor = value[name]
        if not isinstance(tensor, torch.Tensor):
            raise invalid("a tensor", tensor, at=f".{name}")
        if tensor.shape != sent.shape:
            raise Invalid(f".{name} must have shape {list(sent.shape)}, got {list(tensor.shape)}")
        if tensor.dtype != sent.dtype:
            raise Invalid(f".{name} must be {sent.dtype}, got {tensor.dtype}")
        parameters[name] = tensor
    if not _all_finite(parameters.values()):
        for name, tensor in parameters.items():
            finite(tensor, f".{name}")
    return parameters


def _all_finite(tensors: Collection[torch.Tensor]) -> bool:
    """Returns whether `finite` accepts all tensors; one operation for all is faster."""
    if {tensor.layout for tensor in tensors} != {torch.strided}:
        return False
    largest = torch.nn.utils.get_total_norm([t for t in tensors if t.numel()], math.inf)
    return bool(largest <= LARGEST_ENTRY)  # False for NaN


def _model(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping):
        raise invalid("an adapter", value)
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise invalid("a named tensor", tensor, at=f"[{shown(name)}]")
        if not tensor.is_floating_point():
            raise Invalid(f".{printable(name)} must be of floats, got {tensor.dtype}")
        finite(tensor, f".{printable(name)}")
    return dict(value)


def _metrics(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid("a mapping", value)
    known, reading, metrics = of_clients(), context(info), {}
    for name, item in value.items():
        if isinstance(name, str) and name in known:
            metrics[name] = read(known[name].type_in(value), item, f".{name}", reading)
        else:
            reading.dropped.append(f"metrics.{printable(name, max_length=40)}")
    for name in metrics:
        for needed in known[name].needs:
            if needed not in metrics:
                raise Invalid(f" has a {name} without {needed}")
    return metrics


# --- Types ----------------------------------------------------------------------------------------

Text = Annotated[str, Len(0, MAX_TEXT), AfterValidator(_printable)]
"""A short text; control characters are escaped when read."""
Matrix = Annotated[torch.Tensor, PlainValidator(_matrix)]
"""A float tensor [M, M]."""
Jacobian = Annotated[torch.Tensor, PlainValidator(_jacobian)]
"""A float tensor [M, k] with at most as many columns as θ_t has parameters."""
Parameters = Annotated[dict[str, torch.Tensor], PlainValidator(_parameters)]
"""An adapter with the names, shapes and dtypes of θ_t, in its order, all values finite."""
Model = Annotated[dict[str, torch.Tensor], PlainValidator(_model)]
"""An adapter of any names and shapes, all values finite: θ_t itself."""
Metrics = Annotated[dict[str, Any], PlainValidator(_metrics)]
"""Registered quantities of a client's training; others are dropped and counted."""
