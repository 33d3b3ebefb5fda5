"""The stacked engine, which batches the forward and backward passes of a process's clients."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from firm.federation.client import Client, Failure, Reply
from firm.federation.engine_registry import engine
from firm.federation.engines.engine import split_outcomes
from firm.federation.engines.local import LocalEngine
from firm.federation.lockstep import clock, lockstep
from firm.federation.messages import Request

MAX_ROWS = 128
"""With the miniature on a CPU, passes of 32 to 128 rows take equally long per row; 256 rows exceed
the cache and take half as long again."""


@engine("stacked")
class StackedEngine(LocalEngine):
    """Runs clients in lockstep, with batched passes through a model that they share.

    Tasks, states and failures of clients are handled as by the local engine. Clients without shared
    work run sequentially.

    Args:
        clients: As for ``LocalEngine``.
        max_rows: Maximum rows of a batched pass, which bounds memory; the rows of a single client
            are never split.
        timeout: Must be None: a batched pass has no single client to interrupt.
        **options: Options of ``LocalEngine``.

    Raises:
        ValueError: As for ``LocalEngine``, or a time limit is given.
    """

    _clock = staticmethod(clock)

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
                f"timeout must be None, got {timeout:g}: a batched pass cannot be interrupted for "
                "a single client."
            )
        super().__init__(clients, **options)
        self._max_rows = max_rows

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``."""
        self._build_clients(request, clients)
        runs = [partial(self._run_and_tell, request, name) for name in clients]
        return split_outcomes(lockstep(runs, max_size=self._max_rows))
