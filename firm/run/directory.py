"""A run is a directory: what was asked for, what was measured, and where it can be taken up again.

    config.yaml      the resolved configuration
    run.json         commit, versions, command, times, status
    metrics.jsonl    one row per line; a row's key "kind" says what it is about
    samples.jsonl    replies before and after, where text logging is on
    checkpoints/     round_0003/ and its like, each whole or absent

The process may be killed at any moment. A checkpoint therefore notes how long the two logs were
when it was written; a resumed run cuts them to that length and goes on as if nothing had followed.
"""

import importlib.metadata
import json
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from firm.federation.client import State
from firm.run.checkpoint import load_state, save_state, sync
from firm.run.config import to_yaml
from firm.run.errors import UserError

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_CONFIG, _RUN, _METRICS, _SAMPLES = "config.yaml", "run.json", "metrics.jsonl", "samples.jsonl"
_PACKAGES = ("firm-align", "torch", "transformers", "trl", "peft", "accelerate", "numpy")


def check_free(path: str | Path) -> None:
    """Raises `UserError` if there is something at `path` that a new run would mix with."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"the run directory {path} exists and is not empty; "
            "continue it with --resume true or choose another path."
        )


class Run:
    """The directory of one run, open for writing after `create`, `resume` or `open`.

    As a context manager it notes how the run ended, with the traceback in `error.txt` if it failed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Self:
        """Makes the directory of a new run.

        Args:
            path: Directory to be; it may exist if it is empty.
            config: The resolved configuration as plain data.

        Raises:
            UserError: There is something at `path` already.
        """
        run = cls(path)
        check_free(path)
        place = run.path.resolve()
        draft = place.with_name(
            f".{place.name}.draft"
        )  # renamed: a run is there whole or not at all
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(draft / _CONFIG, to_yaml(config))
        _write(draft / _RUN, json.dumps({"status": "running", **_session()}, indent=2))
        draft.rename(place)
        sync(place.parent)
        return run

    @classmethod
    def resume(
        cls, path: str | Path, config: Mapping[str, Any], *, ignore: Collection[str] = ()
    ) -> Self:
        """Takes up a run where its latest checkpoint is, or at its start without one.

        What was logged after that checkpoint is cut off.

        Args:
            path: Directory of the run.
            config: The resolved configuration, which must be the run's own.
            ignore: Key paths that may differ all the same, with everything below them.

        Raises:
            UserError: There is no run at `path`, it has another configuration, or its logs are
                shorter than the checkpoint says.
        """
        run = cls(path)
        if not (run.path / _CONFIG).exists():
            raise UserError(f"there is no run to resume at {path}; start it without --resume true.")
        stored = yaml.safe_load((run.path / _CONFIG).read_text(encoding="utf-8"))
        if differences := _differences(stored, config, ignore):
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UserError(
                f"the run at {path} has another configuration: {', '.join(differences[:3])}{more}; "
                "resume with its config.yaml or choose another path."
            )
        envelope = run._latest_envelope()
        lengths = envelope["log_bytes"] if envelope else {_METRICS: 0, _SAMPLES: 0}
        for name, length in lengths.items():
            run._cut(name, length)
        record = run.record()
        record["status"] = "running"
        record.setdefault("resumed", []).append(_session())
        _write(run.path / _RUN, json.dumps(record, indent=2))
        return run

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        resume: bool,
        ignore: Collection[str] = (),
    ) -> Self:
        """Creates a run or, with `resume`, takes up the one that is there, if any."""
        if resume and (Path(path) / _CONFIG).exists():
            return cls.resume(path, config, ignore=ignore)
        return cls.create(path, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, KeyboardInterrupt):
            self.finish("interrupted")
        else:
            _write(self.path / "error.txt", "".join(traceback.format_exception(error)))
            self.finish("failed")

    def finish(self, status: str = "finished") -> None:
        """Notes in run.json that the run has ended, when and how."""
        record = {**self.record(), "status": status, "ended": _now()}
        _write(self.path / _RUN, json.dumps(record, indent=2))

    def record(self) -> Row:
        """Returns what run.json holds."""
        return json.loads((self.path / _RUN).read_text(encoding="utf-8"))

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl.

        A round's rows are logged before its checkpoint is saved: later ones are cut off on resume.

        Raises:
            ValueError: A number in it is not finite; what has no value is None.
        """
        self._append(_METRICS, [row])

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows to samples.jsonl, under the conditions of `log`."""
        self._append(_SAMPLES, rows)

    def rows(self) -> list[Row]:
        """Returns the rows of metrics.jsonl, without a last line that is still being written."""
        return _read_rows(self.path / _METRICS)

    def samples(self) -> list[Row]:
        """Returns the rows of samples.jsonl, empty without the file."""
        return _read_rows(self.path / _SAMPLES)

    def save_checkpoint(self, round: int, state: State, *, keep_last: int = 3) -> Path:
        """Writes the state after a round and removes all checkpoints but the last ones.

        Args:
            round: Rounds that are complete.
            state: All that is needed to go on.
            keep_last: How many checkpoints stay, at least 1.

        Returns:
            The checkpoint's folder.
        """
        folder = self.path / "checkpoints"
        path = folder / f"round_{round:04d}"
        log_bytes = {}
        for log in (self.path / _METRICS, self.path / _SAMPLES):
            log_bytes[log.name] = log.stat().st_size if log.exists() else 0
            if log.exists():
                sync(log)
        save_state(path, {"round": round, "log_bytes": log_bytes, "state": state})
        sync(self.path)
        kept = [other for number, other in self._checkpoints() if number <= round][-keep_last:]
        for number, other in self._checkpoints():
            if number <= round and other not in kept:
                shutil.rmtree(other)
        for remains in folder.glob(".*"):  # of saves that were interrupted
            shutil.rmtree(remains)
        return path

    def latest_checkpoint(self) -> tuple[int, State] | None:
        """Returns round and state of the newest checkpoint that is whole, None without one."""
        envelope = self._latest_envelope()
        return (envelope["round"], envelope["state"]) if envelope else None

    def _latest_envelope(self) -> State | None:
        for _, path in reversed(self._checkpoints()):
            try:
                return load_state(path)
            except ValueError as error:
                logger.warning("skipped: %s", error)
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Round and folder of all checkpoints, whole or not, by rising round."""
        folders = (self.path / "checkpoints").glob("round_*")
        numbers = ((path.name.removeprefix("round_"), path) for path in folders)
        return sorted((int(number), path) for number, path in numbers if number.isdecimal())

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = []
        for row in rows:
            for key, value in _leaves(row):
                if isinstance(value, float) and not math.isfinite(value):
                    where = ", ".join(
                        f"{k} {row[k]}" for k in ("kind", "round", "client") if k in row
                    )
                    raise ValueError(f"{key} is {value} in the row of {where}; log None instead.")
            lines.append(json.dumps(row) + "\n")
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _cut(self, name: str, length: int) -> None:
        log = self.path / name
        size = log.stat().st_size if log.exists() else 0
        if size < length:
            raise UserError(
                f"{log} has {size} bytes, its checkpoint was written after {length}; "
                "restore the file or start a new run."
            )
        if size > length:
            os.truncate(log, length)
            sync(log)


def _read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end is torn
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); restore it.") from None
    return rows


def _write(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    draft.replace(path)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Key path in dots and value of everything in nested mappings and lists."""
    if isinstance(value, Mapping):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, item in entries:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _differences(stored: Any, config: Any, ignore: Collection[str]) -> list[str]:
    """Differing key paths, each with the stored and the given value, in words."""
    absent = object()
    ours, theirs = dict(_leaves(stored)), dict(_leaves(config))
    words = []
    for key in dict.fromkeys([*ours, *theirs]):
        is_ignored = any(key == path or key.startswith(f"{path}.") for path in ignore)
        was, now = ours.get(key, absent), theirs.get(key, absent)
        if was != now and not is_ignored:
            was, now = ("absent" if value is absent else repr(value) for value in (was, now))
            words.append(f"{key} was {was}, is {now}")
    return words


def _session() -> Row:
    """Who runs what: the surroundings of one start of the program."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "started": _now(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": _git_commit(),
        "versions": versions,
    }


def _git_commit() -> str | None:
    """Commit of the source tree, with "-dirty" when it was changed; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
