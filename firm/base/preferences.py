"""Preferences as grids, as names of folders and as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any, Self

from firm.base.registry import did_you_mean

FRONT_NAME = "front.json"
"""File of a front in the folder of a conditioned run, or of an export."""
TRADE_OFFS = ("preference", "target", "require")
"""Keys that state a trade-off."""
MAX_CELLS = 50_000
"""Largest number of simplices of neighbours, which is about N (M - 1)! for N models."""
SAME = 1e-6
"""Difference of a preference's sum from 1 that is accepted, times M: shares have six digits."""


def grid(resolution: int, num_objectives: int) -> list[tuple[float, ...]]:
    """Returns all preferences in multiples of 1/resolution, the first share descending.

    >>> grid(2, 2)
    [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]
    """
    counts = product(range(resolution, -1, -1), repeat=num_objectives)
    return [tuple(count / resolution for count in row) for row in counts if sum(row) == resolution]


def preference_folder(preference: Sequence[float]) -> str:
    """Returns the folder name of a preference: its shares in percent, to four digits.

    >>> preference_folder([0.25, 0.75])
    '25_75'
    """
    return "_".join(f"{100 * share:.4g}" for share in preference)


def in_words(objectives: Sequence[str], preference: Sequence[float]) -> str:
    """Formats a preference, scaled to sum 1, with the names of its objectives.

    >>> in_words(["helpful", "harmless"], [3, 1])
    'helpful 0.750, harmless 0.250'
    """
    pairs = zip(objectives, preference, strict=True)
    return ", ".join(f"{name} {share / sum(preference):.3f}" for name, share in pairs)


class NamedShares(tuple[float, ...]):
    """Shares in a configuration by objective; `in_order` puts them in the objectives' order."""

    names: tuple[str, ...]

    def __new__(cls, shares: Mapping[str, float]) -> Self:
        """Creates shares from a mapping of objectives."""
        own = super().__new__(cls, shares.values())
        own.names = tuple(shares)
        return own

    def __getnewargs__(self) -> tuple[dict[str, float]]:
        return (self.by_name(),)

    def by_name(self) -> dict[str, float]:
        """Returns the shares by objective."""
        return dict(zip(self.names, self, strict=True))


def in_order(value: Any, objectives: Sequence[str], key: str) -> Any:
    """Returns a configuration's value with all named shares in the order of the objectives.

    One objective may be left out; its share is the rest to 1. Other values are returned as they
    are.

    Args:
        value: A section, a list or mapping of values, or a value.
        objectives: Names of the M objectives.
        key: Key path of the value, for messages.

    Raises:
        ValueError: A name is unknown, or the share of an objective is missing.
    """
    if isinstance(value, NamedShares):
        if not objectives:
            raise ValueError(f"{key} must be in the objectives' order, since no run names them.")
        return tuple(order_shares(value.by_name(), objectives, key=key, has_rest=True))
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        new = {name: in_order(part, objectives, f"{key}.{name}") for name, part in own.items()}
        changed = {name: part for name, part in new.items() if part is not own[name]}
        return replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        new = {name: in_order(part, objectives, f"{key}.{name}") for name, part in value.items()}
        return new if any(new[name] is not value[name] for name in new) else value
    if isinstance(value, list | tuple):
        new = [in_order(part, objectives, f"{key}.{i}") for i, part in enumerate(value)]
        is_new = any(a is not b for a, b in zip(new, value, strict=True))
        return type(value)(new) if is_new else value
    return value


def parse_shares(text: str, objectives: Sequence[str]) -> list[float]:
    """Parses a target such as "b=0.3,a=0.7", and returns its shares in the objectives' order.

    Args:
        text: Comma-separated name=share pairs of all objectives, non-negative, with a sum above 0.
        objectives: Names of the M objectives.

    Raises:
        ValueError: A pair is malformed, an objective is missing, unknown or named twice, or the
            shares are not a valid preference.

    >>> parse_shares("harmless=1, helpful=3", ["helpful", "harmless"])
    [3.0, 1.0]
    """
    return order_shares(split_shares(text, objectives, key="target"), objectives, key="target")


def split_shares(text: str, objectives: Sequence[str] = (), *, key: str) -> dict[str, str]:
    """Splits "a=0.7,b=0.3" into names and shares; `objectives` are suggested in messages.

    Raises:
        ValueError: A pair has no equals sign, or a name stands twice.
    """
    shares = dict[str, str]()
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            known = f" of {', '.join(objectives)}" if objectives else ""
            raise ValueError(f"{key} must be name=share pairs{known}, got {pair.strip()!r}.")
        if name in shares:
            raise ValueError(f"{key} must have each objective once, got {name} twice in {text!r}.")
        shares[name] = value
    return shares


def order_shares(
    given: Mapping[str, Any], objectives: Sequence[str], *, key: str, has_rest: bool = False
) -> list[float]:
    """Returns shares by name in the order of the objectives.

    Args:
        given: Shares, as numbers or as text, non-negative, with a sum above 0.
        objectives: Names of the M objectives.
        key: Name of the setting for messages.
        has_rest: Whether the share of one objective may be left out, and is the rest to 1; if the
            others sum to 1, more may be left out.

    Raises:
        ValueError: An objective is missing or unknown, or the shares are not a valid preference.
    """
    shares, words = dict[str, float](), ",".join(f"{name}={own}" for name, own in given.items())
    for name, value in given.items():
        if name not in objectives:
            known = ", ".join(objectives) + did_you_mean(name, objectives)
            raise ValueError(f"{key} has the unknown objective {name!r}; choose from {known}")
        try:
            shares[name] = float(str(value))  # no booleans
        except ValueError:
            shares[name] = math.nan
        if not 0 <= shares[name] < math.inf:
            raise ValueError(
                f"{key}: the share of {name} must be a non-negative number, got {str(value)!r}."
            )
    missing, rest = [name for name in objectives if name not in shares], 1 - sum(shares.values())
    is_whole = abs(rest) <= SAME * len(objectives)
    if missing and has_rest and (is_whole or (len(missing) == 1 and rest > 0)):
        shares |= {name: 0.0 if is_whole else round(rest, 12) for name in missing}
    elif missing:
        others = ", and the others do not sum to 1" if has_rest else ""
        raise ValueError(
            f"{key} has no share for {', '.join(missing)}{others}, got {words!r}; add "
            f"{missing[0]}=SHARE, or {missing[0]}=0 if it does not matter."
        )
    if sum(shares.values()) <= 0:
        raise ValueError(f"{key} must have a share above 0, got {words!r}.")
    return [shares[name] for name in objectives]
