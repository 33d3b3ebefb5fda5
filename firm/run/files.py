"""Reads and writes files of a run, and creates private folders."""

import csv
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from firm.federation.outside import legible_data
from firm.run.errors import UserError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_text(path: Path, *, remedy: str) -> str:
    """Returns the text of a UTF-8 file; error messages end with `remedy`.

    Raises:
        UserError: The file is not valid UTF-8; the message names file and line.
        OSError: The file cannot be read.
    """
    return _decoded(path.read_bytes(), path, remedy)


def _decoded(content: bytes, path: Path, remedy: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: the byte 0x{content[error.start]:02x} is not UTF-8; {remedy}"
        ) from None


class TooDeep(UserError):
    """Raised when a JSON text is nested too deeply to be parsed."""


def parse_object(text: str, *, where: str, remedy: str) -> dict[str, Any]:
    """Parses a JSON object; error messages start with its location `where` and end with `remedy`.

    Raises:
        UserError: The text is not a JSON object; ``TooDeep`` if it is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooDeep(f"{where} is nested too deeply; {remedy}") from None
    except ValueError as error:
        problem = f"is not JSON ({error})" if text.strip() else "is empty"
    else:
        if isinstance(value, dict):
            return value
        problem = f"must be a JSON object, got {type(value).__name__}"
    raise UserError(f"{where} {problem}; {remedy}") from None


def make_private_folder(path: Path) -> None:
    """Creates a folder that only its owner can access, for any umask; keeps an existing folder.

    Parents are created with default permissions.

    Raises:
        OSError: The folder cannot be created, or `path` exists and is not a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)  # the umask may have removed permissions of the owner


def replace_text(path: Path, text: str) -> None:
    """Replaces a text file atomically."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        sync(draft)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a CSV table with the keys of the first row as columns; texts are made `legible`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, legible_data(list(rows[0])))
        writer.writeheader()
        for row in rows:
            writer.writerow(legible_data(row))


@contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """Yields a draft of a folder, and renames it to `place` on successful exit."""
    place = place.resolve()
    draft = place.with_name(f".{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    draft.rename(place)


@contextmanager
def file_errors(subject: str, reassurance: str = "") -> Iterator[None]:
    """Converts an OSError to a UserError that names the file and the remedy.

    Args:
        subject: The file or folder that is written, for the message.
        reassurance: Clause on unaffected files, placed before the remedy.
    """
    try:
        yield
    except OSError as error:
        remedy = (
            "free space on the disk, then continue with --resume."
            if error.errno in _NO_ROOM
            else "correct its permissions, or choose another path."
        )
        reason = error.strerror or str(error)
        raise UserError(f"{subject} cannot be written ({reason}); {reassurance}{remedy}") from error


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path, *, remedy: str) -> list[Any]:
    """Reads the JSON objects in the lines of a file; returns an empty list if there is no file.

    An incomplete last line is skipped. A line that is nested too deeply becomes None, which
    `valid_rows` drops.

    Raises:
        UserError: A line is not UTF-8 or not a JSON object; the message names file and line.
    """
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]  # drops an incomplete last line
    lines = _decoded(whole, path, remedy).split("\n") if whole else []
    rows: list[Any] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_object(line, where=f"{path}, line {number}", remedy=remedy))
        except TooDeep:
            rows.append(None)
    return rows
