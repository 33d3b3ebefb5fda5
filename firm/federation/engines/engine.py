"""What a strategy may ask of any engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from firm.federation.client import Failure, Reply, State, total_seconds


class Engine(Protocol):
    """Runs tasks on clients and keeps their states, wherever they are.

    A client's state is transactional. Before a task the engine returns the client to its state
    after the last round that the server accepted (round 0 is the initial state), and keeps the
    state that the task leaves as pending until a later payload says whether it was accepted. A
    client that fails, is lost or is rejected is so as if it had not been sampled.
    """

    def map(
        self, task: str, clients: Sequence[str], payload: State
    ) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies of the clients that finished, in the given order, and the failures.

        Args:
            task: Name of a registered task; no code travels.
            clients: Names of the clients to run it on.
            payload: What the task reads, and for the engine "round", the round that is being run,
                and "accepted", the last accepted round by client. To each client goes only its own.
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
        seconds: That the client took; by default those that its metrics tell of.
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
