"""Runs user code, such as reward functions and plugins, and reports its errors in one line.

``except Exception`` is not sufficient: SystemExit, asyncio.CancelledError and exceptions derived
from BaseException would end the run without a message.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import greenlet

from firm.base.errors import ProcessLost, TimeLimitError
from firm.base.sanitize import printable

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
"""Folders of installed packages."""


def interruption_in(error: BaseException) -> BaseException | None:
    """Returns the interruption that an error has been made of by a library, if any."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, INTERRUPTIONS):
        at = getattr(at, "inner_exception", None) or at.__cause__ or at.__context__
    return at


@contextmanager
def user_code(
    what: str,
    remedy: str = "correct it",
    *,
    but: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Replaces any exception raised by user code in the block with a one-line ``ValueError``.

    The message names the user's file and line; the original exception is the cause.

    Args:
        what: Name of the code for the message, such as "reward 'brief'".
        remedy: Advice on how to resolve an error.
        but: Exceptions that are not replaced, in addition to `INTERRUPTIONS`.
    """
    try:
        yield
    except (*INTERRUPTIONS, *but):
        raise
    except BaseException as error:
        reason = describe_error(error).rstrip(".")
        raise ValueError(f"{what} raised {reason}; {remedy}.") from error


def describe_error(error: BaseException) -> str:
    """Returns the type, text, file and line of an error in user code, as one line."""
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:  # from a class defined by the user
        text = ""
    text = printable(" ".join(text.split()), max_length=300)
    where = place(error)
    return (
        f"{type(error).__name__}{f': {text}' if text else ''}"
        f"{f' ({printable(where)})' if where else ''}"
    )


def place(error: BaseException) -> str | None:
    """Returns the file and line in user code where an error originated; None if there is none.

    This is the innermost line outside of this package, Python's library and installed packages; for
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
    """Returns whether user code raised an error, directly or in a library that it calls."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    known = [file for file in files if _is_users(file) or file.startswith(_OWN_FOLDERS)]
    return bool(known) and _is_users(known[-1])


def _is_users(file: str) -> bool:
    is_installed = any(folder in file for folder in _PACKAGE_FOLDERS)
    is_frozen = file.startswith("<frozen ")
    return not (is_installed or is_frozen or file.startswith((*_OWN_FOLDERS, *_LIBRARY_FOLDERS)))


def _short(file: str) -> str:
    """Returns a path relative to the working directory if it is inside, else unchanged."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def import_module(name: str) -> Any:
    """Imports a module, and announces it on standard error if it was not imported before.

    Exceptions from its code propagate.
    """
    if name not in sys.modules:
        _announce("module", name)
    return importlib.import_module(name)


def import_file(file: Path) -> Any:
    """Returns a Python file as a module; imports it once per process and announces it.

    Exceptions from the file's code propagate.

    Raises:
        ImportError: The file does not exist or is not a Python file.
    """
    path = file.expanduser().resolve()
    name = f"firm_plugin_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if not path.is_file() or spec is None:
        raise ImportError("there is no such Python file")
    _announce("file", path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # not exec_module: bytecode of a file that was edited within the same second looks current
        exec(loader.source_to_code(path.read_bytes(), path), vars(module))
    except BaseException:  # after any exception, the module counts as not imported
        del sys.modules[name]
        raise
    return module


def function_named(text: str, key: str) -> Callable[..., Any]:
    """Returns the function that "module:function" or "file.py:function" names.

    Args:
        text: Module, or path of a Python file, and name of the function.
        key: Key path of the setting, for messages.

    Raises:
        ValueError: The text has another form, the module cannot be imported, or it has no such
            function.
    """
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise ValueError(f'{key} must be "module:function" or "file.py:function", got {text!r}.')
    with user_code(f"{key}: {module}"):
        own = import_file(Path(module)) if module.endswith(".py") else import_module(module)
    function = getattr(own, name, None)
    if not callable(function):
        raise ValueError(f"{key}: {module} has no function {name!r}; define it, or name another.")
    return function


def _announce(kind: str, name: object) -> None:
    """Announces that a plugin runs, since the configuration may be from someone else."""
    if not int(os.environ.get("RANK", 0)):  # only the first of a launcher's processes prints
        sys.stderr.write(printable(f"running Python {kind} {name}") + "\n")
