"""Processes that are kept running: a server's, or a site's connection and its own process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from firm.run import UserError
from firm.run.lock import hold, name_holders

SOON, MANY = 20.0, 5
"""A process that ends within these seconds of its start has failed; after so many times in a row
it is not started again."""


def flare_command(role: Literal["server", "client"], kit: Path, site: str = "") -> list[str]:
    """Returns the command that runs FLARE in the kit of a server, or of the client of a site."""
    return [
        sys.executable,
        "-u",
        "-m",
        f"nvflare.private.fed.app.{role}.{role}_train",
        "-m",
        str(kit.resolve()),
        "-s",
        f"fed_{role}.json",
        "--set",
        "secure_train=true",
        *([f"uid={site}"] if site else []),
        "org=firm",
        "config_folder=config",
    ]


def search_path(*folders: Path) -> dict[str, str]:
    """Returns variables by which another Python finds folders, and then what this one does."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path])}


def free_port() -> int:
    """Returns a port of this machine at which nothing listens just now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, patience: float = 60.0) -> None:
    """Waits until something on this machine listens at a port.

    Raises:
        TimeoutError: Nothing does within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing listens at port {port} after {patience:g} s.")


@dataclass
class _Daemon:
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    started: float
    num_failures: int = 0


class Daemons:
    """Starts processes, starts those again that end, and ends them all, with what they started.

    As long as one of them lives, nobody else starts any for the same folder, even if this process
    was killed and left them behind.

    Args:
        commands: By a name that a person understands.
        output: File that all that they print is added to, in the folder that they are for.
        environment: Variables beside this process's own.
    """

    def __init__(
        self, commands: Mapping[str, Sequence[str]], *, output: Path, environment: Mapping[str, str]
    ) -> None:
        self._commands, self._output = commands, output
        self._environment = {**os.environ, **environment}
        self._daemons: dict[str, _Daemon] = {}
        self._file: IO[bytes] | None = None
        self._lock = -1

    def __enter__(self) -> Self:
        """Starts them.

        Raises:
            UserError: Some run for the same folder already; they are named.
        """
        self._lock = hold(self._output.parent)
        self._file = open(self._output, "ab", opener=partial(os.open, mode=0o600))
        for name, command in self._commands.items():
            self._daemons[name] = _Daemon(command, self._start(command), time.monotonic())
        self._name_processes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for daemon in self._daemons.values():
            _end(daemon.process)
        if self._file:
            self._file.close()
        os.close(self._lock)

    def process_id(self, name: str) -> int:
        """Returns the present process's number."""
        return self._daemons[name].process.pid

    def watch(self) -> None:
        """Starts again what has ended; to be called often.

        Raises:
            UserError: One ends again and again, soon after its start.
        """
        for name, daemon in self._daemons.items():
            code = daemon.process.poll()
            if code is None:
                continue
            failed = code != 0 and time.monotonic() - daemon.started < SOON
            daemon.num_failures = daemon.num_failures + 1 if failed else 0
            if daemon.num_failures == MANY:
                raise UserError(
                    f"the {name} ended {MANY} times soon after its start; the reason stands at the "
                    f"end of {self._output}."
                )
            daemon.process, daemon.started = self._start(daemon.command), time.monotonic()
            self._name_processes()

    def _name_processes(self) -> None:
        own = [daemon.process.pid for daemon in self._daemons.values()]
        name_holders(self._lock, [os.getpid(), *own])

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=self._file,
            env=self._environment,
            pass_fds=(self._lock,),
            start_new_session=True,
            umask=0o077,
        )


def _end(process: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """Ends a process and all that it started, at first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
