"""The processes engine, which distributes clients over the processes of a launcher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from firm.base.errors import ProcessLost
from firm.base.state import State
from firm.federation.client import Failure, Reply
from firm.federation.engines.engine import (
    check_states,
    checked_reply,
    split_outcomes,
    tell_finished,
)
from firm.federation.engines.local import LocalEngine
from firm.federation.engines.time_limit import GRACE
from firm.federation.messages import Request
from firm.federation.processes import Processes
from firm.federation.schema import Reading
from firm.federation.tasks import TASKS


class ProcessesEngine:
    """Runs clients on the processes of a launcher; implements ``Engine`` on the server.

    Updates are returned in the requested order, so that on the CPU the resulting adapter is bitwise
    identical for any number of processes.

    Args:
        processes: All processes of the program; more than one.
        clients: Names of all clients, in order.
        local: Engine for the clients of this process.
        on_event: Called for the clients on other processes, as by ``LocalEngine``.
    """

    def __init__(
        self,
        processes: Processes,
        clients: Sequence[str],
        local: LocalEngine,
        *,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        self._processes, self._clients, self._local = processes, list(clients), local
        processes.clients = self._clients
        self._on_event = on_event or (lambda name, **info: None)

    def serve(self) -> None:
        """Handles the server's requests until the run is over; called on the other processes."""
        while (message := self._processes.receive(0))["do"] != "stop":
            answer: Any = None
            if message["do"] == "map":
                fields = message["request"]
                reading = Reading(fields["objectives"], fields["adapter"])
                request = TASKS[message["task"]].request.read(fields, reading)
                replies, failures = self._local.map(request, message["clients"])
                answer = {
                    "replies": [vars(reply) for reply in replies],
                    "failures": [{**vars(failure), "cause": None} for failure in failures],
                }
            elif message["do"] == "client_states":
                answer = self._local.client_states(message["accepted"])
            else:
                self._local.restore_client_states(message["states"])
            if answer is not None and self._processes.leads(self._processes.rank):
                self._processes.send(answer, 0)

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``.

        Raises:
            ProcessLost: A process is gone, or exceeds its clients' time limit; the message names
                them.
        """
        asked = {rank: self._hosted(rank, clients) for rank in range(self._processes.size)}
        for rank in self._others(asked):
            message = {"do": "map", "task": request.task, "clients": asked[rank]}
            self._processes.send({**message, "request": request}, rank)
            for name in asked[rank] if self._processes.leads(rank) else ():
                self._on_event("client_started", client=name, round=request.round)
        replies, failures = self._local.map(request, asked[0])
        outcomes = {outcome.client: outcome for outcome in (*replies, *failures)}
        for rank in filter(self._processes.leads, self._others(asked)):
            answer = self._answer(rank, asked[rank])
            for outcome in (
                *(_reply(request, reply) for reply in answer["replies"]),
                *(Failure(**failure) for failure in answer["failures"]),
            ):
                outcomes[outcome.client] = outcome
                tell_finished(self._on_event, outcome, request.round)
        return split_outcomes(outcomes[name] for name in clients)

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns all clients' states after their last accepted rounds; see ``Engine``."""
        others = range(1, self._processes.size)
        for rank in others:
            self._processes.send({"do": "client_states", "accepted": dict(accepted)}, rank)
        states = self._local.client_states(accepted)
        for rank in filter(self._processes.leads, others):
            states.update(self._processes.receive(rank))
        return {name: states[name] for name in self._clients if name in states}

    def restore_client_states(self, states: State) -> None:
        """Restores the states returned by ``client_states``, on any number of processes."""
        check_states(states, self._clients, all_have_states=False)
        for rank in range(self._processes.size):
            hosted = {name: states[name] for name in self._hosted(rank, list(states))}
            if rank == 0:
                self._local.restore_client_states(hosted)
            else:
                self._processes.send({"do": "restore_client_states", "states": hosted}, rank)

    def close(self) -> None:
        """Stops the other processes; one that is gone, or does not respond, is ignored."""
        self._processes.tell_others({"do": "stop"}, timeout=GRACE)

    def _answer(self, rank: int, clients: Sequence[str]) -> Any:
        patience = self._local.patience(len(clients))
        try:
            return self._processes.expect(rank).result(patience and patience + GRACE)
        except TimeoutError as error:
            raise ProcessLost(
                f"process {rank} of the run's {self._processes.size}, which works on "
                f"{', '.join(clients)}, does not respond; end it, then resume from the last "
                "checkpoint."
            ) from error

    def _hosted(self, rank: int, clients: Sequence[str]) -> list[str]:
        hosted = set(self._processes.hosted(self._clients, rank))
        return [name for name in clients if name in hosted]

    def _others(self, asked: Mapping[int, Sequence[str]]) -> list[int]:
        return [rank for rank, names in asked.items() if rank and names]


def _reply(request: Request, fields: dict[str, Any]) -> Reply | Failure:
    """Returns a reply received from another process of this program, with its types restored."""
    sizes = fields["bytes_down"], fields["bytes_up"]
    reply = checked_reply(request, fields["client"], fields["content"], *sizes)
    return replace(reply, dropped=fields["dropped"]) if isinstance(reply, Reply) else reply
