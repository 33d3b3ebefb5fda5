"""Help page of a configuration: its main keys, all keys, or the keys below a given one."""

import dataclasses
import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from firm.base.fields import field_docstrings, in_words
from firm.run.config import (
    PartialConfig,
    forms_of,
    init_fields,
    join,
    members_of,
    to_dict,
    type_in_words,
)
from firm.run.errors import UserError

_WIDTH = 100
_HOW = (
    "Set keys with --KEY VALUE, or in YAML files with --config FILE; later values override earlier "
    "ones."
)
_FEW = 24
"""Maximum number of keys for which a page shows all of them."""
_PLACEHOLDERS = {dict: "NAME", list: "INDEX", tuple: "INDEX"}
"""Placeholder of an entry in a key path, by the type of its container."""

_Versions = list[tuple[str, PartialConfig]]
"""A section in all its forms and entries, with their names; equal defaults are shown once."""


@dataclass(frozen=True)
class _Key:
    """Help on one key."""

    path: str
    kind: str
    """Type in words."""
    remark: str
    """Range, and value in the paper."""
    text: str
    """Docstring."""
    defaults: list[tuple[str, str | None]]
    """Pairs of form or entry and its default; None if a value is required."""
    forms: tuple[str, ...]
    """Forms of the section that have the key; empty if all have it."""

    @property
    def default(self) -> str:
        """Describes the first default and all defaults that differ from it."""
        (_, first), *others = self.defaults
        rest = [f"{name}: {value}" for name, value in others if value not in (first, None)]
        return "; ".join(["required" if first is None else f"default: {first}", *rest])

    def described(self, *, briefly: bool = False) -> str:
        """Returns the docstring, or its first sentence if `briefly`, with type and default."""
        text = re.split(r"(?<=\.)(?<!Eq\.)\s", self.text)[0] if briefly else self.text
        facts = [self.kind, "" if briefly else self.remark, self.default]
        return f"{text} ({', '.join(filter(None, facts))})".strip()


@dataclass(frozen=True)
class _Part:
    """Help on one section."""

    path: str
    title: str
    form_titles: dict[str, str]
    """Titles of the forms by name, if there are several."""
    keys: list[_Key]
    like: str = ""
    """Earlier section with the same keys; then, `keys` has only the keys with other defaults."""

    def __str__(self) -> str:
        if self.like:
            own = [f"{key.path.rpartition('.')[2]} {key.default}" for key in self.keys]
            return textwrap.fill("; ".join([f"{self.path}: as {self.like}", *own]), _WIDTH)
        blocks: dict[tuple[str, ...], list[str]] = {}
        blocks[()] = [f"{self.path}: {self.title}"] if self.path else []
        for key in self.keys:
            forms = ", ".join(key.forms)
            heading = f"{self.path}, {forms}: {self.form_titles.get(forms, '')}".strip()
            lines = textwrap.wrap(key.described(), _WIDTH - 10)
            entry = [f"  --{key.path} {key.path.rpartition('.')[2].upper()}", *lines]
            blocks.setdefault(key.forms, [heading]).append("\n      ".join(entry))
        return "\n\n".join("\n".join(block) for block in blocks.values() if block)


