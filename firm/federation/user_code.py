"""Code of users, such as reward functions and plugins: whatever it raises becomes one line.

``except Exception`` is not enough for that: SystemExit, asyncio.CancelledError and exceptions that
derive from BaseException would end the run without a word.
"""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import greenlet

from firm.federation.client import ProcessLost, TimeLimitError
from firm.federation.outside import printable

ENDS = (KeyboardInterrupt, ProcessLost, greenlet.GreenletExit)
"""Exceptions that end the run, or a coroutine of `lockstep`."""
INTERRUPTIONS = (*ENDS, TimeLimitError)
"""Exceptions that stop work from outside; they are not errors of the code that they interrupt."""

_ROOT = Path(__file__).parents[2]
_OWN_FOLDERS = (f"{_ROOT / 'firm'}/", f"{_ROOT / 'reward_models'}/")
_LIBRARY_FOLDERS = tuple(
    f"{folder}/" for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
)
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")
"""Where installed packages are."""


@contextmanager
def user_code(
    what: str,
    remedy: str = "correct it",
    *,
    but: tuple[type[BaseException], ...] = (),
    kind: type[Exception] = ValueError,
) -> Iterator[None]:
    """Raises one line of text in place of whatever a user's code raises inside.

    The line names the user's own file and line; the exception itself is the cause.

    Args:
        what: What runs inside, such as "reward 'brief'".
        remedy: What to do about an error.
        but: Exceptions that pass as they are, beside `INTERRUPTIONS`.
        kind: Type of the error that is raised.
    """
    try:
        yield
    except (*INTERRUPTIONS, *but):
        raise
    except BaseException as error:
        raise kind(f"{what} raised {described(error)}; {remedy}.") from error


def described(error: BaseException) -> str:
    """Returns type, text, file and line of an error in a user's code, in one line."""
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:  # a class of the user's own
        text = ""
    text = printable(" ".join(text.split()), max_length=300)
    where = place(error)
    return (
        f"{type(error).__name__}{f': {text}' if text else ''}"
        f"{f' ({printable(where)})' if where else ''}"
    )


def place(error: BaseException) -> str | None:
    """Returns file and line of the user's code that an error came from, None where there is none.

    That is the innermost line outside this package, Python's library and installed packages; for
    a function of an installed package, the line of that function.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    users = [frame for frame in frames if _is_users(frame[0])]
    others = [frame for frame in frames if not frame[0].startswith(_OWN_FOLDERS)]
    if users:
        file, line = users[-1]
    elif others and any(folder in others[0][0] for folder in _PACKAGE_FOLDERS):
        file, line = others[0]
    else:
        return None
    return f"{_short(file)}:{line}"


def is_raised_by_user(error: BaseException) -> bool:
    """Returns whether a user's code raised an error, by itself or in a library that it calls."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    known = [file for file in files if _is_users(file) or file.startswith(_OWN_FOLDERS)]
    return bool(known) and _is_users(known[-1])


def _is_users(file: str) -> bool:
    is_installed = any(folder in file for folder in _PACKAGE_FOLDERS)
    is_frozen = file.startswith("<frozen ")
    return not (is_installed or is_frozen or file.startswith((*_OWN_FOLDERS, *_LIBRARY_FOLDERS)))


def _short(file: str) -> str:
    """Returns a path as seen from the working directory where it is inside."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
