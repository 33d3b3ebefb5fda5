"""Reads and writes files of a run, and creates private folders; no link in a run is followed."""

import csv
import errno
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from firm.base.inside import LinkFound, check_links, make_folder, open_inside, replace_text
from firm.base.sanitize import legible_data
from firm.run.errors import UserError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_text(path: Path, *, remedy: str) -> str:
    """Returns the text of a UTF-8 file; error messages end with `remedy`.

    Raises:
        UserError: The file is not valid UTF-8; the message names file and line.
        OSError: The file cannot be read.
    """
    return _decode(read_bytes(path), path, remedy)


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file; does not follow a link that leaves its folder."""
    with open(path, "rb", opener=open_inside) as file:
        return file.read()


def _decode(content: bytes, path: Path, remedy: str) -> str:
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


def refuse_links(folder: Path) -> None:
    """Declares a folder as named by the user; raises `UserError` if there are links below it.

    Run it before anything in a run, study or sweep is read or written, as it may come from someone
    else. See `firm.base.inside`.
    """
    try:
        check_links(folder)
    except LinkFound as error:
        raise UserError(str(error)) from None


def make_private_folder(path: Path) -> None:
    """Creates a folder that only its owner can access, for any umask; keeps an existing folder.

    Parents are created with default permissions.

    Raises:
        OSError: The folder cannot be created, or `path` exists and is not a folder.
    """
    make_folder(path, 0o700)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a CSV table with the keys of the first row as columns; texts are made `legible`.

    An existing table is replaced atomically.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, legible_data(list(rows[0])))
    writer.writeheader()
    for row in rows:
        writer.writerow(legible_data(row))
    replace_text(path, text.getvalue())


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Converts what libraries raise where a file cannot be written to an OSError.

    Libraries in Rust name the system's error number in a text. NumPy counts what it has written.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and re.search(r"\d+ requested and \d+ written", str(error)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    except UserError:
        raise
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


@contextmanager
def file_errors(
    subject: str, reassurance: str = "", *, again: str = "continue with `firm resume`"
) -> Iterator[None]:
    """Converts an OSError to a UserError that names the file and the remedy.

    Args:
        subject: The file or folder that is written, for the message.
        reassurance: Clause on unaffected files, placed before the remedy.
        again: Clause on what to do once there is space on the disk.
    """
    try:
        with as_os_errors():
            yield
    except LinkFound as error:
        raise UserError(str(error)) from error
    except OSError as error:
        remedy = (
            f"free space on the disk, then {again}."
            if error.errno in _NO_ROOM
            else "correct its permissions, or choose another path."
        )
        reason = error.strerror or str(error)
        raise UserError(f"{subject} cannot be written ({reason}); {reassurance}{remedy}") from error


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = open_inside(path, os.O_RDONLY)
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
    whole = read_bytes(path).rpartition(b"\n")[0]  # drops an incomplete last line
    lines = _decode(whole, path, remedy).split("\n") if whole else []
    rows: list[Any] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_object(line, where=f"{path}, line {number}", remedy=remedy))
        except TooDeep:
            rows.append(None)
    return rows
