"""Registry of the tasks that an engine can request from a client by name; no code is sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from firm.base.registry import Registry

if TYPE_CHECKING:
    from firm.federation.client import Client
    from firm.federation.messages import Answer, Request

Function = TypeVar("Function", bound=Callable[["Client", Any], "Answer"])


@dataclass(frozen=True)
class ClientTask:
    """A function that runs on a client, and the type of the request for it."""

    function: "Callable[[Client, Any], Answer]"
    """Maps a client and the request to the answer."""
    request: "type[Request]"
    """Type of the request."""


_SECURE = "firm.federation.options.secure.messages"
TASKS: Registry[str, ClientTask] = Registry(
    "task",
    {
        "local_training": "firm.federation.training",
        "masked_training": _SECURE,
        "share_keys": _SECURE,
        "send_masked": _SECURE,
        "confirm_members": _SECURE,
        "reveal_shares": _SECURE,
        "share_jacobian": "firm.federation.sharing",
        "correct_gram": "firm.federation.sharing",
        "objective_training": "firm.federation.objective_training",
    },
)


def task(request: "type[Request]") -> Callable[[Function], Function]:
    """Returns a decorator that registers a task under the name of its request.

    Raises:
        ValueError: The name is taken.
    """
    return lambda function: TASKS.add(request.task, function, entry=ClientTask(function, request))
