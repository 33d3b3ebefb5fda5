"""A run is a directory: what was asked for, what was measured, and where it can be taken up again.

    config.yaml      the resolved configuration
    run.json         commit, versions, command, times, status
    metrics.jsonl    one row per line; a row's key "kind" says what it is about
    samples.jsonl    replies before and after, where text logging is on
    checkpoints/     round_0003/ and its like, each whole or absent
    .lock            the process that writes to it

The process may be killed at any moment. A checkpoint therefore notes how long the two logs were
when it was written, and a resumed run cuts them to that length. While a process writes to a run, no
other one may: see `firm.run.lock`. The directory is its owner's alone, since checkpoints hold what
clients keep to themselves.
"""

import json
import logging
import math
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from firm.federation.client import State
from firm.federation.outside import legible, printable
from firm.fields import Hint, PositiveInt, configuration
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
    replace_text,
    sync,
)
from firm.run.lock import LOCK_NAME, check_not_held, hold
from firm.run.resuming import Resume, is_resumed
from firm.run.rows import Row, load_quantities, valid_rows
from firm.run.session import now, session
from firm.run.yaml_text import read_yaml

logger = logging.getLogger(__name__)

_CONFIG, _RUN, _METRICS, _SAMPLES = "config.yaml", "run.json", "metrics.jsonl", "samples.jsonl"
_RESTORE = "restore the file from a copy, or start a new run."


@configuration
class CheckpointConfig:
    """Which checkpoints stay on the disk; one is written after every round."""

    keep_last: Annotated[PositiveInt, Hint("a run resumes from the last")] = 3
    """How many of the latest stay: a damaged one is then no loss."""
    keep_best: bool = True
    """Whether the one with the highest mean reward on the validation prompts stays too."""


