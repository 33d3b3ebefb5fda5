"""Configurations: frozen dataclasses filled from YAML files and from the command line.

A file states what differs from the defaults, and `--key.path value` overrides it:

- A *section* (a nested dataclass) is merged: keys that are not named keep their values.
- A section of several *forms*, told apart by their `name` (a union of dataclasses, or a dataclass
  whose class method `forms` returns those that are registered), keeps, when another form is chosen,
  the keys that were given before and that the new form has too.
- A top-level key `plugins` names modules that register such forms; they are imported first.
- A list or a dictionary replaces the default as a whole, since which objectives there are is one
  choice; `--rewards.helpful.path value` changes one entry and leaves the others. A dictionary of
  anything has key paths for names: `--overrides.strategy.beta value`.

pydantic checks single values. Modules whose dataclasses are read must not postpone their
annotations.
"""

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field
from functools import cache
from pathlib import Path
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from pydantic import TypeAdapter, ValidationError

from firm.federation.outside import printable
from firm.fields import choice_in_words, did_you_mean
from firm.run.errors import UserError
from firm.run.plugins import import_plugin
from firm.run.shipped import find_config
from firm.run.yaml_text import AmbiguousYaml, Dumper, read_yaml

Config = TypeVar("Config")


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
    return build(lay_out(config_class, files, overrides, source=source))


def lay_out(
    config_class: type,
    files: Sequence[str | Path],
    overrides: Sequence[tuple[str, Any]],
    *,
    source: str = "command line",
    base: Mapping[str, Any] | None = None,
    has_plugins: bool = True,
) -> "Section":
    """Returns what `compose` builds, as a tree; required keys may be missing still.

    Settings in `base`, plain data by what messages call their place, come before the files. With
    `has_plugins` false no plugin is imported, and forms that one would register are unknown.
    """
    contents = list((base or {}).items())
    for file in map(str, files):
        with _named_in_errors(file):
            contents.append((file, _read_file(file)))
    plugins: Sequence[str] = ()
    if "plugins" in get_type_hints(config_class):
        mappings = [content for _, content in contents if isinstance(content, Mapping)]
        given = [content["plugins"] for content in mappings if "plugins" in content]
        given += [value for key, value in overrides if key == "plugins"]
        plugins = _lay(tuple[str, ...], None, (), given[-1], "plugins") if given else ()
    for name in plugins if has_plugins else ():
        import_plugin(name)
    root = Section.of(config_class)
    try:
        for file, content in contents:
            with _named_in_errors(file):
                _lay(config_class, root, (), content, "")
        # A form's name decides which keys there are: it goes first, wherever it stands.
        for key, value in sorted(overrides, key=lambda override: not override[0].endswith(".name")):
            given = _Unread(value) if isinstance(value, str) else value
            with _named_in_errors(source):
                _lay(config_class, root, key.split("."), given, "")
    except UserError as error:
        if has_plugins or not plugins:
            raise
        raise UserError(
            f"{error} --help imports no plugins, and does not know what {', '.join(plugins)} "
            "may register."
        ) from error
    return root


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
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, width=100)


# --- From values to a configuration ---------------------------------------------------------------


@dataclass
class Section:
    """A dataclass to be: its checked values so far, and the keys that somebody gave."""

    form: type
    values: dict[str, Any]
    given: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, form: type) -> "Section":
        """Returns a section with the defaults of `form`; required keys are absent."""
        values = {}
        for f in _fields(form):
            if f.default is not MISSING:
                values[f.name] = _tree(f.default)
            elif f.default_factory is not MISSING:
                values[f.name] = _tree(f.default_factory())
        return cls(form, values)

    def turned_into(self, form: type) -> "Section":
        """Returns the section in another form, with the given keys that this form has too."""
        section = Section.of(form)
        section.given = self.given & {f.name for f in _fields(form)}
        section.values |= {key: self.values[key] for key in section.given}
        return section

    def key_paths(self) -> Iterator[str]:
        """Yields all keys at and below this section, in dots."""
        for f in _fields(self.form):
            yield f.name
            value = self.values.get(f.name)
            if isinstance(value, Section):
                yield from (f"{f.name}.{path}" for path in value.key_paths())


