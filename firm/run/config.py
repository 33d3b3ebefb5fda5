"""Configurations: frozen dataclasses filled from YAML files and from the command line.

A file overrides the defaults, and `--key.path value` overrides the files:

- A *section* (a nested dataclass) is merged: keys that are not given keep their values.
- A section may have several *forms*, selected by `name` (a union of dataclasses, or a dataclass
  with a class method `forms` that returns the registered ones). If another form is selected, the
  section keeps those of the given keys that the new form also has. A dataclass without forms may
  have a static method `keys_without_effect`, which returns the keys that a `name` resets.
- A top-level key `plugins` names modules that register such forms; they are imported first.
- A list or a dictionary replaces the entire default, since the set of objectives is a single
  choice; `--rewards.helpful.path value` changes one entry and keeps the others. The names in a
  dictionary with arbitrary values may be key paths: `--overrides.strategy.beta value`.
- A list of real numbers has one for each objective, in their order or by name: `a=0.7,b=0.3`, or
  `{a: 0.7, b: 0.3}`. Names are checked where the objectives are known (`NamedShares`).

Single values are validated by pydantic. Modules that define configuration dataclasses must not
postpone the evaluation of annotations, and import no library that takes seconds.
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

from firm.base.preferences import NamedShares, split_shares
from firm.base.registry import choice_in_words, did_you_mean, spelled_out
from firm.base.sanitize import printable
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
    """Builds a configuration from defaults, YAML files and overrides, in this order.

    Args:
        config_class: A frozen dataclass.
        files: YAML files; later ones override earlier ones.
        overrides: Dotted key paths with their values, as plain data or as text.
        source: Name of the overrides' source in messages.

    Raises:
        UserError: As for `parse`.
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
) -> "PartialConfig":
    """Returns the tree from which `compose` builds a configuration; required keys may be missing.

    The files override the settings in `base`, which are plain data by the name of their source in
    messages. If `has_plugins` is false, no plugins are imported, and the forms that they would
    register are unknown.
    """
    contents = list((base or {}).items())
    for file in map(str, files):
        with _named_in_errors(file):
            contents.append((file, read_config(file)))
    plugins: Sequence[str] = ()
    if "plugins" in get_type_hints(config_class):
        mappings = [content for _, content in contents if isinstance(content, Mapping)]
        given = [content["plugins"] for content in mappings if "plugins" in content]
        given += [_unread(value) for key, value in overrides if key == "plugins"]
        plugins = _lay(tuple[str, ...], None, (), given[-1], "plugins") if given else ()
    for name in plugins if has_plugins else ():
        import_plugin(name)
    root = PartialConfig.of(config_class)
    try:
        for file, content in contents:
            with _named_in_errors(file):
                _lay(config_class, root, (), content, "")
        for key, value in _names_first(overrides):
            given = _unread(value)
            with _named_in_errors(source):
                _lay(config_class, root, key.split("."), given, "")
    except UserError as error:
        if has_plugins or not plugins:
            raise
        raise UserError(
            f"{error} --help imports no plugins, so components registered by "
            f"{', '.join(plugins)} are unknown."
        ) from error
    return root


