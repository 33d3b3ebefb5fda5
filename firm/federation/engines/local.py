"""The local engine, which runs clients in this process.

It is the default, and the reference for the other engines.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from firm.base.errors import TeamLost, WithheldError
from firm.base.state import State
from firm.base.user_code import ENDS
from firm.federation.client import Client, Failure, LazyClients, Reply
from firm.federation.engine_registry import engine
from firm.federation.engines.engine import (
    check_states,
    checked_reply,
    error_kind,
    split_outcomes,
    tell_finished,
)
from firm.federation.engines.time_limit import GRACE, time_limit
from firm.federation.messages import Request
from firm.federation.processes import CLIENT_ERRORS, MACHINE_ERRORS, SHARED_ERRORS
from firm.federation.serialization import packed_size
from firm.federation.tasks import TASKS

logger = logging.getLogger(__name__)


class StateMissing(RuntimeError):
    """Raised when a client's state is missing; the message names rounds, but reveals no data."""

    def __init__(self, client: str, round: int, kept: list[int]) -> None:
        super().__init__(
            f"{client} has states of rounds {kept}, not of round {round}; restore its state from a "
            "backup, or start a new run."
        )


class ClientStates(Protocol):
    """Stores each client's states by the round after which they were taken."""

    def has(self, client: str, round: int) -> bool:
        """Returns whether there is a client's state after a round."""
        ...

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round; raises ``StateMissing`` if there is none."""
        ...

    def write(self, client: str, round: int, state: State) -> None:
        """Stores a state, replacing one of the same client and round; may raise ``OSError``."""
        ...

    def forget(self, client: str, accepted: int) -> None:
        """Drops all states of a client except the one after the accepted round."""
        ...

    def save(self, client: str, round: int, now: int) -> State:
        """Returns what a checkpoint after the round ``now`` contains of a client's state."""
        return {"state": self.read(client, round)}

    def restore(self, client: str, round: int, saved: State) -> None:
        """Restores what ``save`` returned."""
        self.write(client, round, saved["state"])
        self.forget(client, round)


class MemoryStates(ClientStates):
    """Stores states in memory."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, State]] = {}

    def has(self, client: str, round: int) -> bool:
        """Returns whether there is a client's state after a round."""
        return round in self._states.get(client, {})

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


