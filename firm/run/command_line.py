"""Command line of a configuration: `--config FILE.yaml`, `--key.path VALUE` and `--help`."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from firm.base.console import accept_any_text
from firm.run.config import build, lay_out, members_of
from firm.run.errors import UserError, exit_on_user_error
from firm.run.help_page import help_page
from firm.run.plugins import code_in
from firm.run.yaml_text import read_yaml

Config = TypeVar("Config")

ALLOW_CODE = "allow_code"
"""Argument that permits running the Python files named in a resumed folder."""


def run_cli(
    main: Callable[[Config], Any],
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Calls `main` with the configuration from the command line; exits with one line on bad input.

    See `parse` for the arguments and `exit_on_user_error` for the handling of errors.
    """
    accept_any_text()
    with exit_on_user_error():
        main(parse(config_class, argv, **options))


def parse(
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    default_file: str | Path | None = None,
    keys: Mapping[str, Sequence[str]] | None = None,
    resumed: Callable[[Path], Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """Parses a configuration from defaults, YAML files and command-line overrides, in this order.

    `--config file.yaml` may be repeated; later files override earlier ones. Lists are words,
    `--seeds 0 1`, numbers with commas, `--preference 0.7,0.3`, or YAML. A top-level boolean key
    without a value is true, such as `--resume`. `--help` prints the main keys with docstring, type
    and default, `--help all` all keys, and `--help KEY` a key with all keys below it; it imports no
    plugins. `--resume FOLDER` starts from the configuration of the run in a folder and continues
    that run; Python files that are named only by this folder require `--allow_code`.

    Args:
        config_class: A frozen dataclass.
        argv: Arguments without the program's name; by default sys.argv[1:].
        description: First paragraph of the help page; by default the docstring of `config_class`.
        default_file: YAML file to read if the command line names none.
        keys: Main keys by heading; by default the top-level keys that are not sections.
        resumed: Returns the configuration of the run in a folder, as plain data; if None,
            `--resume` takes no folder.
        base: Settings of lowest precedence, by the name of their source in messages.

    Raises:
        UserError: A key is unknown, a value has the wrong type or is rejected by `__post_init__`,
            or a file is missing or malformed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    topic = _take_help(arguments)
    switches = switches_of(config_class) | ({ALLOW_CODE} if resumed is not None else set())
    files, overrides = read_arguments(arguments, switches)
    base = dict(base or {})
    if resumed is not None:
        is_allowed = _take_permission(overrides)
        if folder := _take_folder(overrides):
            settings = base[f"the run {folder}"] = resumed(Path(folder))
            if topic is None and not is_allowed:
                own = [{"base": file} for file in files] + [dict([pair]) for pair in overrides]
                _check_code(folder, settings, own)
        elif is_allowed:
            raise UserError(
                f"command line: --{ALLOW_CODE} needs a folder to resume; Python files that you "
                "pass yourself do not need it."
            )
    if not files and not base and default_file is not None:
        files = [str(default_file)]
    tree = lay_out(config_class, files, overrides, base=base, has_plugins=topic is None)
    if topic is None:
        return build(tree)
    description = description or (config_class.__doc__ or "").strip()
    sys.stdout.write(f"{description}\n\n{help_page(tree, topic, keys=keys, files=[*base, *files])}")
    raise SystemExit(0)


def _take_help(arguments: list[str]) -> str | None:
    """Removes `--help` from the arguments; returns its topic, or None without `--help`.

    The topic is empty if none is given.
    """
    place = next((i for i, given in enumerate(arguments) if given in ("-h", "--help")), None)
    if place is None:
        return None
    _, *rest = arguments[place:]
    has_topic = bool(rest) and not rest[0].startswith("-")
    del arguments[place : place + 1 + has_topic]
    return rest[0] if has_topic else ""


def _take_permission(overrides: list[tuple[str, Any]]) -> bool:
    """Removes `--allow_code` from the overrides; returns its value, false by default.

    It is not a configuration key, since a folder could then grant itself the permission.
    """
    given = [text for key, text in overrides if key == ALLOW_CODE]
    overrides[:] = [(key, text) for key, text in overrides if key != ALLOW_CODE]
    is_allowed = read_yaml(given[-1]) if given else False
    if not isinstance(is_allowed, bool):
        raise UserError(f"command line: {ALLOW_CODE} must be bool, got {given[-1]!r}.")
    return is_allowed


def _check_code(folder: str, settings: Any, own: Any) -> None:
    """Raises `UserError` if a folder's settings would run code that the user has not named.

    The folder may come from a stranger, who controls all of its contents. Paths outside the folder
    are no safer: they may lead to files that were shipped with it, or to a program of the user's
    that is not a plugin.

    Args:
        folder: Folder given to `--resume`.
        settings: Configuration in the folder, as plain data.
        own: The user's own settings, as plain data; code named there is trusted.
    """
    known = code_in(own)
    if names := [name for name in code_in(settings) if name not in known]:
        is_servers = all(name.startswith(("http://", "https://")) for name in names)
        what = "send data to servers" if is_servers else "run Python code"
        raise UserError(
            f"{folder} would {what} ({', '.join(names)}): review it, then pass --{ALLOW_CODE}."
        )


def _take_folder(overrides: list[tuple[str, Any]]) -> str:
    """Returns the folder given to `resume`, and sets `out` to it; empty if there is none.

    Raises:
        UserError: `out` is also given.
    """
    value = dict(overrides).get("resume", "")
    with suppress(UserError):
        if value in ("", "auto") or isinstance(read_yaml(value), bool):
            return ""
    if out := dict(overrides).get("out"):
        raise UserError(
            f"command line: --out must not be given with --resume {value}, which is the run's "
            f"folder, got {out}."
        )
    overrides[:] = [(key, text) for key, text in overrides if key != "resume"]
    overrides += [("out", value), ("resume", "true")]
    return value


def switches_of(config_class: type) -> set[str]:
    """Returns the top-level boolean keys of a configuration."""
    hints = get_type_hints(config_class)
    return {name for name, kind in hints.items() if bool in members_of(kind)}


def read_arguments(
    arguments: Sequence[str], switches: Collection[str] = ()
) -> tuple[list[str], list[tuple[str, Any]]]:
    """Returns config files, and overrides as key paths and texts.

    A key with several words has a list of texts, and a bare switch is true.

    Raises:
        UserError: There is a word before the first key, or a key without a value.
    """
    files, overrides = list[str](), list[tuple[str, Any]]()
    rest = list(arguments)
    for argument in rest:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"command line: {argument!r} is not valid UTF-8; write it in UTF-8.")
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise UserError(
                f"command line: unexpected {argument!r}; "
                "pass a file as --config FILE and a value as --key.path VALUE."
            )
        words = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        if not words and key not in switches:
            raise UserError(f"command line: --{key} has no value; write --{key} VALUE.")
        if words[1:] and key in switches:
            raise UserError(f"command line: --{key} has one value, got {' '.join(words)!r}.")
        if key == "config":
            files += words
        else:
            overrides.append((key, words if len(words) > 1 else (words or ["true"])[0]))
    return files, overrides
