"""Sweep: a folder with many runs of one program, which may be killed and resumed.

    sweep.json       the configuration, and the settings of every point by name
    points/NAME/     the run directory of a point
    replaced/NAME-1/ an unfinished run of the point, before its settings were corrected
    logs/NAME.txt    the output of the point's run

Progress is determined from the runs themselves: a point is finished if its run is. Several
processes may work on a sweep concurrently, on one machine or on several that share the folder: the
lock of each run ensures that only one process works on a point.
"""

import copy
import multiprocessing
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from firm.base.errors import Terminated
from firm.base.inside import LinkFound, give, make_folder, open_inside, place_new, replace_text
from firm.base.json_text import json_text
from firm.base.sanitize import by_reason, check_name
from firm.run.differences import differences
from firm.run.directory import Row, Run
from firm.run.errors import UserError, interrupted_by_sigterm
from firm.run.files import (
    file_errors,
    make_private_folder,
    parse_object,
    read_text,
    refuse_links,
)
from firm.run.lock import check_not_held
from firm.run.names import check_folder_name
from firm.run.resuming import STUDY_NAME, Resume, is_resumed, resume_command

SWEEP_NAME = "sweep.json"
START_METHOD = "spawn"
"""Start method of workers, since CUDA does not work in forked processes."""
PROGRESS_SECONDS = 15.0
"""Time without a finished point after which the progress of the running ones is reported."""


@dataclass(frozen=True)
class Outcome:
    """Result of a point's run."""

    name: str
    seconds: float
    problem: str | None = None
    """Reason why the run did not finish; None if it finished."""


