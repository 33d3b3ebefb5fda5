"""Environment of a run: command, package versions and commit."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from firm.run.rows import Row

_PACKAGES = ("firm-align", "torch", "transformers", "trl", "peft", "accelerate", "numpy")


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
