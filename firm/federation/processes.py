"""The processes of one program, which a launcher has started, and teams of them.

`torchrun --nproc_per_node N` or `accelerate launch --num_processes N` start the same program N
times. The first process is the server: only this one runs the strategy, writes files and prints.
The others host clients, or work as a team with the process that does.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from firm.base.devices import communicates, num_accelerators, process_group_backend
from firm.base.errors import DivergedError, ProcessLost, RolloutError, TeamLost, Terminated
from firm.federation.serialization import pack, unpack

_LAUNCHER = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables that a launcher sets for a process, in addition to RANK."""

SHARED_ERRORS = (MemoryError, torch.OutOfMemoryError, RolloutError)
"""Errors of what all clients of a program share."""
MACHINE_ERRORS = (*SHARED_ERRORS, OSError)
"""Errors caused by the machine rather than the batch."""
CLIENT_ERRORS = (TimeoutError, DivergedError)
"""Errors of a client among them."""

ACCOMPANY = "accompany"
"""Message of the first process that has another one call ``Processes.accompany``."""

_MOMENT = 0.2
"""Seconds to wait for lost connections: enough to notice a process that has already exited, and too
short for one that is being stopped now."""

_PATIENCE = timedelta(days=30)
"""Timeout of collectives: a process may wait for a whole round; a dead peer closes its socket."""


