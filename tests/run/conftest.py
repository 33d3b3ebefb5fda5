"""Processes that are killed while they write."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

# Imports once, then forks a child for every line on stdin: a kill costs no import of torch. With a
# `step` the child kills itself before that file operation, as Python's audit events count them.
NURSERY = """
import json, os, signal, sys
import torch
from firm.run import Run, load_state, save_state

def kill_at(step):
    def on_event(event, _):
        nonlocal step
        if event == "open" or event.startswith(("os.", "shutil.")):
            step -= 1
            if step == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(on_event)

for line in sys.stdin:
    code, argument, step = json.loads(line)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if step:
                kill_at(step)
            exec(code)
            status = 0
        finally:
            os._exit(status)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="session")
def start_and_wait() -> Iterator[Callable[..., int]]:
    """A function that runs code in a process, may kill it after `seconds`, and gives its status."""
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

        def run(code: str, argument: str, *, step: int = 0, seconds: float | None = None) -> int:
            print(json.dumps([code, argument, step]), file=ask, flush=True)
            pid = int(answers.readline())
            if seconds is not None:
                time.sleep(seconds)
                os.kill(pid, signal.SIGKILL)
            return int(answers.readline())

        yield run
        ask.close()
        assert nursery.wait(timeout=30) == 0


@pytest.fixture
def kill_while(start_and_wait: Callable[..., int]) -> Callable[[str, str, float], None]:
    """A function that runs endless code on an `argument` and kills it after some seconds."""

    def kill(code: str, argument: str, seconds: float) -> None:
        status = start_and_wait(code, argument, seconds=seconds)
        assert os.WIFSIGNALED(status), "the code ended by itself before it was killed"

    return kill


@pytest.fixture
def kill_at_every_step(start_and_wait: Callable[..., int]) -> Callable[[str, str], Iterator[int]]:
    """A function that runs code again and again, killed before its 1st, 2nd, ... file operation.

    It yields after each kill, and ends when the code got through.
    """

    def kill(code: str, argument: str) -> Iterator[int]:
        for step in count(1):
            status = start_and_wait(code, argument, step=step)
            if not os.WIFSIGNALED(status):
                assert status == 0, "the code failed; its traceback is on stderr"
                return
            yield step

    return kill
