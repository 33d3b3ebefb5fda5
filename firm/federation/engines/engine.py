"""The interface of every engine, and the registry of those that a configuration may choose."""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from firm.federation.client import Failure, Reply, State
from firm.federation.messages import Request
from firm.federation.outside import printable
from firm.federation.schema import Invalid
from firm.federation.serialization import pack
from firm.fields import did_you_mean


class Engine(Protocol):
    """Runs tasks on clients and keeps their states, wherever they are.

    A client's state is transactional. Before a task it is that after the last round that the server
    accepted (0: the initial state); what the task leaves is pending until a later request says
    whether it was accepted. A client that is lost or refused is as if it had not been sampled. So
    is one that raises or hangs, except that the batches it had drawn are left out
    (``Client.skip_failed_batches``).
    """

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies of the clients that finished, in the given order, and the failures.

        Every answer has been read by its schema (``checked_reply``). To each client goes only what
        concerns it.
        """
        ...

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns all clients' states after their last accepted rounds, for a checkpoint."""
        ...

    def restore_client_states(self, states: State) -> None:
        """Continues from what ``client_states`` returned."""
        ...

    def close(self) -> None:
        """Ends what the engine started."""
        ...


EngineFactory = Callable[..., Engine]
"""Builds an engine in this process from its clients, with the options of ``LocalEngine``."""

ENGINES: dict[str, EngineFactory] = {}
"""Engines that a configuration may choose, by name."""

Factory = TypeVar("Factory", bound=EngineFactory)


def engine(name: str) -> Callable[[Factory], Factory]:
    """Returns a decorator that registers an engine, or a function that builds one, under a name.

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
        near = did_you_mean(name, ENGINES)
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}{near}")


def checked_reply(
    request: Request, client: str, content: Any, bytes_down: int, bytes_up: int
) -> Reply | Failure:
    """Returns the reply of a client whose answer is as its schema says; a failure if it is not."""
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


def divided(outcomes: Iterable[Reply | Failure]) -> tuple[list[Reply], list[Failure]]:
    """Returns the replies and the failures among clients' outcomes, each in their order."""
    outcomes = list(outcomes)
    replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
    return replies, [outcome for outcome in outcomes if isinstance(outcome, Failure)]


def check_states(states: State, clients: Collection[str]) -> None:
    """Raises ``ValueError`` unless a checkpoint has the states of exactly these clients."""
    if states.keys() != set(clients):
        raise ValueError(
            f"The checkpoint has the clients {sorted(states)}, this run has {sorted(clients)}; "
            "resume with the configuration that wrote it."
        )


def request_sizes(request: Request) -> Callable[[str], int]:
    """Returns a function from a client to the bytes of its own request, which it does not pack."""
    num_bytes, num_text_bytes = len(pack(request.of())), _text_bytes(request.of())
    return lambda client: num_bytes + _text_bytes(request.of(client)) - num_text_bytes


def _text_bytes(request: Request) -> int:
    fields = {**vars(request), "adapter": None}
    return len(pack({name: value for name, value in fields.items() if isinstance(value, dict)}))


def error_kind(error: BaseException) -> str:
    """Returns the kind of an error and the machine's number for it.

    Its text may quote a prompt: so does that of an ``OSError`` by a file that is named by one.
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
    """Reports to ``on_event`` that a client has finished, how, and in how many seconds.

    By default these are those of its metrics.
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
    """Returns the total of a client's stage times; 0 where its metrics have none."""
    seconds = metrics.get("seconds")
    stages = seconds.values() if isinstance(seconds, dict) else ()
    return sum(value for value in stages if isinstance(value, int | float))
