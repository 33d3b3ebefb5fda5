"""A time limit for work that may hang."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

GRACE = 10.0
"""Seconds beyond its limit that work has to end in, once it is interrupted."""


@contextmanager
def time_limit(seconds: float | None, name: str, *, interrupt: bool = True) -> Iterator[None]:
    """Interrupts work that takes longer than it may, and ends the process if that does not help.

    Python work is interrupted wherever it is, by the signal SIGALRM. Work that waits in native code
    cannot be: ``GRACE`` seconds later the process says so and exits with 1, so that nobody waits
    for it.

    Args:
        seconds: The limit; None does nothing.
        name: Whose work it is, for the messages.
        interrupt: Whether it may be interrupted; if not, the process ends at once.

    Raises:
        TimeoutError: The limit has passed.
        ValueError: This is not the program's main thread, the only one that hears of signals.
    """
    if seconds is None:
        yield
        return

    def give_up(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"it has not finished within {seconds:g} s")

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
