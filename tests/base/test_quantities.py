"""Quantities: one registration says what clients send, what a log may hold, what is drawn."""

from dataclasses import replace

import pytest

from firm.base.quantities import QUANTITIES, Quantity, drawn, of_clients, register, shown
from firm.base.schema import ByObjective, Finite, PerObjective, PerPair, Series, Share


def test_a_name_is_given_once_and_never_the_servers(new_plugins):
    with pytest.raises(ValueError, match="'client' is written by the server"):
        register(Quantity("client"))
    fog = Quantity("fog", type=Share)
    register(fog)
    for other in (replace(fog, type=Finite), replace(fog, may_leave=False)):
        with pytest.raises(ValueError, match=r"a quantity .*'fog'.* is already registered"):
            register(other)
    before = dict(QUANTITIES)
    register(fog)
    assert before == QUANTITIES


def test_the_type_says_of_what_there_is_one():
    assert Quantity("a").by == ""
    assert Quantity("a", type=Series[PerObjective[Share]]).by == "objective"
    assert Quantity("a", type=Series[PerPair[Finite | None]]).by == "pair"
    assert Quantity("a", by="objective").type == ByObjective[Finite | None]


def test_without_a_title_it_is_sent_and_not_drawn(new_plugins):
    register(Quantity("fog"), Quantity("rain", "Rain", "mm"), Quantity("sun", of=lambda row: 1.0))
    assert {"fog", "rain"} <= of_clients().keys()
    assert "sun" not in of_clients()  # it is derived from a row
    assert shown("further")[-1].name == "rain"
    assert "fog" not in [each.name for each in drawn()]
