"""Types of numbers that are sent and logged: what is valid is so with its objectives."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from pydantic import ValidationError

from firm.base import schema
from firm.base.schema import MAX_ITEMS, MAX_NAMES, SLACK, adapter
from tests.junk import JUNK


@dataclass
class Context:
    objectives: tuple[str, ...] | None = ("left", "right")


KINDS = {
    "finite": schema.Finite,
    "share": schema.Share,
    "correlation": schema.Correlation,
    "count": schema.Count,
    "series": schema.Series[schema.NonNegative],
    "items": schema.Items[schema.Finite],
    "per objective": schema.PerObjective[schema.Share],
    "per pair": schema.PerPair[schema.Correlation | None],
    "by objective": schema.ByObjective[schema.Finite | None],
    "by pair": schema.ByPair[schema.Finite],
    "named": schema.Named[schema.NonNegative],
    "gram": schema.Gram,
}
GOOD = {
    "finite": [0, -1.5, 1e36],
    "share": [0, 1, 0.5, 1 + SLACK],
    "correlation": [-1, 1, 0.5],
    "count": [0, 3],
    "series": [[0.0], (1, 2)],
    "items": [[], [1.5]],
    "per objective": [[0.2, 0.8]],
    "per pair": [[-1.0], [None]],
    "by objective": [{}, {"left": 1, "right": None}],
    "by pair": [{"left-right": 0.5}],
    "named": [{}, {"rollout": 1.0}],
    "gram": [[[1.0, 0.5], [0.5, 1.0]], [[0.0, 0.0], [0.0, 2.0]], [[4.0, -2.0], [-2.0, 1.0]]],
}
BAD = {
    "finite": [math.nan, math.inf, 1e37, 10**400, True, "1", None, [0.5]],
    "share": [-0.1, 1.1, math.nan],
    "correlation": [-1.1, 1.1],
    "count": [1.0, -1, True, "1", None, 10**19],
    "series": [[], [-1.0], {"0": 1}, "123", [None], [0.0] * (MAX_ITEMS + 1)],
    "items": [None, ["x"], [0.0] * (MAX_ITEMS + 1)],
    "per objective": [[1.0], [0.2, 0.3, 0.5], [0.5, 1.5], None],
    "per pair": [[], [0.1, 0.2], [math.nan]],
    "by objective": [{"up": 1.0}, {"left": "x"}, [1.0, 2.0]],
    "by pair": [{"right-left": 0.5}, {"left": 0.5}],
    "named": [
        [],
        {1: 1.0},
        {"a" * 201: 1.0},
        {"\x1b[2J": 1.0},
        {str(i): 1.0 for i in range(MAX_NAMES + 1)},
    ],
    "gram": [
        [[1.0, 0.5], [0.4, 1.0]],
        [[1.0, 1.1], [1.1, 1.0]],
        [[-1.0, 0.0], [0.0, 1.0]],
        [[0.0, 0.0], [0.0, -1.0]],
        [[1.0]],
        [[1e308, 0.0], [0.0, 1.0]],
        5,
    ],
}


@pytest.mark.parametrize("name", KINDS)
def test_valid_values_are_read_and_others_refused(name):
    for value in GOOD[name]:
        once = adapter(KINDS[name]).validate_python(value, context=Context())
        assert adapter(KINDS[name]).validate_python(once, context=Context()) == once
    for value in BAD[name]:
        with pytest.raises(ValidationError):
            adapter(KINDS[name]).validate_python(value, context=Context())


def test_without_known_objectives_their_number_is_open():
    for context in (Context(None), None):
        assert adapter(KINDS["per objective"]).validate_python([1.0], context=context) == [1.0]
        assert adapter(KINDS["by objective"]).validate_python({"up": 1.0}, context=context)


@pytest.mark.parametrize("name", KINDS)
@given(value=JUNK)
def test_whatever_comes_is_read_or_refused_with_words(name, value):
    try:
        adapter(KINDS[name]).validate_python(value, context=Context())
    except ValidationError as refused:
        words = [schema.in_words(error) for error in refused.errors()]
    else:
        return
    assert all(words)
