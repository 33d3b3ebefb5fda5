"""Grids of preferences at which fronts are measured, and the names of their folders."""

from collections.abc import Sequence
from itertools import product


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
