"""Pydantic types, with valid ranges, of the numbers that clients send and runs log.

A type such as ``Series[PerObjective[Share]]`` is declared once, where the number is computed
(`firm.base.quantities`). A client's message is validated strictly, and a row of a log leniently: an
invalid entry is dropped, and the others are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol, TypeVar

from annotated_types import Interval, Len
from pydantic import AfterValidator, AllowInfNan, ConfigDict, Strict, TypeAdapter, ValidationInfo
from pydantic_core import PydanticCustomError

LARGEST = 1e36
"""Largest magnitude of a number: it is finite in float32, and its square in float64."""
SLACK = 1e-3
"""Tolerance of shares and correlations beyond their range, for rounding."""
MAX_ITEMS = 10_000
"""Maximum number of items of a list, such as the solves of one round."""
MAX_NAMES = 1_000
"""Maximum number of entries of a mapping with free names."""
MAX_TEXT = 200
"""Maximum number of characters of a name."""
ROUNDING = 1e-6
"""Relative asymmetry that rounding leaves in a Gram matrix."""

T = TypeVar("T")


class Objectives(Protocol):
    """Validation context of a value; `objectives` is None if they are not known."""

    @property
    def objectives(self) -> Sequence[str] | None:
        """Names of the M objectives, in order."""
        ...


@dataclass(frozen=True)
class PerEach:
    """Marks a type with one entry per objective, or per pair of objectives as "a-b"."""

    pairs: bool = False

    def names(self, objectives: Sequence[str]) -> list[str]:
        """Returns the names of the entries, in order."""
        names = list(objectives)
        if not self.pairs:
            return names
        return [f"{a}-{b}" for i, a in enumerate(names) for b in names[i + 1 :]]

    def check_all(self, value: list[Any], info: ValidationInfo) -> list[Any]:
        """Returns a list with one item for each entry, if the objectives are known."""
        names = self._known(info)
        if names is not None and len(value) != len(names):
            raise PydanticCustomError("length", "a list of {count} items", {"count": len(names)})
        return value

    def check_some(self, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Returns a mapping from names of entries, if the objectives are known."""
        names = self._known(info)
        if names is not None and not value.keys() <= set(names):
            among = {"names": ", ".join(names)}
            raise PydanticCustomError("names", "a mapping with names among {names}", among)
        return value

    def _known(self, info: ValidationInfo) -> list[str] | None:
        objectives = info.context.objectives if info.context else None
        return None if objectives is None else self.names(objectives)


@dataclass(frozen=True)
class Separate:
    """Marks a list with independent items: if an item is invalid, the others are still valid."""


_EACH, _PAIR = PerEach(), PerEach(pairs=True)


def _is_printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("printable", "a text of characters that can be printed")
    return value


def _is_gram(rows: list[list[float]]) -> list[list[float]]:
    for i, row in enumerate(rows):
        for j in range(i + 1):
            bound = (max(row[i], 0) * max(rows[j][j], 0)) ** 0.5 * (1 + ROUNDING)
            slack = ROUNDING * max(row[i], rows[j][j])
            if row[i] < 0 or abs(row[j] - rows[j][i]) > slack or abs(row[j]) > bound + slack:
                raise PydanticCustomError(
                    "gram", "a Gram matrix, symmetric with |G_ij|² ≤ G_ii G_jj"
                )
    return rows


# --- Types ----------------------------------------------------------------------------------------

Finite = Annotated[float, AllowInfNan(False), Interval(ge=-LARGEST, le=LARGEST)]
NonNegative = Annotated[float, AllowInfNan(False), Interval(ge=0, le=LARGEST)]
Share = Annotated[float, AllowInfNan(False), Interval(ge=-SLACK, le=1 + SLACK)]
Correlation = Annotated[float, AllowInfNan(False), Interval(ge=-1 - SLACK, le=1 + SLACK)]
Count = Annotated[int, Interval(ge=0, le=10**18)]
Name = Annotated[str, Len(0, MAX_TEXT), AfterValidator(_is_printable)]

Series = Annotated[list[T], Strict(False), Len(1, MAX_ITEMS)]
"""One entry for each solve, or each batch."""
Items = Annotated[list[T], Strict(False), Len(0, MAX_ITEMS), Separate()]
"""List of independent items."""
PerObjective = Annotated[list[T], Strict(False), AfterValidator(_EACH.check_all), _EACH]
"""M entries."""
PerPair = Annotated[list[T], Strict(False), AfterValidator(_PAIR.check_all), _PAIR]
"""M(M - 1)/2 entries, the pairs in the order 01, 02, ..., 12, ..."""
ByObjective = Annotated[dict[str, T], AfterValidator(_EACH.check_some), _EACH]
"""Entries of some of the objectives."""
ByPair = Annotated[dict[str, T], AfterValidator(_PAIR.check_some), _PAIR]
"""Entries of some pairs, as "a-b"."""
Named = Annotated[dict[Name, T], Len(0, MAX_NAMES)]
"""Entries with free names."""
Gram = Annotated[PerObjective[PerObjective[Finite]], AfterValidator(_is_gram)]
"""A Gram matrix [M, M]: symmetric, within the bound of Cauchy and Schwarz."""


def in_words(error: Mapping[str, Any]) -> str:
    """Describes the value that pydantic's error expects, such as "a finite number"."""
    kind, limits = error["type"], error.get("ctx", {})
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = "at least" if "ge" in limits else "at most"
        return f"{bound} {limits.get('ge', limits.get('le')):g}"
    if kind == "string_too_long":
        return f"a text of at most {limits['max_length']} characters"
    if kind == "string_too_short":
        return f"a text of at least {limits['min_length']} characters"
    if kind == "string_pattern_mismatch":
        return f"a text that matches {limits['pattern']}"
    if kind == "too_short" and limits["min_length"] == 1:
        return "non-empty"
    if kind in ("too_short", "too_long"):
        bound = "at least" if "min_length" in limits else "at most"
        length = limits.get("min_length", limits.get("max_length"))
        return f"of {bound} {length} items, not {limits['actual_length']}"
    return _WORDS.get(kind) or error["msg"].removeprefix("Input should be ")


_WORDS = {
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Returns a strict pydantic validator of a type; the only conversion is from tuple to list."""
    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
