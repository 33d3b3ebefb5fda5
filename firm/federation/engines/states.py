"""Storage of the clients' states for an engine: the accepted ones, and those that are pending."""

from typing import Protocol

from firm.federation.client import State


class StateMissing(RuntimeError):
    """A client's state is not there; the text names rounds, and quotes no data."""

    def __init__(self, client: str, round: int, kept: list[int]) -> None:
        super().__init__(
            f"{client} has states of rounds {kept}, not of round {round}; restore its state from "
            "the checkpoint of the server's state."
        )


class ClientStates(Protocol):
    """Keeps each client's states by the round that they are after."""

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round; raises ``StateMissing`` without one."""
        ...

    def write(self, client: str, round: int, state: State) -> None:
        """Keeps a state in place of one of the same client and round, or raises ``OSError``."""
        ...

    def forget(self, client: str, accepted: int) -> None:
        """Drops a client's states that came after the accepted round, and older ones."""
        ...


class MemoryStates:
    """Keeps states in memory; implements ``ClientStates``."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, State]] = {}

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round."""
        states = self._states.get(client, {})
        if round not in states:
            raise StateMissing(client, round, sorted(states))
        return states[round]

    def write(self, client: str, round: int, state: State) -> None:
        """Keeps a state."""
        self._states.setdefault(client, {})[round] = state

    def forget(self, client: str, accepted: int) -> None:
        """Drops all states but the accepted one."""
        self._states[client] = {accepted: self._states[client][accepted]}
