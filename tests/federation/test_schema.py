"""Schemas: what is read is fit to compute with; whatever else comes is told by its path."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.options.privacy import PrivacyConfig
from firm.federation.schema import (
    ByObjective,
    Fields,
    Flag,
    Invalid,
    Items,
    Matrix,
    Metrics,
    Model,
    Named,
    Number,
    Optional,
    Parameters,
    PerObjective,
    Reading,
    Record,
    Text,
    shown,
)
from firm.schema import MAX_ITEMS, MAX_NAMES

ADAPTER = {"b": torch.zeros(2, 3), "a": torch.zeros(4)}
SCHEMAS = {
    "number": Number(0, 1),
    "integer": Number(-3, 3, is_integer=True),
    "flag": Flag(),
    "text": Text(),
    "choice": Text(("one", "two")),
    "optional": Optional(Number()),
    "items": Items(Number(), 1, 3),
    "per objective": PerObjective(Number(0, 1)),
    "per pair": PerObjective(Number(-1, 1), pairs=True),
    "named": Named(Number()),
    "by objective": ByObjective(Optional(Number())),
    "by pair": ByObjective(Number(), pairs=True),
    "matrix": Matrix(),
    "jacobian": Matrix("d"),
    "parameters": Parameters(),
    "model": Model(),
    "fields": Fields({"a": Number(), "b": Flag()}, required=("a",)),
    "metrics": Metrics(),
}
GOOD = {
    "number": [0, 1, 0.5],
    "integer": [-3, 0, 3],
    "flag": [True, False],
    "text": ["", "a" * 200],
    "choice": ["one"],
    "optional": [None, 1.5],
    "items": [[1], (1, 2, 3)],
    "per objective": [[0.2, 0.8]],
    "per pair": [[-1.0]],
    "named": [{}, {"rollout": 1.0}],
    "by objective": [{}, {"left": 1, "right": None}],
    "by pair": [{"left-right": 0.5}],
    "matrix": [torch.eye(2), torch.eye(2).double()],
    "jacobian": [torch.ones(2, 10), torch.ones(2, 1)],
    "parameters": [ADAPTER, dict(reversed(ADAPTER.items()))],
    "model": [ADAPTER, {}, {"x": torch.ones(1).bfloat16()}],
    "fields": [{"a": 1}, {"a": 1, "b": True}],
    "metrics": [{}, {"num_steps": 3, "weights": [[0.5, 0.5]]}],
}
BAD = {
    "number": [-0.1, 1.1, math.nan, math.inf, True, "1", None, [0.5], 10**400],
    "integer": [1.0, 4, True, "1"],
    "flag": [0, 1, "true", None],
    "text": [1, None, "a" * 201, b"a"],
    "choice": ["three", ["one"], None],
    "optional": ["", math.nan],
    "items": [[], [1] * 4, {"0": 1}, "123", [None]],
    "per objective": [[1.0], [0.2, 0.3, 0.5], [0.5, 1.5], None],
    "per pair": [[], [0.1, 0.2], [math.nan]],
    "named": [[], {1: 1.0}, {"a" * 201: 1.0}, {str(i): 1.0 for i in range(MAX_NAMES + 1)}],
    "by objective": [{"up": 1.0}, {"left": "x"}, [1.0, 2.0]],
    "by pair": [{"right-left": 0.5}, {"left": 0.5}],
    "matrix": [torch.ones(2, 3), torch.ones(3, 3), torch.eye(2) * math.nan, [[1.0]], torch.ones(4)],
    "jacobian": [torch.ones(2, 11), torch.ones(2, 0), torch.ones(2, 3).long()],
    "parameters": [
        {"a": ADAPTER["a"]},
        {**ADAPTER, "c": torch.zeros(1)},
        {**ADAPTER, "a": torch.zeros(5)},
        {**ADAPTER, "a": torch.zeros(4).double()},
        {**ADAPTER, "a": torch.full((4,), math.nan)},
        {**ADAPTER, "a": torch.full((4,), 1e30)},
        {**ADAPTER, "a": [0.0] * 4},
        {**ADAPTER, 1: torch.zeros(1)},
        None,
    ],
    "model": [{"x": torch.ones(1).long()}, {"x": torch.tensor([math.inf])}, {"x": 1.0}, []],
    "fields": [{}, {"a": 1, "c": 1}, {"b": True}, []],
    "metrics": [{"num_steps": 0.5}, {"gram": [[1.0, 0.0], [0.0, 1.0]]}, [], None],
}


def _read(name, value):
    return SCHEMAS[name].read(value, "the.path", Reading(("left", "right"), ADAPTER))


@pytest.mark.parametrize("name", SCHEMAS)
def test_good_values_are_read_and_reading_again_changes_nothing(name, same):
    assert GOOD[name]
    for value in GOOD[name]:
        once = _read(name, value)
        assert same(_read(name, once), once)


@pytest.mark.parametrize("name", SCHEMAS)
def test_bad_values_are_refused_with_their_path(name):
    assert BAD[name]
    for value in BAD[name]:
        with pytest.raises(Invalid, match=r"the\.path") as refused:
            _read(name, value)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 400


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("name", SCHEMAS)
@given(value=JUNK)
def test_whatever_comes_is_read_or_refused(name, value):
    try:
        _read(name, value)
    except Invalid:
        return


def test_numbers_are_read_as_floats_unless_they_count():
    assert isinstance(_read("number", 1), float)
    assert isinstance(_read("integer", 1), int)


def test_texts_are_read_without_what_a_terminal_obeys():
    assert _read("text", "a\x1b[2J\n") == "a\\x1b[2J\\n"


def test_an_adapter_is_read_in_the_order_of_the_one_that_was_sent():
    assert list(_read("parameters", dict(reversed(ADAPTER.items())))) == list(ADAPTER)


def test_lists_have_a_longest_length():
    with pytest.raises(Invalid, match=f"from 0 to {MAX_ITEMS} items, got {MAX_ITEMS + 1}"):
        Items(Number()).read([0.0] * (MAX_ITEMS + 1), "path", Reading((), {}))


def test_metrics_that_nobody_registered_are_dropped_and_told():
    reading = Reading(("left", "right"), ADAPTER)
    value = {"num_steps": 1, "kind": "run", "\x1b[2J": 3, "mine": torch.zeros(1)}
    assert Metrics().read(value, "metrics", reading) == {"num_steps": 1}
    assert reading.dropped == ["metrics.kind", "metrics.\\x1b[2J", "metrics.mine"]


def test_what_is_shown_of_a_value_is_short_and_printable():
    values = ["x" * 10_000, 10**400, 10**5000, [[[["\x1b"]]] * 50] * 50, torch.zeros(3), "\ud800"]
    for value in values:
        assert shown(value).isprintable()
        assert len(shown(value)) <= 80


def test_a_record_is_read_by_its_own_annotations():
    schema, reading = Record(PrivacyConfig), Reading((), {})
    fields = {"clip_norm": 1, "noise_multiplier": 0.5, "at": "client", "noise_seed": None}
    record = schema.read(fields, "privacy", reading)
    assert record == PrivacyConfig(1.0, 0.5, at="client")
    assert schema.read(record, "privacy", reading) is record
    for change, message in (
        ({"at": "both"}, r"privacy\.at must be one of server, client"),
        ({"noise_seed": 0.5}, r"privacy\.noise_seed must be an integer"),
        ({"clip_norm": -1.0}, r"privacy: clip_norm must be positive"),
        ({"clip_norm": True}, r"privacy\.clip_norm must be a finite number"),
        ({"more": 1}, "privacy has the unknown field 'more'"),
    ):
        with pytest.raises(Invalid, match=message):
            schema.read({**fields, **change}, "privacy", reading)
    with pytest.raises(Invalid, match="privacy lacks the field 'noise_multiplier'"):
        schema.read({"clip_norm": 1.0}, "privacy", reading)
