"""What only shows a run becomes a note when it fails, and the run goes on."""

import logging

import pytest

from firm.run.guard import drawing, drawn


def _fail() -> str:
    raise ValueError("two\nlines \x1b[2J")


def test_what_fails_is_a_note_and_a_warning_of_one_line(caplog, undrawn) -> None:
    found = drawn("The page", _fail, instead=lambda note: f"<{note}>")
    note = "The page could not be drawn (ValueError: two\\nlines \\x1b[2J)."
    assert found == f"<{note}>"
    with drawing("The page"):
        _fail()
    assert undrawn == [note, note]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_what_succeeds_is_returned_without_a_word(caplog) -> None:
    assert drawn("The page", lambda: "drawn", instead=str) == "drawn"
    with drawing("The page"):
        pass
    assert not caplog.records


def test_an_interrupt_is_none_of_its_business() -> None:
    with pytest.raises(KeyboardInterrupt), drawing("The page"):
        raise KeyboardInterrupt


def test_our_own_tests_fail_where_something_is_not_drawn(request) -> None:
    check = request.getfixturevalue("_notes")
    with drawing("The page"):
        _fail()
    assert check.notes
    assert "ValueError" in check.tracebacks[0]  # what the test would fail with
    check.clear()
