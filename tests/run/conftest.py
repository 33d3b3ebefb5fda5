"""Processes that are killed while they write."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.nursery import nursery

# With a `step` the child kills itself before that file operation, as Python's audit events count
# them.
NURSERY = """
import json, os, signal, sys
import torch
from firm.run import Run
from firm.run.checkpoint import load_state, save_state

def kill_at(step):
    def on_event(event, _):
        nonlocal step
        if event in ("os.listdir", "os.scandir"):  # their number grows with the kept checkpoints
            return
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
    with nursery(NURSERY) as (ask, answer):

        def run(code: str, argument: str, *, step: int = 0, seconds: float | None = None) -> int:
            ask(code, argument, step)
            pid = answer()
            if seconds is not None:
                time.sleep(seconds)
                os.kill(pid, signal.SIGKILL)
            return answer()

        yield run


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
