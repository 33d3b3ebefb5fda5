"""Schemas: what each field of a message may be, and how it is read.

Nothing that another party sends is used before it has been read here. Reading checks type, shape,
range and finiteness, and returns plain values that the program can compute with; what is wrong is
reported with the field's path. The same schemas generate the mutated messages of the conformance
suite.
"""

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import torch
from pydantic import ValidationError

from firm.federation.outside import printable
from firm.quantities import of_clients
from firm.schema import adapter, in_words

LARGEST = 1e36
"""Largest magnitude of a measured number; it is finite in float32, and its square in float64."""
LARGEST_ENTRY = 1e18
"""Largest magnitude of a tensor's entry; its square is finite in float32."""
MAX_ITEMS = 10_000
"""Most items of a list, such as the solves of one round."""
MAX_TEXT = 200
"""Most characters of a text."""
MAX_NAMES = 1_000
"""Most entries of a mapping with free names."""


class Invalid(ValueError):
    """A value is not what its schema says; the message names the field."""


@dataclass
class Reading:
    """The context in which a message is read, and what was left out of it."""

    objectives: Sequence[str]
    adapter: Mapping[str, torch.Tensor]
    dropped: list[str] = field(default_factory=list)


@runtime_checkable
class Schema(Protocol):
    """Reads one value."""

    def read(self, value: Any, path: str, reading: Reading) -> Any:
        """Returns the value, whatever it is, as the program uses it; ``path`` names it in messages.

        Raises:
            Invalid: The value is something else.
        """
        ...


@dataclass(frozen=True)
class Number:
    """A finite number in a range, bounds included."""

    low: float = -LARGEST
    high: float = LARGEST
    is_integer: bool = False

    def read(self, value: Any, path: str, reading: Reading) -> float:
        """Returns the number."""
        what = "an integer" if self.is_integer else "a finite number"
        types = int if self.is_integer else int | float
        if isinstance(value, bool) or not isinstance(value, types):
            raise _invalid(path, what, value)
        if not self.low <= value <= self.high:  # NaN is in no range
            raise _invalid(path, f"{what} from {self.low:g} to {self.high:g}", value)
        return value if self.is_integer else float(value)


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def read(self, value: Any, path: str, reading: Reading) -> bool:
        """Returns the flag."""
        if not isinstance(value, bool):
            raise _invalid(path, "true or false", value)
        return value


@dataclass(frozen=True)
class Text:
    """A short text that a terminal can show, or one of a few."""

    choices: Collection[str] | None = None
    max_length: int = MAX_TEXT

    def read(self, value: Any, path: str, reading: Reading) -> str:
        """Returns the text, without what a terminal would obey."""
        if not isinstance(value, str) or len(value) > self.max_length:
            raise _invalid(path, f"a text of at most {self.max_length} characters", value)
        if self.choices is not None and value not in self.choices:
            raise _invalid(path, f"one of {', '.join(self.choices)}", value)
        return printable(value, max_length=self.max_length)


@dataclass(frozen=True)
class Optional:
    """A value, or None."""

    schema: Schema

    def read(self, value: Any, path: str, reading: Reading) -> Any:
        """Returns None, or the value."""
        return None if value is None else self.schema.read(value, path, reading)


@dataclass(frozen=True)
class Items:
    """A list whose items are alike."""

    schema: Schema
    min_length: int = 0
    max_length: int = MAX_ITEMS

    def read(self, value: Any, path: str, reading: Reading) -> list[Any]:
        """Returns the list."""
        if not isinstance(value, list | tuple):
            raise _invalid(path, "a list", value)
        if not self.min_length <= len(value) <= self.max_length:
            raise Invalid(
                f"{path} must have from {self.min_length} to {self.max_length} items, got "
                f"{len(value)}"
            )
        return [self.schema.read(item, f"{path}[{i}]", reading) for i, item in enumerate(value)]


@dataclass(frozen=True)
class PerObjective:
    """A list of one item per objective, or per pair of objectives."""

    schema: Schema
    pairs: bool = False

    def read(self, value: Any, path: str, reading: Reading) -> list[Any]:
        """Returns the list, of M or M(M - 1)/2 items."""
        count = len(reading.objectives)
        count = count * (count - 1) // 2 if self.pairs else count
        return Items(self.schema, count, count).read(value, path, reading)