def _fields(form: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(form) if f.init]


def _tree(value: Any) -> Any:
    """Returns a configuration's value with sections in place of dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: _tree(getattr(value, f.name)) for f in _fields(type(value))}
        return Section(type(value), values)
    if isinstance(value, Mapping):
        return {key: _tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_tree(item) for item in value)
    return value


def build(tree: Any, path: str = "") -> Any:
    """Returns a configuration's value from its tree; dataclasses check themselves."""
    if isinstance(tree, dict):
        return {key: build(item, join(path, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(build(item, join(path, place)) for place, item in enumerate(tree))
    if not isinstance(tree, Section):
        return tree
    names = [f.name for f in _fields(tree.form)]
    for key in (join(path, name) for name in names if name not in tree.values):
        raise UserError(f"{key} is required, got nothing; give --{key} VALUE or a config file.")
    values = {name: build(tree.values[name], join(path, name)) for name in names}
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
    members = [member for member in members_of(kind) if member is not type(None)]
    shape = members[0] if len(members) == 1 else kind
    forms, origin, parts = forms_of(kind), get_origin(shape), get_args(shape)
    is_sequence = origin is list or (origin is tuple and parts[1:] == (...,))
    if not (forms or is_sequence or origin is dict):
        if keys:
            raise UserError(f"unknown key {join(path, *keys)}; {path} is a single value.")
        return _convert(kind, value, path)
    if isinstance(value, str) and not keys:
        value = read_yaml(value, path)
    if value is None and not keys and type(None) in members_of(kind):
        return None
    if forms:
        return _lay_section(forms, old, keys, value, path)
    return _lay_entries(shape, old, keys, value, path)


def _with_text_keys(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a mapping whose keys are names; YAML reads yes and 1 as no text.

    Raises:
        UserError: A key is no text.
    """
    for key, item in value.items():
        if not isinstance(key, str):
            raise UserError(
                f"{path or 'the file'} must have texts for names, got {key!r}, which YAML reads as "
                f"{type_in_words(type(key))}; write it in quotes."
            )
        yield key, item


def _lay_entries(kind: Any, old: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Returns a list or dictionary: a whole one replaces the old, key paths change one entry."""
    origin, parts = get_origin(kind), get_args(kind)
    is_dict, part = origin is dict, parts[1] if origin is dict else parts[0]
    if keys:
        entries = dict(old or {}) if is_dict else {str(i): v for i, v in enumerate(old or ())}
        name, rest = (join("", *keys), ()) if part is Any else (keys[0], keys[1:])
        if not is_dict and name not in entries:
            raise UserError(f"unknown key {join(path, *keys)}; {path} has {len(entries)} entries.")
        entries[name] = _lay(part, entries.get(name), rest, value, join(path, name))
    elif (is_dict and isinstance(value, Mapping)) or (
        not is_dict and isinstance(value, list | tuple)
    ):
        items = _with_text_keys(value, path) if isinstance(value, Mapping) else enumerate(value)
        entries = {name: _lay(part, None, (), item, join(path, name)) for name, item in items}
    else:
        what = "a mapping of names" if is_dict else type_in_words(kind)
        example = "{a: b}" if is_dict else "[a, b]"
        raise UserError(f"{path} must be {what}, got {value!r}; write {example}.")
    return entries if is_dict else origin(entries.values())


def _lay_section(
    forms: Sequence[type], old: Section | None, keys: Sequence[str], value: Any, path: str
) -> Section:
    if keys:
        entries = [(keys[0], keys[1:], value)]
    elif value is None:  # `section:` with all its keys commented out
        entries = []
    elif isinstance(value, Mapping):
        entries = [(key, (), item) for key, item in _with_text_keys(value, path)]
    else:
        raise UserError(f"{path or 'the file'} must be a section of keys, got {value!r}.")
    section = old or (Section.of(forms[0]) if len(forms) == 1 else None)
    for key, rest, item in sorted(entries, key=lambda entry: entry[0] != "name"):
        place = join(path, key)
        if key == "name" and len(forms) > 1:
            form = _form_named(forms, item, place)
            section = section.turned_into(form) if section else Section.of(form)
        if section is None:
            break
        hints = get_type_hints(section.form)
        if key not in (names := [f.name for f in _fields(section.form)]):
            near = [other for other in section.key_paths() if other.endswith(f".{key}")]
            near += difflib.get_close_matches(key, names, n=1)
            near += [join(free, key, *rest) for free in names if hints[free] == dict[str, Any]]
            remedy = (
                f"did you mean {join(path, near[0])}?"
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


_adapter = cache(TypeAdapter)


class _Unread(str):
    """A value's text on the command line; one in a file has been read, and is a text in quotes."""


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Returns a single value, or what its text stands for, as `kind` wants it."""
    readings, doubt = _readings(kind, value) if isinstance(value, str) else ([value], None)
    for reading in readings:
        with suppress(ValidationError):
            return _adapter(kind).validate_python(reading, strict=True)
    if doubt is not None:
        what = path if kind is Any else f"{path} must be {type_in_words(kind)}"
        raise UserError(f"{what}: {doubt.reason}")
    got = printable(value, max_length=80) if isinstance(value, str) else value
    choices = [
        c for part in members_of(kind) if get_origin(part) is Literal for c in get_args(part)
    ]
    raise UserError(
        f"{path} must be {type_in_words(kind)}, got "
        f"{'null' if value is None else repr(got)}{did_you_mean(value, choices)}"
    )


def _readings(kind: Any, text: str) -> tuple[list[Any], AmbiguousYaml | None]:
    """Returns what a text may stand for, the likeliest first, and why it may be unclear."""
    own: Any = Path(text) if Path in members_of(kind) else str(text)
    if kind in (str, Path) or (kind is Any and not isinstance(text, _Unread)):
        return [own], None
    try:
        value = read_yaml(text)
    except AmbiguousYaml as error:
        return [] if kind is Any else [own], error
    except UserError:
        return [own], None
    return [own] if isinstance(value, str) and kind is not Any else [value, own], None


def members_of(kind: Any) -> tuple[Any, ...]:
    """Returns what a union is a union of; the type itself for other types."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def forms_of(kind: Any) -> list[type]:
    """Returns the dataclasses that `kind` is or is a union of; empty for other types.

    A dataclass with a class method `forms` stands for those that it returns.
    """
    forms = []
    for member in members_of(kind):
        if hasattr(member, "forms"):
            forms += member.forms()
        elif isinstance(member, type) and dataclasses.is_dataclass(member):
            forms.append(member)
    return forms


def _forms_by_name(forms: Sequence[type]) -> dict[str, type]:
    return {name: form for form in forms for name in get_args(get_type_hints(form)["name"])}


def _form_named(forms: Sequence[type], name: Any, path: str) -> type:
    by_name = _forms_by_name(forms)
    if name not in by_name:
        near = did_you_mean(name, by_name)
        raise UserError(f"{path} must be one of {', '.join(by_name)}, got {name!r}{near}")
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


@contextmanager
def _named_in_errors(source: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def join(path: str, *keys: Any) -> str:
    """Returns a key path in dots."""
    return ".".join([*([path] if path else []), *map(str, keys)])


def type_in_words(kind: Any) -> str:
    """Returns a type as messages and help name it, such as "a list of int or null"."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "null"
    if origin is Literal:
        return choice_in_words(parts)
    if len(members_of(kind)) > 1:
        return " or ".join(map(type_in_words, parts))
    if origin in (list, tuple):
        return f"a list of {', '.join(type_in_words(part) for part in parts if part is not ...)}"
    return getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
