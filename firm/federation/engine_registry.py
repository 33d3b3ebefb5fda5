"""The registry of engines, by which configurations choose them without importing them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from firm.base.registry import Registry

if TYPE_CHECKING:
    from firm.federation.engines.engine import Engine

EngineFactory = Callable[..., "Engine"]
"""Builds an engine in this process from its clients, with the options of ``LocalEngine``."""

ENGINES: Registry[str, EngineFactory] = Registry(
    "engine",
    {
        "local": "firm.federation.engines.local",
        "stacked": "firm.federation.engines.stacked",
    },
)
"""Engines that a configuration may choose, by name."""

Factory = TypeVar("Factory", bound=EngineFactory)


def engine(name: str) -> Callable[[Factory], Factory]:
    """Returns a decorator that registers an engine, or a function that builds one, under a name.

    Raises:
        ValueError: The name is taken.
    """
    return ENGINES.register(name)