def help_page(
    root: PartialConfig,
    topic: str = "",
    *,
    keys: Mapping[str, Sequence[str]] | None = None,
    files: Sequence[str] = (),
) -> str:
    """Returns the help page of a configuration.

    Args:
        root: The configuration, with the defaults to show.
        topic: A key, for help on the key and all keys below it; "all" for all keys; empty for the
            main keys.
        keys: Main keys by heading; by default the top-level keys that are not sections.
        files: Files that provide the defaults.

    Raises:
        UserError: `topic` is not a key.
    """
    parts = list(_parts([("", root)]))
    every = {key.path: key for part in reversed(parts) for key in reversed(part.keys)}
    if topic not in ("", "all"):
        below = list(_parts([("", root)], topic=topic.split(".")))
        if not below:
            near = difflib.get_close_matches(topic, [*every, *(part.path for part in parts)], n=1)
            hint = f"did you mean {near[0]}?" if near else "--help all prints every key."
            raise UserError(f"--help: unknown key {topic}; {hint}")
        return "\n\n".join(map(str, below)) + "\n"
    source = f" Defaults are from {' and '.join(files)}." if files else ""
    intro = textwrap.fill(f"{_HOW}{source}", _WIDTH, break_on_hyphens=False, break_long_words=False)
    if topic == "all" or (keys is None and len(every) <= _FEW):
        return "\n\n".join([intro, *filter(None, map(str, parts))]) + "\n"
    groups = keys or {"Keys": [key.path for key in parts[0].keys]}
    tables = {
        heading: {f"--{path}": every[path].described(briefly=True) for path in paths}
        for heading, paths in groups.items()
    }
    sections: dict[str, str] = {}
    for part in parts[1:]:
        sections.setdefault(part.path.partition(".")[0], part.title)
    tables["Sections (--help SECTION prints the keys of a section, --help all prints all)"] = (
        sections
    )
    return "\n\n".join([intro, *_in_columns(tables)]) + "\n"


