"""Which keys of a configuration are the paper's and which are not, read off their docstrings.

The docstrings are the one place where the values of FIRM's Appendix A.1 stand (Nourzad et al.,
"Experimental Setup"), each beside its key: plans, pages and tests compare with them.
"""

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
    """The paper's value: what the docstring states, else the default, which then is the paper's.
    Where it has several, the text joins them by "or"."""

    @property
    def is_papers(self) -> bool:
        """Whether the value is the paper's, or one of them."""
        if isinstance(self.paper_value, str):
            return any(_is_same(self.value, each) for each in self.paper_value.split(" or "))
        return self.value == self.paper_value


@dataclass(frozen=True)
class Departure:
    """A key that has another value than the paper's in some of several configurations."""

    path: str
    source: str
    """Where the paper gives its value, such as "A.1"."""
    paper_value: Any
    values: Mapping[str, Any]
    """The other values, by the configuration's name."""


def departures(configs: Mapping[str, Any]) -> list[Departure]:
    """Returns the keys whose values are not the paper's, in the order of their appearance.

    Args:
        configs: Dataclasses by name, such as the runs of a study by setting.
    """
    found: dict[str, Departure] = {}
    for name, config in configs.items():
        for each in hyperparameters(config):
            if each.source and not each.is_papers:
                before = found.get(each.path)
                values = {**(before.values if before else {}), name: each.value}
                found[each.path] = Departure(each.path, each.source, each.paper_value, values)
    return list(found.values())


def hyperparameters(config: Any) -> Iterator[Hyperparameter]:
    """Yields the keys that the docstrings call the paper's or not in the paper, in order.

    A key is the paper's where its docstring names an appendix, as in "(A.1: 16)" or "(A.1)", or
    its class says where all defaults come from. It is not in the paper where its docstring, or
    that of its class, says so. One that is in part comes twice. Nothing below a class that says
    so is compared with the paper.

    Args:
        config: A dataclass; nested ones and mappings of them are looked into.
    """
    yield from _hyperparameters(config, "")


def _is_same(value: Any, paper_value: str) -> bool:
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return float(value) == float(paper_value)
    return value == paper_value


def _hyperparameters(config: Any, path: str, *, is_given: bool = True) -> Iterator[Hyperparameter]:
    form, documents = type(config), field_docstrings(type(config))
    about = " ".join((form.__doc__ or "").split())
    for field in dataclasses.fields(form):
        value, place = getattr(config, field.name), f"{path}{field.name}"
        entries = value if isinstance(value, Mapping) else {"": value}
        nested = {k: v for k, v in entries.items() if dataclasses.is_dataclass(v)}
        for name, entry in nested.items():
            inside = f"{place}.{name}." if name else f"{place}."
            may_be_given = is_given and not _OPEN.search(about)
            yield from _hyperparameters(entry, inside, is_given=may_be_given)
        if nested or isinstance(value, Mapping):
            continue
        document = documents.get(field.name, "")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if is_given and (given := _GIVEN.search(document)):
            stated = given[2] or default
            yield Hyperparameter(place, value, given[1], stated)
        elif is_given and (section := _DEFAULTS.search(about)) and not _OPEN.search(document):
            yield Hyperparameter(place, value, section[1], default)
        if _OPEN.search(document) or _OPEN.search(about):
            yield Hyperparameter(place, value, "")


def field_docstrings(form: type) -> dict[str, str]:
    """Returns the string under each field of a dataclass, inherited ones too, on one line."""
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
