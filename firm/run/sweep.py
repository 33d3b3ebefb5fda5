"""A sweep: many runs of one program below one folder, which may be killed and taken up again.

    sweep.json       what was asked for: the configuration, and every point by name
    points/NAME/     a run directory for each point
    logs/NAME.txt    what the point's run printed

What is done is read off the runs themselves: a point is finished when its run says so. Several
processes may work on one sweep at a time, on one machine or on several that share the folder: the
lock of a run keeps all but one of them from each point.
"""

import json
import multiprocessing
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from firm.federation.outside import by_reason, check_name
from firm.run.differences import differences
from firm.run.directory import Row, Run
from firm.run.errors import Terminated, UserError, interrupted_by_sigterm
from firm.run.files import file_errors, make_private_folder, parse_object, read_text
from firm.run.lock import check_not_held
from firm.run.names import check_folder_name
from firm.run.resuming import Resume, is_resumed

SWEEP_NAME = "sweep.json"
START_METHOD = "spawn"
"""How workers start: CUDA does not work in forked processes."""


@dataclass(frozen=True)
class Outcome:
    """How the run of a point ended."""

    name: str
    seconds: float
    problem: str | None = None
    """Why it is not finished; None if it is."""


class Sweep:
    """A folder of runs, which has a manifest."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Row = _read(self.path)

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        points: Mapping[str, Mapping[str, Any]],
        *,
        resume: Resume,
    ) -> Self:
        """Returns a new sweep, or with `resume` the one that is there for this configuration.

        Configuration and points, by name what distinguishes each, are plain data.

        Raises:
            UserError: There is something else at `path`, a sweep of another configuration or other
                points, or none where one is to continue; nothing is changed then.
        """
        path = Path(path)
        asked = {"config": dict(config), "points": {n: dict(p) for n, p in points.items()}}
        if (path / SWEEP_NAME).exists():
            manifest = _read(path)
            if not resume:
                raise UserError(
                    f"there is a sweep at {path} already; continue it with --resume {path} or "
                    "choose another path."
                )
            if changed := differences({k: manifest[k] for k in asked}, asked):
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                raise UserError(
                    f"the sweep at {path} is another one: {', '.join(changed[:3])}{more}; "
                    "use its configuration or choose another path."
                )
            return cls(path)
        is_resumed(path, resume, SWEEP_NAME)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists, is not empty and holds no sweep; choose another path.")
        with file_errors(f"the sweep {path}"):
            make_private_folder(path)
            draft = path / f".{SWEEP_NAME}.{uuid.uuid4().hex}"
            draft.write_text(json.dumps({"id": uuid.uuid4().hex[:8], **asked}, indent=2))
            with suppress(FileExistsError):  # another process of this sweep was faster
                os.link(draft, path / SWEEP_NAME)
            draft.unlink()
        return cls.open(path, config, points, resume=True)

    @property
    def id(self) -> str:
        """What distinguishes this sweep from others with the same name."""
        return self.manifest["id"]

    def run_path(self, name: str) -> Path:
        """Returns where the run of a point is, or will be."""
        return self.path / "points" / name

    def is_done(self, name: str) -> bool:
        """Returns whether the run of a point has finished."""
        run = Run(self.run_path(name))
        return (run.path / "run.json").exists() and run.record().get("status") == "finished"

    def pending(self) -> list[str]:
        """Returns the points that are not finished, in order."""
        return [name for name in self.manifest["points"] if not self.is_done(name)]

    def work(
        self,
        run: Callable[[str, dict[str, Any]], Any],
        settings: Mapping[str, dict[str, Any]],
        *,
        num_workers: int = 1,
    ) -> Iterator[Outcome]:
        """Runs points that are not done, in several processes; yields each as it ends.

        A point that fails leaves the others to go on. One that another process is at is left to
        that process, and not yielded.

        Args:
            run: Called with the path of a point's run and its settings: a function of a module. It
                takes up the run that is there, if any.
            settings: Plain data by point; the others are left alone.
            num_workers: Processes that work at once.
        """
        queue = [name for name in settings if not self.is_done(name)]
        context = multiprocessing.get_context(START_METHOD)
        with ProcessPoolExecutor(
            num_workers, context, initializer=_end_with, initargs=(os.getpid(),)
        ) as pool:
            running: set[Future[Outcome | None]] = set()
            try:
                while queue or running:
                    while queue and len(running) < num_workers:
                        name = queue.pop(0)
                        if self.is_done(name):  # another process was faster
                            continue
                        log = self.path / "logs" / f"{name}.txt"
                        log.parent.mkdir(exist_ok=True)
                        place = str(self.run_path(name))
                        running.add(
                            pool.submit(_run_point, run, name, place, settings[name], str(log))
                        )
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        if outcome := future.result():
                            yield outcome
            except Terminated:  # which came to this process alone, unlike Ctrl-C
                for worker in multiprocessing.active_children():
                    worker.terminate()
                pool.shutdown(cancel_futures=True)  # once their runs have noted it
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def sweep_folder(run_path: Path) -> Path | None:
    """Returns the folder of the sweep that a run is a point of; None for a run on its own."""
    folder = run_path.absolute().parent.parent
    is_point = (folder / SWEEP_NAME).is_file() and run_path.absolute().parent.name == "points"
    return folder if is_point else None


def summarise(outcomes: Sequence[Outcome]) -> None:
    """Raises a `UserError` that names the points that failed, if any did."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        causes = by_reason((outcome.name, outcome.problem or "") for outcome in failed)
        reasons = "\n".join(f"  {cause}" for cause in causes)
        raise UserError(
            f"{len(failed)} of {len(outcomes)} points did not finish; the others are kept. Repair "
            f"the cause and call again with --resume:\n{reasons}"
        )


def _run_point(
    run: Callable[[str, dict[str, Any]], Any],
    name: str,
    place: str,
    settings: dict[str, Any],
    log: str,
) -> Outcome | None:
    """Runs one point in a worker; returns None where another process is at it."""
    start, problem = time.perf_counter(), None
    if _is_held(place):
        return None
    try:
        with interrupted_by_sigterm(), _printed_to(log):
            run(place, settings)
    except UserError as error:
        if _is_held(place):  # both came at once, and the other one was faster
            return None
        problem = str(error)
    except Exception as error:  # a point that fails leaves the others to go on
        problem = f"{type(error).__name__}: {error}"
        with open(log, "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    return Outcome(name, time.perf_counter() - start, problem)


def _is_held(place: str) -> bool:
    try:
        check_not_held(Path(place))
    except UserError:
        return True
    return False


@contextmanager
def _printed_to(log: str) -> Iterator[None]:
    with open(log, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, however that ended: a lock must not survive it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _read(path: Path) -> Row:
    manifest = path / SWEEP_NAME
    remedy = "restore it or choose another path."
    try:
        text = read_text(manifest, remedy=remedy)
    except FileNotFoundError:
        raise UserError(
            f"there is no sweep at {path}; give the folder with {SWEEP_NAME}."
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
