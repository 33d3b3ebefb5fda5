"""Differences between two configurations, by key."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

ORDERED = ("rewards", "pairs")
"""Mappings whose order counts: preferences, weights and what clients keep are in it."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key path and the value of each leaf in nested mappings and lists."""
    if isinstance(value, Mapping):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, item in entries:
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def differences(stored: Any, config: Any, ignore: Collection[str] = ()) -> list[str]:
    """Describes the differing keys, each with its stored and its given value.

    A key that is absent from the stored configuration, because it was added later, counts as null.
    Objectives in another order differ.

    Args:
        stored: Stored configuration, as plain data.
        config: Given configuration, as plain data.
        ignore: Key paths that may differ, together with all keys below them.
    """
    absent = object()
    ours, theirs = dict(leaves(stored)), dict(leaves(config))
    words = []
    for key in dict.fromkeys([*ours, *theirs]):
        is_ignored = any(key == path or key.startswith(f"{path}.") for path in ignore)
        was, now = ours.get(key, absent), theirs.get(key, absent)
        is_new = was is absent and now is None
        if was != now and not (is_ignored or is_new):
            was, now = ("absent" if value is absent else repr(value) for value in (was, now))
            words.append(f"{key} was {was}, is {now}")
    for key in ORDERED:
        was, now = (_names(own, key) for own in (stored, config))
        if was != now and sorted(was) == sorted(now) and key not in ignore:
            words.append(f"the order of {key} was {', '.join(was)}, is {', '.join(now)}")
    return words


def _names(config: Any, key: str) -> list[str]:
    """Returns the keys of a mapping in a configuration, which may be malformed, in order."""
    own = config.get(key) if isinstance(config, Mapping) else None
    return list(map(str, own)) if isinstance(own, Mapping) else []
