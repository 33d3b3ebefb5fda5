"""Rules that end a run, such as "kl > 8" or "validation.rewards.helpful < 0.4 for 3"."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any, Self, get_args, is_typeddict

from firm.base.comparisons import BOUND, OPERATORS
from firm.base.quantities import QUANTITIES
from firm.base.registry import did_you_mean
from firm.base.schema import adapter

_FORM = re.compile(
    rf"(?P<of>validation\.)?(?P<name>\w+)(?:\.(?P<part>\S+))?\s*{BOUND}"
    r"(?:\s+for\s+(?P<rounds>[1-9]\d{0,5}))?"
)


@dataclass(frozen=True)
class StopRule:
    """A comparison of a quantity with a number, which must hold in consecutive rounds."""

    text: str
    """The rule as written."""
    is_validation: bool
    """True if the quantity is that of the evaluation on validation prompts; otherwise it is the
    median over the clients, which none of them alone can move, or one of the round."""
    name: str
    """Name of the quantity."""
    part: str | None
    """Objective, or another key of a quantity with several values."""
    sign: str
    """One of <, <=, > and >=."""
    bound: float
    """The number."""
    num_rounds: int
    """Consecutive rounds in which the comparison must hold."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the rule in a text.

        Raises:
            ValueError: The text is not a rule.
        """
        match = _FORM.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            bound = float(match["bound"])
        except ValueError:
            raise ValueError(
                'a rule of stop_when must read like "kl > 8" or "validation.rewards.helpful < 0.4 '
                f'for 3", got {text!r}.'
            ) from None
        rounds = int(match["rounds"] or 1)
        is_validation = match["of"] is not None
        return cls(
            text.strip(), is_validation, match["name"], match["part"], match["sign"], bound, rounds
        )

    def check(self, parts: Collection[str]) -> None:
        """Raises ``ValueError`` if the quantity is unknown or needs another key.

        Args:
            parts: Names of objectives and further scores.
        """
        kinds = ("evaluation",) if self.is_validation else ("client", "round")
        known = [own for (kind, _), own in QUANTITIES.items() if kind in kinds]
        types = [own.type for own in known if own.name == self.name]
        where = "of the validation prompts" if self.is_validation else "of a round"
        if not types:
            raise ValueError(
                f"stop_when {self.text!r}: there is no quantity {self.name!r} {where}"
                f"{did_you_mean(self.name, [own.name for own in known])}"
            )

        def fits(*values: Any) -> bool:
            return any(_is_valid(kind, value, parts) for kind in types for value in values)

        part = self.part
        # whether the log's schema accepts such a value
        if fits(0) if part is None else fits({part: 0}, {part: {"mean": 0}}):
            return
        if part is not None and fits(0):
            raise ValueError(
                f"stop_when {self.text!r}: {self.name} is a single number, got {part}; write "
                f"{self.name}."
            )
        first = next(iter(parts))
        if fits({first: 0}, {first: {"mean": 0}}):
            raise ValueError(
                f"stop_when {self.text!r}: {self.name} needs one of {', '.join(parts)}, as in "
                f"{self.name}.{first}, got {part or 'none'}."
            )
        raise ValueError(
            f"stop_when {self.text!r}: {self.name} has more than one number a round, which no rule "
            "reads; choose another quantity."
        )

    def holds(self, rows: Sequence[Mapping[str, Any]], last: int) -> bool:
        """Returns whether the comparison holds in each of the rounds up to the last one.

        A round without the quantity does not count, and neither ends nor extends the series.

        Args:
            rows: Rows of the log.
            last: Number of the last round.
        """
        values = [value for number, value in self._values(rows).items() if number <= last]
        compare = OPERATORS[self.sign]
        newest = values[-self.num_rounds :]  # rounds without the quantity are left out
        return len(newest) == self.num_rounds and all(compare(v, self.bound) for v in newest)

    def reads(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether rows of the log contain the quantity."""
        return bool(self._values(rows))

    def _values(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        """Returns the quantity by round, in order."""
        kinds = ("evaluation",) if self.is_validation else ("client", "round")
        found: dict[int, list[float]] = {}
        for row in rows:
            is_other = self.is_validation and row.get("split") != "validation"
            if row.get("kind") not in kinds or is_other or not row.get("round"):
                continue
            value = row.get(self.name)
            for key in (self.part, "mean"):
                if isinstance(value, Mapping):
                    value = value.get(key)
            if isinstance(value, int | float):
                found.setdefault(row["round"], []).append(float(value))
        # one client cannot move it
        return {number: median(found[number]) for number in sorted(found)}


def _is_valid(kind: Any, value: Any, parts: Collection[str]) -> bool:
    of_name = get_args(kind)[1:]
    if of_name and is_typeddict(of_name[0]):  # statistics by name, as of an evaluation's rewards
        return (
            isinstance(value, dict) and value.keys() <= set(parts) and {"mean": 0} in value.values()
        )
    try:
        adapter(kind).validate_python(value, context=SimpleNamespace(objectives=list(parts)))
    except ValueError:
        return False
    return True
