"""Registry of the tasks that an engine can request from a client by name; no code is sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from firm.base.registry import Registry
from firm.federation.client import Client
from firm.federation.messages import Answer, Request

Function = TypeVar("Function", bound=Callable[[Client, Any], Answer])


@dataclass(frozen=True)
class ClientTask:
    """A function that runs on a client, and the type of the request for it."""

    function: Callable[[Client, Any], Answer]
    """Maps a client and the request to the answer."""
    request: type[Request]
    """Type of the request."""


TASKS: Registry[str, ClientTask] = Registry("task")


def task(request: type[Request]) -> Callable[[Function], Function]:
    """Returns a decorator that registers a task under the name of its request.

    Raises:
        ValueError: The name is taken.
    """
    return lambda function: TASKS.add(request.task, function, entry=ClientTask(function, request))
