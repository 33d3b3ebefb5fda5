"""Plugins: modules that register strategies and other components when imported."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from firm.base.user_code import ENDS, describe_error, import_file, import_module
from firm.run.errors import UserError
from firm.run.shipped import find_config
from firm.run.yaml_text import read_yaml

_CODE_KEYS = {"plugins", "file", "url", "urls", "advantages", "function"}
"""Keys, at any depth, of modules, functions or Python files to run, and of servers that get
prompts."""


def import_plugin(name: str) -> None:
    """Imports a plugin, given as the name of a module or the path of a Python file.

    Raises:
        UserError: The module or file does not exist, or cannot be imported.
    """
    try:
        if name.endswith(".py"):
            import_file(Path(name))
        else:
            import_module(name)
    except ENDS:
        raise
    except BaseException as error:  # a plugin may raise anything; the user gets one line
        reason = describe_error(error)
        raise UserError(f"plugins: {name} cannot be imported ({reason}); correct it.") from error


def code_in(settings: Any) -> list[str]:
    """Returns what a configuration's plain data may run or send data to.

    That is modules, Python files, and servers of reward models and rollouts.

    Searches at every depth, including dotted key paths, strings that can be parsed as YAML, and
    the files named by `base`. The result may include names that are never run, but must not miss
    any, since untrusted data may hide them.
    """
    return list(dict.fromkeys(_code_names(settings, is_code=False, bases=frozenset())))


def _code_names(settings: Any, *, is_code: bool, bases: frozenset[Path]) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            parts = str(key).split(".")
            if parts[-1] == "base" and isinstance(value, str):
                yield from _names_in_base(value, bases)
            is_codes = is_code or not _CODE_KEYS.isdisjoint(parts)
            yield from _code_names(value, is_code=is_codes, bases=bases)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _code_names(value, is_code=is_code, bases=bases)
    elif isinstance(settings, str):
        data: Any = None
        with suppress(UserError):
            data = read_yaml(settings)
        if isinstance(data, Mapping | list):
            yield from _code_names(data, is_code=is_code, bases=bases)
        elif is_code and settings:
            yield settings


def _names_in_base(name: str, bases: frozenset[Path]) -> Iterator[str]:
    with suppress(UserError, OSError, UnicodeDecodeError):  # reported when the file is used
        path = find_config(name).resolve()
        if path not in bases:
            data = read_yaml(path.read_text(encoding="utf-8"))
            yield from _code_names(data, is_code=False, bases=bases | {path})
