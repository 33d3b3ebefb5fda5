"""What an engine can ask of a client, by name: the name travels, never code."""

from collections.abc import Callable
from typing import Any

from firm.federation.client import Client, State

Task = Callable[[Client, State], Any]
"""Does a client's part: (client, payload) to the content of its reply."""

TASKS: dict[str, Task] = {}


def task(name: str) -> Callable[[Task], Task]:
    """Returns a decorator that registers a task under a name, once.

    Raises:
        ValueError: When the name is taken.
    """

    def register(function: Task) -> Task:
        if name in TASKS:
            raise ValueError(f"A task named {name!r} exists already; choose another name.")
        TASKS[name] = function
        return function

    return register
