"""Compares configurations with the values in FIRM's paper (Appendix A.1)."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from firm.base.fields import NotInPaper, Paper, sources


@dataclass(frozen=True)
class Hyperparameter:
    """A key of a configuration, with its value in the paper."""

    path: str
    value: Any
    paper: Paper | None
    """Section and value in the paper; None if the paper does not specify it."""

    @property
    def is_papers(self) -> bool:
        """True if the value is one of the paper's."""
        return self.paper is not None and self.value in self.paper.values


@dataclass(frozen=True)
class Departure:
    """A key that differs from the paper's value in at least one configuration."""

    path: str
    paper: Paper
    values: Mapping[str, Any]
    """The differing values, by configuration name."""


def departures(configs: Mapping[str, Any]) -> list[Departure]:
    """Returns the keys with values that differ from the paper's, in order of appearance.

    Args:
        configs: Configurations by name, such as the runs of a study by setting.
    """
    by_path: dict[str, Departure] = {}
    for name, config in configs.items():
        for key in hyperparameters(config):
            if key.paper and not key.is_papers:
                before = by_path.get(key.path, Departure(key.path, key.paper, {}))
                by_path[key.path] = dataclasses.replace(
                    before, values={**before.values, name: key.value}
                )
    return list(by_path.values())


def hyperparameters(config: Any) -> Iterator[Hyperparameter]:
    """Yields keys that the paper specifies or leaves open, in order; keys with both appear twice.

    Skips keys if neither their field nor its class refers to the paper. Keys below a class that is
    not in the paper are not compared.

    Args:
        config: A dataclass; nested dataclasses and mappings of them are searched recursively.
    """
    yield from _hyperparameters(config, "", is_compared=True)


def _hyperparameters(config: Any, path: str, *, is_compared: bool) -> Iterator[Hyperparameter]:
    of_class = getattr(type(config), "__source__", None)
    is_compared = is_compared and not isinstance(of_class, NotInPaper)
    by_field = sources(type(config))
    for field in dataclasses.fields(config):
        value, place = getattr(config, field.name), f"{path}{field.name}"
        entries = value if isinstance(value, Mapping) else {"": value}
        nested = {k: v for k, v in entries.items() if dataclasses.is_dataclass(v)}
        for name, entry in nested.items():
            inside = f"{place}.{name}." if name else f"{place}."
            yield from _hyperparameters(entry, inside, is_compared=is_compared)
        if nested or isinstance(value, Mapping):
            continue
        for source in by_field[field.name] or [of_class]:
            if isinstance(source, Paper) and is_compared:
                values = source.values or (_default(field),)
                yield Hyperparameter(place, value, Paper(source.section, values))
        if any(isinstance(source, NotInPaper) for source in [of_class, *by_field[field.name]]):
            yield Hyperparameter(place, value, None)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
