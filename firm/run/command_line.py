"""The command line of a configuration: `--config FILE.yaml`, `--key.path VALUE` and `--help`."""

import json
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from firm.fields import field_docstrings, in_words
from firm.run.config import Section, compose, forms_of, join, members_of, to_dict, type_in_words
from firm.run.errors import UserError, exit_on_user_error

Config = TypeVar("Config")


def run_cli(
    main: Callable[[Config], Any],
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    default_file: str | Path | None = None,
) -> None:
    """Calls `main` with the configuration of the command line; bad input ends in one line.

    The arguments are those of `parse`; errors end as `exit_on_user_error` says.
    """
    with exit_on_user_error():
        main(parse(config_class, argv, description=description, default_file=default_file))


def parse(
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    default_file: str | Path | None = None,
) -> Config:
    """Returns the configuration of the defaults, then YAML files, then overrides.

    `--config file.yaml` may be repeated; later files are laid over earlier ones. A top-level key
    that is a bool needs no value to be true: `--resume`. `--help` prints every key with its
    docstring, type and default, and exits.

    Args:
        config_class: A frozen dataclass.
        argv: Arguments without the program's name; those of the process when None.
        description: Opens the help page; the docstring of `config_class` when empty.
        default_file: YAML file that is read when the command line names none.

    Raises:
        UserError: An unknown key, a value of the wrong type or one that a `__post_init__` refuses,
            a file that is missing or malformed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(_help_page(config_class, description))
        raise SystemExit(0)
    switches = {name for name, kind in get_type_hints(config_class).items() if kind is bool}
    files, overrides = _read_arguments(arguments, switches)
    if not files and default_file is not None:
        files = [str(default_file)]
    return compose(config_class, files, overrides)


def _read_arguments(
    arguments: Sequence[str], switches: Collection[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns config files, and overrides as key path and text; a switch alone is true."""
    files, overrides = [], []
    rest = list(arguments)
    for argument in rest:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"command line: {argument!r} is no UTF-8 text; write it in UTF-8.")
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise UserError(
                f"command line: unexpected {argument!r}; "
                "give a file as --config FILE and a value as --key.path VALUE."
            )
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--")
            if not has_value and key not in switches:
                raise UserError(f"command line: --{key} has no value; write --{key} VALUE.")
            value = rest.pop(0) if has_value else "true"
        if key == "config":
            files.append(value)
        else:
            overrides.append((key, value))
    return files, overrides


def _help_page(config_class: type, description: str) -> str:
    usage = f"usage: {Path(sys.argv[0]).name} [--config FILE.yaml ...] [--key.path VALUE ...]"
    description = description or (config_class.__doc__ or "").strip()
    return "\n\n".join([usage, description, *_help_texts(Section.of(config_class), "")]) + "\n"


def _help_texts(section: Section, path: str) -> Iterator[str]:
    """Yields help on a section's own keys, then on every section in it."""
    lines = (
        [f"{path}: {(section.form.__doc__ or '').strip().partition(chr(10))[0]}"] if path else []
    )
    documents = field_docstrings(section.form)
    hints = get_type_hints(section.form, include_extras=True)
    places = {name: list(_places(kind)) for name, kind in get_type_hints(section.form).items()}
    for name in (name for name in places if not places[name]):
        default = section.values.get(name, MISSING)
        facts = [
            type_in_words(get_type_hints(section.form)[name]),
            in_words(hints[name]),
            "required" if default is MISSING else f"default: {json.dumps(to_dict(default))}",
        ]
        text = f"{documents.get(name, '')} ({', '.join(filter(None, facts))})"
        lines.append(f"  --{join(path, name)} {name.upper()}")
        lines.append(textwrap.fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if lines:
        yield "\n".join(lines)
    for name in places:
        default = section.values.get(name)
        for entry, form in places[name]:
            if not (isinstance(default, Section) and default.form is form):
                default = Section.of(form)
            yield from _help_texts(default, join(path, name, *entry))


def _places(kind: Any) -> Iterator[tuple[list[str], type]]:
    """Yields the sections that a field of this type holds, and how a key names an entry of it."""
    for member in members_of(kind):
        entry = {dict: ["NAME"], list: ["INDEX"], tuple: ["INDEX"]}.get(get_origin(member), [])
        for part in get_args(member) or [member]:
            yield from ((entry, form) for form in forms_of(part))
