"""Files of a run as they are read, and folders that are their owner's alone."""

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
    """Returns the text of a UTF-8 file; messages end with what to do, the remedy.

    Raises:
        UserError: A byte of it is not UTF-8; the message names file and line.
        OSError: It cannot be read.
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
    """A JSON text is nested too deeply to be read."""


def parse_object(text: str, *, where: str, remedy: str) -> dict[str, Any]:
    """Returns the JSON object in a text; messages name where it is and the remedy.

    Raises:
        UserError: It is no JSON object; ``TooDeep`` where nothing can read it.
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
        problem = f"holds no JSON object but a {type(value).__name__}"
    raise UserError(f"{where} {problem}; {remedy}") from None


def make_private_folder(path: Path) -> None:
    """Makes a folder that its owner alone can enter, whatever the umask; one that is there stays.

    Parents are made as usual.

    Raises:
        OSError: It cannot be made, or something else is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)  # a umask may have taken more than it should


def replace_text(path: Path, text: str) -> None:
    """Replaces a text file as a whole, or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        sync(draft)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table whose columns are the keys of its first row; its texts are `legible`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, legible_data(list(rows[0])))
        writer.writeheader()
        for row in rows:
            writer.writerow(legible_data(row))


@contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """Gives a draft of a folder, which gets its name once it is complete."""
    place = place.resolve()
    draft = place.with_name(f".{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    draft.rename(place)


@contextmanager
def file_errors(what: str, comfort: str = "") -> Iterator[None]:
    """Turns what the file system refuses into a line on what could not be written."""
    try:
        yield
    except OSError as error:
        remedy = (
            "make room, then continue with --resume."
            if error.errno in _NO_ROOM
            else "correct its permissions, or choose another path."
        )
        reason = error.strerror or str(error)
        raise UserError(f"{what} cannot be written ({reason}); {comfort}{remedy}") from error


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path, *, remedy: str) -> list[Any]:
    """Returns the JSON objects in the lines of a file; empty without the file.

    A last line that is still being written is left out. One that is nested too deeply is None,
    which `valid_rows` leaves out.

    Raises:
        UserError: A line is not UTF-8, or holds no JSON object; the message names file and line.
    """
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]  # what follows the last line end is torn
    lines = _decoded(whole, path, remedy).split("\n") if whole else []
    rows: list[Any] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_object(line, where=f"{path}, line {number}", remedy=remedy))
        except TooDeep:
            rows.append(None)
    return rows
