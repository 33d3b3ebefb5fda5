"""The engine's slots, and the bounded queue of requests for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from firm.serving.requests import RequestRefused


class Slots:
    """Slots of an engine, for which requests wait in the order in which they came.

    Args:
        num_slots: Number of replies that are computed at once.
        max_waiting: Number of requests that may wait.
    """

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self.num_slots, self.max_waiting = num_slots, max_waiting
        self._num_admitted = 0
        self._turn, self._free = asyncio.Lock(), asyncio.Semaphore(num_slots)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Counts a request from before its body is read to the end of its answer.

        Raises:
            RequestRefused: When as many as may run and wait are here already.
        """
        if self._num_admitted >= self.num_slots + self.max_waiting:
            raise RequestRefused(
                f"{self.max_waiting} requests are waiting already: try again later.",
                429,
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1

    async def take(self, num: int) -> None:
        """Waits for slots; requests for several take theirs one after the other."""
        num_taken = 0
        try:
            async with self._turn:
                while num_taken < num:
                    await self._free.acquire()
                    num_taken += 1
        except BaseException:
            self.free(num_taken)
            raise

    def free(self, num: int) -> None:
        """Frees slots for the next requests."""
        for _ in range(num):
            self._free.release()
