"""Work that hangs is interrupted, or its process ends; whoever waits for it is told of whom."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from firm.base.errors import TimeLimitError
from firm.federation import LocalEngine
from firm.federation.engines.time_limit import time_limit

STUCK = """
import signal, time
from firm.federation.engines import time_limit

time_limit.GRACE = 0.2
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as if it waited in native code
with time_limit.time_limit(0.2, "client_1"):
    time.sleep(60)
"""

TOGETHER = """
import time
from firm.federation.engines.time_limit import time_limit

try:
    with time_limit(0.2, "client_1", interrupt=False):
        time.sleep(60)
finally:
    print("interrupted")
"""

TWO_PROCESSES = """
import os, signal, sys, time
from contextlib import closing
from firm.federation import LocalEngine, Processes, ProcessesEngine
from firm.base.errors import ProcessLost
from firm.federation.engines import processes
from firm.federation.strategies import firm  # registers the weighting
from firm.federation.training import LocalTraining

how, processes.GRACE = sys.argv[1], 0.1


class Client:
    num_examples, objectives = 1, ("a",)

    def __init__(self, name):
        self.name, self.carried = name, {}

    def state(self):
        return {}

    def restore(self, state):
        if self.name == "client_1" and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "client_1":
            time.sleep(6)
            open(sys.argv[2], "w").close()


joined = Processes.join()
names = ["client_0", "client_1", "client_2"]
local = LocalEngine([Client(name) for name in joined.hosted(names)])
local.patience = lambda num_clients: 1.0  # whatever keeps the limit there does not
engine = ProcessesEngine(joined, names, local)
if not joined.is_server:
    if how == "killed between rounds":
        os.kill(os.getpid(), signal.SIGKILL)
    engine.serve()
try:
    if how == "killed between rounds":
        engine.client_states({})
    fields = {"round": 1, "objectives": ("a",), "adapter": {}, "num_local_steps": 1}
    with closing(engine):  # which waits for no process that does not respond
        engine.map(LocalTraining(**fields, weighting="firm"), names)
except ProcessLost as error:
    print("after it woke" if os.path.exists(sys.argv[2]) else "lost:", error)
"""


def test_a_client_that_hangs_is_interrupted_and_named_and_leaves_no_trace(
    new_client, request_of, same
):
    def states(hangs: bool):
        clients = [new_client(name) for name in "ab"]
        engine = LocalEngine(clients, timeout=0.3)
        engine.map(request_of(1, {}), ["a", "b"])
        if hangs:
            load = clients[0].load
            clients[0].load = lambda *given: (load(*given), time.sleep(60))
            began = time.perf_counter()
            replies, failures = engine.map(request_of(2, {"a": 1, "b": 1}), ["a", "b"])
            assert time.perf_counter() - began < 30
            assert [reply.client for reply in replies] == ["b"]
            assert [(failure.client, failure.reason) for failure in failures] == [
                ("a", "TimeLimitError: it has not finished within 0.3 s")
            ]
            clients[0].load = load
        else:
            engine.map(request_of(2, {"a": 1, "b": 1}), ["b"])
        replies, _ = engine.map(request_of(3, {"a": 1, "b": 2}), ["a", "b"])
        adapters = [reply.content.adapter for reply in replies]
        return adapters, engine.client_states({"a": 3, "b": 3})

    assert same(states(hangs=True), states(hangs=False))


def test_a_client_that_is_interrupted_in_its_exit_from_no_grad_leaves_gradients_on(
    new_client, request_of
):
    clients = [new_client(name) for name in "ab"]

    def interrupted(*given):
        torch.set_grad_enabled(False)  # as no_grad does; its exit did not come to restore the mode
        raise TimeLimitError("it has not finished within 1 s")

    clients[0].load = interrupted
    replies, failures = LocalEngine(clients).map(request_of(1, {}), ["a", "b"])
    assert [failure.client for failure in failures] == ["a"]
    assert [reply.client for reply in replies] == ["b"]
    assert torch.is_grad_enabled()


def test_work_within_its_limit_is_left_alone_and_so_is_what_comes_after():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(0.2, "client_1"):
        pass
    time.sleep(0.3)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(TimeoutError), time_limit(0.01, "client_1"):
        time.sleep(60)
    assert signal.getsignal(signal.SIGALRM) is before
    waiting = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()


def test_an_interruption_that_python_ignores_is_repeated():
    class Slow:
        def __del__(self):
            time.sleep(60)

    def work():
        Slow()
        time.sleep(60)

    hook, began = sys.unraisablehook, time.perf_counter()
    with pytest.raises(TimeLimitError), time_limit(0.05, "client_1"):
        work()
    assert time.perf_counter() - began < 30
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("program", [STUCK, TOGETHER])
def test_what_cannot_be_interrupted_ends_its_process_with_a_line(program):
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("client_1 has not finished within 0.2 s and cannot be interru")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("killed", "lost: process 1 of the run's 2, which worked on client_1, is gone; unless"),
        (
            "killed between rounds",
            "lost: process 1 of the run's 2, which worked on client_1, is gone; unless",
        ),
        (
            "frozen",
            "lost: process 1 of the run's 2, which works on client_1, does not respond; end",
        ),
    ],
)
def test_a_process_that_is_killed_or_frozen_is_named_with_its_clients(
    two_processes, how, told, tmp_path
):
    server, _ = two_processes(TWO_PROCESSES, how, str(tmp_path / "woke"))
    assert told in server.stdout, server.stderr


@pytest.mark.parametrize("options", [{"timeout": 0.0}, {"timeout": 1.0, "num_workers": 2}])
def test_a_limit_that_cannot_be_kept_is_refused(new_client, options):
    with pytest.raises(ValueError, match=r"timeout must be positive and needs num_workers=1, got"):
        LocalEngine([new_client("a")], **options)


def test_a_limit_needs_the_main_thread(new_client, request_of):
    engine, raised = LocalEngine([new_client("a")], timeout=1.0), []

    def run():
        try:
            engine.map(request_of(1, {}), ["a"])
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised == ["a time limit can only be enforced from the program's main thread."]