def _in_columns(tables: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    width = 4 + max(len(name) for rows in tables.values() for name in rows)
    for heading, rows in tables.items():
        lines = [
            textwrap.fill(
                text,
                _WIDTH,
                initial_indent=f"  {name}".ljust(width),
                subsequent_indent=" " * width,
                break_on_hyphens=False,
            )
            for name, text in rows.items()
        ]
        yield "\n".join([f"{heading}:", *lines])


# --- From a configuration to its sections and keys ------------------------------------------------


def _parts(
    versions: _Versions,
    path: str = "",
    title: str = "",
    *,
    topic: Sequence[str] = (),
    before: dict[Any, _Part] | None = None,
) -> Iterator[_Part]:
    """Yields a section and, recursively, the sections in it that match the topic.

    Args:
        versions: The section.
        path: Key path of the section.
        title: Title of the section, used if it has several forms.
        topic: Key path; only keys at and below it are included.
        before: Sections yielded so far, by their forms.
    """
    before = {} if before is None else before
    forms = _forms(versions)
    titles = {name: _title(form) for form, name in forms.items() if name}
    keys = [key for key in _keys(versions, path) if _is_at(key.path, topic)]
    part = _Part(path, title if titles else _title(next(iter(forms))), titles, keys)
    like = before.setdefault(tuple(forms), part) if keys or _is_at(path, topic) else part
    if like is not part:
        pairs = zip(keys, like.keys, strict=True)
        own = [key for key, same in pairs if key.defaults[0][1] != same.defaults[0][1]]
        yield dataclasses.replace(part, keys=own, like=like.path)
        return
    if keys or _is_at(path, topic):
        yield part
    for name, text, inner in _sections(versions):
        place = join(path, name)
        if _is_at(place, topic[: place.count(".") + 1]):
            yield from _parts(inner, place, text, topic=topic, before=before)


def _is_at(path: str, topic: Sequence[str]) -> bool:
    """Returns whether a key path equals a topic or is below it."""
    steps = path.split(".")
    return len(steps) >= len(topic) and all(
        step == wanted or step in _PLACEHOLDERS.values()
        for step, wanted in zip(steps, topic, strict=False)
    )


def _forms(versions: _Versions) -> dict[type, str]:
    """Returns the names of the forms; empty for a single form."""
    forms = dict.fromkeys(section.form for _, section in versions)
    return {form: _form_name(form) if len(forms) > 1 else "" for form in forms}


def _form_name(form: type) -> str:
    return get_args(get_type_hints(form)["name"])[0]


def _title(form: type) -> str:
    return (form.__doc__ or "").strip().partition("\n")[0]


def _fields(form: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields the name, type, annotation and docstring of each field of a form."""
    documents, kinds = field_docstrings(form), get_type_hints(form)
    annotations = get_type_hints(form, include_extras=True)
    for name in (field.name for field in init_fields(form)):
        yield name, kinds[name], annotations[name], documents.get(name, "")


def _keys(versions: _Versions, path: str) -> list[_Key]:
    """Returns the keys directly in a section; a key shared by several forms is listed once."""
    forms = _forms(versions)
    kinds: dict[tuple, Any] = {}
    owners: dict[tuple, _Versions] = {}
    choice = Literal[*forms.values()]
    choice_text = field_docstrings(versions[0][1].form).get("name", "")
    for label, section in versions:
        for name, kind, annotation, text in _fields(section.form):
            if name == "name" and len(forms) > 1:
                kind, annotation, text = choice, choice, choice_text
            if not list(_places(kind)):
                identity = (name, repr(annotation), text)
                kinds[identity] = kind, annotation
                owners.setdefault(identity, []).append((label, section))
    keys = []
    for identity, sections in owners.items():
        (name, _, text), (kind, annotation) = identity, kinds[identity]
        having = {forms[section.form]: None for _, section in sections}
        if kind == choice:  # a form's own name does not count as a default
            sections = [entry for entry in sections if entry[0] not in having]
        defaults = [(label, _default(section, name)) for label, section in sections]
        keys.append(
            _Key(
                join(path, name),
                type_in_words(kind),
                in_words(annotation),
                text,
                defaults or [("", None)],
                () if len(having) == len(forms) else tuple(having),
            )
        )
    return keys


def _default(section: PartialConfig, name: str) -> str | None:
    if name not in section.values:
        return None
    return json.dumps(to_dict(section.values[name]), ensure_ascii=False)


def _sections(versions: _Versions) -> Iterator[tuple[str, str, _Versions]]:
    """Yields the path, docstring and versions of each section directly in a section."""
    found: dict[tuple, list[tuple[str, Any]]] = {}
    texts: dict[tuple, str] = {}
    for label, section in versions:
        for name, kind, _, text in _fields(section.form):
            for entry, forms in _places(kind).items():
                place = (name, entry, tuple(forms))
                texts.setdefault(place, text)
                found.setdefault(place, []).append((label, section.values.get(name)))
    for (name, entry, forms), values in found.items():
        way = join(name, entry) if entry else name
        yield way, texts[name, entry, forms], _versions_of(forms, entry, values)


def _versions_of(forms: Sequence[type], entry: str, values: Sequence[tuple[str, Any]]) -> _Versions:
    """Returns the versions of a section from its values in the versions of its parent."""
    (_, chosen), *others = values
    if not entry and isinstance(chosen, PartialConfig):
        rest = (form for form in forms if form is not chosen.form)
        turned = [(_form_name(form), chosen.turned_into(form)) for form in rest]
        return [("", chosen), *turned, *((k, v) for k, v in others if isinstance(v, PartialConfig))]
    named = len(forms) > 1
    new = [(_form_name(form) if named else "", PartialConfig.of(form)) for form in forms]
    given = [pair for label, value in values for pair in _entries(label, value)]
    return [*new, *((label, value) for label, value in given if isinstance(value, PartialConfig))]


def _entries(label: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the entries of a mapping or sequence by name; any other value by `label`."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return [(str(index), item) for index, item in enumerate(value)]
    return [(label, value)]


def _places(kind: Any) -> dict[str, list[type]]:
    """Returns the forms of the sections in a field of this type, by the entry's placeholder."""
    places: dict[str, list[type]] = {}
    for member in members_of(kind):
        entry = _PLACEHOLDERS.get(get_origin(member), "")
        for part in get_args(member) or [member]:
            if forms := forms_of(part):
                places.setdefault(entry, []).extend(forms)
    return places
