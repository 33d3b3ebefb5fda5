"""A time limit for work that may hang."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from firm.federation.client import TimeLimitError

GRACE = 10.0
"""Seconds beyond its limit that work has to end in, once it is interrupted."""


@contextmanager
def time_limit(seconds: float | None, name: str, *, interrupt: bool = True) -> Iterator[None]:
    """Interrupts work that takes longer than it may, and ends the process if that does not help.

    Python work is interrupted by the signal SIGALRM, which only the program's main thread hears.
    Where that does not help for ``GRACE`` seconds, as with work in native code, or may not be done,
    the process says whose work it is and exits with 1, so that nobody waits for it.

    Raises:
        TimeLimitError: The limit has passed.
    """
    if seconds is None:
        yield
        return

    def give_up(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeLimitError(f"it has not finished within {seconds:g} s")

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
            signal.setitimer(signal.ITIMER_REAL, 0)  # may be interrupted itself, the rest may not
    finally:
        last_resort.cancel()
        signal.signal(signal.SIGALRM, before)


def _end_process(name: str, seconds: float) -> NoReturn:
    sys.stderr.write(
        f"{name} has not finished within {seconds:g} s and cannot be interrupted; the process that "
        "works on it ends. Repair the cause, then resume from the last checkpoint.\n"
    )
    sys.stderr.flush()
    os._exit(1)
