"""What only shows a run never ends it: a page, figure, table or W&B that fails is a warning."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from firm.federation.outside import printable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def drawn(what: str, draw: Callable[[], T], instead: Callable[[str], T]) -> T:
    """Returns what `draw` returns or, where it fails, what `instead` makes of a note on that.

    The note, one line that names what failed and the error, is logged as a warning, and the
    traceback at level DEBUG. Our own tests fail on such a warning.

    >>> drawn("The answer", lambda: f"{42:.1f}", instead=str)
    '42.0'
    """
    try:
        return draw()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the run is worth more than any picture of it
        return instead(_warn(what, error))


@contextmanager
def drawing(what: str) -> Iterator[None]:
    """Turns whatever fails inside into the warning of `drawn`."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as in `drawn`
        _warn(what, error)


def _warn(what: str, error: BaseException) -> str:
    note = f"{what} could not be drawn ({printable(f'{type(error).__name__}: {error}')})."
    logger.warning("%s", note)
    logger.debug("%s", what, exc_info=error)
    return note
