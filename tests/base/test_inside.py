import os
from collections.abc import Callable
from pathlib import Path

import pytest

from firm.base import inside
from firm.base.inside import (
    LinkFound,
    check_links,
    give,
    make_folder,
    move,
    open_inside,
    place_new,
    remove,
    remove_folder,
    replace_bytes,
    replace_text,
    whole_folder,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the given one, with a file and a folder."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").write_text("own")
    return folder


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder that the user names, by a link to it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "given").symlink_to("disk")
    give(tmp_path / "given")
    return tmp_path / "given"


def write(path: Path, mode: str = "w") -> None:
    with open(path, mode, encoding="utf-8", opener=open_inside) as file:
        file.write("theirs")


def folder_at(path: Path, *, may_exist: bool = True) -> None:
    with whole_folder(path, may_exist=may_exist) as draft:
        (draft / "file").write_text("theirs")


WRITERS: dict[str, Callable[[Path], None]] = {
    "write": write,
    "append": lambda path: write(path, "a"),
    "change": lambda path: write(path, "r+"),
    "replace": lambda path: replace_text(path, "theirs"),
    "replace bytes": lambda path: replace_bytes(path, b"theirs"),
    "make a folder": make_folder,
    "make a private folder": lambda path: make_folder(path, 0o700),
    "whole folder": folder_at,
}


