"""Where an engine keeps its clients' states: the accepted ones, and those that are pending."""

from typing import Protocol

from firm.federation.client import State


class StateMissing(RuntimeError):
    """A client's state is not there; the text names rounds, and quotes no data."""


class ClientStates(Protocol):
    """Keeps each client's states by the round that they are after."""

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round.

        Raises:
            StateMissing: It is not there; says which are.
        """
        ...

    def write(self, client: str, round: int, state: State) -> None:
        """Keeps a state, in place of one of the same client and round.

        Raises:
            OSError: There is no room for it, where it is kept on a disk; nothing else is lost.
        """
        ...

    def forget(self, client: str, accepted: int) -> None:
        """Drops what is not needed once the state after the round `accepted` is the accepted one.

        That is all that came after it, which was rejected, and what is older.
        """
        ...


class MemoryStates:
    """Keeps states in memory; implements ``ClientStates``."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, State]] = {}

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round."""
        states = self._states.get(client, {})
        if round not in states:
            raise missing_state(client, round, sorted(states))
        return states[round]

    def write(self, client: str, round: int, state: State) -> None:
        """Keeps a state."""
        self._states.setdefault(client, {})[round] = state

    def forget(self, client: str, accepted: int) -> None:
        """Drops all states but the accepted one."""
        self._states[client] = {accepted: self._states[client][accepted]}


def missing_state(client: str, round: int, kept: list[int]) -> StateMissing:
    """Returns the error of a state that is not there."""
    return StateMissing(
        f"{client} has states of rounds {kept}, not of round {round}; restore its state from the "
        "checkpoint of the server's state."
    )
