"""Storage of the clients' accepted and pending states for an engine."""

from typing import Protocol

from firm.federation.client import State


class StateMissing(RuntimeError):
    """Raised when a client's state is missing; the message names rounds, and quotes no data."""

    def __init__(self, client: str, round: int, kept: list[int]) -> None:
        super().__init__(
            f"{client} has states of rounds {kept}, not of round {round}; restore its state from "
            "the checkpoint of the server's state."
        )


class ClientStates(Protocol):
    """Stores each client's states by the round after which they were taken."""

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round; raises ``StateMissing`` if there is none."""
        ...

    def write(self, client: str, round: int, state: State) -> None:
        """Stores a state, replacing one of the same client and round; may raise ``OSError``."""
        ...

    def forget(self, client: str, accepted: int) -> None:
        """Drops all states of a client except the one after the accepted round."""
        ...


class MemoryStates:
    """Stores states in memory; implements ``ClientStates``."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, State]] = {}

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round."""
        states = self._states.get(client, {})
        if round not in states:
            raise StateMissing(client, round, sorted(states))
        return states[round]

    def write(self, client: str, round: int, state: State) -> None:
        """Stores a state."""
        self._states.setdefault(client, {})[round] = state

    def forget(self, client: str, accepted: int) -> None:
        """Drops all states but the accepted one."""
        self._states[client] = {accepted: self._states[client][accepted]}
