import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from firm.federation.training import LocalTraining

# Imports once, then forks two processes for every line on stdin, in a launcher's environment. They
# end as processes do; what still works after two minutes is killed.
NURSERY = """
import json, os, signal, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # imports may print
import torch
import firm.federation

for line in sys.stdin:
    program, arguments, port, outputs = json.loads(line)
    members = []
    for rank in range(2):
        members.append(os.fork())
        if not members[-1]:
            for number, path in enumerate(outputs[rank], 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            sys.argv = ["-c", *arguments]
            exec(program, {"__name__": "__main__"})
            sys.exit()
    deadline, codes = time.monotonic() + 120, {}
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


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    """Runs a Python program in two processes of a launcher's environment.

    Called with the program and its arguments; returns each process as it completed.
    """
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as nursery:
        assert nursery.stdin
        assert nursery.stdout
        ask, answers = nursery.stdin, nursery.stdout

        def run(program: str, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            folder = tmp_path_factory.mktemp("two_processes")
            outputs = [[str(folder / f"{rank}.{end}") for end in ("out", "err")] for rank in (0, 1)]
            print(json.dumps([program, arguments, port, outputs]), file=ask, flush=True)
            return [
                subprocess.CompletedProcess(arguments, code, *(Path(p).read_text() for p in paths))
                for code, paths in zip(json.loads(answers.readline()), outputs, strict=True)
            ]

        yield run
        ask.close()
        assert nursery.wait(timeout=30) == 0


@pytest.fixture
def request_of(start):
    """What a round of local training sends: ``request_of(round_number, accepted)``."""

    def build(round_number, accepted):
        return LocalTraining(
            round=round_number,
            objectives=start.objectives,
            adapter=start.adapter,
            accepted=accepted,
            num_local_steps=2,
            weighting="firm",
        )

    return build