class Sweep:
    """A folder of runs with a manifest."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        refuse_links(self.path)
        self.manifest: Row = _read(self.path)

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        points: Mapping[str, Mapping[str, Any]],
        *,
        resume: Resume,
        kind: str = "sweep",
        own_keys: Mapping[str, Sequence[str]] | None = None,
        lists: Mapping[str, int] = MappingProxyType({}),
        on_change: Callable[[], None] = lambda: None,
    ) -> Self:
        """Creates a sweep or, depending on `resume`, returns the one with this configuration.

        Args:
            path: Folder of the sweep.
            config: Configuration, as plain data.
            points: Distinguishing settings of each point by name, as plain data.
            resume: Whether to continue an existing sweep; see ``Resume``.
            kind: Name of such folders in messages.
            own_keys: Path of the keys that concern a point alone, or it and others with the same
                path, by the point's name. They may change unless one of these points is finished;
                before any point is finished, all keys may. By default, no key may change.
            lists: Keys from which the points follow, with the number of first entries that must not
                change. All points stay, and further ones may be added.
            on_change: Called before a changed configuration is stored.

        Raises:
            UserError: `path` contains something else or a sweep with another configuration or other
                points, or there is no sweep to continue. Nothing is changed in these cases.
        """
        path = Path(path)
        refuse_links(path)
        asked = {"config": dict(config), "points": {n: dict(p) for n, p in points.items()}}
        if (path / SWEEP_NAME).exists():
            sweep = cls(path)
            if not resume:
                raise UserError(
                    f"there is already a {kind} at {path}; continue it with "
                    f"`{resume_command(path)}` or choose another path."
                )
            fixed = [
                {
                    "config": sweep._fixed_part(each["config"], own_keys, lists),
                    "points": {
                        n: p for n, p in each["points"].items() if n in sweep.manifest["points"]
                    },
                }
                for each in (sweep.manifest, asked)
            ]
            if changed := differences(*fixed):
                # what differs in the points follows from the configuration
                own = [text for text in changed if text.startswith("config.")]
                changed = [text.removeprefix("config.") for text in own] or changed
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                raise UserError(
                    f"the {kind} at {path} has another configuration: {', '.join(changed[:3])}"
                    f"{more}; use its configuration or choose another path."
                )
            if differences({key: sweep.manifest[key] for key in asked}, asked):
                on_change()
                sweep.manifest |= asked
                replace_text(path / SWEEP_NAME, json_text(sweep.manifest, indent=2))
            return sweep
        is_resumed(path, resume, SWEEP_NAME)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} is not empty and contains no {kind}; choose another path.")
        with file_errors(f"the {kind} {path}", again="start again"):
            make_private_folder(path)
            manifest = json_text({"id": uuid.uuid4().hex[:8], **asked}, indent=2)
            with suppress(FileExistsError):  # the first of several processes wins
                place_new(path / SWEEP_NAME, manifest)
        return cls.open(path, config, points, resume=True, kind=kind)

    def _fixed_part(
        self, config: Any, own_keys: Mapping[str, Sequence[str]] | None, lists: Mapping[str, int]
    ) -> Any:
        """Returns the part of a configuration that must not change; see `open`."""
        firsts = {
            key: config[key][:count] if count else None
            for key, count in lists.items()
            if key in config
        }
        config = {**config, **firsts}
        if own_keys is None:
            return config
        paths = {name: tuple(path) for name, path in own_keys.items()}
        finished = {path for name, path in paths.items() if self.is_done(name)}
        if not finished:
            return {}
        fixed = copy.deepcopy(config)
        for *parents, last in set(paths.values()) - finished:
            place = fixed
            for key in parents:
                place = place.get(key, {})
            place.pop(last, None)
        return fixed

    @property
    def id(self) -> str:
        """Identifier that distinguishes this sweep from others with the same name."""
        return self.manifest["id"]

    def run_path(self, name: str) -> Path:
        """Returns the directory of a point's run, which may not exist yet."""
        return self.path / "points" / name

    def is_done(self, name: str) -> bool:
        """Returns whether a point's run is finished."""
        run = Run(self.run_path(name))
        return (run.path / "run.json").exists() and run.record().get("status") == "finished"

    def pending(self) -> list[str]:
        """Returns the names of the unfinished points, in order."""
        return [name for name in self.manifest["points"] if not self.is_done(name)]

    def work(
        self,
        run: Callable[[str, dict[str, Any]], Any],
        settings: Mapping[str, dict[str, Any]],
        *,
        num_workers: int = 1,
        on_progress: Callable[[str, str], Any] = lambda name, line: None,
    ) -> Iterator[Outcome]:
        """Runs the unfinished points in several processes; yields each outcome as it completes.

        A failed point, or one whose process is killed, does not affect the others. A point that
        another process is running is skipped and not yielded.

        Args:
            run: Module-level function, called with the path of a point's run and its settings. It
                must resume the run if it exists.
            settings: Plain data by point; points that are not listed are not run.
            num_workers: Number of concurrent processes.
            on_progress: Called from time to time with the name of a running point and the line on
                its latest round.
        """
        queue = [name for name in settings if not self.is_done(name)]
        idle: list[ProcessPoolExecutor] = []
        running: dict[Future[Outcome | None], _Running] = {}
        try:
            while queue or running:
                while queue and len(running) < num_workers:
                    name = queue.pop(0)
                    if self.is_done(name):  # finished by another process in the meantime
                        continue
                    log = self.path / "logs" / f"{name}.txt"
                    with file_errors(f"the logs in {log.parent}"):
                        make_folder(log.parent)
                    place = str(self.run_path(name))
                    shown = _last_round(log)
                    worker, future = _submit(idle, run, name, place, settings[name], str(log))
                    running[future] = _Running(name, worker, log, shown)
                done, _ = wait(running, PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                for point in running.values() if not done else ():
                    if (line := _last_round(point.log)) != point.shown:
                        point.shown = line
                        on_progress(point.name, line)
                for future in done:
                    point = running.pop(future)
                    try:
                        outcome = future.result()
                        idle.append(point.worker)
                    except BrokenProcessPool:
                        outcome = point.killed()
                        point.worker.shutdown()
                    if outcome:
                        yield outcome
        except Terminated:  # only this process got the signal, unlike Ctrl-C
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        finally:
            for worker in [*idle, *(point.worker for point in running.values())]:
                worker.shutdown(cancel_futures=True)  # waits until a run has recorded its end


def sweep_folder(run_path: Path) -> Path | None:
    """Returns the folder of the sweep that contains a run; None for a standalone run."""
    folder = run_path.absolute().parent.parent
    is_point = (folder / SWEEP_NAME).is_file() and run_path.absolute().parent.name == "points"
    return folder if is_point else None


def summarise(outcomes: Sequence[Outcome], path: Path) -> None:
    """Raises a `UserError` that lists the failed points of the sweep at `path`, if any."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        causes = by_reason((outcome.name, outcome.problem or "") for outcome in failed)
        reasons = "\n".join(f"  {cause}" for cause in causes)
        raise UserError(
            f"{len(failed)} of {len(outcomes)} runs did not finish; the others are kept. Correct "
            f"the settings in {path / STUDY_NAME}, or remove another cause, and continue with "
            f"`{resume_command(path)}`:\n{reasons}"
        )


@dataclass
class _Running:
    """A point that is being run."""

    name: str
    worker: ProcessPoolExecutor
    """A pool of one process: where one of several is killed, a pool ends the others."""
    log: Path
    shown: str
    """Line on the latest round that was reported."""
    start: float = field(default_factory=time.perf_counter)

    def killed(self) -> Outcome:
        """Returns the outcome of a point whose process has ended before its run did."""
        problem = "its process was killed, perhaps for lack of memory"
        return Outcome(self.name, time.perf_counter() - self.start, problem)


def _submit(
    idle: list[ProcessPoolExecutor], *arguments: Any
) -> tuple[ProcessPoolExecutor, Future[Outcome | None]]:
    """Calls `_run_point` in an idle worker that still lives, or in a new one."""
    while idle:
        worker = idle.pop()
        with suppress(BrokenProcessPool):  # killed while it was idle
            return worker, worker.submit(_run_point, *arguments)
    context = multiprocessing.get_context(START_METHOD)
    worker = ProcessPoolExecutor(1, context, initializer=_end_with_parent)
    return worker, worker.submit(_run_point, *arguments)


def _run_point(
    run: Callable[[str, dict[str, Any]], Any],
    name: str,
    place: str,
    settings: dict[str, Any],
    log: str,
) -> Outcome | None:
    """Runs one point in a worker; returns None if another process is running it."""
    start, problem = time.perf_counter(), None
    give(Path(log).parent.parent)  # the sweep, which may come from someone else
    try:
        if _is_held(place):
            return None
        with interrupted_by_sigterm(), _print_to(log):
            run(place, settings)
    except LinkFound as error:
        problem = str(error)
    except UserError as error:
        if _is_held(place):  # another process started it in the meantime
            return None
        problem = str(error)
    except Terminated:  # this worker alone; a sweep that is terminated does not wait for it
        problem = "its process was terminated"
    except Exception as error:  # a failed point must not stop the others
        problem = f"{type(error).__name__}: {error}"
        with open(log, "a", encoding="utf-8", opener=open_inside) as file:
            traceback.print_exc(file=file)
    return Outcome(name, time.perf_counter() - start, problem)


def _last_round(log: Path) -> str:
    """Returns the last line on a round in a point's log; empty if there is none."""
    with suppress(OSError):
        with open(log, encoding="utf-8", errors="replace", opener=open_inside) as file:
            lines = file.read().splitlines()
        return next((line for line in reversed(lines) if line.startswith("round ")), "")
    return ""


def _is_held(place: str) -> bool:
    try:
        check_not_held(Path(place))
    except UserError:
        return True
    return False


@contextmanager
def _print_to(log: str) -> Iterator[None]:
    with (
        open(log, "a", encoding="utf-8", opener=open_inside) as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        yield


def _end_with_parent() -> None:
    """Exits this process when its parent has ended for any reason, to release its lock."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one

    def watch() -> None:
        parent.join()  # waits for the end of a pipe that the parent holds open
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _read(path: Path) -> Row:
    manifest = path / SWEEP_NAME
    remedy = "restore it or choose another path."
    try:
        text = read_text(manifest, remedy=remedy)
    except FileNotFoundError:
        raise UserError(
            f"there is no study or sweep at {path}; pass the folder with {SWEEP_NAME}."
        ) from None
    content = parse_object(text, where=str(manifest), remedy=remedy)
    try:
        points = {
            check_folder_name(n, "a point's name"): dict(p) for n, p in content["points"].items()
        }
        return {
            "id": check_name(content["id"], "id"),
            "config": content["config"],
            "points": points,
        }
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{manifest} is malformed ({error}); {remedy}") from None
