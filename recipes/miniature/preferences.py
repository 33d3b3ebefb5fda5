"""Preference pairs from files: validated line by line, split deterministically, and truncated.

A preference file holds one JSON object per line with the fields `prompt`, `chosen`, `rejected` and
`kind`. A prompt may be a dialogue in the form of Anthropic's HH-RLHF, whose turns open with
`"\\n\\nHuman:"` and `"\\n\\nAssistant:"`; any other text counts as one human turn.
"""

import gzip
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

FIELDS = ("prompt", "chosen", "rejected", "kind")


@dataclass(frozen=True)
class Preference:
    """A pair of replies to a prompt; a judge of this kind prefers the first one."""

    prompt: str
    chosen: str
    rejected: str
    kind: str


def load_preferences(path: str | Path) -> list[Preference]:
    """Returns the pairs of a JSON-lines file, plain or compressed by gzip; ignores further fields.

    Raises:
        ValueError: The file is missing, holds no pair, or a line of it is malformed; the message
            names the file and the line, and never repeats the text.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"preference file not found: {path}. Give the path of a JSON-lines file.")
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8") as lines:
            pairs = [
                _parse(line, f"{path}, line {number}")
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        reason = f"{path} cannot be read as JSON lines: {error}."
        raise ValueError(f"{reason} Give UTF-8 text, plain or whole under gzip.") from error
    if not pairs:
        raise ValueError(f"{path} holds no preference pair. Give one JSON object per line.")
    return pairs


def _parse(line: str, place: str) -> Preference:
    expected = f"Expected an object with the string fields {', '.join(FIELDS)}."
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{place}: not valid JSON ({error.msg} at column {error.colno})."
        raise ValueError(f"{reason} {expected}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: got a JSON {type(row).__name__}. {expected}")
    for field in FIELDS:
        if field not in row:
            raise ValueError(f"{place}: field '{field}' is missing. {expected}")
        if not isinstance(row[field], str) or not row[field].strip():
            got = "an empty string" if isinstance(row[field], str) else type(row[field]).__name__
            raise ValueError(f"{place}: field '{field}' must be a non-empty string, got {got}.")
    if not re.fullmatch(r"[\w-]+", row["kind"]):  # it becomes the name of a reward model's folder
        raise ValueError(f"{place}: field 'kind' must be letters, digits, '_' or '-' only.")
    return Preference(**{field: row[field] for field in FIELDS})


def first_human_turn(prompt: str) -> str:
    """Returns the first human turn in lower case, without punctuation or double spaces.

    >>> first_human_turn("\\n\\nHuman: Well,  hello!\\n\\nAssistant: Hi.\\n\\nHuman: How are you?")
    'well hello'
    """
    turn = prompt.partition(HUMAN)[2] or prompt
    return " ".join(re.sub(r"[^\w\s]", "", turn.partition(ASSISTANT)[0].lower()).split())


def split_of(prompt: str) -> Split:
    """Returns the split of a dialogue: 80 % train, 5 % validation, 15 % test.

    It depends only on the first human turn, so that dialogues with the same opening are always in
    the same split, in any file and order: a random split of rows would leak 7 to 11 % of HH-RLHF's
    held-out openings into the training rows.
    """
    digest = hashlib.sha256(("hh0" + first_human_turn(prompt)).encode()).hexdigest()
    bucket = int(digest, 16) % 1000
    return "train" if bucket < 800 else "validation" if bucket < 850 else "test"


def split_preferences(pairs: Iterable[Preference]) -> dict[Split, list[Preference]]:
    """Returns the pairs of every split, each in the order given."""
    pairs_by_split: dict[Split, list[Preference]] = {split: [] for split in SPLITS}
    for pair in pairs:
        pairs_by_split[split_of(pair.prompt)].append(pair)
    return pairs_by_split


def dialogue_texts(pair: Preference) -> list[str]:
    """Returns the two training documents of a pair.

    They are the whole dialogue with the chosen reply, and the rejected reply after only the last
    human turn, so that no prompt is trained on twice.
    """
    _, marker, last_turn = pair.prompt.rpartition(HUMAN)
    return [pair.prompt + pair.chosen, (marker + last_turn) + pair.rejected]


def truncate_prompt(prompt: str, *, max_tokens: int, num_tokens: Callable[[str], int]) -> str:
    """Returns the longest end of a dialogue that starts with a human turn and fits.

    Drops whole turns first. Only if the last human turn is too long is its beginning cut, so that
    the final `"\\n\\nAssistant:"` is always kept. A text without turns counts as one turn.

    Raises:
        ValueError: `max_tokens` has no room for the markers of one turn.
    """
    starts = [match.start() for match in re.finditer(HUMAN, prompt)]
    for start in (0, *starts):
        if num_tokens(prompt[start:]) <= max_tokens:
            return prompt[start:]
    _, marker, turn = prompt.rpartition(HUMAN)
    end = ASSISTANT if turn.endswith(ASSISTANT) else ""
    said = turn.removesuffix(end)
    cut = bisect_left(
        range(len(said) + 1), True, key=lambda i: num_tokens(marker + said[i:] + end) <= max_tokens
    )
    if cut > len(said):
        needed = num_tokens(marker + end)
        raise ValueError(f"max_tokens must be at least {needed} for one turn, got {max_tokens}.")
    return marker + said[cut:] + end


def truncate_reply(reply: str, *, max_tokens: int, num_tokens: Callable[[str], int]) -> str:
    """Returns the longest beginning of a reply that has at most `max_tokens` tokens."""
    if num_tokens(reply) <= max_tokens:
        return reply
    end = bisect_left(range(len(reply)), True, key=lambda i: num_tokens(reply[:i]) > max_tokens)
    return reply[: end - 1]
