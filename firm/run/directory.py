"""Directory of a run: its configuration, its measurements and the checkpoints to resume from.

    config.yaml      the resolved configuration
    run.json         commit, versions, command, times, status
    metrics.jsonl    one row per line; the key "kind" gives the kind of row
    samples.jsonl    replies before and after alignment, if text logging is enabled
    checkpoints/     folders such as round_0003/, each complete or absent
    clients/         states of the clients that have trained, to which checkpoints refer
    .lock            names the process that writes to the directory

The process may be killed at any moment. A checkpoint therefore records the length of the two logs,
and a resumed run truncates them to this length. Only one process at a time may write to a run: see
`firm.run.lock`. The directory is accessible only to its owner, since checkpoints contain private
data of clients.
"""

import importlib.metadata
import itertools
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from firm.base.fields import Hint, PositiveInt, configuration
from firm.base.inside import give, move, open_inside, remove, remove_folder, replace_text
from firm.base.json_text import json_text
from firm.base.sanitize import legible, printable
from firm.base.state import State
from firm.run.checkpoint import OtherFormat, load_state, save_state
from firm.run.config import to_yaml
from firm.run.differences import differences, leaves
from firm.run.errors import UserError
from firm.run.files import (
    file_errors,
    make_private_folder,
    parse_object,
    read_rows,
    read_text,
    refuse_links,
    sync,
)
from firm.run.lock import LOCK_NAME, check_not_held, hold
from firm.run.resuming import BEGUN, CONFIG_NAME, RESTORE, Resume, is_resumed, read_settings
from firm.run.rows import Row, load_quantities, valid_rows

logger = logging.getLogger(__name__)

_RUN, _METRICS, _SAMPLES = "run.json", "metrics.jsonl", "samples.jsonl"
_PACKAGES = ("firm-align", "torch", "transformers", "trl", "peft", "accelerate", "numpy")


@configuration
class CheckpointConfig:
    """Checkpoints to keep; one is written after every round."""

    keep_last: Annotated[PositiveInt, Hint("a run resumes from the last")] = 3
    """Number of latest checkpoints to keep, in case one is damaged."""
    keep_best: bool = True
    """Also keep the checkpoint that is best on the validation prompts: by the mean reward, or a
    conditioned policy's by expected utility, where its front is measured."""


