"""An event loop for coroutine reward functions, in a thread that lives as long as the process.

``asyncio.run`` would not work: notebooks already run a loop, and HTTP clients that a reward
function keeps between calls belong to the loop in which they were first used.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop of each process: a forked one has none of its parent's threads."""


def gathered(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Returns the results of coroutines that run concurrently, in their order.

    An exception in one of them is raised after all have ended; of several exceptions, the first
    coroutine's. Interrupting the caller cancels them.
    """

    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(gather(), _loop())
    try:
        results = future.result()
    except BaseException:  # Ctrl-C, or a passed time limit
        future.cancel()
        raise
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        process = os.getpid()
        if process not in _loops:
            loop = _loops[process] = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="rewards", daemon=True)
            thread.start()
            atexit.register(_end, process, loop, thread)
        return _loops[process]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    torch.get_num_threads()  # a new thread adopts torch's number only if it asks
    torch.set_grad_enabled(False)
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except BaseException:  # SystemExit in a task leaves the loop; the task has it as its error
            continue
        return


def _end(process: int, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends the loop with its process; running tasks are left alone."""
    if os.getpid() != process:
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=1.0)
    if not thread.is_alive():
        loop.close()