def content(folder: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("target", ["file", "inner", "nowhere"])
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(given, outside, writer, target):
    before = content(outside)
    (given / "name").symlink_to(outside / target)
    with pytest.raises(LinkFound, match=r"given/name is a link, .*; replace it with the file or"):
        WRITERS[writer](given / "name")
    assert content(outside) == before
    assert (given / "name").readlink() == outside / target


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_below_a_link_to_a_folder(given, outside, writer):
    before = content(outside)
    (given / "a").mkdir()
    (given / "a/b").symlink_to(outside)
    for name in ("file", "inner", "new"):
        with pytest.raises(LinkFound, match="given/a/b is a link"):
            WRITERS[writer](given / "a/b" / name)
    assert content(outside) == before


def test_nothing_is_moved_placed_or_removed_below_a_link(given, outside):
    before = content(outside)
    (given / "a").symlink_to(outside)
    (given / "own").touch()
    for act in (
        lambda: move(given / "own", given / "a/own"),
        lambda: move(given / "a/file", given / "theirs"),
        lambda: place_new(given / "a/new", "theirs"),
        lambda: remove(given / "a/file"),
        lambda: remove_folder(given / "a/inner"),
    ):
        with pytest.raises(LinkFound, match="given/a is a link"):
            act()
    with pytest.raises(OSError, match="symbolic link"):
        remove_folder(given / "a")
    remove(given / "a")
    assert content(outside) == before
    assert os.listdir(given) == ["own"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_is_exchanged_between_check_and_use_leads_nowhere(
    given, outside, writer, monkeypatch
):
    before = content(outside)
    (given / "a/b").mkdir(parents=True)
    check_links(given)
    open_part = inside._open_part
    opened: list[str] = []

    def exchange(path: Path, *others: int) -> int:
        descriptor = open_part(path, *others)
        opened.append(path.name)
        if opened == ["a"]:  # it is open, and what is written goes there, wherever it is now
            (given / "a").rename(given / "was")
            (given / "a").symlink_to(outside)
        return descriptor

    monkeypatch.setattr(inside, "_open_part", exchange)
    try:
        WRITERS[writer](given / "a/b/new") if writer != "change" else write(given / "a/b/new", "x")
    except LinkFound:
        assert writer == "whole folder"  # which opens the path twice
    else:
        assert (given / "was/b/new").exists()
    assert content(outside) == before


def test_what_a_library_writes_to_an_exchanged_draft_stays_inside(given, outside):
    before = content(outside)
    with whole_folder(given / "a") as draft:
        (given / ".a.draft").rename(given / "was")
        (given / ".a.draft").symlink_to(outside)
        (draft / "file").write_text("theirs")
        (draft / "deep").mkdir()
    assert content(outside) == before
    assert (given / "was/file").read_text() == "theirs"


@pytest.mark.parametrize("mode", ["w", "a", "r+"])
def test_a_file_with_a_second_name_is_not_changed_in_place(given, outside, mode):
    os.link(outside / "file", given / "name")
    with pytest.raises(LinkFound, match=r"given/name is a file with a second name \(a hard link\)"):
        write(given / "name", mode)
    assert (outside / "file").read_text() == "own"
    replace_text(given / "name", "theirs")
    assert (outside / "file").read_text() == "own"
    assert (given / "name").read_text() == "theirs"


def test_a_pipe_is_refused_without_waiting_for_its_other_end(given):
    os.mkfifo(given / "pipe")
    for mode in ("r", "a"):
        with (
            pytest.raises(OSError, match=r"neither a file nor a folder|No such device"),
            open(given / "pipe", mode, opener=open_inside),
        ):
            pass
    with pytest.raises(LinkFound, match="given/pipe is neither a file nor a folder; remove it"):
        check_links(given)


def test_a_file_below_a_given_folder_is_not_read_through_a_link(given, outside):
    (given / "name").symlink_to(outside / "file")
    with pytest.raises(LinkFound), open(given / "name", opener=open_inside):
        pass
    with open(outside / "file", opener=open_inside) as file:
        assert file.read() == "own"
    (outside / "link").symlink_to("file")  # of a folder that was not given, such as a hub's
    with open(outside / "link", opener=open_inside) as file:
        assert file.read() == "own"
    with pytest.raises(LinkFound, match=r"a way out"):
        write(given / "../outside/file")


def test_the_folder_that_a_user_names_may_be_a_link(given):
    for act in WRITERS.values():
        if act is not WRITERS["change"]:
            act(given / "a")
            remove(given / "a")
    make_folder(given)
    make_folder(given / "b/c", 0o700)
    write(given / "b/c/d")
    assert (given.parent / "disk/b/c/d").read_text() == "theirs"
    check_links(given)


def test_links_are_found_at_any_depth_but_those_of_wandb(given, outside):
    (given / "wandb/run/logs").mkdir(parents=True)
    (given / "wandb/latest-run").symlink_to("run")
    (given / "wandb/run/logs/core.log").symlink_to(outside / "file")
    check_links(given)
    (given / "a/b").mkdir(parents=True)
    (given / "a/b/c").symlink_to("..")
    with pytest.raises(LinkFound, match="given/a/b/c is a link"):
        check_links(given)
    remove(given / "a/b/c")
    (given / "wandb").rename(given / "a/wandb")
    (given / "wandb").symlink_to(outside)
    with pytest.raises(LinkFound, match="given/wandb is a link"):
        check_links(given)


def test_a_folder_is_whole_or_as_before(given):
    folder_at(given / "a")
    with pytest.raises(IsADirectoryError), whole_folder(given / "a", may_exist=True) as draft:
        draft.read_text()
    assert content(given) == {"a": None, "a/file": "theirs"}
    with pytest.raises(OSError, match="not empty"):
        folder_at(given / "a", may_exist=False)
    assert content(given) == {"a": None, "a/file": "theirs"}


def test_of_two_that_place_a_new_file_one_succeeds(given):
    place_new(given / "a", "first")
    with pytest.raises(FileExistsError):
        place_new(given / "a", "second")
    assert content(given) == {"a": "first"}


@pytest.mark.parametrize("umask", [0, 0o777])
def test_a_new_folder_has_the_permissions_asked_for(given, umask):
    before = os.umask(umask)
    try:
        make_folder(given / "a", 0o700)
    finally:
        os.umask(before)
    assert (given / "a").stat().st_mode & 0o777 == 0o700


def test_a_folder_is_written_in_the_current_one_and_behind_a_link_to_another_disk(
    tmp_path, monkeypatch
):
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "work").mkdir()
    for place in (Path("evaluation"), Path("runs/evaluation"), Path("work/../b"), Path("../c")):
        with whole_folder(place) as draft:
            replace_text(draft / "a.txt", "a")
        assert (place / "a.txt").read_text() == "a"
