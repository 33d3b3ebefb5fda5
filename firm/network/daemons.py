"""Supervised processes: a server's, or a site's FLARE connection and training process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal, Self

from firm.base.inside import open_inside
from firm.run.errors import UserError
from firm.run.lock import hold, name_holders

SOON, MANY = 300.0, 5
"""A process that ends within `SOON` seconds of its start has failed; after `MANY` failures in a row
it is not restarted."""


def flare_command(role: Literal["server", "client"], kit: Path, site: str = "") -> list[str]:
    """Returns the command that runs FLARE's server or a site's FLARE client in a kit."""
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
    """Returns a PYTHONPATH with `folders` first, followed by this process's search path."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path])}


def free_port() -> int:
    """Returns a port of this machine that is currently free."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, patience: float = 60.0) -> None:
    """Waits until a process on this machine listens on a port.

    Raises:
        TimeoutError: No process listens within `patience` seconds.
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
    """Starts processes, restarts them if they end, and terminates them with their children on exit.

    As long as one of them runs, no other `Daemons` can start for the same folder, even if this
    process was killed and left them behind.

    Args:
        commands: Commands by a human-readable name.
        output: File to which the processes' output is appended, in the folder that they serve.
        environment: Variables added to this process's environment.
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
        """Starts the processes.

        Raises:
            UserError: Processes for the same folder are already running; the message names them.
        """
        self._lock = hold(self._output.parent)
        self._file = open(self._output, "ab", opener=partial(open_inside, mode=0o600))
        for name, command in self._commands.items():
            self._daemons[name] = _Daemon(command, self._start(command), time.monotonic())
        self._name_processes()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _end([daemon.process for daemon in self._daemons.values()])
        finally:
            if self._file:
                self._file.close()
            os.close(self._lock)

    def process_id(self, name: str) -> int:
        """Returns the ID of the current process with this name."""
        return self._daemons[name].process.pid

    def watch(self) -> None:
        """Restarts processes that have ended; call it frequently.

        Raises:
            UserError: A process failed ``MANY`` times in a row, within ``SOON`` seconds each.
        """
        for name, daemon in self._daemons.items():
            code = daemon.process.poll()
            if code is None:
                continue
            failed = code != 0 and time.monotonic() - daemon.started < SOON
            daemon.num_failures = daemon.num_failures + 1 if failed else 0
            if daemon.num_failures == MANY:
                raise UserError(
                    f"the {name} ended {MANY} times soon after its start; see the end of "
                    f"{self._output} for the reason."
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
            pass_fds=(self._lock,),  # keeps the folder locked if this process is killed
            start_new_session=True,  # makes a process group, which `_end` signals as a whole
            umask=0o077,  # files of a kit are private to the user
        )


def _end(processes: Sequence[subprocess.Popen[bytes]], patience: float = 5.0) -> None:
    """Terminates processes and their children, all by SIGTERM and, what is left, by SIGKILL.

    Interrupted while it waits, as by a second Ctrl-C, it kills them at once.
    """
    try:
        _signal(processes, signal.SIGTERM)
        end = time.monotonic() + patience
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
