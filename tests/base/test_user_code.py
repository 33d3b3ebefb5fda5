"""What users' code may raise, and what is said of it."""

import asyncio
import json

import greenlet
import pytest

from firm.base.errors import TimeLimitError
from firm.base.user_code import describe_error, user_code
from firm.federation import ProcessLost
from reward_models import brevity


class Odd(BaseException):
    """What a user's own loop is ended by."""


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("score"), "KeyError: 'score'"),
        (SystemExit(), "SystemExit"),
        (SystemExit(0), "SystemExit: 0"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (StopIteration(), "StopIteration"),
        (Odd("enough"), "Odd: enough"),
        (TimeoutError("no answer"), "TimeoutError: no answer"),
        (Mute(), "Mute"),
    ],
)
def test_whatever_is_raised_is_one_line_with_its_place(error, text):
    with pytest.raises(ValueError, match="raised") as caught, user_code("reward 'a'", "repair it"):
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith(f"reward 'a' raised {text} (tests/base/test_user_code")
    assert str(caught.value).endswith("); repair it.")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), ProcessLost("gone"), TimeLimitError("late"), greenlet.GreenletExit()],
)
def test_what_stops_the_work_from_outside_passes(error):
    with pytest.raises(type(error)), user_code("reward 'a'"):
        raise error


def test_errors_that_are_expected_pass():
    with pytest.raises(OSError, match="disk"), user_code("loader", but=(OSError,)):
        raise OSError("disk")


def line_of(source, tmp_path, name="mine.py"):
    """Returns what is said of an error of a function `reward` in a file."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    space = {"json": json}
    exec(compile(source, str(file), "exec"), space)
    try:
        space["reward"]()
    except Exception as error:
        # as a framework calls it: no frame of this test
        return describe_error(error.with_traceback(error.__traceback__.tb_next))
    raise AssertionError


def test_the_place_is_the_users_line_and_not_one_of_a_library_below_it(tmp_path):
    source = "def reward():\n    return helper()\n\ndef helper():\n    return json.loads('[1')\n"
    assert line_of(source, tmp_path).endswith(f" ({tmp_path / 'mine.py'}:5)")


def test_the_place_in_an_installed_package_is_the_function_that_was_called(tmp_path):
    source = "def reward():\n    return helper()\n\ndef helper():\n    return 1 / 0\n"
    said = line_of(source, tmp_path, "lib/site-packages/judges/mine.py")
    assert said.endswith("judges/mine.py:2)")


def test_an_error_of_this_package_alone_has_no_place():
    with pytest.raises(ValueError, match="half_words") as caught:
        brevity(["a"], half_words=0)
    error = caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this test
    assert describe_error(error).endswith("got 0.")


def test_a_file_that_cannot_be_read_as_python_has_its_own_line(tmp_path):
    try:
        compile("x = 1\nif x\n", str(tmp_path / "mine.py"), "exec")
    except SyntaxError as error:
        said = describe_error(error)
    assert said == f"SyntaxError: expected ':' ({tmp_path / 'mine.py'}:2)"


def test_places_are_shown_as_seen_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert line_of("def reward():\n    1 / 0\n", tmp_path).endswith("(mine.py:2)")