@dataclass(frozen=True)
class Named:
    """A mapping from texts to values that are alike."""

    schema: Schema
    max_length: int = MAX_NAMES

    def read(self, value: Any, path: str, reading: Reading) -> dict[str, Any]:
        """Returns the mapping."""
        if not isinstance(value, Mapping) or len(value) > self.max_length:
            raise _invalid(path, f"a mapping of at most {self.max_length} names", value)
        read = {}
        for key, item in value.items():
            name = Text().read(key, f"a name of {path}", reading)
            read[name] = self.schema.read(item, f"{path}.{name}", reading)
        return read


@dataclass(frozen=True)
class ByObjective:
    """A mapping from some of the objectives, or of their pairs as "a-b", to values."""

    schema: Schema
    pairs: bool = False

    def read(self, value: Any, path: str, reading: Reading) -> dict[str, Any]:
        """Returns the mapping."""
        read = Named(self.schema).read(value, path, reading)
        names = list(reading.objectives)
        if self.pairs:
            names = [f"{a}-{b}" for i, a in enumerate(names) for b in names[i + 1 :]]
        if strangers := [name for name in read if name not in names]:
            raise Invalid(f"{path} has {strangers[0]!r}, which is none of {', '.join(names)}")
        return read


@dataclass(frozen=True)
class Matrix:
    """A float tensor [M, M], or [M, d] with at most as many columns as θ_t has parameters."""

    columns: str = "M"
    """M, or d."""

    def read(self, value: Any, path: str, reading: Reading) -> torch.Tensor:
        """Returns the tensor."""
        count = len(reading.objectives)
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.size(0) != count:
            raise _invalid(path, f"a matrix of {count} rows", value)
        most = sum(t.numel() for t in reading.adapter.values()) if self.columns == "d" else count
        if not (most if self.columns == "M" else 1) <= value.size(1) <= most:
            raise _invalid(path, f"a matrix of {'at most ' * (most != count)}{most} columns", value)
        return _finite(value, path)


@dataclass(frozen=True)
class Parameters:
    """An adapter with the names, shapes and dtypes of θ_t, all values finite."""

    def read(self, value: Any, path: str, reading: Reading) -> dict[str, torch.Tensor]:
        """Returns the adapter, in the order of θ_t."""
        if not isinstance(value, Mapping):
            raise _invalid(path, "an adapter", value)
        for name in value:
            if name not in reading.adapter:
                raise Invalid(f"{path} has the unknown parameter {shown(name)}")
        read = {}
        for name, sent in reading.adapter.items():
            if name not in value:
                raise Invalid(f"{path} lacks the parameter {name!r}")
            tensor = value[name]
            if not isinstance(tensor, torch.Tensor):
                raise _invalid(f"{path}.{name}", "a tensor", tensor)
            if tensor.shape != sent.shape:
                raise Invalid(
                    f"{path}.{name} must have shape {list(sent.shape)}, got {list(tensor.shape)}"
                )
            if tensor.dtype != sent.dtype:
                raise Invalid(f"{path}.{name} must be {sent.dtype}, got {tensor.dtype}")
            read[name] = _finite(tensor, f"{path}.{name}")
        return read


@dataclass(frozen=True)
class Model:
    """An adapter of any names and shapes, all values finite: θ_t itself."""

    def read(self, value: Any, path: str, reading: Reading) -> dict[str, torch.Tensor]:
        """Returns the adapter."""
        if not isinstance(value, Mapping):
            raise _invalid(path, "an adapter", value)
        for name, tensor in value.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise _invalid(f"{path}[{shown(name)}]", "a named tensor", tensor)
            if not tensor.is_floating_point():
                raise Invalid(f"{path}.{printable(name)} must be of floats, got {tensor.dtype}")
            _finite(tensor, f"{path}.{printable(name)}")
        return dict(value)


