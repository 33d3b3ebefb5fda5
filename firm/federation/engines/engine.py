"""The interface of engines, and the registry of engines that a configuration may choose."""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from firm.base.sanitize import printable
from firm.base.state import State
from firm.federation.client import Failure, Reply
from firm.federation.engine_registry import ENGINES as ENGINES
from firm.federation.engine_registry import engine as engine
from firm.federation.messages import Request
from firm.federation.schema import Invalid


class Engine(Protocol):
    """Runs tasks on clients and keeps the clients' states, wherever the clients run.

    A client's state is transactional. A task starts from the state after the last round that the
    server accepted (0: the initial state); the state after the task is pending until a later
    request states whether it was accepted. If a client is lost or rejected, its state is rolled
    back. The same applies if it raises or hangs, except that the batches it had drawn are skipped
    (``Client.skip_failed_batches``).
    """

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies of the clients that finished, in the given order, and the failures.

        Every answer has been validated against its schema (``checked_reply``). Each client receives
        only the part of the request that concerns it.
        """
        ...

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns the clients' states after their last accepted rounds, for a checkpoint."""
        ...

    def restore_client_states(self, states: State) -> None:
        """Restores the states returned by ``client_states``."""
        ...

    def close(self) -> None:
        """Stops the threads and processes that the engine started."""
        ...


def checked_reply(
    request: Request, client: str, content: Any, bytes_down: int, bytes_up: int
) -> Reply | Failure:
    """Returns the client's reply if its answer conforms to the schema, otherwise a failure."""
    reading = request.reading()
    try:
        answer = request.answer.read(content, reading)
        if getattr(answer, "client", client) != client:
            raise Invalid("client must be the one that received the request")
    except Exception as error:  # any error caused by a hostile answer is its sender's failure
        kind = "" if isinstance(error, Invalid) else f"{type(error).__name__}: "
        reason = printable(f"its answer is refused: {kind}{error}")
        return Failure(client, reason, bytes_down, bytes_up, is_refused=True)
    return Reply(client, answer, bytes_down, bytes_up, dropped=len(reading.dropped))


def split_outcomes(outcomes: Iterable[Reply | Failure]) -> tuple[list[Reply], list[Failure]]:
    """Splits clients' outcomes into replies and failures; both keep the given order."""
    outcomes = list(outcomes)
    replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
    return replies, [outcome for outcome in outcomes if isinstance(outcome, Failure)]


def check_states(states: State, clients: Collection[str], *, all_have_states: bool = True) -> None:
    """Checks that a checkpoint has the states of these clients, of all or of some.

    Raises:
        ValueError: When the clients differ.
    """
    if states.keys() - set(clients) or (all_have_states and len(states) < len(clients)):
        raise ValueError(
            f"The checkpoint has the clients {sorted(states)}, this run has {sorted(clients)}; "
            "resume with the configuration that wrote it."
        )


def error_kind(error: BaseException) -> str:
    """Returns the type of an error and the operating system's error number, without its text.

    The text may quote a prompt, for example in an ``OSError`` about a file named after one.
    """
    kind = type(error).__name__
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and isinstance(number, int) and number in errno.errorcode:
        return f"{kind} {number} ({os.strerror(number)})"
    return kind


def tell_finished(
    on_event: Callable[..., None],
    outcome: Reply | Failure,
    round_number: int,
    *,
    seconds: float | None = None,
) -> None:
    """Reports to ``on_event`` that a client has finished, with its outcome and duration.

    By default ``seconds`` is the total of the stage times in the client's metrics.
    """
    failed = isinstance(outcome, Failure)
    metrics = {} if failed else getattr(outcome.content, "metrics", {})
    on_event(
        "client_finished",
        client=outcome.client,
        round=round_number,
        seconds=_total_seconds(metrics) if seconds is None else seconds,
        reason=outcome.reason if failed else None,
        metrics=metrics,
    )


def _total_seconds(metrics: Mapping[str, Any]) -> float:
    """Returns the total of a client's stage times; 0 if its metrics have none."""
    seconds = metrics.get("seconds")
    stages = seconds.values() if isinstance(seconds, dict) else ()
    return sum(value for value in stages if isinstance(value, int | float))
