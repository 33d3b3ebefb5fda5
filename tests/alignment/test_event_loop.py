import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from firm.alignment import event_loop
from firm.alignment.event_loop import start_coroutines
from firm.base.errors import TimeLimitError
from firm.federation.engines.time_limit import time_limit


def gathered(coroutines):
    return start_coroutines(coroutines)()


async def doubled(value):
    await asyncio.sleep(0)
    return 2 * value


def test_results_keep_their_order():
    assert gathered([doubled(1), doubled(2), doubled(3)]) == [2, 4, 6]
    assert gathered([]) == []


def test_coroutines_run_concurrently():
    here, there = asyncio.Event(), asyncio.Event()

    async def meets(own, other):
        own.set()
        await asyncio.wait_for(other.wait(), timeout=30)
        return True

    assert gathered([meets(here, there), meets(there, here)]) == [True, True]


def test_they_run_before_anyone_waits_for_them():
    ran = threading.Event()

    async def runs():
        ran.set()
        return 5

    results = start_coroutines([runs()])
    assert ran.wait(30)
    assert results() == results() == [5]


def test_it_works_inside_a_running_loop_and_from_several_threads():
    async def notebook():
        return gathered([doubled(4)])

    assert asyncio.run(notebook()) == [8]
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(gathered([doubled(n)])))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [[0], [2], [4], [6]]


def test_all_calls_have_one_loop_without_gradients():
    async def here():
        return asyncio.get_running_loop(), torch.is_grad_enabled()

    ((first, _),) = gathered([here()])
    ((second, has_gradients),) = gathered([here()])
    assert first is second
    assert not has_gradients


@pytest.mark.parametrize("error", [KeyError("a"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_raised_when_all_have_ended_and_the_loop_goes_on(error):
    ended = []

    async def fails():
        raise error

    async def slow():
        await asyncio.sleep(0.05)
        ended.append(True)

    with pytest.raises(type(error)):
        gathered([fails(), slow()])
    assert gathered([doubled(1)]) == [2]
    if isinstance(error, Exception):
        assert ended


def test_a_task_of_a_coroutine_that_exits_leaves_the_loop_at_work():
    async def fails():
        raise SystemExit(3)

    async def waits():
        return await asyncio.create_task(fails())

    with pytest.raises(SystemExit):
        gathered([waits()])
    assert gathered([doubled(1)]) == [2]


def test_a_time_limit_cancels_what_runs():
    cancelled = threading.Event()

    async def hangs():
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    with pytest.raises(TimeLimitError), time_limit(0.2, "client"):
        gathered([hangs()])
    assert cancelled.wait(30)


def test_coroutines_whose_results_nobody_can_ask_for_are_cancelled():
    began, cancelled = threading.Event(), threading.Event()

    async def hangs():
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    results = start_coroutines([hangs()])
    assert began.wait(30)
    del results
    assert cancelled.wait(30)


FORKED = """
import importlib.util
import os
import sys

spec = importlib.util.spec_from_file_location("event_loop", sys.argv[1])  # without the package
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def gathered(coroutines):
    return module.start_coroutines(coroutines)()

async def one():
    return 1

assert gathered([one()]) == [1]
child = os.fork()
if child == 0:
    assert gathered([one()]) == [1]
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_its_own_loop_and_programs_end_without_a_word():
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", FORKED, event_loop.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout == "7\n", ended.stderr
    assert "event loop" not in ended.stderr
