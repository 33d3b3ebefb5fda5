import json
import math
import os
from dataclasses import dataclass
from typing import Any

import pytest

from firm.fronts.json_record import read_record, write_record


@dataclass(frozen=True)
class Part:
    name: str
    size: float | None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    figures: dict[str, float]
    count: int
    anything: Any

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must not be negative, got {self.count}.")


WHOLE = Whole((Part("é", 0.1), Part("b", None)), {"x": 1e-300}, 3, {"deep": [1, None]})


def _change(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def path(tmp_path):
    write_record(tmp_path / "whole.json", WHOLE, version=1)
    return tmp_path / "whole.json"


def test_what_is_written_is_read_again(path):
    assert read_record(path, Whole, version=1) == WHOLE


def test_what_is_not_finite_becomes_null_and_nan(path):
    write_record(path, Whole((), {"x": math.inf, "y": -math.nan}, 0, None), version=1)
    assert "Infinity" not in path.read_text()
    found = read_record(path, Whole, version=1)
    assert all(math.isnan(value) for value in found.figures.values())


def test_a_whole_number_is_read_as_a_float_where_one_belongs(path):
    _change(path, lambda c: c["figures"].update(x=2))
    assert isinstance(read_record(path, Whole, version=1).figures["x"], float)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_record(path, Whole((), {}, 0, None), version=1)
    assert read_record(path, Whole, version=1) == WHOLE
    assert list(path.parent.iterdir()) == [path]


def test_the_file_may_be_read_by_others(path):
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=2), 'expected an object with "format": 1'),
        (lambda c: c.pop("count"), "count is missing"),
        (lambda c: c["parts"][1].pop("name"), r"parts\[1\]\.name is missing"),
        (lambda c: c["parts"][0].update(color="red"), r"parts\[0\]\.color is an unknown key"),
        (lambda c: c.update(count=1.5), r"count must be an integer, got 1\.5"),
        (lambda c: c.update(count=True), "count must be an integer, got true"),
        (lambda c: c.update(parts={}), "parts must be a list, got {}"),
        (lambda c: c["parts"].append(3), r"parts\[2\] must be an object, got 3"),
        (lambda c: c["parts"][0].update(name=None), r"name must be a string, got null"),
        (lambda c: c.update(figures=[]), r"figures must be an object, got \[\]"),
        (lambda c: c["figures"].update(x="1"), r'figures\.x must be a number, got "1"'),
        (lambda c: c["figures"].update(x=10**400), "too large"),
        (
            lambda c: c["parts"][0].update(size="a" * 99),
            r'size must be a number, got "a{39}\[\.\.\.\]',
        ),
        (lambda c: c.update(count=-1), "count must not be negative, got -1"),
    ],
)
def test_what_is_malformed_is_refused_in_one_line_that_says_where(path, change, message):
    _change(path, change)
    with pytest.raises(ValueError, match=message) as error:
        read_record(path, Whole, version=1)
    assert str(error.value).startswith(f"{path} is not a valid whole: ")
    assert "\n" not in str(error.value)
    assert ".. Restore" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a valid whole"):
        read_record(path, Whole, version=1)
