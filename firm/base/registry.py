"""Registries: components by name, to which users' files add their own."""

import difflib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError, core_schema

ABBREVIATIONS = {"bs": "batch_size", "lr": "learning_rate"}
"""Words of other trainers for words of ours, which suggestions spell out."""

Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry")
Component = TypeVar("Component")


class Registry(dict[Key, Entry]):
    """Components by the names that choose them.

        ENGINES: Registry[str, EngineFactory] = Registry("engine")

        @ENGINES.register("local")
        class LocalEngine: ...

    Looking up an unknown name raises ``ValueError`` with the nearest name and the list of all.

    Args:
        noun: Kind of the components, for messages.
        entries: Components to start with. A text names the module that registers the component,
            which is imported when it is first used: a configuration needs the name alone.
    """

    def __init__(self, noun: str, entries: Mapping[Key, Entry | str] | None = None) -> None:
        super().__init__(entries or {})  # type: ignore[arg-type]
        self.noun = noun
        self._imported: dict[Key, Entry] = {}

    def __getitem__(self, name: Key) -> Entry:
        entry = super().__getitem__(name)
        if isinstance(entry, str):
            import_module(entry)
            self[name] = entry = self._imported[name]
        return entry

    def items(self) -> Any:
        """Returns the names and components; imports all of them."""
        awaited = [name for name, entry in dict.items(self) if isinstance(entry, str)]
        return {**self, **{name: self[name] for name in awaited}}.items()

    def values(self) -> Any:
        """Returns the components; imports all of them."""
        return dict(self.items()).values()

    def __missing__(self, name: Key) -> Entry:
        names = choice_in_words(sorted(map(str, self)))
        raise ValueError(f"{self.noun} must be {names}, got {name!r}{did_you_mean(name, self)}")

    def add(self, name: Key, component: Component, *, entry: Any = None) -> Component:
        """Registers a component and returns it.

        A redefinition, as when a notebook cell runs twice, replaces the earlier component.

        Args:
            name: Its name.
            component: The component.
            entry: The registered entry, if it is not the component itself.

        Raises:
            ValueError: The name is empty, or taken by another component.
        """
        entry = component if entry is None else entry
        article = "an" if self.noun[0] in "aeiou" else "a"
        if not name:
            raise ValueError(f"{article} {self.noun} needs a name, got {name!r}; choose one.")
        old = self.get(name, entry)
        package = getattr(component, "__module__", "").partition(".")[0]
        if isinstance(old, str) and old.partition(".")[0] == package:  # the component it awaits
            self._imported[name] = entry
        elif old != entry and _origin(old) != _origin(entry):
            raise ValueError(
                f"{article} {self.noun} {name!r} is already registered; choose another name."
            )
        self[name] = entry
        return component

    def register(self, name: Key) -> Callable[[Component], Component]:
        """Returns a decorator that registers a function or class under a name; see ``add``."""
        return lambda component: self.add(name, component)


def _origin(entry: Any) -> Any:
    """Returns the qualified name of a function or class, which a redefinition shares."""
    name = getattr(entry, "__qualname__", None)
    return (entry.__module__, name) if name else entry


@dataclass(frozen=True, eq=False, repr=False)
class OneOf:
    """Requires a string to be one of a registry's names; names may be registered later."""

    names: Collection[str]
    other: str | None = None
    """A further valid value."""

    @property
    def choices(self) -> list[str]:
        """All valid values."""
        return [*([] if self.other is None else [self.other]), *self.names]

    def __str__(self) -> str:
        return choice_in_words(self.choices)

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> core_schema.CoreSchema:
        """Returns pydantic's schema of the annotated type, with the check after it."""
        return core_schema.no_info_after_validator_function(self._check, handler(kind))

    def _check(self, name: str) -> str:
        if name not in self.choices:
            raise PydanticCustomError("names", "{names}", {"names": str(self)})
        return name


def choice_in_words(literals: Sequence[Any]) -> str:
    """Describes the allowed literals of a value, such as "one of a, b"."""
    return ("one of " if len(literals) > 1 else "") + ", ".join(map(str, literals))


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Returns the end of a message about an unknown name, which suggests the nearest known name.

    If no name is near, returns a full stop. The comparison ignores case.

    >>> did_you_mean("Frim", ["firm", "fedavg"]), did_you_mean("nothing", ["firm", "fedavg"])
    ("; did you mean 'firm'?", '.')
    """
    by_lower = {str(each).lower(): str(each) for each in known}
    near = difflib.get_close_matches(spelled_out(str(name).lower()), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else "."


def spelled_out(name: str) -> str:
    """Returns a name with the abbreviations of other trainers spelled out.

    >>> spelled_out("actor_lr")
    'actor_learning_rate'
    """
    return "_".join(ABBREVIATIONS.get(word, word) for word in name.split("_"))
