"""Event loop for asynchronous reward functions, in a thread that lives as long as the process.

``asyncio.run`` does not work: notebooks already run a loop, and HTTP clients that a reward function
keeps between calls are bound to the loop in which they were first used.
"""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Event loop by process id, since a forked process does not inherit its parent's threads."""


def start_coroutines(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> Callable[[], list[Any]]:
    """Starts coroutines, which run concurrently, and returns a function that waits for the results.

    The results are in order. Exceptions are raised after all coroutines have ended; if there are
    several, the first coroutine's. Interrupting the wait, or dropping the function, cancels the
    coroutines.
    """

    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(gather(), _loop())

    def results() -> list[Any]:
        try:
            found = future.result()
        except BaseException:  # Ctrl-C, or a passed time limit
            future.cancel()
            raise
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    # an error elsewhere may leave nobody to wait
    weakref.finalize(results, future.cancel).atexit = False
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
    torch.get_num_threads()  # a new thread adopts torch's number of threads only once it queries it
    torch.set_grad_enabled(False)
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except BaseException:  # a task's SystemExit stops the loop; the task has it as its error
            continue
        return


def _end(process: int, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stops the loop when its process ends, without waiting for running tasks."""
    if os.getpid() != process:
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=1.0)
    if not thread.is_alive():
        loop.close()
