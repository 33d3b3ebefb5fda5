"""Components are registered under names of their own and found by them."""

from typing import Annotated

import pytest

from firm.base.fields import configuration
from firm.base.registry import OneOf, Registry

COLORS: Registry[str, object] = Registry("color", {"red": 1})


@configuration
class Wall:
    """A wall."""

    color: Annotated[str, OneOf(COLORS, "none")] = "none"
    """Its color."""


@pytest.fixture(autouse=True)
def colors():
    yield
    COLORS.clear()
    COLORS["red"] = 1


def test_a_name_belongs_to_one_component():
    @COLORS.register("teal")
    def teal():
        pass

    def other():
        pass

    with pytest.raises(
        ValueError, match="a color 'teal' is already registered; choose another name"
    ):
        COLORS.add("teal", other)
    with pytest.raises(ValueError, match=r"a color needs a name, got ''; choose one"):
        COLORS.add("", other)
    assert COLORS["teal"] is teal


def test_an_unknown_name_is_refused_with_the_nearest_and_all():
    with pytest.raises(ValueError, match="color must be red, got 'redd'; did you mean 'red'"):
        COLORS["redd"]
    assert COLORS.get("redd") is None


def test_a_configuration_takes_names_that_are_registered_later():
    with pytest.raises(ValueError, match=r"color must be one of none, red, got 'teal'\."):
        Wall("teal")
    COLORS.add("teal", object())
    assert Wall("teal").color == "teal"
    with pytest.raises(ValueError, match="got 'teel'; did you mean 'teal'"):
        Wall("teel")
