"""Time limits for work that may hang."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from firm.base.errors import TimeLimitError

GRACE = 10.0
"""Seconds after its time limit within which interrupted work must end."""

REPEAT = 0.01
"""Seconds after which an interruption that had no effect is repeated."""


@contextmanager
def time_limit(seconds: float, name: str, *, interrupt: bool = True) -> Iterator[None]:
    """Interrupts work that exceeds a time limit, and ends the process if that has no effect.

    Python code is interrupted by the signal SIGALRM, which only the program's main thread receives.
    If this has no effect for ``GRACE`` seconds, as in native code, or if interrupting is not
    allowed, the process prints ``name`` and exits with 1, so that no other process waits for it.

    Python ignores what is raised in a finalizer, a weak reference's callback or a callback from
    native code. An interruption that arrives in one of them is repeated.

    Raises:
        TimeLimitError: The limit has passed.
    """

    def give_up(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeLimitError(f"it has not finished within {seconds:g} s")

    def repeat(ignored: "sys.UnraisableHookArgs") -> None:
        if isinstance(ignored.exc_value, TimeLimitError):
            signal.setitimer(signal.ITIMER_REAL, REPEAT)
        else:
            unraisable_before(ignored)

    unraisable_before, sys.unraisablehook = sys.unraisablehook, repeat
    before = signal.signal(signal.SIGALRM, give_up)
    end = seconds + GRACE if interrupt else seconds
    last_resort = threading.Timer(end, _end_process, (name, seconds))
    last_resort.daemon = True
    last_resort.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds if interrupt else 0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the signal may arrive here, but no later
    finally:
        last_resort.cancel()
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = unraisable_before


def _end_process(name: str, seconds: float) -> NoReturn:
    sys.stderr.write(
        f"{name} has not finished within {seconds:g} s and cannot be interrupted; the process that "
        "works on it ends. Repair the cause, then resume from the last checkpoint.\n"
    )
    sys.stderr.flush()
    os._exit(1)
