"""A configuration's types say what its fields may be and where their values come from."""

from dataclasses import FrozenInstanceError, field, replace
from math import inf, nan
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Interval, MinLen

from firm.base.fields import (
    NOT_IN_PAPER,
    FiniteFloat,
    Fraction,
    Hint,
    NonNegativeFloat,
    NonNegativeInt,
    Paper,
    PositiveFloat,
    PositiveInt,
    configuration,
    field_docstrings,
    in_words,
)


@configuration
class Settings:
    """Some of everything."""

    count: PositiveInt = 1
    """A count."""
    least: Annotated[NonNegativeInt, Ge(2)] = 2
    """Its own bound counts too."""
    rate: Annotated[PositiveFloat, Paper("A.1", (0.5, 0.25))] = 0.5
    share: Annotated[Fraction | None, Hint("null takes all")] = None
    open_share: Annotated[float, Interval(ge=0, lt=1), NOT_IN_PAPER] = 0.0
    bias: FiniteFloat = 0.0
    limit: PositiveInt | None = None
    either: Annotated[PositiveInt | Literal["auto"] | None, Hint("auto chooses")] = "auto"
    kind: Literal["a", "b"] = "a"
    widths: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1,)
    shares: dict[str, NonNegativeFloat] = field(default_factory=dict)
    plain: float = 0.0

    def __post_init__(self) -> None:
        if self.rate > self.count:
            raise ValueError(f"rate must be at most count ({self.count}), got {self.rate}.")


@configuration(source=NOT_IN_PAPER)
class Heir(Settings):
    """Inherits ranges and checks."""

    own: PositiveInt = 1
    """Its own."""


BAD = {
    "count": (0, "count must be at least 1, got 0."),
    "least": (1, "least must be at least 2, got 1."),
    "rate": (0.0, "rate must be positive, got 0.0."),
    "share": (1.5, "share must be at least 0 and at most 1, got 1.5; null takes all."),
    "open_share": (1.0, "open_share must be at least 0 and less than 1, got 1.0."),
    "bias": (nan, "bias must be a finite number, got nan."),
    "limit": (0, "limit must be at least 1 or null, got 0."),
    "either": (0, "either must be at least 1, got 0; auto chooses."),
    "kind": ("c", "kind must be one of a, b, got 'c'."),
    "widths": ((2, 0), "widths.1 must be at least 1, got 0."),
    "shares": ({"x": -1.0}, "shares.x must be non-negative, got -1.0."),
}


@pytest.mark.parametrize("form", [Settings, Heir])
@pytest.mark.parametrize("name", BAD)
def test_a_value_out_of_its_range_is_refused_wherever_the_object_is_made(form: Any, name: str):
    value, message = BAD[name]
    for make in (lambda **given: form(**given), lambda **given: replace(form(), **given)):
        with pytest.raises(ValueError) as refusal:
            make(**{name: value})
        assert str(refusal.value) == message


@pytest.mark.parametrize("value", [inf, -inf, nan])
@pytest.mark.parametrize("name", ["rate", "share", "open_share", "bias"])
def test_a_ranged_number_is_finite(name: str, value: Any):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        Settings(**{name: value})
    assert Settings(plain=inf).plain == inf


def test_an_empty_list_is_refused_where_one_entry_is_the_least():
    with pytest.raises(ValueError, match=r"^widths must be non-empty, got \(\)"):
        Settings(widths=())


def test_checks_across_fields_run_after_the_ranges_and_are_inherited():
    for form in (Settings, Heir):
        with pytest.raises(ValueError, match=r"^rate must be at most count \(1\), got 2\.0\.$"):
            form(rate=2.0)
        with pytest.raises(ValueError, match=r"^count must be at least 1"):
            form(rate=2.0, count=0)
    with pytest.raises(ValueError, match=r"^own must be at least 1"):
        Heir(own=0)


def test_values_are_kept_as_they_are_given_and_cannot_be_changed():
    settings = Settings(count=3, widths=(4, 5), limit=7)
    assert (settings.count, settings.widths, settings.limit) == (3, (4, 5), 7)
    with pytest.raises(FrozenInstanceError):
        settings.count = 0  # type: ignore[misc]


def test_ranges_and_sources_are_told_in_words():
    hints = Settings.__annotations__
    assert in_words(hints["share"]) == "at least 0 and at most 1"
    assert in_words(hints["rate"]) == "positive, A.1 of the paper: 0.5 or 0.25"
    assert in_words(hints["open_share"]) == "at least 0 and less than 1, not in the paper"
    assert in_words(hints["plain"]) == ""


def test_docstrings_below_fields_are_read_inherited_ones_too():
    assert field_docstrings(Heir) == {
        "count": "A count.",
        "least": "Its own bound counts too.",
        "own": "Its own.",
    }
