"""Opens, replaces and moves what lies inside a folder that may come from someone else.

The path of a folder that the user names may lead through links, such as a `runs` on another disk.
Below it no link is followed: `open_inside` opens one folder after the other by its descriptor, so
that a folder that is replaced by a link between a check and its use leads nowhere either. A file
that is changed in place must have no second name, a hard link, by which it is outside as well.

Every function of this module rests on `open_inside`. Linux and macOS have the system calls.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_GIVEN: set[Path] = set()
_NOT_CHECKED = "wandb"
"""Folder in which W&B leaves links to its logs; each of its sessions writes to a new folder."""
_BELOW = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class LinkFound(OSError):
    """Raised when a file or folder is a link, or something else that is not opened."""

    def __str__(self) -> str:
        return str(self.strerror)


def _link_found(path: Path, kind: str, remedy: str) -> LinkFound:
    return LinkFound(errno.ELOOP, f"{path} is {kind}; {remedy}")


def give(folder: str | Path) -> None:
    """Declares a folder as named by the user: no link below it is followed from now on."""
    _GIVEN.add(Path(folder).absolute())


def check_links(folder: str | Path) -> None:
    """Declares a folder as named by the user, and checks that there are no links below it.

    Libraries that write to the folder by themselves follow links. Links that W&B has made in its
    own folder are allowed.

    Raises:
        LinkFound: There is a link, or a file that is neither regular nor a folder.
    """
    give(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # another process may have removed it
                _check_kind(path, path.lstat().st_mode)
        folders[:] = [name for name in folders if name != _NOT_CHECKED]


def open_inside(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file or folder without following a link; an `opener` of Python's `open`.

    Links above the folder given to `give` are followed. If no such folder contains the path, only
    the last part of the path is checked, and only if it is opened for writing.

    Args:
        path: The file or folder.
        flags: As of `os.open`.
        mode: Permissions of a new file, less the umask.

    Returns:
        The descriptor.

    Raises:
        LinkFound: A part of the path is a link, it is neither a file nor a folder, or the file
            would be changed in place and has another name.
        OSError: As of `os.open`.
    """
    path = Path(path).absolute()
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    root = next((place for place in reversed(path.parents) if place in _GIVEN), None)
    if root is None:
        if path in _GIVEN or not is_written:
            return os.open(path, flags, mode)
        root = path.parent
    *parents, name = path.relative_to(root).parts
    place = root
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parents:
            place /= part
            inner = _open_part(place, _BELOW, folder)
            os.close(folder)
            folder = inner
        # truncated only once the file is known to have one name; a pipe must not block
        own = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = _open_part(place / name, own, folder, mode)
    finally:
        os.close(folder)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status.st_mode)
        if is_written and status.st_nlink > 1:
            kind = "a file with a second name (a hard link), which would change as well"
            raise _link_found(path, kind, "replace it with a copy of itself.")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_part(path: Path, flags: int, folder: int, mode: int = 0) -> int:
    """Opens a file or folder in the folder of a descriptor; `path` is for messages."""
    if path.name == "..":
        raise _link_found(path, "a way out of the folder", "choose a path without it.")
    try:
        return os.open(path.name, flags, mode, dir_fd=folder)
    except OSError as error:  # which one a link raises depends on the system
        with suppress(FileNotFoundError):
            _check_kind(path, os.lstat(path.name, dir_fd=folder).st_mode)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _check_kind(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        remedy = "replace it with the file or folder itself, or remove it."
        raise _link_found(path, "a link, which may lead out of the folder", remedy)
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise _link_found(path, "neither a file nor a folder", "remove it.")


@contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """Yields a descriptor of the folder that contains `path`."""
    folder = open_inside(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def make_folder(path: Path, mode: int | None = None) -> None:
    """Creates a folder and its parents; keeps an existing folder.

    Args:
        path: The folder.
        mode: Permissions of a new folder, for any umask; its parents have the default ones.

    Raises:
        LinkFound: It is a link, or a folder below a given one leads through a link.
        OSError: It cannot be created, or is a file.
    """
    path = Path(path).absolute()  # the current folder has no name otherwise
    if path.name == ".." and path.is_dir():  # the parent of a given folder such as ../x
        return
    if not path.parent.exists():
        make_folder(path.parent)
    with _folder_of(path) as folder:
        try:
            os.mkdir(path.name, 0o777 if mode is None else mode, dir_fd=folder)
        except FileExistsError:
            is_below = path not in _GIVEN and any(place in _GIVEN for place in path.parents)
            flags = _BELOW if is_below else os.O_RDONLY | os.O_DIRECTORY
            os.close(_open_part(path, flags, folder))
            return
        if mode is not None:  # the umask may have removed permissions of the owner
            os.chmod(path.name, mode, dir_fd=folder)


def replace_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Replaces a text file atomically: readers see either the old or the new text.

    Args:
        path: The file.
        text: Its new content.
        errors: Treatment of lone surrogates, which UTF-8 cannot encode; as of `str.encode`.

    Raises:
        LinkFound: The file is a link, or a folder below a given one leads through a link.
        OSError: The file cannot be written; an existing file is unchanged.
    """
    replace_bytes(path, text.encode(errors=errors))


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file atomically, as `replace_text` does."""
    with _folder_of(path) as folder, _draft(path, content, folder) as draft:
        _check_no_link(path, folder)
        os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)


def place_new(path: Path, text: str) -> None:
    """Writes a new text file atomically; of several processes that do so, one succeeds.

    Raises:
        FileExistsError: There is a file, or a link.
        LinkFound: A folder below a given one leads through a link.
        OSError: The file cannot be written.
    """
    with _folder_of(path) as folder, _draft(path, text.encode(), folder) as draft:
        # `link` fails if the name exists, unlike `replace`
        os.link(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _draft(path: Path, content: bytes, folder: int) -> Iterator[str]:
    """Yields the name of a new file with this content, beside `path`; removes it afterwards."""
    draft = f".{path.name}.{os.getpid()}.draft"  # processes may write one file
    _remove(draft, folder)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield draft
    finally:
        with suppress(OSError):
            _remove(draft, folder)


@contextmanager
def whole_folder(path: Path, *, may_exist: bool = False) -> Iterator[Path]:
    """Yields the path of a draft of a folder, which becomes `path` on successful exit.

    The draft is flushed to the disk before; it is removed on failure. Use it for libraries that
    write to paths by themselves: on Linux the draft's path is that of its descriptor, so that
    nobody can exchange it.

    Args:
        path: The folder; its parents are created.
        may_exist: Whether an existing folder is replaced. It is absent for a moment between two
            renames.

    Raises:
        LinkFound: It is a link, or a folder below a given one leads through a link.
        OSError: It cannot be written; or it exists, is not empty and must not.
    """
    make_folder(path.parent)
    draft, old = (f".{path.name}.{suffix}" for suffix in ("draft", "old"))
    with _folder_of(path) as folder:
        for remains in (draft, old):
            _remove(remains, folder)
        os.mkdir(draft, dir_fd=folder)
        try:
            own = _open_part(path.with_name(draft), _BELOW, folder)
            try:
                by_descriptor = Path(f"/proc/self/fd/{own}")
                yield by_descriptor if by_descriptor.exists() else path.with_name(draft)
                _sync_all(own)
            finally:
                os.close(own)
            if may_exist and _check_no_link(path, folder):
                # a folder that is not empty cannot be replaced by `rename`
                os.rename(path.name, old, src_dir_fd=folder, dst_dir_fd=folder)
            os.rename(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):  # the failure above is the one to report
                _remove(draft, folder)
            raise
        os.fsync(folder)
        with suppress(OSError):  # which only wastes space
            _remove(old, folder)


def move(source: Path, target: Path) -> None:
    """Renames a file or folder; a folder replaces an empty one at most.

    Raises:
        LinkFound: A folder below a given one leads through a link.
        OSError: As of `os.rename`.
    """
    with _folder_of(source) as old, _folder_of(target) as new:
        os.rename(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)


def remove(path: Path) -> None:
    """Removes a file or folder, if it exists; of a link nothing but the link itself.

    Raises:
        LinkFound: A folder below a given one leads through a link.
        OSError: It cannot be removed.
    """
    if path.parent.exists():
        with _folder_of(path) as folder:
            _remove(path.name, folder)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content.

    Raises:
        LinkFound: A folder below a given one leads through a link.
        OSError: It does not exist, cannot be removed, or is a file or a link.
    """
    with _folder_of(path) as folder:
        shutil.rmtree(path.name, dir_fd=folder)


def _remove(name: str, folder: int) -> None:
    try:
        is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _check_no_link(path: Path, folder: int) -> bool:
    """Returns whether a file or folder exists, after checking that it is no link."""
    try:
        mode = os.lstat(path.name, dir_fd=folder).st_mode
    except FileNotFoundError:
        return False
    _check_kind(path, mode)
    return True


def _sync_all(folder: int) -> None:
    for _, _, files, place in os.fwalk(".", dir_fd=folder):
        for name in files:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.fsync(place)