def _names_first(overrides: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the overrides with each form's name before the keys that are valid in it.

    A name stays behind an override that selects the form of its section, or of one above, so that
    the later of two prevails.
    """
    ordered = list[tuple[str, Any]]()
    for key, value in overrides:
        section, _, last = key.rpartition(".")
        place = len(ordered)
        while section and last == "name" and place and not _selects(*ordered[place - 1], section):
            place -= 1
        ordered.insert(place, (key, value))
    return ordered


def _selects(key: str, value: Any, section: str) -> bool:
    """Returns whether an override selects the form of a section, or of one above it."""
    above, _, last = key.rpartition(".")
    if last == "name":
        return f"{section}.".startswith(f"{above}.")
    if not f"{section}.".startswith(f"{key}."):
        return False
    if isinstance(value, str):
        with suppress(UserError):
            value = read_yaml(value)
    for name in [*filter(None, section.removeprefix(key).split(".")), "name"]:
        if not isinstance(value, Mapping):
            return False
        if "name" in value:
            return True
        value = value.get(name)
    return False


def to_dict(config: Any) -> Any:
    """Converts a configuration to plain data: dictionaries, lists, strings, numbers, None."""
    if isinstance(config, NamedShares):
        return config.by_name()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in init_fields(type(config))}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def to_yaml(config: Any) -> str:
    """Converts a configuration to YAML from which `parse` builds an equal configuration."""
    # Non-ASCII is escaped, since PyYAML reads a literal next-line character back as a space.
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, width=100)


# --- From values to a configuration ---------------------------------------------------------------


@dataclass
class PartialConfig:
    """A dataclass under construction: its validated values so far, and the keys that were given."""

    form: type
    values: dict[str, Any]
    given: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, form: type) -> "PartialConfig":
        """Creates a section with the defaults of `form`, without its required keys."""
        values = {}
        for f in init_fields(form):
            if f.default is not MISSING:
                values[f.name] = _tree(f.default)
            elif f.default_factory is not MISSING:
                values[f.name] = _tree(f.default_factory())
        return cls(form, values)

    def turned_into(self, form: type) -> "PartialConfig":
        """Converts the section to another form; keeps the given keys that this form also has."""
        section = PartialConfig.of(form)
        section.given = self.given & {f.name for f in init_fields(form)}
        section.values |= {key: self.values[key] for key in section.given}
        return section

    def reset_(self, keys: Sequence[str]) -> None:
        """Sets keys to their defaults, as if they had not been given."""
        defaults = PartialConfig.of(self.form).values
        self.values |= {key: defaults[key] for key in keys}
        self.given -= set(keys)

    def key_paths(self) -> Iterator[str]:
        """Yields the dotted paths of all keys in this section and the sections below it."""
        for f in init_fields(self.form):
            yield f.name
            value = self.values.get(f.name)
            if isinstance(value, PartialConfig):
                yield from (f"{f.name}.{path}" for path in value.key_paths())


def init_fields(form: type) -> list[dataclasses.Field]:
    """Returns the fields of a dataclass that its constructor takes."""
    return [f for f in dataclasses.fields(form) if f.init]


def _tree(value: Any) -> Any:
    """Replaces the dataclasses in a configuration's value by sections."""
    if isinstance(value, NamedShares):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: _tree(getattr(value, f.name)) for f in init_fields(type(value))}
        return PartialConfig(type(value), values)
    if isinstance(value, Mapping):
        return {key: _tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_tree(item) for item in value)
    return value


