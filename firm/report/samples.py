"""Replies of several models to the same prompts, side by side."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from firm.report.record import Record
from firm.run.rows import Row

ROLES = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]*")


@dataclass(frozen=True)
class Turn:
    """A turn of a dialogue; the role is empty in a text without roles."""

    role: str
    text: str


@dataclass(frozen=True)
class ScoredReply:
    """One reply with its scores."""

    text: str
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Sample:
    """One prompt and the replies to it, the base model's first."""

    turns: Sequence[Turn]
    replies: Sequence[ScoredReply]

    def change(self, name: str) -> float | None:
        """Returns the second reply's score minus the first's."""
        scores = [reply.scores.get(name) for reply in self.replies[:2]]
        if len(scores) < 2 or scores[0] is None or scores[1] is None:
            return None
        return scores[1] - scores[0]


def samples_of(record: Record, *, by_preference: bool = True) -> list[Sample]:
    """Returns the base model's samples in file order, with the aligned model's latest replies.

    A conditioned model has a reply at each preference, by falling share of the first objective;
    unless `by_preference`, one at equal shares.
    """
    latest = max((row["round"] for row in record.samples), default=0)
    bases = [row for row in record.samples if row["round"] == 0]
    columns = [_by_prompt(record.samples, latest)] if latest > 0 else []
    half = len(bases) // 2
    if not record.num_rounds and [row["prompt"] for row in bases[half:]] == [
        row["prompt"] for row in bases[:half]
    ]:  # the adapter that the run starts from comes after the base model
        bases, columns = bases[:half], [_by_prompt(bases[half:], 0)]
    if by_preference and (preferences := sample_preferences(record)):
        columns = [
            _by_prompt([r for r in record.front_samples if tuple(r["preference"]) == each], latest)
            for each in preferences
        ]
    samples = []
    for row in bases:
        # a prompt may be asked several times: its replies are paired in order
        found = [replies.get(row["prompt"]) for replies in columns]
        aligned = [_reply(matching.pop(0)) for matching in found if matching]
        samples.append(Sample(turns_of(row), [_reply(row), *aligned]))
    return samples


def sample_preferences(record: Record) -> list[tuple[float, ...]]:
    """Returns the preferences with replies of the final model; empty if it is not conditioned."""
    latest = max((row["round"] for row in record.samples), default=0)
    rows = [row for row in record.front_samples if row["round"] == latest]
    return sorted({tuple(row["preference"]) for row in rows}, reverse=True)


def _by_prompt(rows: Sequence[Row], round: int) -> dict[str, list[Row]]:
    replies: dict[str, list[Row]] = {}
    for row in rows:
        if row["round"] == round:
            replies.setdefault(row["prompt"], []).append(row)
    return replies


def turns_of(row: Row) -> tuple[Turn, ...]:
    """Returns the turns of a sample's prompt; without messages, parses it in HH-RLHF's format."""
    messages = row.get("messages")
    if messages is None:
        return dialogue(row["prompt"])
    return tuple(Turn(m["role"], m["content"]) for m in messages)


def dialogue(prompt: str) -> tuple[Turn, ...]:
    r"""Splits a prompt in HH-RLHF's format into turns; other prompts are one turn without a role.

    Drops the empty last turn, in whose place the reply is shown.

    >>> [turn.role for turn in dialogue("\n\nHuman: Hello\n\nAssistant:")]
    ['Human']
    """
    head, *rest = ROLES.split(prompt)
    turns = [
        Turn("", head.strip()),
        *(Turn(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)),
    ]
    return tuple(Turn(turn.role, turn.text.strip()) for turn in turns if turn.text.strip())


def _reply(row: Row) -> ScoredReply:
    return ScoredReply(row["completion"].strip(), row.get("scores") or {})