def check_free(path: str | Path, config: Mapping[str, Any]) -> None:
    """Raises `UserError` unless `path` is absent or an empty directory.

    If the directory contains a run or study and the configuration has a key `resume`, the message
    suggests resuming.
    """
    path = Path(path)
    check_not_held(path)
    if path.exists() and path.samefile("."):
        raise UserError(
            f"the run directory {path} is the current folder, which a run replaces; choose another "
            "path."
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        is_resumable = "resume" in config and any((path / name).exists() for name in BEGUN)
        line = shlex.join(["firm", "resume", str(path)])
        again = f"continue it with `{line}` or " if is_resumable else ""
        raise UserError(
            f"the run directory {path} exists and is not empty; {again}choose another path."
        )


def set_aside(path: Path, target: Path) -> Path:
    """Moves an unfinished run, which is to start again, to `target` with a number; returns where.

    Raises:
        UserError: Another process is executing the run.
    """
    check_not_held(path)
    numbers = itertools.count(1)
    aside = next(p for n in numbers if not (p := target.with_name(f"{target.name}-{n}")).exists())
    make_private_folder(aside.parent)
    move(path, aside)
    return aside


class Run:
    """The directory of one run, open for writing after `create`, `resume` or `open`.

    It is locked against other processes until `close` is called or this process ends. As a context
    manager, it closes itself and records how the run ended, with the traceback in `error.txt` if
    the run failed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._qualities: dict[int, float] = {}

    @classmethod
    def check(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        resume: Resume,
        ignore: Collection[str] = (),
    ) -> None:
        """Raises the `UserError` that `open` would raise, without side effects."""
        run = cls(path)
        again = "continue with `firm resume`" if resume else "start again"
        with file_errors(f"the run directory {run.path}", again=again):
            if is_resumed(run.path, resume, CONFIG_NAME):
                run._check_resumable(config, ignore)
                place = run.path
            else:
                check_free(run.path, config)
                parents = [run.path, *run.path.absolute().parents]
                place = next(parent for parent in parents if parent.exists())
            trial = place / f".{os.getpid()}.trial"
            make_private_folder(trial)
            remove(trial)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Self:
        """Creates a run in a directory that is absent or empty.

        Raises:
            UserError: `path` exists and is not an empty directory, or it is not writable.
        """
        run = cls(path)
        with file_errors(f"the run directory {run.path}", again="start again"):
            check_free(path, config)
            give(run.path)
            place = run.path.absolute()
            if place.is_symlink() or ".." in place.parts:
                there = next(each for each in (place, *place.parents) if os.path.lexists(each))
                os.close(open_inside(there, os.O_DIRECTORY))
                place = place.resolve()
            # Filled under a temporary name, so that the run appears complete and already locked.
            draft = place.with_name(f".{place.name}.draft")
            make_private_folder(draft)
            run._lock = hold(draft, shown=run.path)
            with ExitStack() as on_error:
                on_error.callback(run.close)
                on_error.callback(_remove, draft)
                for remains in draft.iterdir():
                    if remains.name != LOCK_NAME:
                        remove(remains)
                replace_text(draft / CONFIG_NAME, to_yaml(config))
                replace_text(draft / _RUN, json_text({"status": "running", **session()}, indent=2))
                move(draft, place)
                on_error.pop_all()
            sync(place.parent)
        return run

    @classmethod
    def resume(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        ignore: Collection[str] = (),
        renew: Collection[str] = (),
    ) -> Self:
        """Resumes the run at its latest checkpoint, or at its start if it has none.

        Rows that were logged after the checkpoint are removed. Key paths in ``ignore``, with all
        keys below them, may differ from the run's stored configuration. Keys in ``renew`` may
        differ, too, and their new values are stored in config.yaml.

        Raises:
            UserError: There is no run at `path`, another process writes to it, its configuration
                differs, all checkpoints are damaged or one has another version's format, its logs
                are shorter than the checkpoint records, or it is not writable.
        """
        run = cls(path)
        is_resumed(run.path, True, CONFIG_NAME)
        with file_errors(f"the run directory {run.path}"):
            run._check_resumable(config, [*ignore, *renew])
            run._lock = hold(run.path)
            with ExitStack() as on_error:
                on_error.callback(run.close)
                run._take_up({key: config[key] for key in renew})
                on_error.pop_all()
        return run

    def check_same(self, config: Mapping[str, Any], *, ignore: Collection[str] = ()) -> None:
        """Raises ``UserError`` if the configuration differs from the run's, as for `resume`."""
        if changed := differences(self.settings(), config, ignore):
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise UserError(
                f"the run at {self.path} has another configuration: {', '.join(changed[:3])}"
                f"{more}; resume with its config.yaml or choose another path."
            )

    def _check_resumable(self, config: Mapping[str, Any], ignore: Collection[str]) -> None:
        refuse_links(self.path)
        check_not_held(self.path)
        self.record()
        self.check_same(config, ignore=ignore)
        for name, length in _log_lengths(self._latest_envelope()).items():
            log = self.path / name
            size = 0
            if log.exists():
                with open(log, "r+b", opener=open_inside) as file:  # as it will be appended to
                    size = os.fstat(file.fileno()).st_size
            if size < length:
                raise UserError(
                    f"{log} must have at least {length} bytes, as at its checkpoint, got {size}; "
                    "restore the file or start a new run."
                )

    def _take_up(self, renewed: Mapping[str, Any]) -> None:
        """Restores the directory to its state at the latest checkpoint."""
        settings = self.settings()
        if any(settings.get(key) != value for key, value in renewed.items()):
            replace_text(self.path / CONFIG_NAME, to_yaml({**settings, **renewed}))
        envelope, record = self._latest_envelope(), self.record()
        for name, length in _log_lengths(envelope).items():
            log = self.path / name
            if log.exists() and log.stat().st_size > length:
                with open(log, "r+b", opener=open_inside) as file:
                    file.truncate(length)
                    os.fsync(file.fileno())
        qualities = envelope.get("scores", {}) if envelope else {}
        self._qualities = {n: qualities[n] for n, _ in self._checkpoints() if n in qualities}
        record["status"] = "running"
        record.setdefault("resumed", []).append(session())
        replace_text(self.path / _RUN, json_text(record, indent=2))

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        resume: Resume,
        ignore: Collection[str] = (),
        renew: Collection[str] = (),
    ) -> Self:
        """Creates a run or, depending on `resume`, resumes an existing one.

        Raises:
            UserError: As for the methods `create` and `resume`.
        """
        if is_resumed(Path(path), resume, CONFIG_NAME):
            return cls.resume(path, config, ignore=ignore, renew=renew)
        return cls.create(path, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
                return
            # the disk may be full or a file damaged, which `error` itself then reports
            with suppress(OSError, UserError):
                if isinstance(error, KeyboardInterrupt):
                    self.finish("interrupted")
                    return
                text = legible("".join(traceback.format_exception(error)))
                replace_text(self.path / "error.txt", text)
                self.finish("failed")
        finally:
            self.close()

    def close(self) -> None:
        """Unlocks the directory for other processes, as does the end of this process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finish(self, status: str = "finished") -> None:
        """Records in run.json when and how the run ended."""
        record = {**self.record(), "status": status, "ended": now()}
        replace_text(self.path / _RUN, json_text(record, indent=2))

    def record(self) -> Row:
        """Returns the contents of run.json."""
        path = self.path / _RUN
        return parse_object(read_text(path, remedy=RESTORE), where=str(path), remedy=RESTORE)

    def settings(self) -> Any:
        """Returns the contents of config.yaml as plain data."""
        return read_settings(self.path)

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl.

        Log a round's rows before saving its checkpoint: resuming removes later rows.

        Raises:
            ValueError: A number in the row is not finite; use None for missing values.
        """
        self._append(_METRICS, [row])

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows to samples.jsonl; the conditions of `log` apply."""
        self._append(_SAMPLES, rows)

    def rows(self) -> list[Row]:
        """Returns the valid rows of metrics.jsonl, without an incomplete last line.

        Raises:
            UserError: A line is not a JSON object; the message names file and line.
        """
        return self.checked_rows()[0]

    def checked_rows(self) -> tuple[list[Row], list[str]]:
        """Returns the valid rows, and descriptions of the data that `valid_rows` dropped."""
        load_quantities(self.settings() if (self.path / CONFIG_NAME).exists() else None)
        return valid_rows(read_rows(self.path / _METRICS, remedy=RESTORE))

    def samples(self) -> list[Row]:
        """Returns the valid rows of samples.jsonl; empty if there is no file."""
        return valid_rows(read_rows(self.path / _SAMPLES, remedy=RESTORE), kind="sample")[0]

    def save_checkpoint(
        self, round: int, state: State, *, keep_last: int = 3, quality: float | None = None
    ) -> Path:
        """Saves the state after a round, and returns the checkpoint's folder.

        Keeps the last `keep_last` checkpoints and the one with the highest quality, the earliest
        among equals (larger is better; None if it is not measured).

        Raises:
            ValueError: The quality is not finite.
            UserError: The disk is full or not writable; earlier checkpoints remain intact.
        """
        if quality is not None and not math.isfinite(quality):
            raise ValueError(
                f"the quality of round {round} must be finite, got {quality}; pass None if it is "
                "not measured."
            )
        path = self.path / "checkpoints" / f"round_{round:04d}"
        log_bytes = {}
        reassurance = "older checkpoints are intact: " if self._checkpoints() else ""
        with file_errors(f"the checkpoint of round {round} in {path.parent}", reassurance):
            make_private_folder(path.parent)
            for log in (self.path / _METRICS, self.path / _SAMPLES):
                log_bytes[log.name] = log.stat().st_size if log.exists() else 0
                if log.exists():
                    sync(log)  # before the checkpoint, which must not refer to lost rows
            self._qualities.pop(round, None)
            qualities = self._qualities | ({} if quality is None else {round: quality})
            envelope = {"round": round, "scores": qualities, "log_bytes": log_bytes, "state": state}
            save_state(path, envelope)
            sync(self.path)
            self._qualities = qualities
            self._prune(round, keep_last)
        return path

    def _prune(self, round: int, keep_last: int) -> None:
        numbers = [number for number, _ in self._checkpoints() if number <= round]
        kept = set(numbers[-keep_last:])
        if self._qualities:
            kept.add(self._best_round(self._qualities))
        if others := self._qualities.keys() - {round}:  # the newest round may yet be undone
            kept.add(self._best_round(others))
        for number, path in self._checkpoints():
            if number <= round and number not in kept:
                _remove(path)
                self._qualities.pop(number, None)
        for suffix in ("draft", "old"):  # remains of interrupted saves
            for remains in (self.path / "checkpoints").glob(f".round_*.{suffix}"):
                _remove(remains)

    def _best_round(self, rounds: Iterable[int]) -> int:
        """Returns the one of the rounds with the highest quality, the earliest among equals."""
        return max(rounds, key=lambda number: (self._qualities[number], -number))

    def forget_quality(self, round: int) -> None:
        """Takes back the quality of a round, which is then no candidate for the best."""
        self._qualities.pop(round, None)

    def best_checkpoint(self) -> tuple[int, State] | None:
        """Returns the round and state of the checkpoint with the highest quality.

        None if no quality was measured, or the checkpoint is not kept or damaged.
        """
        if not self._qualities:
            return None
        try:
            best = self._best_round(self._qualities)
            envelope = load_state(self.path / "checkpoints" / f"round_{best:04d}")
        except ValueError as error:
            logger.warning("skipped: %s", printable(error))
            return None
        return envelope["round"], envelope["state"]

    def latest_checkpoint(self) -> tuple[int, State] | None:
        """Returns the round and state of the newest intact checkpoint; None if there are none.

        Logs a warning about damaged newer checkpoints.

        Raises:
            UserError: All checkpoints are damaged, or one has another version's format.
        """
        envelope = self._latest_envelope(log=logger.warning)
        return (envelope["round"], envelope["state"]) if envelope else None

    def _latest_envelope(self, log: Callable[..., None] = logger.debug) -> State | None:
        problems = []
        for _, path in reversed(self._checkpoints()):
            try:
                envelope = load_state(path)
            except OtherFormat:
                raise
            except ValueError as error:
                problems.append(error)
                continue
            for problem in problems:
                log("skipped: %s", printable(problem))
            return envelope
        if problems:
            raise UserError(
                f"the run at {self.path} cannot be resumed, because none of its "
                f"{len(problems)} checkpoints is intact (the newest: {problems[0]}); restore one "
                "from a backup, or start a new run."
            )
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Returns the round and folder of all checkpoints, intact or not, in ascending order."""
        folders = (self.path / "checkpoints").glob("round_*")
        numbers = ((path.name.removeprefix("round_"), path) for path in folders)
        return sorted((int(number), path) for number, path in numbers if number.isdecimal())

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = []
        for row in rows:
            for key, value in leaves(row):
                if isinstance(value, float) and not math.isfinite(value):
                    where = ", ".join(
                        f"{k} {row[k]}" for k in ("kind", "round", "client") if k in row
                    )
                    raise ValueError(f"{key} is {value} in the row of {where}; log None instead.")
            lines.append(json_text(row) + "\n")
        log = self.path / name
        with file_errors(str(log)), open(log, "a", encoding="utf-8", opener=open_inside) as file:
            file.write("".join(lines))


def _remove(folder: Path) -> None:
    """Removes a folder; a failure only wastes space, so it is logged and does not stop a run."""
    try:
        remove_folder(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        logger.warning("%s cannot be removed: %s", printable(folder), printable(reason))


def _log_lengths(envelope: State | None) -> dict[str, int]:
    """Returns the size of each log at a checkpoint, in bytes; 0 without a checkpoint."""
    return envelope["log_bytes"] if envelope else {_METRICS: 0, _SAMPLES: 0}


def session() -> Row:
    """Returns the time, command, commit and package versions of this start of the program."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "started": now(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": _git_commit(),
        "versions": versions,
    }


def _git_commit() -> str | None:
    """Returns the commit, with "-dirty" if the tree was modified; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def now() -> str:
    """Returns the current time in UTC, in ISO format with a precision of seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
