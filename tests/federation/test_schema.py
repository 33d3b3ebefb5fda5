"""Schemas: what is read is fit to compute with; whatever else comes is told by its path."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given

from firm.base.schema import ByObjective, Finite, NonNegative, PerObjective, PerPair
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.schema import (
    Invalid,
    Jacobian,
    Matrix,
    Metrics,
    Model,
    Parameters,
    Reading,
    Text,
    read,
    read_fields,
    read_record,
    shown,
)
from tests.junk import JUNK

ADAPTER = {"b": torch.zeros(2, 3), "a": torch.zeros(4)}
KINDS = {
    "flag": bool,
    "text": Text,
    "choice": Literal["one", "two"],
    "optional": NonNegative | None,
    "matrix": Matrix,
    "jacobian": Jacobian,
    "parameters": Parameters,
    "model": Model,
    "updates": ByObjective[Parameters],
    "metrics": Metrics,
}
GOOD = {
    "flag": [True, False],
    "text": ["", "a" * 200],
    "choice": ["one"],
    "optional": [None, 1.5],
    "matrix": [torch.eye(2), torch.eye(2).double()],
    "jacobian": [torch.ones(2, 10), torch.ones(2, 1)],
    "parameters": [ADAPTER, dict(reversed(ADAPTER.items()))],
    "model": [ADAPTER, {}, {"x": torch.ones(1).bfloat16()}],
    "updates": [{}, {"left": ADAPTER}],
    "metrics": [{}, {"num_steps": 3, "weights": [[0.5, 0.5]]}],
}
BAD = {
    "flag": [0, 1, "true", None],
    "text": [1, None, "a" * 201, b"a"],
    "choice": ["three", ["one"], None],
    "optional": ["", math.nan],
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
    "updates": [{"up": ADAPTER}, {"left": {"a": ADAPTER["a"]}}, [ADAPTER]],
    "metrics": [{"num_steps": 0.5}, {"gram": [[1.0, 0.0], [0.0, 1.0]]}, [], None],
}


def _read(name, value):
    return read(KINDS[name], value, "the.path", Reading(("left", "right"), ADAPTER))


@pytest.mark.parametrize("name", KINDS)
def test_good_values_are_read_and_reading_again_changes_nothing(name, same):
    assert GOOD[name]
    for value in GOOD[name]:
        once = _read(name, value)
        assert same(_read(name, once), once)


@pytest.mark.parametrize("name", KINDS)
def test_bad_values_are_refused_with_their_path(name):
    assert BAD[name]
    for value in BAD[name]:
        with pytest.raises(Invalid, match=r"the\.path") as refused:
            _read(name, value)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", KINDS)
@given(value=JUNK)
def test_whatever_comes_is_read_or_refused(name, value):
    try:
        _read(name, value)
    except Invalid:
        return


def test_a_path_leads_to_what_is_wrong():
    reading = Reading(("left", "right"), ADAPTER)
    for kind, value, problem in (
        (PerObjective[PerPair[Finite]], [[1.0], ["x"]], r"p\[1\]\[0\] must be a finite number"),
        (ByObjective[Finite], {"left": 1e37}, r"p\.left must be at most 1e\+36, got 1e\+37"),
        (ByObjective[Parameters], {"left": {}}, r"p\.left lacks the parameter 'b'"),
        (
            Metrics,
            {"by_objective": {"left": {"num_steps": -1}}},
            r"p\.by_objective\.left\.num_steps",
        ),
    ):
        with pytest.raises(Invalid, match=problem):
            read(kind, value, "p", reading)


def test_texts_are_read_without_what_a_terminal_obeys():
    assert _read("text", "a\x1b[2J\n") == "a\\x1b[2J\\n"


def test_an_adapter_is_read_in_the_order_of_the_one_that_was_sent():
    assert list(_read("parameters", dict(reversed(ADAPTER.items())))) == list(ADAPTER)


def test_metrics_that_nobody_registered_are_dropped_and_told():
    reading = Reading(("left", "right"), ADAPTER)
    value = {"num_steps": 1, "kind": "run", "\x1b[2J": 3, "mine": torch.zeros(1)}
    assert read(Metrics, value, "metrics", reading) == {"num_steps": 1}
    assert reading.dropped == ["metrics.kind", "metrics.\\x1b[2J", "metrics.mine"]


def test_what_is_shown_of_a_value_is_short_and_printable():
    values = ["x" * 10_000, 10**400, 10**5000, [[[["\x1b"]]] * 50] * 50, torch.zeros(3), "\ud800"]
    for value in values:
        assert shown(value).isprintable()
        assert len(shown(value)) <= 80


def test_a_record_is_read_by_its_own_annotations():
    kind, reading = PrivacyConfig, Reading((), {})
    fields = {"clip_norm": 1, "noise_multiplier": 0.5, "at": "client", "noise_seed": None}
    own = read_record(kind, fields, "privacy", reading)
    assert own == PrivacyConfig(1.0, 0.5, at="client")
    assert read_record(kind, own, "privacy", reading) is own
    for change, message in (
        ({"at": "both"}, r"privacy\.at must be 'server', 'client' or 'sum'"),
        ({"noise_seed": 0.5}, r"privacy\.noise_seed must be an integer"),
        ({"clip_norm": -1.0}, r"privacy\.clip_norm must be greater than 0"),
        ({"clip_norm": True}, r"privacy\.clip_norm must be a finite number"),
        ({"more": 1}, "privacy has the unknown field 'more'"),
    ):
        with pytest.raises(Invalid, match=message):
            read_record(kind, {**fields, **change}, "privacy", reading)
    with pytest.raises(Invalid, match="privacy lacks the field 'noise_multiplier'"):
        read_record(kind, {"clip_norm": 1.0}, "privacy", reading)


def test_a_mapping_has_fields_of_a_type_each():
    kinds, reading = {"a": NonNegative, "b": bool}, Reading((), {})
    assert read_fields(kinds, {"a": 1, "b": True}, reading, required=["a"]) == {"a": 1.0, "b": True}
    for value, message in (
        ({}, "the message lacks the field 'a'"),
        ({"a": 1, "c": 1}, "the message has the unknown field 'c'"),
        ({"a": 1, "b": 1}, "^b must be true or false, got 1"),
        ([], "the message must be a mapping"),
    ):
        with pytest.raises(Invalid, match=message):
            read_fields(kinds, value, reading, required=["a"])