@engine("local")
class LocalEngine:
    """Runs clients sequentially or on several threads; implements ``Engine``.

    The results do not depend on the number of threads as long as clients share no mutable state
    (clients of one language model share some, clients of one ``fmoo.Workspace`` do not).

    Args:
        clients: All clients, with distinct names and the same objectives. Their current states are
            used as the states of round 0. Of ``LazyClients``, only those of the current round are
            in memory, and a client has no state before its first round.
        num_workers: Threads that clients run on; 1 is the caller's thread. Each computes with the
            number of threads that torch is set to when the first client runs; with several workers
            it must be one: ``torch.set_num_threads(1)``.
        timeout: Seconds after which a client is interrupted (``time_limit``); requires calls from
            the program's main thread, and a single worker.
        interrupt: Whether a client may be interrupted; otherwise its process exits. A member of a
            ``Team`` must not give up alone: it would continue with the next client while the other
            members still work on this one.
        states: Storage of the clients' states; in memory by default.
        on_event: Called, one call at a time, with "client_started" (client, round) and
            "client_finished" (client, round, seconds, the reason of a failure, and an update's
            metrics).

    Raises:
        ValueError: Two clients have the same name or different objectives, there is no worker, or
            the time limit is not positive or cannot be enforced.
    """

    _clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        num_workers: int = 1,
        timeout: float | None = None,
        interrupt: bool = True,
        states: ClientStates | None = None,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        self._lazy = clients if isinstance(clients, LazyClients) else None
        names = self._lazy.names if self._lazy else [client.name for client in clients]
        self._names = dict.fromkeys(names)
        if len(self._names) < len(names):
            raise ValueError(f"Clients need distinct names, got {list(names)}.")
        self._clients = {} if self._lazy else {client.name: client for client in clients}
        if len({client.objectives for client in self._clients.values()}) > 1:
            raise ValueError(
                "Clients need the same objectives in the same order, got "
                f"{ {client.name: client.objectives for client in clients} }."
            )
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}.")
        if timeout is not None and (num_workers > 1 or not timeout > 0):
            raise ValueError(
                f"timeout must be positive and needs num_workers=1, got {timeout:g} and "
                f"{num_workers}."
            )
        self._timeout, self._interrupt = timeout, interrupt
        self._on_event = on_event or (lambda name, **info: None)
        self._event_lock = threading.Lock()
        # a new thread adopts torch's number of threads once it queries it; oneDNN never does
        self._pool = (
            ThreadPoolExecutor(num_workers, initializer=torch.get_num_threads)
            if num_workers > 1
            else None
        )
        self._states = MemoryStates() if states is None else states
        self._round = 0
        for name, client in self._clients.items():
            self._states.write(name, 0, _state_of(client))

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``.

        Any exception raised by a client becomes a failure; the traceback is logged at level DEBUG.
        The batches that the client had drawn are skipped in later rounds, unless the machine caused
        the error (out of memory, disk full, no rollout server).
        """
        if self._timeout is not None and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a time limit can only be enforced from the program's main thread.")
        self._build_clients(request, clients)
        run = partial(self._run_and_tell, request)
        return split_outcomes(
            list(self._pool.map(run, clients) if self._pool else map(run, clients))
        )

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns {client: {"round": last accepted round, "state": its state then}}.

        Another storage than memory may have saved a state by itself, and refers to it instead.
        Clients that have not been asked yet have no state.
        """
        now = max(accepted.values(), default=0)
        return {
            name: {"round": number, **self._states.save(name, number, now)}
            for name, number in ((name, accepted.get(name, 0)) for name in self._names)
            if self._states.has(name, number)
        }

    def restore_client_states(self, states: State) -> None:
        """Restores the states returned by ``client_states``.

        Raises:
            ValueError: The states are those of other clients.
        """
        check_states(states, self._names, all_have_states=not self._lazy)
        if self._lazy:
            self._clients.clear()
        for name, saved in states.items():
            self._states.restore(name, saved["round"], saved)

    def patience(self, num_clients: int) -> float | None:
        """Returns an upper bound on the seconds that the clients take; None without a limit."""
        return None if self._timeout is None else num_clients * (self._timeout + GRACE)

    def close(self) -> None:
        """Stops the workers once they have finished."""
        if self._pool:
            self._pool.shutdown()

    def _build_clients(self, request: Request, names: Sequence[str]) -> None:
        """Builds the clients of a request, and frees those of earlier rounds.

        Clients may keep a batch for later requests of the same round.
        """
        if self._lazy is None:
            return
        if request.round != self._round:
            self._round = request.round
            self._clients = {name: self._clients[name] for name in names if name in self._clients}
        for name in names:
            is_new = request.accepted.get(name, 0) == 0 and not self._states.has(name, 0)
            if is_new or name not in self._clients:
                self._clients[name] = self._lazy.build(name)
            if is_new:
                self._states.write(name, 0, _state_of(self._clients[name]))

    def _run_and_tell(self, request: Request, name: str) -> Reply | Failure:
        self._tell("client_started", client=name, round=request.round)
        start = self._clock()
        outcome = self._run(request, name)
        seconds = self._clock() - start
        tell_finished(self._tell, outcome, request.round, seconds=seconds)
        return outcome

    def _tell(self, event: str, **info: Any) -> None:
        with self._event_lock:
            self._on_event(event, **info)

    def _limit(self, name: str) -> AbstractContextManager[None]:
        if self._timeout is None:
            return nullcontext()
        return time_limit(self._timeout, name, interrupt=self._interrupt)

    def _run(self, request: Request, name: str) -> Reply | Failure:
        client, accepted_round = self._clients[name], request.accepted.get(name, 0)
        accepted_state = self._states.read(name, accepted_round)
        self._states.forget(name, accepted_round)  # an older pending state was rejected
        own_request = request.of(name)
        bytes_down = packed_size(own_request)
        try:
            # the grad mode is restored even if the limit interrupts an exit from no_grad
            with torch.enable_grad(), self._limit(name):
                _restore(client, accepted_state)
                client.rate = request.rate
                content = TASKS[request.task].function(client, own_request)
                state = _state_of(client)
            outcome = checked_reply(request, name, content, bytes_down, packed_size(content))
            if isinstance(outcome, Reply):
                self._states.write(name, request.round, state)
                return outcome
        except TeamLost as error:
            raise TeamLost(f"{name}: {error}") from error
        except ENDS:
            raise
        except (
            BaseException
        ) as error:  # a client may run arbitrary code, which must not end the run
            logger.debug("%s failed in round %d", name, request.round, exc_info=True)
            is_withheld = isinstance(error, WithheldError)
            own = (error.__cause__ if is_withheld else None) or error
            reason = str(error) if is_withheld else f"{type(error).__name__}: {error}"
            for each in (error, own):
                traceback.clear_frames(each.__traceback__)  # may hold a whole autograd graph
            outcome = Failure(
                name,
                reason,
                bytes_down,
                kind=error_kind(own),
                cause=error,
                is_of_machine=isinstance(own, SHARED_ERRORS) and not isinstance(own, CLIENT_ERRORS),
            )
            if isinstance(own, MACHINE_ERRORS) and not isinstance(own, CLIENT_ERRORS):
                return outcome
        self._leave_out_failed_batches(client, accepted_round, accepted_state)
        return outcome

    def _leave_out_failed_batches(self, client: Client, round: int, state: State) -> None:
        """Advances a client's accepted state past the batches drawn by the failed task."""
        try:
            _restore(client, state)
            client.skip_failed_batches()
            self._states.write(client.name, round, _state_of(client))
        except ENDS:
            raise
        except BaseException:  # the same error has been reported already
            logger.warning("%s could not skip its failed batches", client.name, exc_info=True)


def _state_of(client: Client) -> State:
    """Returns everything that affects a client's later rounds: its state and that of options."""
    return {**client.state(), **({"carried": dict(client.carried)} if client.carried else {})}


def _restore(client: Client, state: State) -> None:
    """Restores a client from the result of ``_state_of``."""
    own = dict(state)
    client.carried.clear()
    client.carried.update(own.pop("carried", {}))
    client.restore(own)