def check_free(path: str | Path, config: Mapping[str, Any]) -> None:
    """Raises `UserError` if there is something at `path` that a new run would mix with.

    It advises to resume a run that is there, if a run of this configuration can be resumed.
    """
    path = Path(path)
    check_not_held(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        is_resumable = "resume" in config and (path / _CONFIG).exists()
        raise UserError(
            f"the run directory {path} exists and is not empty; "
            f"{f'continue it with --resume {path} or ' if is_resumable else ''}choose another path."
        )


def run_to_resume(path: Path) -> Any:
    """Returns the configuration of the run in a folder, as plain data.

    Raises:
        UserError: There is no run at `path`.
    """
    is_resumed(path, True, _CONFIG)
    return Run(path).settings()


class Run:
    """The directory of one run, open for writing after `create`, `resume` or `open`.

    It keeps other processes out until `close` or the end of this one. As a context manager it
    closes itself and notes how the run ended, with the traceback in `error.txt` if it failed.
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
        """Raises the `UserError` that `open` would raise; changes nothing."""
        run = cls(path)
        with file_errors(f"the run directory {run.path}"):
            if is_resumed(run.path, resume, _CONFIG):
                run._check_resumable(config, ignore)
                place = run.path
            else:
                check_free(run.path, config)
                parents = [run.path, *run.path.absolute().parents]
                place = next(parent for parent in parents if parent.exists())
            tempfile.TemporaryDirectory(prefix=".", dir=place).cleanup()

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Self:
        """Returns a new run in a directory that is absent or empty.

        Raises:
            UserError: There is something at `path` already, or it cannot be written to.
        """
        run = cls(path)
        with file_errors(f"the run directory {run.path}"):
            check_free(path, config)
            place = run.path.resolve()
            # Filled under another name: a run is there whole or not at all, and locked from then.
            draft = place.with_name(f".{place.name}.draft")
            make_private_folder(draft)
            run._lock = hold(draft, shown=run.path)
            with ExitStack() as on_error:
                on_error.callback(run.close)
                on_error.callback(shutil.rmtree, draft, ignore_errors=True)
                for remains in draft.iterdir():
                    if remains.name != LOCK_NAME:
                        remains.unlink()
                replace_text(draft / _CONFIG, to_yaml(config))
                replace_text(draft / _RUN, json.dumps({"status": "running", **session()}, indent=2))
                draft.rename(place)
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
        """Returns the run at its latest checkpoint, or at its start without one.

        What was logged after that checkpoint is cut off. Key paths in ``ignore``, with everything
        below them, may differ from the run's own configuration; so may the keys in ``renew``, whose
        new values config.yaml then has.

        Raises:
            UserError: There is no run at `path`, another process writes to it, it has another
                configuration, no checkpoint is whole or of this version's format, its logs are
                shorter than the checkpoint says, or it cannot be written to.
        """
        run = cls(path)
        is_resumed(run.path, True, _CONFIG)
        with file_errors(f"the run directory {run.path}"):
            run._check_resumable(config, [*ignore, *renew])
            run._lock = hold(run.path)
            with ExitStack() as on_error:
                on_error.callback(run.close)
                run._take_up({key: config[key] for key in renew})
                on_error.pop_all()
        return run

    def _check_resumable(self, config: Mapping[str, Any], ignore: Collection[str]) -> None:
        check_not_held(self.path)
        self.record()
        if changed := differences(self.settings(), config, ignore):
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise UserError(
                f"the run at {self.path} has another configuration: {', '.join(changed[:3])}"
                f"{more}; resume with its config.yaml or choose another path."
            )
        for name, length in _log_lengths(self._latest_envelope()).items():
            log = self.path / name
            size = log.stat().st_size if log.exists() else 0
            if size < length:
                raise UserError(
                    f"{log} has {size} bytes, its checkpoint was written after {length}; "
                    "restore the file or start a new run."
                )

    def _take_up(self, renewed: Mapping[str, Any]) -> None:
        """Makes the directory what it was when the latest checkpoint was written."""
        settings = self.settings()
        if any(settings.get(key) != value for key, value in renewed.items()):
            replace_text(self.path / _CONFIG, to_yaml({**settings, **renewed}))
        envelope, record = self._latest_envelope(), self.record()
        for name, length in _log_lengths(envelope).items():
            log = self.path / name
            if log.exists() and log.stat().st_size > length:
                os.truncate(log, length)
                sync(log)
        qualities = envelope.get("scores", {}) if envelope else {}
        self._qualities = {n: qualities[n] for n, _ in self._checkpoints() if n in qualities}
        record["status"] = "running"
        record.setdefault("resumed", []).append(session())
        replace_text(self.path / _RUN, json.dumps(record, indent=2))

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
        """Creates a run or, with `resume`, takes up the one that is there.

        Raises:
            UserError: As `create` or `resume`.
        """
        if is_resumed(Path(path), resume, _CONFIG):
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
            # the disk may be full, or a file be damaged, which the error itself says then
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
        """Lets other processes write to the directory, as the end of this one does too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finish(self, status: str = "finished") -> None:
        """Notes in run.json that the run has ended, when and how."""
        record = {**self.record(), "status": status, "ended": now()}
        replace_text(self.path / _RUN, json.dumps(record, indent=2))

    def record(self) -> Row:
        """Returns what run.json holds."""
        path = self.path / _RUN
        return parse_object(read_text(path, remedy=_RESTORE), where=str(path), remedy=_RESTORE)

    def settings(self) -> Any:
        """Returns what config.yaml holds, as plain data."""
        path = self.path / _CONFIG
        return read_yaml(read_text(path, remedy=_RESTORE), str(path))

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
        """Returns the valid rows of metrics.jsonl, without a last line that is still being written.

        Raises:
            UserError: A line holds no JSON object; the message names file and line.
        """
        return self.checked_rows()[0]

    def checked_rows(self) -> tuple[list[Row], list[str]]:
        """Returns the rows and what `valid_rows` left out of them."""
        load_quantities(self.settings() if (self.path / _CONFIG).exists() else None)
        return valid_rows(read_rows(self.path / _METRICS, remedy=_RESTORE))

    def samples(self) -> list[Row]:
        """Returns what is valid of the rows of samples.jsonl, empty without the file."""
        return valid_rows(read_rows(self.path / _SAMPLES, remedy=_RESTORE), kind="sample")[0]

    def save_checkpoint(
        self, round: int, state: State, *, keep_last: int = 3, quality: float | None = None
    ) -> Path:
        """Writes the state after a round, and returns the checkpoint's folder.

        Of all checkpoints the last ones stay, and the first one with the highest quality (larger is
        better; None when it is not measured).

        Raises:
            ValueError: The quality is not finite.
            UserError: The disk is full, or refuses otherwise; earlier checkpoints are whole.
        """
        if quality is not None and not math.isfinite(quality):
            raise ValueError(
                f"the quality of round {round} must be finite, got {quality}: pass None where it "
                "is not measured."
            )
        path = self.path / "checkpoints" / f"round_{round:04d}"
        log_bytes = {}
        comfort = "older ones are whole: " if self._checkpoints() else ""
        with file_errors(f"the checkpoint of round {round} in {path.parent}", comfort):
            make_private_folder(path.parent)
            for log in (self.path / _METRICS, self.path / _SAMPLES):
                log_bytes[log.name] = log.stat().st_size if log.exists() else 0
                if log.exists():
                    sync(log)
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
            kept.add(max(self._qualities, key=lambda number: (self._qualities[number], -number)))
        for number, path in self._checkpoints():
            if number <= round and number not in kept:
                _remove(path)
                self._qualities.pop(number, None)
        for suffix in ("draft", "old"):  # of saves that were interrupted
            for remains in (self.path / "checkpoints").glob(f".round_*.{suffix}"):
                _remove(remains)

    def latest_checkpoint(self) -> tuple[int, State] | None:
        """Returns round and state of the newest whole checkpoint, None before the first.

        It warns of newer ones that are damaged.

        Raises:
            UserError: None is whole, or one is of another version's format.
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
                f"{len(problems)} checkpoints is whole (the newest: {problems[0]}); restore one "
                "from a copy, or start a new run."
            )
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Returns round and folder of all checkpoints, whole or not, by rising round."""
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
            lines.append(json.dumps(row) + "\n")
        log = self.path / name
        with file_errors(str(log)), log.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def _remove(folder: Path) -> None:
    """Removes a folder; one that refuses costs room, which is no reason to stop a run."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        logger.warning("%s cannot be removed: %s", printable(folder), printable(reason))


def _log_lengths(envelope: State | None) -> dict[str, int]:
    """Returns the bytes that each log had when a checkpoint was written; none without one."""
    return envelope["log_bytes"] if envelope else {_METRICS: 0, _SAMPLES: 0}
