"""The stacked engine: all clients of a process at once, as one large batch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from firm.federation.client import Client, Failure, Reply
from firm.federation.engines.engine import divided, engine, request_sizes
from firm.federation.engines.local import LocalEngine
from firm.federation.lockstep import lockstep
from firm.federation.messages import Request

MAX_ROWS = 128
"""With the miniature on a CPU 32 to 128 rows take as long, 256 half as much again: what is larger
than the cache waits for memory."""


@engine("stacked")
class StackedEngine(LocalEngine):
    """Runs clients in lockstep: what they do with a model that all share is done for all at once.

    A client's tasks, its state and its failures are those of the local engine. Clients that share
    nothing in lockstep run one after the other.

    Args:
        clients: As for ``LocalEngine``.
        max_rows: The most rows of a joint pass, which bounds memory; a client's own rows are one
            pass however many they are.
        timeout: Must be None: a joint pass has no single client to interrupt.
        **options: Those of ``LocalEngine``.

    Raises:
        ValueError: As ``LocalEngine``, or a time limit is given.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        max_rows: int = MAX_ROWS,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        if timeout is not None:
            raise ValueError(
                f"timeout must be None, got {timeout:g}: a joint pass has no single client to "
                "interrupt."
            )
        super().__init__(clients, **options)
        self._max_rows = max_rows

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``."""
        size_of = request_sizes(request)
        runs = [partial(self._run_and_tell, request, size_of, name) for name in clients]
        return divided(lockstep(runs, max_size=self._max_rows))
