"""Sanitizes untrusted text for terminals and file names.

Failure reasons of sites, names in untrusted files and names in a job's configuration are sanitized
once, where they enter the program.
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NUM_NAMED = 3
"""Maximum number of names that a message lists per reason."""
MAX_NAME = 64
"""Maximum length of a name of a run, site or client, which may become part of a path."""
_FIGURES = ("kl", "length", "end_share", "distinct_1", "distinct_2")
"""Figures of an evaluation of replies beside the scores."""
_COLUMNS = ("mean", "se")
"""Figures of a score."""


def printable(text: object, *, max_length: int = 500) -> str:
    """Returns an object's ``str`` as a single line that is safe to print on a terminal.

    Control characters, line ends, bidirectional overrides and lone surrogates are replaced by
    readable escapes; text longer than ``max_length`` characters is truncated.

    >>> printable("done\\x1b[2J\\nround 9/9")
    'done\\\\x1b[2J\\\\nround 9/9'
    """
    shown = str(text)[: max_length + 1]
    escaped = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in shown
    )
    return escaped if len(escaped) <= max_length else escaped[: max_length - 1] + "…"


def legible(text: str) -> str:
    r"""Returns multi-line text that is safe to show in a terminal or an editor.

    Like `printable`, but without truncation, and keeping characters that are needed in natural
    languages: line ends, tabs, spaces of any width and the joiners of Persian, Hindi and emoji.

    >>> legible("one\x1b[2J\ntwo")
    'one\\x1b[2J\ntwo'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or _is_prose(c) else ascii(c)[1:-1] for c in text)


def _is_prose(character: str) -> bool:
    return character in "\n\t\u200c\u200d" or unicodedata.category(character) == "Zs"


def legible_data(value: Any) -> Any:
    """Applies `legible` to all strings in plain data, including keys."""
    match value:
        case str():
            return legible(value)
        case dict():
            return {legible_data(key): legible_data(entry) for key, entry in value.items()}
        case list() | tuple():
            return [legible_data(entry) for entry in value]
        case _:
            return value


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type if the text is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_name(name: str, what: str) -> str:
    """Returns the name unchanged, after checking that it is safe as part of a path.

    It must be one path component of letters, digits, '.', '_' and '-' that begins with a letter or
    a digit, with at most ``MAX_NAME`` characters. ``what`` describes the name in the message, such
    as "a run's name".

    Raises:
        ValueError: The name is not safe, such as '../run'.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(
            f"{what} must be at most {MAX_NAME} letters, digits, '.', '_' and '-', and begin with "
            f"a letter or a digit, got {printable(repr(name), max_length=80)}."
        )
    return name


def check_score_name(name: str, what: str, *, of_replies: bool = True) -> str:
    """Returns the name of an objective or score, checked as by ``check_name``.

    Args:
        name: The name.
        what: Description for the message.
        of_replies: Whether replies are scored, and not pairs.

    Raises:
        ValueError: The name is not safe, or that of a figure that every evaluation or score has.
    """
    taken = (*(_FIGURES if of_replies else ()), *_COLUMNS)
    if check_name(name, what) in taken:
        raise ValueError(
            f"{what} must not be one of {', '.join(taken)}, which are figures of every "
            f"evaluation, got {name!r}; choose another, such as {name}_reward."
        )
    return name


def by_reason(failures: Iterable[tuple[str, str]]) -> list[str]:
    """Groups failures by reason, one text for each; only a few names are listed per reason.

    Args:
        failures: Pairs of name and reason.

    >>> by_reason([("a", "late"), ("b", "ill"), ("c", "late")])
    ['a, c: late', 'b: ill']
    """
    names: dict[str, list[str]] = {}
    for name, reason in failures:
        names.setdefault(reason, []).append(name)
    texts = []
    for reason, own in names.items():
        named, others = ", ".join(own[:NUM_NAMED]), len(own) - NUM_NAMED
        texts.append(f"{named}{f' and {others} more' if others > 0 else ''}: {reason}")
    return texts
