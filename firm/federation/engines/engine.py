"""What a strategy may ask of any engine."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from firm.federation.client import Client, Failure, Reply, State, total_seconds
from firm.federation.messages import Request
from firm.federation.outside import printable
from firm.federation.schema import Invalid
from firm.federation.serialization import pack


class Engine(Protocol):
    """Runs tasks on clients and keeps their states, wherever they are.

    A client's state is transactional. Before a task the engine returns the client to its state
    after the last round that the server accepted (round 0 is the initial state), and keeps the
    state that the task leaves as pending until a later request says whether it was accepted. A
    client that is lost or refused is as if it had not been sampled. So is one that raises or hangs,
    except that the batches it had drawn are left out (``Client.skip_failed_batches``).
    """

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies of the clients that finished, in the given order, and the failures.

        Every answer has been read by its schema (``checked_reply``) before anything else sees it.

        Args:
            request: Names the registered task that carries it out. To each client goes only what
                concerns it.
            clients: Names of the clients that are asked.
        """
        ...

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns all clients' states after their last accepted rounds, for a checkpoint."""
        ...

    def restore_client_states(self, states: State) -> None:
        """Continues from what ``client_states`` returned."""
        ...

    def close(self) -> None:
        """Ends what the engine started; it is not used afterwards."""
        ...


class EngineFactory(Protocol):
    """Builds an engine in this process; `LocalEngine` says what the arguments mean."""

    def __call__(
        self,
        clients: Sequence[Client],
        *,
        num_workers: int = 1,
        timeout: float | None = None,
        interrupt: bool = True,
        on_event: Callable[..., None] | None = None,
    ) -> Engine:
        """Returns the engine; the clients' present states are those of round 0."""
        ...


ENGINES: dict[str, EngineFactory] = {}
"""Engines that a configuration may choose, by name."""

Factory = TypeVar("Factory", bound=EngineFactory)


def engine(name: str) -> Callable[[Factory], Factory]:
    """Registers an engine, or a function that builds one, under a name.

    Raises:
        ValueError: The name is taken.
    """

    def register(factory: Factory) -> Factory:
        if name in ENGINES:
            raise ValueError(f"there is an engine {name!r} already; choose another name.")
        ENGINES[name] = factory
        return factory

    return register


def check_engine(name: str) -> None:
    """Raises ``ValueError`` on a name that no engine has."""
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}.")


def checked_reply(
    request: Request, client: str, content: Any, bytes_down: int, bytes_up: int
) -> Reply | Failure:
    """Returns the reply of a client whose answer is as its schema says; a failure if it is not.

    Args:
        request: What was asked.
        client: Who answered.
        content: What came; anything.
        bytes_down: Size of the request.
        bytes_up: Size of the answer.
    """
    reading = request.reading()
    try:
        answer = request.answer.read(content, reading)
        if getattr(answer, "client", client) != client:
            raise Invalid("client must be the one that was asked")
    except Exception as error:  # whatever reading a hostile answer may raise is its sender's
        kind = "" if isinstance(error, Invalid) else f"{type(error).__name__}: "
        reason = printable(f"its answer is refused: {kind}{error}")
        return Failure(client, reason, bytes_down, bytes_up, is_refused=True)
    return Reply(client, answer, bytes_down, bytes_up, dropped=len(reading.dropped))


class RequestSizes:
    """Sizes of a request as it goes to single clients, without packing it for each of them.

    Args:
        request: The request to all.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_bytes = len(pack(request.of()))
        self._empty = _text_bytes(request.of())

    def of(self, client: str) -> int:
        """Returns the bytes of the client's own request."""
        return self._num_bytes + _text_bytes(self._request.of(client)) - self._empty


def _text_bytes(request: Request) -> int:
    """Returns the bytes of the fields that differ from client to client."""
    fields = {**vars(request), "adapter": None}
    return len(pack({name: value for name, value in fields.items() if isinstance(value, dict)}))


def error_kind(error: BaseException) -> str:
    """Returns the kind of an error and the machine's number for it, without its text.

    The text may quote a prompt: so does that of an ``OSError`` by a file that is named by one.
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
    """Tells ``on_event`` that a client has finished, and how.

    Args:
        on_event: As of ``LocalEngine``.
        outcome: What became of the client.
        round_number: The round t.
        seconds: That the client took; by default those of its metrics.
    """
    failed = isinstance(outcome, Failure)
    metrics = {} if failed else getattr(outcome.content, "metrics", {})
    on_event(
        "client_finished",
        client=outcome.client,
        round=round_number,
        seconds=total_seconds(metrics) if seconds is None else seconds,
        reason=outcome.reason if failed else None,
        metrics=metrics,
    )