@dataclass(frozen=True)
class Fields:
    """A mapping with fields of its own, each with its schema; an unknown one is refused."""

    schemas: Mapping[str, Schema]
    required: tuple[str, ...] = ()

    def read(self, value: Any, path: str, reading: Reading) -> dict[str, Any]:
        """Returns the mapping."""
        if not isinstance(value, Mapping):
            raise _invalid(path, "a mapping", value)
        for name in value:
            if name not in self.schemas:
                raise Invalid(f"{path or 'the message'} has the unknown field {shown(name)}")
        for name in self.required:
            if name not in value:
                raise Invalid(f"{path or 'the message'} lacks the field {name!r}")
        return {
            name: self.schemas[name].read(item, f"{path}.{name}" if path else name, reading)
            for name, item in value.items()
        }


@dataclass(frozen=True)
class Record:
    """A frozen dataclass, which checks its ranges itself, or a mapping of its fields."""

    kind: type

    def read(self, value: Any, path: str, reading: Reading) -> Any:
        """Returns the dataclass."""
        if isinstance(value, self.kind):
            return value
        try:
            return self.kind(**fields_of(self.kind).read(value, path, reading))
        except Invalid:
            raise
        except ValueError as error:
            raise Invalid(f"{path}: {error}") from error


@cache
def fields_of(kind: type) -> Fields:
    """Returns the schemas of a dataclass' fields, by their annotations."""
    hints = get_type_hints(kind, include_extras=True)
    required = (
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    )
    schemas = {each.name: _of_type(hints[each.name]) for each in fields(kind)}
    return Fields(schemas, tuple(required))


def _of_type(hint: Any) -> Schema:
    """Returns the schema that an annotation states, or that of a plain type."""
    if get_origin(hint) is Annotated:
        stated = [entry for entry in hint.__metadata__ if isinstance(entry, Schema)]
        return stated[0] if stated else _of_type(hint.__origin__)
    if type(None) in get_args(hint):
        (inner,) = (each for each in get_args(hint) if each is not type(None))
        return Optional(_of_type(inner))
    if get_origin(hint) is Literal:
        return Text(get_args(hint))
    if isinstance(hint, type) and is_dataclass(hint):
        return Record(hint)
    plain = {bool: Flag(), int: Number(-(2**63), 2**64, is_integer=True), float: Number()}
    return plain[hint]


@dataclass(frozen=True)
class Metrics:
    """Registered quantities of a client's training; others are dropped and counted."""

    def read(self, value: Any, path: str, reading: Reading) -> dict[str, Any]:
        """Returns the registered quantities."""
        if not isinstance(value, Mapping):
            raise _invalid(path, "a mapping", value)
        known, metrics = of_clients(), {}
        for name, item in value.items():
            if isinstance(name, str) and name in known:
                kind = known[name].type_in(value)
                metrics[name] = read(kind, item, f"{path}.{name}", reading)
            else:
                reading.dropped.append(f"{path}.{printable(name, max_length=40)}")
        for name in metrics:
            for needed in known[name].needs:
                if needed not in metrics:
                    raise Invalid(f"{path} has a {name} without {needed}")
        return metrics


def read(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    """Returns a value of a type of `firm.schema`; ``path`` names it in messages.

    Raises:
        Invalid: It is something else.
    """
    try:
        return adapter(kind).validate_python(value, context=reading)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    place = path + "".join(
        f"[{step}]" if isinstance(step, int) else f".{printable(step, max_length=40)}"
        for step in first["loc"]
    )
    if isinstance(cause, Invalid):  # of a check that names a place in the value
        raise Invalid(f"{place}{cause}")
    raise _invalid(place, in_words(first), first["input"])


def shown(value: Any) -> str:
    """Returns a value in few printable characters, whatever it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}, {value.dtype}"
    try:
        return printable(reprlib.repr(value), max_length=80)
    except Exception:  # a stranger's object may raise anything when it is shown
        return f"a {type(value).__name__}"


def _invalid(path: str, wanted: str, value: Any) -> Invalid:
    return Invalid(f"{path} must be {wanted}, got {shown(value)}")


def _finite(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        raise Invalid(f"{path} must be a dense tensor of floats, got {shown(tensor)}")
    if not tensor.isfinite().all():
        raise Invalid(f"{path} is not finite")
    if tensor.numel() and tensor.abs().max() > LARGEST_ENTRY:
        raise Invalid(f"{path} has entries beyond {LARGEST_ENTRY:g}")
    return tensor
