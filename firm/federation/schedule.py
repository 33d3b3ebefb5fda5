"""Weights or preferences of the objectives that change from round to round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal

from firm.base.fields import NOT_IN_PAPER, Hint, PositiveInt, configuration
from firm.base.preferences import order_shares
from firm.base.user_code import function_named, user_code
from firm.solvers.settings import check_shares

_KEY = "strategy.schedule"


@configuration(source=NOT_IN_PAPER)
class ScheduleConfig:
    """Weights or preference by round."""

    shares: list[list[float]] = field(default_factory=list)
    """Weights or preferences, in order or by name, such as `helpful=1 helpful=0.4,harmless=0.6`;
    before the first and after the last of their rounds they stay as there."""
    rounds: Annotated[list[PositiveInt] | None, Hint("null: 1, 2, 3, ...")] = None
    """Rounds of these shares, increasing, such as 1 and 8; null: one after the other from 1."""
    shape: Literal["linear", "cosine", "steps"] = "linear"
    """Course between two of the rounds: linear; cosine, which starts and ends slowly; or steps,
    which keeps shares until the next."""
    function: str = ""
    """Function in place of `shares`, as "module:function" or "file.py:function": called with the
    number of the round, it returns the shares, in order or by name."""

    def __post_init__(self) -> None:
        if bool(self.shares) == bool(self.function):
            given = "both" if self.shares else "neither"
            raise ValueError(f"schedule must have either shares or a function, got {given}.")
        rounds = self.rounds
        if rounds is None:
            return
        if len(rounds) != len(self.shares) or sorted(set(rounds)) != rounds:
            raise ValueError(
                f"schedule.rounds must increase, and be as many as shares ({len(self.shares)}), "
                f"got {rounds}."
            )

    def at(self, number: int, objectives: Sequence[str]) -> tuple[float, ...]:
        """Returns the shares of the objectives in a round, scaled to sum 1, shape [M].

        Raises:
            ValueError: The function fails, or shares are no preference of these objectives.
        """
        if self.function:
            function = function_named(self.function, f"{_KEY}.function")
            with user_code(f"{_KEY}.function {self.function}"):
                shares = function(number)
            if isinstance(shares, Mapping):
                shares = order_shares(shares, objectives, key=f"{_KEY}.function", has_rest=True)
            return _scaled(shares, objectives, f"function's shares of round {number}")
        rounds = self.rounds or range(1, len(self.shares) + 1)
        known = {
            each: _scaled(own, objectives, f"shares of round {each}")
            for each, own in zip(rounds, self.shares, strict=True)
        }
        before = max((each for each in rounds if each <= number), default=rounds[0])
        after = min((each for each in rounds if each > number), default=before)
        if self.shape == "steps" or not before <= number < after:
            return known[before]
        done = (number - before) / (after - before)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        pairs = zip(known[before], known[after], strict=True)
        return tuple(first + done * (last - first) for first, last in pairs)


def _scaled(shares: Sequence[float], objectives: Sequence[str], name: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, shares))
    except (TypeError, ValueError):
        raise ValueError(
            f"{_KEY}: the {name} must be numbers, one for each of {', '.join(objectives)}, got "
            f"{shares!r}."
        ) from None
    check_shares(shares, len(objectives), name=f"{_KEY}: the {name}")
    return tuple(share / sum(shares) for share in shares)
