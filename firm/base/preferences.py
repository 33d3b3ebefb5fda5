"""Preferences as grids, as names of folders and as text."""

import math
from collections.abc import Sequence
from itertools import product

from firm.base.registry import did_you_mean

FRONT_NAME = "front.json"
"""File of a front in the folder of a conditioned run, or of an export."""
TRADE_OFFS = ("preference", "target", "require")
"""Keys that state a trade-off."""


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


def parse_shares(text: str, objectives: Sequence[str], *, key: str = "target") -> list[float]:
    """Parses shares such as "b=0.3,a=0.7", and returns them in the order of the objectives.

    Args:
        text: Comma-separated name=share pairs of all objectives, non-negative, with a sum above 0.
        objectives: Names of the M objectives.
        key: Name of the setting for messages.

    Raises:
        ValueError: A pair is malformed, an objective is missing, unknown or named twice, or the
            shares are not a valid preference.

    >>> parse_shares("harmless=1, helpful=3", ["helpful", "harmless"])
    [3.0, 1.0]
    """
    known, shares = ", ".join(objectives), {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ValueError(f"{key} must be name=share pairs of {known}, got {pair.strip()!r}.")
        if name not in objectives:
            near = did_you_mean(name, objectives)
            raise ValueError(f"{key} has the unknown objective {name!r}; choose from {known}{near}")
        if name in shares:
            raise ValueError(f"{key} must have each objective once, got {name} twice in {text!r}.")
        try:
            shares[name] = float(value)
        except ValueError:
            shares[name] = math.nan
        if not 0 <= shares[name] < math.inf:
            raise ValueError(
                f"{key}: the share of {name} must be a non-negative number, got {value!r}."
            )
    if missing := [name for name in objectives if name not in shares]:
        raise ValueError(
            f"{key} has no share for {', '.join(missing)}, got {text!r}; add {missing[0]}=0 if it "
            "does not matter."
        )
    if sum(shares.values()) <= 0:
        raise ValueError(f"{key} must have a share above 0, got {text!r}.")
    return [shares[name] for name in objectives]
