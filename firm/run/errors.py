"""User errors: reported in one line, with exit code 2 and no traceback."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from firm.base.errors import ProcessLost, RolloutError, RoundFailed, Terminated
from firm.base.sanitize import printable
from firm.base.user_code import describe_error, is_raised_by_user

_MAX_LINE = 4_000
"""Maximum length of an error message in characters."""


class UserError(ValueError):
    """Raised on invalid user input; one line states the problem, the input and a remedy."""


def _is_output_closed() -> bool:
    """Returns whether the reader of the standard output has closed it; if so, the rest is lost."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file
        return False
    asked = select.poll()
    asked.register(output, 0)  # errors are always reported
    is_closed = bool(asked.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # for the flush at the end
    return is_closed


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raises `Terminated` in the main thread inside the context, if SIGTERM arrives.

    A run can then record how it ended before the process exits. A signal handler that is already
    set, or that is set inside the context, takes precedence.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child inherits the handler, but must simply terminate
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        signal.signal(signum, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (end, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Exits with one line on stderr and exit code 2 if the input is invalid.

    Invalid values, files and rewards raise ValueError or OSError, or make every client fail, and
    rollout engines raise RolloutError. Since a defect may do so, too, the line says how to get a
    traceback unless the error is a `UserError`.
    A SystemExit raised by user code, which would end the program silently, is reported in the same
    way. Other exceptions keep their traceback. As in shells, the exit code is 130 after Ctrl-C,
    143 after SIGTERM, and 141, without a line, if the reader of the output, such as `head`, has
    closed it; notes added to the interrupt are printed. It is 1 after `ProcessLost`.
    """
    try:
        with interrupted_by_sigterm():
            yield
            if sys.stdout is not None:  # it was closed before the program started
                sys.stdout.flush()
    except (ValueError, OSError, RoundFailed, RolloutError, ProcessLost) as error:
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            raise SystemExit(128 + signal.SIGPIPE) from None
        if os.environ.get("FIRM_TRACEBACK"):
            raise
        rank = os.environ.get("RANK", "0")  # of a launcher's process; the first needs no label
        words = " ".join(str(error).split()) or type(error).__name__
        if notes := getattr(error, "__notes__", ()):
            words = "; ".join([words.removesuffix("."), *notes])
        line = printable(words, max_length=_MAX_LINE)
        hint = "" if isinstance(error, UserError) else " (FIRM_TRACEBACK=1 shows where)"
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {line}{hint}\n")
        raise SystemExit(1 if isinstance(error, ProcessLost) else 2) from None
    except SystemExit as error:
        if not is_raised_by_user(error):
            raise
        line = f"{describe_error(error)} ended the program; correct this code."
        if os.environ.get("FIRM_TRACEBACK"):
            raise RuntimeError(line) from error
        sys.stderr.write(f"error: {line} (FIRM_TRACEBACK=1 shows where)\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt as interrupt:
        is_sigterm = isinstance(interrupt, Terminated)
        notes = getattr(interrupt, "__notes__", ())
        words = "; ".join(["terminated" if is_sigterm else "interrupted", *notes])
        if os.environ.get("RANK", "0") == "0":  # all processes of a launcher end
            sys.stderr.write(f"{printable(words, max_length=_MAX_LINE)}\n")
        raise SystemExit(128 + (signal.SIGTERM if is_sigterm else signal.SIGINT)) from None
