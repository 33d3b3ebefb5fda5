"""How two configurations differ, key by key."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields key path in dots and value of everything in nested mappings and lists."""
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
    """Returns the differing key paths, each with the stored and the given value, in words.

    A key that the stored configuration lacks, since it was added later, is null there.
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
    return words
