"""Resuming of runs: the folder given to `firm resume`, and the command printed after Ctrl-C."""

import difflib
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from firm.base.errors import ProcessLost, RolloutError, RoundFailed
from firm.run.errors import UserError
from firm.run.files import read_text, refuse_links
from firm.run.plugins import code_in
from firm.run.yaml_text import read_yaml

Resume = bool | Literal["auto"]
"""Continue the run in a folder: true requires a run, "auto" starts one if there is none,
and false refuses a folder that is not empty."""

CONFIG_NAME = "config.yaml"
"""File with the resolved configuration of a run, in its folder."""
STUDY_NAME = "study.yaml"
"""File with the configuration of a study or sweep, in its folder."""
BEGUN = (CONFIG_NAME, STUDY_NAME)
"""Files of which a run, study or sweep that has begun has one."""
RESTORE = "restore the file from a backup, or start a new run."
"""Remedy for a damaged file of a run."""


def is_resumed(path: Path, resume: Resume, marker: str) -> bool:
    """Returns whether to resume the run in a folder instead of starting a new one.

    Args:
        path: The folder.
        resume: The requested behaviour.
        marker: Name of a file in the folder of a run, or a pattern of such files.

    Raises:
        UserError: `resume` is true, but there is no run; suggests the folder with the nearest name.
    """
    if not resume:
        return False
    if any(path.glob(marker)):
        return True
    if resume == "auto":
        return False
    beside = path.parent.glob("*") if path.parent.is_dir() else ()
    runs = {folder.name: folder for folder in beside if any(folder.glob(marker))}
    near = difflib.get_close_matches(path.name, runs, n=1)
    remedy = f"did you mean {runs[near[0]]}?" if near else "pass the folder of a run."
    raise UserError(f"there is no run to resume at {path}; {remedy}")


def check_out(resume: Resume, out: Path | None) -> None:
    """Raises ``ValueError`` if a run is to be resumed but its folder is not given."""
    if resume and out is None:
        raise ValueError(
            f"resume needs the run's folder, got {resume} without `out`; pass --out, or use "
            "`firm resume FOLDER`."
        )


def check_run(path: Path) -> None:
    """Raises `UserError` unless there is a run at `path`, without links."""
    refuse_links(path)
    if not all((path / name).exists() for name in (CONFIG_NAME, "run.json")):
        raise UserError(f"there is no run at {path}; pass the folder that contains run.json.")


def read_settings(path: Path) -> Any:
    """Returns the configuration of the run in a folder, as plain data."""
    file = path / CONFIG_NAME
    return read_yaml(read_text(file, remedy=RESTORE), str(file))


def run_to_resume(path: Path) -> Any:
    """Returns the configuration of the run in a folder, as plain data.

    Raises:
        UserError: There is no run at `path`, or there is a link in it.
    """
    is_resumed(path, True, CONFIG_NAME)
    refuse_links(path)
    return read_settings(path)


def study_to_resume(path: Path) -> Any:
    """Returns the configuration of the study in a folder, as plain data.

    Raises:
        UserError: There is no study at `path`, or there is a link in it.
    """
    is_resumed(path, True, STUDY_NAME)
    refuse_links(path)
    remedy = "restore it, or pass the study's --config with --out and --resume."
    file = path / STUDY_NAME
    return read_yaml(read_text(file, remedy=remedy), str(file))


@contextmanager
def continued_later(path: Path) -> Iterator[None]:
    """Adds a note with the command that resumes a run or study to what ends it early.

    That is a `KeyboardInterrupt`, a `RoundFailed`, a `RolloutError`, a `ValueError` of a reward
    function or, in the first process, a `ProcessLost`. The command starts as many processes as the
    launcher has.

    No note is added if the folder contains neither.

    Args:
        path: Folder of the run or study.
    """
    launcher = _launcher()  # before the processes join, which removes its variables
    try:
        yield
    except (KeyboardInterrupt, RoundFailed, RolloutError, ProcessLost, ValueError) as end:
        is_told = isinstance(end, UserError)  # which says itself what to do
        is_told |= isinstance(end, ProcessLost) and os.environ.get("RANK", "0") != "0"
        if not is_told and any((path / name).exists() for name in BEGUN):
            end.add_note(f"continue with: {launcher}{resume_command(path)}")
        raise


def resume_command(path: Path) -> str:
    """Returns the command that resumes the run, study or sweep in a folder."""
    begun = [str(file) for name in BEGUN if (file := path / name).exists()]
    allowed = ["--allow_code"] if any(code_in({"base": file}) for file in begun) else []
    return shlex.join(["firm", "resume", str(path), *allowed])


def _launcher() -> str:
    """Returns the words before a command that start its processes; none without a launcher."""
    size, num_local = (int(os.environ.get(f"{own}WORLD_SIZE", 1)) for own in ("", "LOCAL_"))
    if size == 1:
        return ""
    nodes = f"--nnodes {size // num_local} " if size > num_local else ""
    return f"torchrun {nodes}--nproc_per_node {num_local} -m "
