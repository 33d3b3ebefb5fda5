"""Comparisons of a named number with a bound, such as "correct >= 0.5"."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BOUND = r"(?P<sign>[<>]=?)\s*(?P<bound>[-+]?[\d.]+(?:e[-+]?\d+)?)"
"""Pattern of the sign and the number of a comparison."""
_FORM = re.compile(rf"(?P<name>\S+?)\s*{BOUND}")


@dataclass(frozen=True)
class Comparison:
    """A comparison of a named number with a bound."""

    name: str
    """Name of the number."""
    sign: str
    """One of <, <=, > and >=."""
    bound: float
    """The bound."""

    @classmethod
    def parse(cls, text: str, key: str) -> Self:
        """Returns the comparison in a text.

        Raises:
            ValueError: The text is not a comparison; the message has the `key`.

        >>> Comparison.parse("correct >= 0.5", "only_if")
        Comparison(name='correct', sign='>=', bound=0.5)
        """
        match = _FORM.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            return cls(match["name"], match["sign"], float(match["bound"]))
        except ValueError:
            raise ValueError(f'{key} must read like "correct >= 0.5", got {text!r}.') from None

    def holds(self, value: Any) -> Any:
        """Returns whether it holds for a number, or for each entry of a tensor; not for NaN."""
        return OPERATORS[self.sign](value, self.bound)
