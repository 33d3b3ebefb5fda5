"""Errors that are the user's to cure: one line, exit code 2, no traceback."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from firm.federation import ProcessLost, RoundFailed
from firm.federation.outside import printable
from firm.federation.user_code import described, is_raised_by_user

_MAX_LINE = 4_000
"""Longest line that an error ends the program with, in characters."""


class UserError(ValueError):
    """What was wrong, what was received and what to do, in one line for the person who typed it."""


class Terminated(KeyboardInterrupt):
    """Somebody asked this process to end, by SIGTERM; like Ctrl-C, it is no defect."""


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raises `Terminated` inside, in the main thread, where SIGTERM comes.

    A run then notes how it ended before the process goes. A handler that the signal has already, or
    is given inside, counts instead.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child, which ends as it would have
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        signal.signal(signum, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (end, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends the program with one line on stderr and exit code 2 when the input is at fault.

    Bad values, files and rewards raise ValueError or OSError, or make every client fail. A defect
    may do so too, so whatever is not a plain `UserError` says how to see its traceback. So does a
    SystemExit from code of a user, which would end the program without a word. All other exceptions
    keep theirs. Ctrl-C ends the program with 130, SIGTERM with 143, as shells count, and with the
    notes that were added to the interrupt on its way.
    """
    try:
        with interrupted_by_sigterm():
            yield
    except (ValueError, OSError, RoundFailed, ProcessLost) as error:
        if os.environ.get("FIRM_TRACEBACK"):
            raise
        rank = os.environ.get("RANK", "0")  # of a launcher's processes; the first needs no name
        words = " ".join(str(error).split()) or type(error).__name__
        line = printable(words, max_length=_MAX_LINE)
        hint = "" if isinstance(error, UserError) else " (FIRM_TRACEBACK=1 shows where)"
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {line}{hint}\n")
        raise SystemExit(1 if isinstance(error, ProcessLost) else 2) from None
    except SystemExit as error:
        if not is_raised_by_user(error):
            raise
        line = f"{described(error)} ended the program; correct that code."
        if os.environ.get("FIRM_TRACEBACK"):
            raise RuntimeError(line) from error
        sys.stderr.write(f"error: {line} (FIRM_TRACEBACK=1 shows where)\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt as interrupt:
        is_sigterm = isinstance(interrupt, Terminated)
        notes = getattr(interrupt, "__notes__", ())
        words = "; ".join(["terminated" if is_sigterm else "interrupted", *notes])
        sys.stderr.write(f"{printable(words, max_length=_MAX_LINE)}\n")
        raise SystemExit(128 + (signal.SIGTERM if is_sigterm else signal.SIGINT)) from None
