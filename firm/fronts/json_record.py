"""Dataclasses as JSON files: written atomically, validated against their annotations when read."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from firm.base.inside import open_inside, replace_text
from firm.base.json_text import json_text

RecordT = TypeVar("RecordT")


def write_record(path: str | Path, record: Any, *, version: int) -> None:
    """Writes a dataclass of the types that `read_record` supports as JSON, replacing `path`.

    Non-finite numbers, which JSON does not support, become null and are read as NaN. If writing
    fails, an existing file is left unchanged.
    """
    text = json_text({"format": version, **asdict(record)}, indent=2, ensure_ascii=False) + "\n"
    replace_text(Path(path), text)


def read_record(
    path: str | Path, kind: type[RecordT], *, version: int, added: Mapping[str, Any] | None = None
) -> RecordT:
    """Returns the dataclass in a file written by `write_record`.

    The file must have exactly the dataclass's fields, with values of their types: str, int, float,
    bool, Any, `X | None`, `tuple[X, ...]`, `dict[str, X]` or a dataclass of these.

    Args:
        path: The file.
        kind: The dataclass.
        version: Required version of the format.
        added: Defaults of fields that older files of this version lack.

    Raises:
        ValueError: When the file is malformed or the dataclass rejects its values; names the key.
    """
    try:
        with open(path, encoding="utf-8", opener=open_inside) as file:
            content = json.load(file)
        if not isinstance(content, dict) or content.pop("format", None) != version:
            raise ValueError(f'expected an object with "format": {version}')
        return _parse(kind, {**(added or {}), **content}, "")
    # invalid JSON and UTF-8 raise ValueError too
    except (ValueError, OverflowError, RecursionError) as error:
        what = kind.__name__.lower()
        raise ValueError(
            f"{path} is not a valid {what}: {str(error).rstrip('.')}. Restore or rewrite the file."
        ) from None


def _parse(kind: Any, value: Any, where: str) -> Any:
    """Converts plain data to type `kind`; `where` is the key path for messages."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        entries, hints = _of_type(dict, value, where), get_type_hints(kind)
        for key in sorted(hints.keys() ^ entries.keys()):
            problem = "is missing" if key in hints else "is an unknown key"
            raise ValueError(f"{_join_key(where, key)} {problem}")
        parts = {k: _parse(hints[k], entries[k], _join_key(where, k)) for k in hints}
        return kind(**parts)  # type: ignore[operator]
    if origin is UnionType:  # X | None
        return None if value is None else _parse(args[0], value, where)
    if origin is tuple:
        entries = _of_type(list, value, where)
        return tuple(_parse(args[0], entry, f"{where}[{i}]") for i, entry in enumerate(entries))
    if origin is dict:
        entries = _of_type(dict, value, where)
        return {
            key: _parse(args[1], entry, _join_key(where, key)) for key, entry in entries.items()
        }
    if kind is float:
        number = math.nan if value is None else _of_type((int, float), value, where)
        return float(number)
    return value if kind is Any else _of_type(kind, value, where)


def _join_key(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    bool: "true or false",
}


def _of_type(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        text = json.dumps(value)
        shown = text if len(text) <= 40 else f"{text[:40]}[...]"
        raise ValueError(f"{where} must be {_NAMES.get(kind, 'a number')}, got {shown}")
    return value
