"""Processes that may be killed while they write."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

# Imports once, then forks a child for every line on stdin: a kill costs no import of torch.
NURSERY = """
import json, os, sys
import torch
from firm.run import Run, load_state, save_state
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            code, argument = json.loads(line)
            exec(code)
        finally:
            os._exit(1)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="session")
def kill_while() -> Iterator[Callable[[str, str, float], None]]:
    """A function that runs code on an `argument` in a process and kills it after some seconds."""
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

        def kill(code: str, argument: str, seconds: float) -> None:
            print(json.dumps([code, argument]), file=ask, flush=True)
            pid = int(answers.readline())
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
            status = int(answers.readline())
            assert os.WIFSIGNALED(status), "the code ended by itself before it was killed"

        yield kill
        ask.close()
        assert nursery.wait(timeout=30) == 0