class Processes:
    """The processes of a program, seen from one of them; without a launcher there is only one.

    Attributes:
        rank: Rank of this process; 0 is the server.
        size: Number of processes.
        per_client: Number of processes that work together on each client.
        clients: Names of all clients once an engine has set them, for messages about lost
            processes.
        accompany: Called while this process waits for the first one, if that asks for help with the
            passes of a sharded model.
    """

    def __init__(self, rank: int = 0, size: int = 1, per_client: int = 1) -> None:
        if size % per_client:
            raise ValueError(
                f"processes_per_client must divide the number of processes, got {per_client} and "
                f"{size}; start another number by the launcher's --nproc_per_node or "
                "--num_processes."
            )
        self.rank, self.size, self.per_client = rank, size, per_client
        self.clients: Sequence[str] = ()
        self.accompany: Callable[[], None] = lambda: None
        self._is_ending = False

    @classmethod
    def join(cls, *, per_client: int = 1) -> "Processes":
        """Connects the processes that the launcher started; call it once, before anything else.

        Other libraries must not mistake the processes for data-parallel copies of one training
        (Accelerate would average the gradients of different clients): after this call they see a
        single process, on the accelerator of its local rank if there are any.
        """
        place = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
        size = int(place.get("WORLD_SIZE", 1))
        processes = cls(int(os.environ.get("RANK", 0)), size, per_client)
        if size > 1:
            if count := num_accelerators():
                torch.accelerator.set_device_index(int(place["LOCAL_RANK"]) % count)
            dist.init_process_group(
                process_group_backend(), rank=processes.rank, world_size=size, timeout=_PATIENCE
            )
            signal.signal(signal.SIGTERM, processes._stopped)
        return processes

    @property
    def is_server(self) -> bool:
        """True if this process runs the strategy, writes files and prints."""
        return self.rank == 0

    def hosted(self, clients: Sequence[str], rank: int | None = None) -> list[str]:
        """Returns the clients of a process, by default this one, assigned round-robin."""
        rank = self.rank if rank is None else rank
        return list(clients[rank // self.per_client :: self.size // self.per_client])

    def leads(self, rank: int) -> bool:
        """Returns whether the process of this rank sends the replies of its clients."""
        return rank % self.per_client == 0

    def team(self) -> "Team | None":
        """Returns the processes that work on the same clients as this one; None if it is alone."""
        if self.per_client == 1:
            return None
        group = None
        for first in range(0, self.size, self.per_client):
            members = list(range(first, first + self.per_client))
            made = dist.new_group(members, timeout=_PATIENCE)  # every process makes every group
            if self.rank in members:
                group = made
        return Team(self.rank % self.per_client, self.per_client, group)

    def send(self, message: Any, rank: int) -> None:
        """Sends a message to another process; raises ``ProcessLost`` if it is gone."""
        packed = torch.frombuffer(bytearray(pack(message)), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([len(packed)]), rank)
            dist.send(packed, rank)
        except RuntimeError as error:
            raise self._lost(rank) from error

    def tell_others(self, message: Any, *, timeout: float) -> None:
        """Sends a message to all other processes, as far as they take it within so many seconds."""

        def tell(rank: int) -> None:
            with suppress(ProcessLost):
                self.send(message, rank)

        told = [
            threading.Thread(target=tell, args=(rank,), daemon=True) for rank in range(1, self.size)
        ]
        for each in told:
            each.start()
        end = time.monotonic() + timeout
        for each in told:
            each.join(max(0.0, end - time.monotonic()))

    def receive(self, rank: int) -> Any:
        """Returns the next message of another process; raises ``ProcessLost`` if it is gone."""
        while isinstance(message := self.expect(rank).result(), str) and message == ACCOMPANY:
            self.accompany()
        return message

    def expect(self, rank: int) -> Future[Any]:
        """Returns a future of another process's next message, or of ``ProcessLost`` if it is gone.

        A thread that waits inside a collective blocks signals, so that a process whose peer has
        died could only be killed without a message. A thread that waits for a future does not.
        """
        expected: Future[Any] = Future()

        def run() -> None:
            try:
                expected.set_result(_received(rank))
            except RuntimeError as error:
                lost = self._lost(rank)
                lost.__cause__ = error
                expected.set_exception(lost)
            except BaseException as error:  # raised where the result is awaited
                expected.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return expected

    def _lost(self, rank: int) -> ProcessLost:
        self._is_ending = True
        hosted = self.hosted(self.clients, rank)
        work = f", which worked on {', '.join(hosted)}," if hosted else ""
        remedy = "; repair the cause, then resume from the last checkpoint" if self.clients else ""
        return ProcessLost(
            f"process {rank} of the run's {self.size}{work} is gone; unless it was killed, see its "
            f"own message above{remedy}."
        )

    def _stopped(self, signum: int, frame: FrameType | None) -> None:
        """Ends this process, which the launcher stops if another one has ended, or on request.

        A process that ends already, with the message of a lost connection, is not interrupted.

        Raises:
            ProcessLost: The server is gone, or, seen from the server, another process.
            Terminated: All processes were there: the launcher itself was asked to end.
        """
        if self._is_ending:
            return
        self._is_ending = True
        others = [self.expect(rank) for rank in (range(1, self.size) if self.is_server else [0])]
        for other in wait(others, timeout=_MOMENT, return_when=FIRST_EXCEPTION).done:
            if error := other.exception():
                raise error
        raise Terminated

    def broadcast(self, message: Any = None) -> Any:
        """Returns the server's message on all processes; only the server passes one."""
        if not self.is_server:
            return self.receive(0)
        for rank in range(1, self.size):
            self.send(message, rank)
        return message


@dataclass(frozen=True)
class Team:
    """Processes that work together on the same clients.

    All members run the same task at the same time: when one calls a method of the team, all must
    call it, in the same order.
    """

    rank: int
    """Rank of this process in the team."""
    size: int
    """Number of processes."""
    group: Any = None
    """Process group of the team."""

    def share(self, num_rows: int) -> slice:
        """Returns this process's rows of a batch, split nearly evenly in order of rank."""
        bounds = [num_rows * rank // self.size for rank in (self.rank, self.rank + 1)]
        return slice(*bounds)

    def alone(self) -> AbstractContextManager[None]:
        """Opens a context for passes that this process runs alone."""
        return nullcontext()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all members' tensors, which must have the same shape."""
        total = tensor.clone() if communicates(tensor.device) else tensor.cpu()
        with self._connected():
            dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def gather(self, content: Any) -> list[Any]:
        """Returns the values of all members in order of rank; any value that `pack` accepts."""
        packed = torch.frombuffer(bytearray(pack(content)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(packed)
        with self._connected():
            dist.all_reduce(lengths, group=self.group)
            padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            padded[: len(packed)] = packed
            gathered = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(gathered, padded, group=self.group)
        pieces = zip(gathered, lengths.tolist(), strict=True)
        return [unpack(piece[:length].numpy().tobytes()) for piece, length in pieces]

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.lost() from error

    def lost(self) -> TeamLost:
        """Returns the error of a lost connection to another member."""
        return TeamLost(
            f"a process of the client's {self.size} is gone; unless it was killed, see its message "
            "above; repair the cause, then resume from the last checkpoint."
        )

    @contextmanager
    def unanimous(self) -> Iterator[None]:
        """Raises an error on every member if the block raises one on any member.

        A member's own error is raised unchanged, another member's as ``RuntimeError``, or as an
        error of the same class if the machine or the rollout engine caused it. No member then waits
        for one that has failed.
        """
        error = None
        try:
            yield
        except ProcessLost:
            raise
        except Exception as own:  # raised below, once the other members have been informed
            error = own
        failure = None
        if error:
            own = () if isinstance(error, CLIENT_ERRORS) else MACHINE_ERRORS
            kinds = [*(kind.__name__ for kind in own if isinstance(error, kind)), ""]
            failure = [f"{type(error).__name__}: {error}", kinds[0]]
        failures = self.gather(failure)
        if error:
            raise error
        for rank, failure in enumerate(failures):
            if failure:
                (reason, kind), known = failure, {each.__name__: each for each in MACHINE_ERRORS}
                text = f"process {rank} of the client's {self.size} failed: {reason}"
                raise known.get(kind, RuntimeError)(text)


def _received(rank: int) -> Any:
    """Returns the next message of a process.

    The tensors are freed in this function: if a thread frees one while the interpreter shuts down,
    the process aborts.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank)
    packed = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(packed, rank)
    return unpack(packed.numpy().tobytes())
