"""Replies of base and aligned model to the same prompts, side by side."""

import re
from dataclasses import dataclass

from firm.report.record import Record
from firm.run.directory import Row

ROLES = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]*")


@dataclass(frozen=True)
class Turn:
    """What one side of a dialogue said; the role is empty in a text without roles."""

    role: str
    text: str


@dataclass(frozen=True)
class Reply:
    """One reply with its scores."""

    text: str
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Pair:
    """The same prompt answered by base and aligned model."""

    turns: tuple[Turn, ...]
    base: Reply
    aligned: Reply | None

    def change(self, name: str) -> float | None:
        """Score of the aligned reply minus that of the base reply."""
        before = self.base.scores.get(name)
        after = self.aligned.scores.get(name) if self.aligned else None
        return None if before is None or after is None else after - before


def sample_pairs(record: Record) -> list[Pair]:
    """Returns the base model's samples in file order, each with the latest reply to its prompt."""
    latest = max((row["round"] for row in record.samples), default=0)
    bases = [row for row in record.samples if row["round"] == 0]
    replies: dict[str, list[Row]] = {}
    for row in record.samples:
        if row["round"] == latest and latest > 0:
            replies.setdefault(row["prompt"], []).append(row)
    pairs = []
    for row in bases:
        matching = replies.get(row["prompt"])
        aligned = _reply(matching.pop(0)) if matching else None
        pairs.append(Pair(dialogue(row["prompt"]), _reply(row), aligned))
    return pairs


def dialogue(prompt: str) -> tuple[Turn, ...]:
    r"""Splits a prompt in HH form into its turns; any other prompt is one turn without a role.

    The empty turn at the end, which the reply fills, is left out.

    >>> [turn.role for turn in dialogue("\n\nHuman: Hello\n\nAssistant:")]
    ['Human']
    """
    head, *rest = ROLES.split(prompt)
    turns = [
        Turn("", head.strip()),
        *(Turn(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)),
    ]
    return tuple(Turn(turn.role, turn.text.strip()) for turn in turns if turn.text.strip())


def _reply(row: Row) -> Reply:
    return Reply(row["completion"].strip(), row.get("scores") or {})
