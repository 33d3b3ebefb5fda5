"""Turns failures of pages, figures, tables and trackers into warnings that never end a run."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from firm.base.sanitize import printable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def drawn(what: str, draw: Callable[[], T], instead: Callable[[str], T]) -> T:
    """Returns the result of `draw` or, if it fails, the result of `instead` on a note.

    The note, one line that names the failed output and the error, is logged as a warning, and the
    traceback at level DEBUG.

    >>> drawn("The answer", lambda: f"{42:.1f}", instead=str)
    '42.0'
    """
    try:
        return draw()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a failed figure must not end the run
        return instead(_warn(what, error))


@contextmanager
def drawing(what: str) -> Iterator[None]:
    """Turns exceptions inside the context into the warning of `drawn`."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as in `drawn`
        _warn(what, error)


class Guard:
    """Turns exceptions of a service into warnings, one for all equal exceptions.

    Args:
        service: Its name.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._reported: set[tuple[type, str]] = set()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Turns exceptions inside the context into warnings that name the failed output."""
        try:
            yield
        except Exception as error:  # a failure of the service must not end the run
            if (failure := (type(error), str(error))) not in self._reported:
                self._reported.add(failure)
                _warn(f"{self._service}: {what}", error)


def _warn(what: str, error: BaseException) -> str:
    note = f"{what} could not be drawn ({printable(f'{type(error).__name__}: {error}')})."
    logger.warning("%s", note)
    logger.debug("%s", what, exc_info=error)
    return note
