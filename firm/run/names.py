"""User-supplied names that become folders and files."""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from firm.base.sanitize import printable

MAX_FOLDER_BYTES = 150
"""Maximum length of a folder's name; file systems allow 255 bytes, of which suffixes for seeds and
drafts need some."""


def dated_folder(name: str) -> Path:
    """Returns runs/NAME-TIME, the default folder of results."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def slug(name: str) -> str:
    """Converts a name to a part of a file name.

    >>> slug("FIRM, β = 0.05")
    'firm_β_0.05'
    """
    words = "".join(c if c.isalnum() or c in ".-" else " " for c in name).split()
    return "_".join(words).lower()


def check_slugs(names: Collection[str], noun: str) -> None:
    """Checks that names yield distinct file names that are neither hidden nor too long.

    Args:
        names: The names.
        noun: Noun for the named objects in messages, such as "settings".

    Raises:
        ValueError: A name is not suitable, or two names yield the same file name.
    """
    taken: dict[str, str] = {}
    for name in names:
        part = slug(name)
        shown = printable(repr(name), max_length=80)
        if not any(map(str.isalnum, part)) or part.startswith("."):
            raise ValueError(
                f"{noun} need names that contain letters or digits and do not start with a dot, "
                f"got {shown}."
            )
        if not name.isprintable():
            raise ValueError(f"{noun} need names of printable characters in one line, got {shown}.")
        if (size := len(part.encode())) > MAX_FOLDER_BYTES:
            raise ValueError(
                f"{noun} need names of at most {MAX_FOLDER_BYTES} bytes, got {size} in {shown}."
            )
        if part in taken:
            raise ValueError(
                f"{noun} need names that differ as file names, got {taken[part]!r} and {name!r}; "
                "rename one."
            )
        taken[part] = name


def check_folder_name(name: str, noun: str) -> str:
    """Checks that a name can be the name of a folder, and returns it unchanged.

    It must be a single printable path component that neither starts nor ends with a dot or a space.

    Args:
        name: The name.
        noun: Noun for the name in messages, such as "an algorithm's name".

    Raises:
        ValueError: The name is not suitable, such as '../run', or too long.
    """
    is_plain = name.isprintable() and name.strip(" .") == name and not set(name) & set("/\\")
    if not name or not is_plain or len(name.encode(errors="replace")) > MAX_FOLDER_BYTES:
        raise ValueError(
            f"{noun} must be a valid folder name: at most {MAX_FOLDER_BYTES} bytes, no slashes or "
            "control characters, and no dot or space at its start or end, got "
            f"{printable(repr(name), max_length=80)}."
        )
    return name