def build(tree: Any, path: str = "") -> Any:
    """Builds a configuration's value from its tree; dataclasses validate themselves."""
    if isinstance(tree, dict):
        return {key: build(item, join(path, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, NamedShares):
        return type(tree)(build(item, join(path, place)) for place, item in enumerate(tree))
    if not isinstance(tree, PartialConfig):
        return tree
    names = [f.name for f in init_fields(tree.form)]
    for key in (join(path, name) for name in names if name not in tree.values):
        raise UserError(f"{key} is required, got nothing; pass --{key} VALUE or a config file.")
    values = {name: build(tree.values[name], join(path, name)) for name in names}
    try:
        return tree.form(**values)
    except ValueError as error:
        opens_with_key = str(error).partition(" ")[0] in names
        prefix = path and path + ("." if opens_with_key else ": ")
        raise UserError(f"{prefix}{error}") from error


def _lay(kind: Any, old: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Validates a value and inserts it into a tree; returns the new tree.

    Args:
        kind: Annotation of the tree.
        old: The tree so far. Its sections are modified; None starts from the defaults of `kind`.
        keys: Path from the tree to the place of `value`; empty for the tree itself.
        value: Plain data, or its text from the command line.
        path: Path from the root to the tree.

    Raises:
        UserError: The key does not exist, or the value does not match its type.
    """
    members = [member for member in members_of(kind) if member is not type(None)]
    shape = members[0] if len(members) == 1 else kind
    forms, origin, parts = forms_of(kind), get_origin(shape), get_args(shape)
    is_sequence = origin is list or (origin is tuple and parts[1:] == (...,))
    if not (forms or is_sequence or origin is dict):
        if keys:
            raise UserError(f"unknown key {join(path, *keys)}; {path} is a single value.")
        return _convert(kind, value, path)
    if is_sequence and parts[0] is float:
        shares = _named_shares(old, keys, value, path)
        if shares is not None:
            return shares
    if isinstance(value, _Unread) and not keys and is_sequence:
        value = _items(value, parts[0], path)
    elif isinstance(value, str) and not keys:
        value = read_yaml(value, path)
    if value is None and not keys and type(None) in members_of(kind):
        return None
    if forms:
        return _lay_section(forms, old, keys, value, path)
    return _lay_entries(shape, old, keys, value, path)


def _named_shares(old: Any, keys: Sequence[str], value: Any, path: str) -> NamedShares | None:
    """Returns shares by name, or None if the value is given by position.

    Raises:
        UserError: A share is not a number, or a name stands twice.
    """
    shares: Any = value
    if keys and not keys[0].isdigit():
        shares = {**(old.by_name() if isinstance(old, NamedShares) else {}), join("", *keys): value}
    elif keys:
        return None
    words = value if isinstance(value, list | tuple) else [value]
    if not keys and words and all(isinstance(word, str) and "=" in word for word in words):
        try:
            shares = split_shares(",".join(words), key=path)
        except ValueError as error:
            raise UserError(str(error)) from error
        shares = {name: _Unread(share) for name, share in shares.items()}
    elif isinstance(value, str) and value.lstrip()[:1] == "{":
        shares = read_yaml(value, path)
    if not isinstance(shares, Mapping):
        return None
    items = _with_text_keys(shares, path)
    return NamedShares({name: _convert(float, own, join(path, name)) for name, own in items})


def _with_text_keys(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a mapping after checking that keys are strings, unlike yes and 1.

    Raises:
        UserError: A key is not a string.
    """
    for key, item in value.items():
        if not isinstance(key, str):
            raise UserError(
                f"{path or 'the file'} must have strings as keys, got {key!r}, which YAML reads as "
                f"{type_in_words(type(key))}; quote it."
            )
        yield key, item


def _lay_entries(kind: Any, old: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Replaces a list or dictionary, or changes a single entry if there are `keys`."""
    origin, parts = get_origin(kind), get_args(kind)
    is_dict, part = origin is dict, parts[1] if origin is dict else parts[0]
    if keys:
        entries = dict(old or {}) if is_dict else {str(i): v for i, v in enumerate(old or ())}
        name, rest = (join("", *keys), ()) if part is Any else (keys[0], keys[1:])
        if not is_dict and name not in entries:
            raise UserError(f"unknown key {join(path, *keys)}; {path} has {len(entries)} entries.")
        entries[name] = _lay(part, entries.get(name), rest, value, join(path, name))
    elif isinstance(value, Mapping if is_dict else list | tuple):
        items = _with_text_keys(value, path) if isinstance(value, Mapping) else enumerate(value)
        entries = {name: _lay(part, None, (), item, join(path, name)) for name, item in items}
    else:
        expected = "a mapping of names" if is_dict else type_in_words(kind)
        example = "{a: b}" if is_dict else "[a, b]"
        if part is float and not is_dict:
            example = "0.7,0.3, or NAME=0.7,NAME=0.3 with the objectives' names"
        raise UserError(f"{path} must be {expected}, got {value!r}; write {example}.")
    return entries if is_dict else origin(entries.values())


def _lay_section(
    forms: Sequence[type], old: PartialConfig | None, keys: Sequence[str], value: Any, path: str
) -> PartialConfig:
    if keys:
        entries = [(keys[0], keys[1:], value)]
    elif value is None:  # `section:` with all of its keys commented out
        entries = []
    elif isinstance(value, Mapping):
        entries = [(key, (), item) for key, item in _with_text_keys(value, path)]
    else:
        known = {f.name for form in forms for f in init_fields(form)}
        own, file, colon, name = known & {"name", "path", "source"}, *str(value).rpartition(":")
        hint = f"; set {join(path, min(own))}" if path and own else ""
        if colon and file.endswith(".py") and {"name", "file"} <= known:
            hint = f"; set {join(path, 'file')} {file} and {join(path, 'name')} {name}"
        raise UserError(f"{path or 'the file'} must be a section of keys, got {value!r}{hint}.")
    section = old or (PartialConfig.of(forms[0]) if len(forms) == 1 else None)
    for key, rest, item in sorted(entries, key=lambda entry: entry[0] != "name"):
        place = join(path, key)
        if key == "name" and len(forms) > 1:
            form = _form_named(forms, item, place)
            section = section.turned_into(form) if section else PartialConfig.of(form)
        if section is None:
            break
        hints = get_type_hints(section.form)
        if key not in (names := [f.name for f in init_fields(section.form)]):
            whole, paths = spelled_out(key), [*section.key_paths()]
            near = [other for other in paths if other.endswith(f".{whole}")]
            near += difflib.get_close_matches(whole, names, n=1)
            near += [other for other in paths if other.endswith(f"_{whole}") and whole != key]
            near += [join(free, key, *rest) for free in names if hints[free] == dict[str, Any]]
            remedy = (
                f"did you mean {join(path, near[0])}?"
                if near
                else f"valid keys here: {', '.join(names)}."
            )
            raise UserError(f"unknown key {place}; {remedy}")
        section.values[key] = _lay(hints[key], section.values.get(key), rest, item, place)
        section.given.add(key)
        if key == "name" and hasattr(section.form, "keys_without_effect"):
            section.reset_(section.form.keys_without_effect(section.values[key]))
    if section is None:
        names = ", ".join(_forms_by_name(forms))
        raise UserError(f"{path}.name is required, got nothing; choose one of {names}.")
    return section


_adapter = cache(TypeAdapter)


class _Unread(str):
    """Unparsed text of a value on the command line; strings in files are already parsed."""


def _unread(value: Any) -> Any:
    """Marks a text, or the texts of a list, as unparsed."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [_Unread(item) for item in value]
    return _Unread(value) if isinstance(value, str) else value


def _items(text: _Unread, part: Any, path: str) -> Any:
    """Returns the items of a list from one word: YAML, one item, or several with commas between.

    A word is one item if the items are lists themselves.
    """
    opening = text.lstrip()
    is_null = opening.rstrip() in ("null", "~")
    if is_null or opening[:1] in ("[", "{", "") or opening[:2] in ("- ", "-\n"):
        return read_yaml(text, path)
    nested = any(get_origin(member) in (list, tuple) for member in members_of(part))
    return [text] if nested else [_Unread(item) for item in text.split(",")]


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Converts a single value, or its text, to the type `kind`."""
    if kind is Any and isinstance(value, list):  # several words on the command line
        return [_convert(kind, item, path) for item in value]
    readings, doubt = _readings(kind, value) if isinstance(value, str) else ([value], None)
    for reading in readings:
        with suppress(ValidationError):
            return _adapter(kind).validate_python(reading, strict=True)
    if doubt is not None:
        rule = path if kind is Any else f"{path} must be {type_in_words(kind)}"
        raise UserError(f"{rule}: {doubt.reason}")
    got = printable(value, max_length=80) if isinstance(value, str) else value
    choices = [
        c for part in members_of(kind) if get_origin(part) is Literal for c in get_args(part)
    ]
    raise UserError(
        f"{path} must be {type_in_words(kind)}, got "
        f"{'null' if value is None else repr(got)}{did_you_mean(value, choices)}"
    )


def _readings(kind: Any, text: str) -> tuple[list[Any], AmbiguousYaml | None]:
    """Returns possible values of a text, the likeliest first, and the error if it is ambiguous."""
    own: Any = str(text)
    if Path in members_of(kind):
        own = Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)
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
    """Returns the members of a union; for other types, the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def forms_of(kind: Any) -> list[type]:
    """Returns the dataclasses in `kind`, a dataclass or a union; empty for other types.

    A dataclass with a class method `forms` is replaced by the dataclasses that it returns.
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
    if not isinstance(name, str) or name not in by_name:
        near = did_you_mean(name, by_name)
        raise UserError(f"{path} must be one of {', '.join(by_name)}, got {name!r}{near}")
    return by_name[name]


# --- Reading and messages -------------------------------------------------------------------------


def read_config(file: str) -> Any:
    """Returns the content of a configuration file, found by its path or as one that ships.

    Raises:
        UserError: There is no such file, or it is no YAML text; the message does not name it.
    """
    try:
        text = find_config(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file; check --config.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error}); pass a YAML text file.") from None
    return read_yaml(text)


@contextmanager
def _named_in_errors(source: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def join(path: str, *keys: Any) -> str:
    """Joins keys to a dotted key path."""
    return ".".join([*([path] if path else []), *map(str, keys)])


def type_in_words(kind: Any) -> str:
    """Describes a type for messages and help, such as "a list of int or null"."""
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
