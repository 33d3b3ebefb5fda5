"""Configurations: frozen dataclasses with the range and source of each value in its type.

    @configuration
    class KLConfig:
        controller: Annotated[Literal["fixed", "adaptive"], Paper("A.1")] = "adaptive"
        coefficient: Annotated[NonNegativeFloat, NOT_IN_PAPER] = 0.2
        max_tokens: Annotated[PositiveInt | None, Hint("null takes all")] = None

Ranges are checked whenever an object is created, from a file or in Python, and `--help` shows them.
Checks that involve several fields belong in `__post_init__`.
"""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from reprlib import Repr
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from annotated_types import Ge, Gt, Interval
from pydantic import AllowInfNan, TypeAdapter, ValidationError

from firm.base import schema
from firm.base.registry import OneOf, choice_in_words, did_you_mean

T = TypeVar("T")

_FINITE = AllowInfNan(False)
_UNIONS = (Union, types.UnionType)
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_WORDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}

LARGEST = 2**31 - 1
"""Upper limit of integers that only bound other values, and thus allocate nothing."""

PositiveInt = Annotated[int, Interval(ge=1, le=LARGEST)]
NonNegativeInt = Annotated[int, Interval(ge=0, le=LARGEST)]
Seed = Annotated[int, Interval(ge=-(2**63), le=2**63 - 1)]
BoundedInt = Annotated[int, Interval(ge=1, le=2**20)]
"""Number of items that are processed or stored, such as rows of a batch, epochs or replies."""
NumTokens = Annotated[int, Interval(ge=1, le=10_000_000)]
"""Length of a text in tokens; the longest contexts have ten million."""
NumWorkers = Annotated[int, Interval(ge=1, le=4_096)]
"""Number of threads or processes on one machine."""
_SAFEGUARDS = {-(2**63)} | {
    get_args(kind)[1].le for kind in (PositiveInt, Seed, BoundedInt, NumTokens, NumWorkers)
}
"""Limits that help pages omit; only error messages mention them."""
Port = Annotated[int, Interval(ge=1, le=65_535)]
NumClients = Annotated[int, Interval(ge=1, le=100_000)]
"""Number of clients; a run keeps an index of all, so larger numbers are mistakes."""
NumRounds = Annotated[int, Interval(ge=0, le=1_000_000)]
"""Number of rounds or local steps; plans and schedules iterate over them."""
FiniteFloat = Annotated[float, _FINITE]
PositiveFloat = Annotated[float, Gt(0), _FINITE]
NonNegativeFloat = Annotated[float, Ge(0), _FINITE]
Fraction = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class Hint:
    """Remedy for a rejected value, appended to the error message."""

    text: str


@dataclass(frozen=True)
class Paper:
    """Location of a field's value in FIRM's paper (Nourzad et al.)."""

    section: str
    """Section or appendix, such as "A.1"."""
    values: tuple[Any, ...] = ()
    """Values in the paper; empty: the field's default."""

    def __str__(self) -> str:
        value = self.values_in_words
        return f"{self.section} of the paper" + (value and f": {value}")

    @property
    def values_in_words(self) -> str:
        """The values, joined by "or"."""
        return " or ".join(map(str, self.values))


class NotInPaper:
    """Marks a field that FIRM's paper leaves unspecified."""

    def __str__(self) -> str:
        return "not in the paper"


NOT_IN_PAPER = NotInPaper()


@overload
def configuration(form: type[T], /) -> type[T]: ...
@overload
def configuration(*, source: Paper | NotInPaper) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def configuration(form: type | None = None, /, *, source: Paper | NotInPaper | None = None) -> Any:
    """Turns a class into a frozen dataclass that checks its fields against their types.

    Numbers must be within their range, and strings must be among their literals. A `__post_init__`
    of the class runs after these checks.

    Args:
        form: The class.
        source: Source of the values, for fields without a source in their annotation.
    """

    def decorate(form: type) -> type:
        check_across_fields = form.__dict__.get("__post_init__")

        def __post_init__(self: Any) -> None:
            _check_fields(self)
            if check_across_fields:
                check_across_fields(self)

        if check_across_fields or not hasattr(form, "__post_init__"):
            form.__post_init__ = __post_init__  # type: ignore[attr-defined]
        form.__source__ = source  # type: ignore[attr-defined]
        return dataclass(frozen=True)(form)

    return decorate if form is None else decorate(form)


