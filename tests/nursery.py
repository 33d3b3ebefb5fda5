"""Processes that cost no start: a nursery imports once, then forks a child for every request."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

LAUNCHER = """
import json, os, signal, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # imports may print
exec(sys.argv[1])

for line in sys.stdin:
    program, arguments, port, outputs = json.loads(line)
    members = []
    for rank in range(2):
        members.append(os.fork())
        if not members[-1]:
            for number, path in enumerate(outputs[rank], 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            sys.argv = ["-c", *arguments]
            exec(program, {"__name__": "__main__"})
            sys.exit()
    deadline, codes = time.monotonic() + 600, {}
    while len(codes) < 2:
        for pid in set(members) - set(codes):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    print(json.dumps([codes[pid] for pid in members]), file=answers, flush=True)
"""


@contextmanager
def nursery(
    program: str, *arguments: str, **environment: str
) -> Iterator[tuple[Callable[..., None], Callable[[], Any]]]:
    """Starts a program that answers lines of JSON on stdin with lines of JSON on stdout.

    Yields:
        `ask(*request)`, which sends a line, and `answer()`, which waits for one.
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    ) as process:
        assert process.stdin
        assert process.stdout
        requests, answers = process.stdin, process.stdout
        yield (
            lambda *request: print(json.dumps(request), file=requests, flush=True),
            lambda: json.loads(answers.readline()),
        )
        requests.close()
        assert process.wait(timeout=300) == 0


@contextmanager
def forked_workers() -> Iterator[None]:
    """Lets sweeps fork their workers from this process, which has imported what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firm.run.sweep.START_METHOD", "fork")
        yield


@contextmanager
def two_processes(
    folder: Path, imports: str, **environment: str
) -> Iterator[Callable[..., list[subprocess.CompletedProcess[str]]]]:
    """Yields a function that runs a program in two processes of a launcher's environment.

    It is called with the program and its arguments and returns each process as it completed. They
    end as processes do, with all that Python and torch have to say at their end; what still works
    after ten minutes is killed.

    Args:
        folder: Where what they print is kept.
        imports: What the nursery imports, once.
        environment: Further variables.
    """
    with nursery(LAUNCHER, imports, **environment) as (ask, answer):

        def run(program: str, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            outputs = [
                [f"{folder}/{port}.{rank}.{end}" for end in ("out", "err")] for rank in (0, 1)
            ]
            ask(program, arguments, port, outputs)
            return [
                subprocess.CompletedProcess(arguments, code, *(Path(p).read_text() for p in paths))
                for code, paths in zip(answer(), outputs, strict=True)
            ]

        yield run
