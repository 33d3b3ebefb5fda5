"""Lock that allows one writer per directory; the kernel releases it when the process ends.

The lock is held on a file in the directory, so it persists when the directory is renamed. On file
systems without locks (some network mounts), writing is allowed with a warning.
"""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from glob import iglob
from pathlib import Path

from firm.base.inside import open_inside
from firm.run.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def hold(folder: Path, *, shown: Path | None = None) -> int:
    """Locks a directory until the returned descriptor is closed or the process ends.

    Child processes inherit the descriptor only if they are forked or if it is passed to them.
    Messages refer to the folder as `shown`, if given.

    Raises:
        UserError: Another process holds the lock.
        OSError: The directory is not writable.
    """
    descriptor = open_inside(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    with ExitStack() as on_error:
        on_error.callback(os.close, descriptor)
        _lock(descriptor, fcntl.LOCK_EX, shown or folder)
        name_holders(descriptor, [os.getpid()])
        on_error.pop_all()
    return descriptor


def name_holders(descriptor: int, processes: Sequence[int]) -> None:
    """Writes the IDs of the processes that hold the lock to the lock file, for error messages."""
    numbers = ", ".join(map(str, processes))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{numbers} on {socket.gethostname()}".encode(), 0)


def check_not_held(folder: Path) -> None:
    """Raises `UserError` if a process holds the lock of the directory; writes nothing."""
    try:
        descriptor = open_inside(folder / LOCK_NAME, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        _lock(descriptor, fcntl.LOCK_SH, folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int, shown: Path) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"the directory {shown} is in use by process {_holders(descriptor) or 'unknown'}; "
            "wait until it has ended, stop it, or choose another path."
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning(
            "%s cannot be locked (%s); make sure that no other process writes to it",
            shown,
            error.strerror,
        )


def _holders(descriptor: int) -> str:
    """Returns the IDs of the processes that hold a lock file, and their machine.

    The file names processes that may have ended since, while children that inherited the lock hold
    it. On this machine the names are therefore checked against the processes that have it open.
    """
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    recorded, _, host = text.partition(" on ")
    if host != socket.gethostname():
        return text
    alive = _processes_with(descriptor)
    named = [number for number in recorded.split(", ") if number in alive]
    numbers = ", ".join(named or sorted(alive, key=int))
    return f"{numbers} on {host}" if numbers else text


def _processes_with(descriptor: int) -> set[str]:
    """Returns the IDs of the user's processes that have the file of a descriptor open.

    The descriptor itself does not count. Empty on systems without /proc.
    """
    file, own = os.fstat(descriptor), f"/proc/{os.getpid()}/fd/{descriptor}"
    processes = set[str]()
    for place in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # another user's process, or one that has ended meanwhile
            if place != own and os.path.samestat(os.stat(place), file):
                processes.add(place.split("/")[2])
    return processes