def metadata(kind: Any) -> list[Any]:
    """Returns the metadata of an annotation and of the types nested in it."""
    own = list(get_args(kind)[1:]) if get_origin(kind) is Annotated else []
    return [entry for part in get_args(kind) for entry in metadata(part)] + own


def sources(form: type) -> dict[str, list[Paper | NotInPaper]]:
    """Returns the sources of a dataclass's values by field, from the fields' annotations."""
    return {
        name: [entry for entry in metadata(kind) if isinstance(entry, Paper | NotInPaper)]
        for name, kind in get_type_hints(form, include_extras=True).items()
    }


def in_words(kind: Any) -> str:
    """Describes a field's range and its value in the paper, for the help page."""
    others = [str(each) for each in metadata(kind) if isinstance(each, OneOf | Paper | NotInPaper)]
    return ", ".join(filter(None, [_range(kind), *others]))


def _range(kind: Any, *, is_whole: bool = False) -> str:
    """Describes the range of a type; includes the safeguards only if `is_whole`."""
    limits = {
        name: limit
        for entry in metadata(kind)
        for name in _WORDS
        if (limit := getattr(entry, name, None)) is not None
    }
    if not is_whole:
        limits = {name: limit for name, limit in limits.items() if limit not in _SAFEGUARDS}
    if limits in ({"gt": 0}, {"ge": 0}):
        return "positive" if "gt" in limits else "non-negative"
    return " and ".join(f"{_WORDS[name]} {_in_words(limit)}" for name, limit in limits.items())


def _in_words(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _choices(kind: Any) -> list[Any]:
    """Returns the literals, or the names of a registry, that a type allows."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    own = [name for each in metadata(kind) if isinstance(each, OneOf) for name in each.choices]
    return own or [literal for part in get_args(kind) for literal in _choices(part)]


@cache
def _adapters(form: type) -> dict[str, tuple[Any, TypeAdapter]]:
    """Returns the annotation and validator of each field with metadata or literals."""
    hints = get_type_hints(form, include_extras=True)
    kinds = {f.name: hints[f.name] for f in form.__dataclass_fields__.values()}
    return {
        name: (kind, TypeAdapter(kind))
        for name, kind in kinds.items()
        if any(word in repr(kind) for word in ("Annotated", "Literal"))
    }


def _check_fields(settings: Any) -> None:
    """Checks the fields of a dataclass against their types.

    Raises:
        ValueError: A value is out of range, not finite or not among the literals; the message
            starts with the field's name.
    """
    for name, (kind, adapter) in _adapters(type(settings)).items():
        try:
            adapter.validate_python(getattr(settings, name))
        except ValidationError as error:
            raise ValueError(_message(name, kind, error)) from None


def _message(name: str, kind: Any, error: ValidationError) -> str:
    first, choices = error.errors()[0], []
    if first["type"].startswith(("greater", "less")):
        words = _range(kind, is_whole=first["type"].startswith("less"))
    elif first["type"] in ("literal_error", "names"):
        choices = _choices(kind)
        words = choice_in_words(choices)
    else:
        words = schema.in_words(first)
    remedy = "".join(f"; {entry.text}." for entry in metadata(kind) if isinstance(entry, Hint))
    if not remedy and type(None) in get_args(kind):
        words += " or null"
    union = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    has_several = len(set(get_args(union)) - {type(None)}) > 1 and get_origin(union) in _UNIONS
    place = first["loc"][1:] if has_several else first["loc"]  # without the member's type
    path = ".".join(map(str, (name, *place)))
    got = _SHORT.repr(first["input"])
    return f"{path} must be {words}, got {got}{remedy or did_you_mean(first['input'], choices)}"


def field_docstrings(form: type) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass as one line; includes inherited fields."""
    documents: dict[str, str] = {}
    for base in reversed(form.__mro__):
        if not is_dataclass(base):
            continue
        definition = _definitions(base.__module__).get(base.__qualname__)
        if definition is None:  # defined within a function or in a notebook
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(definition, ast.ClassDef)
        for statement, below in zip(definition.body, definition.body[1:], strict=False):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    documents[name] = " ".join(text.split())
    return documents


@cache
def _definitions(module: str) -> dict[str, ast.ClassDef]:
    """Returns the classes of a module by name; parsing it once is faster than class by class."""
    if not hasattr(sys.modules[module], "__file__"):
        return {}
    source = inspect.getsource(sys.modules[module])
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
