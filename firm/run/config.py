"""Configurations: frozen dataclasses filled from YAML files and from the command line.

A file states what differs from the defaults, and `--key.path value` overrides it:

- A *section* (a nested dataclass) is merged: keys that are not named keep their values.
- A section of several *forms*, told apart by their `name` (a union of dataclasses, or a dataclass
  whose class method `forms` returns those that are registered), keeps, when another form is chosen,
  the keys that were given before and that the new form has too.
- A top-level key `plugins` names modules that register such forms; they are imported first.
- A list or a dictionary replaces the default as a whole, since which objectives there are is one
  choice; `--rewards.helpful.path value` changes one entry and leaves the others.

jsonargparse converts and checks single values and writes the help page. What it lacks stands here:
partial sections, forms chosen by name, errors of `__post_init__`, and one line that names file, key
and nearest key. Modules whose dataclasses are read must not postpone their annotations.
"""

import argparse
import dataclasses
import difflib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import (
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from firm.federation.outside import printable
from firm.run.earlier import translated_settings
from firm.run.errors import UserError, exit_on_user_error
from firm.run.plugins import import_plugin
from firm.run.shipped import find_config
from firm.run.yaml_text import read_yaml

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


def compose(
    config_class: type[Config],
    files: Sequence[str | Path],
    overrides: Sequence[tuple[str, Any]],
    *,
    source: str = "command line",
) -> Config:
    """Returns the configuration of the defaults, then YAML files, then overrides.

    Args:
        config_class: A frozen dataclass.
        files: YAML files, later ones laid over earlier ones.
        overrides: Key paths in dots and their values, plain data or its text.
        source: What messages call the place that overrides come from.

    Raises:
        UserError: As `parse`.
    """
    contents = []
    for file in map(str, files):
        with _named_in_errors(file):
            contents.append((file, translated_settings(_read_file(file))))
    if "plugins" in get_type_hints(config_class):
        mappings = [content for _, content in contents if isinstance(content, Mapping)]
        given = [content["plugins"] for content in mappings if "plugins" in content]
        given += [value for key, value in overrides if key == "plugins"]
        for name in _lay(tuple[str, ...], None, (), given[-1], "plugins") if given else ():
            import_plugin(name)
    root = _Section.of(config_class)
    for file, content in contents:
        with _named_in_errors(file):
            _lay(config_class, root, (), content, "")
    # A form's name decides which keys there are: it goes first, wherever it stands.
    for key, value in sorted(overrides, key=lambda override: not override[0].endswith(".name")):
        with _named_in_errors(source):
            _lay(config_class, root, key.split("."), value, "")
    return _build(root, "")


def to_dict(config: Any) -> Any:
    """Returns the configuration as plain data: dictionaries, lists, strings, numbers, None."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in _fields(type(config))}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def to_yaml(config: Any) -> str:
    """Returns the configuration as YAML that `parse` reads back to an equal one."""
    # Escapes for what is not ASCII: PyYAML reads a literal next-line character back as a space.
    return yaml.safe_dump(to_dict(config), sort_keys=False, width=100)


# --- From values to a configuration ---------------------------------------------------------------


@dataclass
class _Section:
    """A dataclass to be: its checked values so far, and the keys that somebody gave."""

    form: type
    values: dict[str, Any]
    given: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, form: type) -> "_Section":
        """A section with the defaults of `form`; required keys are absent."""
        values = {}
        for f in _fields(form):
            if f.default is not MISSING:
                values[f.name] = _tree(f.default)
            elif f.default_factory is not MISSING:
                values[f.name] = _tree(f.default_factory())
        return cls(form, values)

    def turned_into(self, form: type) -> "_Section":
        """The section in another form, with the given keys that this form has too."""
        section = _Section.of(form)
        section.given = self.given & {f.name for f in _fields(form)}
        section.values |= {key: self.values[key] for key in section.given}
        return section

    def key_paths(self) -> Iterator[str]:
        """All keys at and below this section, in dots."""
        for f in _fields(self.form):
            yield f.name
            value = self.values.get(f.name)
            if isinstance(value, _Section):
                yield from (f"{f.name}.{path}" for path in value.key_paths())


@runtime_checkable
class _Registered(Protocol):
    """A dataclass that stands for others, which register themselves."""

    @classmethod
    def forms(cls) -> Sequence[type]:
        """Returns the others."""
        ...


def _fields(form: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(form) if f.init]


def _tree(value: Any) -> Any:
    """A configuration's value with sections in place of dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: _tree(getattr(value, f.name)) for f in _fields(type(value))}
        return _Section(type(value), values)
    if isinstance(value, Mapping):
        return {key: _tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_tree(item) for item in value)
    return value


def _build(tree: Any, path: str) -> Any:
    """A configuration's value from its tree; dataclasses check themselves as they are built."""
    if isinstance(tree, dict):
        return {key: _build(item, _join(path, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_build(item, _join(path, place)) for place, item in enumerate(tree))
    if not isinstance(tree, _Section):
        return tree
    names = [f.name for f in _fields(tree.form)]
    for key in (_join(path, name) for name in names if name not in tree.values):
        raise UserError(f"{key} is required, got nothing; give --{key} VALUE or a config file.")
    values = {name: _build(tree.values[name], _join(path, name)) for name in names}
    try:
        return tree.form(**values)
    except ValueError as error:
        opens_with_key = str(error).partition(" ")[0] in names
        prefix = path and path + ("." if opens_with_key else ": ")
        raise UserError(f"{prefix}{error}") from error


def _lay(kind: Any, old: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Returns the tree `old` with `value`, checked, at the place to which `keys` lead.

    Args:
        kind: Annotation of the tree.
        old: The tree so far; sections in it are changed, None starts from the defaults of `kind`.
        keys: Way from here to the place of `value`; none when it is here.
        value: Plain data, or its text from the command line.
        path: Way from the root to here.

    Raises:
        UserError: There is no such place, or the value does not fit it.
    """
    members = [member for member in _members(kind) if member is not type(None)]
    shape = members[0] if len(members) == 1 else kind
    forms, origin, parts = _forms(kind), get_origin(shape), get_args(shape)
    is_sequence = origin is list or (origin is tuple and parts[1:] == (...,))
    if not (forms or is_sequence or origin is dict):
        if keys:
            raise UserError(f"unknown key {_join(path, *keys)}; {path} is a single value.")
        return _convert(kind, value, path)
    if isinstance(value, str) and not keys:
        value = read_yaml(value, path)
    if value is None and not keys and type(None) in _members(kind):
        return None
    if forms:
        return _lay_section(forms, old, keys, value, path)
    return (_lay_mapping if origin is dict else _lay_sequence)(shape, old, keys, value, path)


def _lay_mapping(kind: Any, old: Any, keys: Sequence[str], value: Any, path: str) -> dict:
    part = get_args(kind)[1]
    if keys:
        entries, name = old or {}, keys[0]
        return {**entries, name: _lay(part, entries.get(name), keys[1:], value, _join(path, name))}
    if not isinstance(value, Mapping):
        raise UserError(f"{path} must be a mapping of names, got {value!r}; write {{a: b}}.")
    return {
        name: _lay(part, None, (), item, _join(path, name))
        for name, item in _with_text_keys(value, path)
    }


def _with_text_keys(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping whose keys are names; YAML reads yes, 1 and null as something else.

    Raises:
        UserError: A key is no text.
    """
    for key, item in value.items():
        if not isinstance(key, str):
            raise UserError(
                f"{path or 'the file'} must have texts for names, got {key!r}, which YAML reads as "
                f"{_type_in_words(type(key))}; write it in quotes."
            )
        yield key, item


def _lay_sequence(kind: Any, old: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    part, sequence = get_args(kind)[0], get_origin(kind)
    if keys:
        entries = list(old or ())
        if not keys[0].isdecimal() or int(keys[0]) >= len(entries):
            raise UserError(f"unknown key {_join(path, *keys)}; {path} has {len(entries)} entries.")
        place = int(keys[0])
        entries[place] = _lay(part, entries[place], keys[1:], value, _join(path, place))
    elif isinstance(value, list | tuple):
        entries = [_lay(part, None, (), v, _join(path, place)) for place, v in enumerate(value)]
    else:
        raise UserError(f"{path} must be {_type_in_words(kind)}, got {value!r}; write [a, b].")
    return sequence(entries)


def _lay_section(
    forms: Sequence[type], old: _Section | None, keys: Sequence[str], value: Any, path: str
) -> _Section:
    if keys:
        entries = [(keys[0], keys[1:], value)]
    elif value is None:  # `section:` with all its keys commented out
        entries = []
    elif isinstance(value, Mapping):
        entries = [(key, (), item) for key, item in _with_text_keys(value, path)]
    else:
        raise UserError(f"{path or 'the file'} must be a section of keys, got {value!r}.")
    section = old or (_Section.of(forms[0]) if len(forms) == 1 else None)
    for key, rest, item in sorted(entries, key=lambda entry: entry[0] != "name"):
        place = _join(path, key)
        if key == "name" and len(forms) > 1:
            form = _form_named(forms, item, place)
            section = section.turned_into(form) if section else _Section.of(form)
        if section is None:
            break
        hints = get_type_hints(section.form)
        if key not in (names := [f.name for f in _fields(section.form)]):
            near = [other for other in section.key_paths() if other.endswith(f".{key}")]
            near += difflib.get_close_matches(key, names, n=1)
            remedy = (
                f"did you mean {_join(path, near[0])}?"
                if near
                else f"valid keys here: {', '.join(names)}."
            )
            raise UserError(f"unknown key {place}; {remedy}")
        section.values[key] = _lay(hints[key], section.values.get(key), rest, item, place)
        section.given.add(key)
    if section is None:
        names = ", ".join(_forms_by_name(forms))
        raise UserError(f"{path}.name is required, got nothing; choose one of {names}.")
    return section


def _convert(kind: Any, value: Any, path: str) -> Any:
    """A single value, or a structure of single values, as `kind` wants it."""
    members = _members(kind)
    if isinstance(value, str):
        if kind in (str, Path):
            return kind(value)
        try:
            read_yaml(value)  # jsonargparse reads texts, too, but knows no limits
        except UserError:
            if str in members or kind is Any:
                return value
            if Path in members:
                return Path(value)
            raise UserError(
                f"{path} must be {_type_in_words(kind)}, got {printable(value, max_length=80)!r}."
            ) from None
    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_argument("--value", type=kind)
    try:
        converted = parser.parse_object({"value": value}).value
    except argparse.ArgumentError:
        raise UserError(f"{path} must be {_type_in_words(kind)}, got {value!r}.") from None
    if converted is None and kind is not Any and type(None) not in members:
        raise UserError(f"{path} must be {_type_in_words(kind)}, got null.")
    return converted


def _members(kind: Any) -> tuple[Any, ...]:
    """What a union is a union of; the type itself for other types."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _forms(kind: Any) -> list[type]:
    """The dataclasses that `kind` is or is a union of; empty for other types.

    A dataclass with a class method `forms` stands for those that it returns.
    """
    forms = []
    for member in _members(kind):
        if isinstance(member, _Registered):
            forms += member.forms()
        elif isinstance(member, type) and dataclasses.is_dataclass(member):
            forms.append(member)
    return forms


def _forms_by_name(forms: Sequence[type]) -> dict[str, type]:
    return {name: form for form in forms for name in get_args(get_type_hints(form)["name"])}


def _form_named(forms: Sequence[type], name: Any, path: str) -> type:
    by_name = _forms_by_name(forms)
    if name not in by_name:
        raise UserError(f"{path} must be one of {', '.join(by_name)}, got {name!r}.")
    return by_name[name]


# --- Reading and messages -------------------------------------------------------------------------


def _read_file(file: str) -> Any:
    try:
        text = find_config(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file; check --config.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error}); give a YAML text file.") from None
    return read_yaml(text)


def _read_arguments(
    arguments: Sequence[str], switches: Collection[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Config files, and overrides as key path and text; a switch without a value is true."""
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


@contextmanager
def _named_in_errors(source: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def _join(path: str, *keys: Any) -> str:
    return ".".join([*([path] if path else []), *map(str, keys)])


def _type_in_words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "null"
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if len(_members(kind)) > 1:
        return " or ".join(map(_type_in_words, parts))
    if origin in (list, tuple):
        return f"a list of {', '.join(_type_in_words(part) for part in parts if part is not ...)}"
    return getattr(kind, "__name__", str(kind)) if origin is None else str(kind)


# --- Help -----------------------------------------------------------------------------------------


def _help_page(config_class: type, description: str) -> str:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    usage = f"usage: {Path(sys.argv[0]).name} [--config FILE.yaml ...] [--key.path VALUE ...]"
    description = description or (config_class.__doc__ or "").strip()
    return "\n\n".join([usage, description, *_help_texts(_Section.of(config_class), "")]) + "\n"


def _help_texts(section: _Section, path: str) -> Iterator[str]:
    """Help on a section's own keys, then on every section in it."""
    nested: dict[str, list[tuple[str, type]]] = {}
    for name, kind in get_type_hints(section.form).items():
        for member in _members(kind):
            entry = {dict: ["NAME"], list: ["INDEX"], tuple: ["INDEX"]}.get(get_origin(member), [])
            for form in [form for part in get_args(member) or [member] for form in _forms(part)]:
                nested.setdefault(name, []).append((_join(path, name, *entry), form))
    parser = ArgumentParser(prog="", add_help=False, usage=argparse.SUPPRESS, default_env=False)
    parser.add_class_arguments(section.form, path or None, skip=set(nested), as_group=False)
    defaults = {key: value for key, value in section.values.items() if key not in nested}
    parser.set_defaults({_join(path, key): value for key, value in defaults.items()})
    keys = parser.format_help().strip().removeprefix("options:\n")
    title = f"{path}: {(section.form.__doc__ or '').strip().partition(chr(10))[0]}\n"
    if keys:
        yield (title if path else "") + keys
    for name, places in nested.items():
        default = section.values.get(name)
        for place, form in places:
            if not (isinstance(default, _Section) and default.form is form):
                default = _Section.of(form)
            yield from _help_texts(default, place)
