"""Which keys of a configuration are the paper's and which are not, read off their docstrings."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_OPEN = re.compile(r"not in the paper|nothing of this is in the paper", re.IGNORECASE)
_GIVEN = re.compile(r"\((A\.\d[\d.]*\d|A\.\d)(?:: ([^);]+))?")
_DEFAULTS = re.compile(r"Defaults: (section \d+) of the paper")


@dataclass(frozen=True)
class Hyperparameter:
    """A key of the configuration of which its docstring says how it stands to the paper."""

    path: str
    value: Any
    source: str
    """Where the paper gives it, such as "A.1"; empty when it does not, or not wholly."""
    paper_value: Any = None
    """The paper's value: what the docstring states, else the default, which then is the paper's."""

    @property
    def is_papers(self) -> bool:
        """Whether the value is the paper's."""
        if isinstance(self.paper_value, str) and not isinstance(self.value, str):
            with suppress(TypeError, ValueError):
                return float(self.value) == float(self.paper_value)
        return self.value == self.paper_value


def hyperparameters(config: Any) -> Iterator[Hyperparameter]:
    """The keys that the docstrings call the paper's or not in the paper, in order.

    A key is the paper's where its docstring names an appendix, as in "(A.1: 16)" or "(A.1)", or
    its class says where all defaults come from. It is not in the paper where its docstring, or
    that of its class, says so. One that is in part comes twice.

    Args:
        config: A dataclass; nested ones and mappings of them are looked into.
    """
    yield from _hyperparameters(config, "")


def _hyperparameters(config: Any, path: str) -> Iterator[Hyperparameter]:
    form, documents = type(config), field_docstrings(type(config))
    about = " ".join((form.__doc__ or "").split())
    for field in dataclasses.fields(form):
        value, place = getattr(config, field.name), f"{path}{field.name}"
        entries = value if isinstance(value, Mapping) else {"": value}
        nested = {k: v for k, v in entries.items() if dataclasses.is_dataclass(v)}
        for name, entry in nested.items():
            yield from _hyperparameters(entry, f"{place}.{name}." if name else f"{place}.")
        if nested or isinstance(value, Mapping):
            continue
        document = documents.get(field.name, "")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if given := _GIVEN.search(document):
            stated = given[2] or default
            yield Hyperparameter(place, value, given[1], stated)
        elif (section := _DEFAULTS.search(about)) and not _OPEN.search(document):
            yield Hyperparameter(place, value, section[1], default)
        if _OPEN.search(document) or _OPEN.search(about):
            yield Hyperparameter(place, value, "")


def field_docstrings(form: type) -> dict[str, str]:
    """The string under each field of a dataclass, inherited fields included, on one line each."""
    documents: dict[str, str] = {}
    for base in reversed(form.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                documents[field.target.id] = " ".join(str(below.value.value).split())
    return documents
