"""Limits the time spent on redrawing the pages of work in progress."""

import math
import time
from collections.abc import Callable
from typing import Self

SHARE = 0.05
"""Share of the time that drawing takes up at most, if a page takes as long as the one before."""


class Paced:
    """Redraws a page as it gets out of date, but only for a small share of the time.

    The page of a long run may take longer to draw than a small round to train. It is therefore
    drawn again only after a time in proportion to that of the last drawing. As a context manager,
    this object also draws the page when an exception leaves the context, if it was drawn before.

    Args:
        draw: Draws the page as of now.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, draw: Callable[[], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._draw, self._clock = draw, clock
        self._due = -math.inf
        self._is_drawn = False

    def __call__(self) -> None:
        """Draws the page if that is due."""
        start = self._clock()
        if start < self._due:
            return
        self._is_drawn = True
        self._draw()
        end = self._clock()
        self._due = end + (end - start) * (1 / SHARE - 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._is_drawn:
            self._draw()
