import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from firm.run import Run, UserError
from firm.run.lock import check_not_held, hold

HOLD = """
run = Run.open(argument + "/run", {"seed": 1}, resume="auto")
import time
from pathlib import Path
Path(argument, "pid.draft").write_text(str(os.getpid()))
Path(argument, "pid.draft").rename(Path(argument, "pid"))
while not Path(argument, "enough").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def held(tmp_path: Path, start_and_wait):
    """Runs a function of a process's id while that process has the run in `tmp_path` open."""

    def run(check) -> None:
        thread = threading.Thread(target=start_and_wait, args=(HOLD, str(tmp_path)))
        thread.start()
        try:
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            check(int((tmp_path / "pid").read_text()))
        finally:
            (tmp_path / "enough").touch()
            thread.join()

    return run


def test_a_run_that_another_process_writes_is_refused_by_its_name(tmp_path: Path, held) -> None:
    path = tmp_path / "run"

    def check(pid: int) -> None:
        before = {file: file.read_bytes() for file in path.iterdir()}
        line = rf"directory {path} is in use by process {pid} on {socket.gethostname()}; wait"
        for resume in (True, False):
            with pytest.raises(UserError, match=line):
                Run.open(path, {"seed": 1}, resume=resume)
            with pytest.raises(UserError, match=line):
                Run.check(path, {"seed": 1}, resume=resume)
        assert {file: file.read_bytes() for file in path.iterdir()} == before

    held(check)
    Run.resume(path, {"seed": 1})


def test_the_lock_of_a_killed_process_blocks_nobody(tmp_path: Path, start_and_wait) -> None:
    status = start_and_wait(HOLD, str(tmp_path), seconds=0.5)
    assert os.WIFSIGNALED(status)
    assert (tmp_path / "run/.lock").read_text().startswith((tmp_path / "pid").read_text())
    run = Run.resume(tmp_path / "run", {"seed": 1})
    assert (tmp_path / "run/.lock").read_text().startswith(f"{os.getpid()} on ")
    run.close()


def test_a_child_that_outlives_the_holder_is_named_in_its_place(tmp_path: Path) -> None:
    # the child reads until the test ends; the parent that forked it exits
    program = f"""
import os
from pathlib import Path
from firm.run.lock import hold
hold(Path({str(tmp_path)!r}))
child = os.fork()
if child == 0:
    os.read(0, 1)
else:
    print(os.getpid(), child, flush=True)
    os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        parent, child = process.stdout.readline().split()
        assert process.wait() == 0
        assert (tmp_path / ".lock").read_text().startswith(f"{parent} on ")
        with pytest.raises(UserError, match=f"in use by process {child} on"):
            hold(tmp_path)
        process.stdin.close()


def test_a_run_is_free_once_it_has_ended(tmp_path: Path) -> None:
    with Run.create(tmp_path / "a", {}) as run:
        with pytest.raises(UserError, match="is in use"):
            Run.resume(run.path, {})
        check_not_held(tmp_path)  # its parent is free
    Run.resume(run.path, {}).close()
    with pytest.raises(RuntimeError), Run.resume(run.path, {}):
        raise RuntimeError
    check_not_held(run.path)


def test_of_two_that_create_the_same_run_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".a.draft").mkdir()
    descriptor = hold(tmp_path / ".a.draft")  # the other is halfway through
    with pytest.raises(UserError, match=rf"the directory {tmp_path}/a is in use by process"):
        Run.create(tmp_path / "a", {})
    os.close(descriptor)  # it died
    Run.create(tmp_path / "a", {})
    assert os.listdir(tmp_path) == ["a"]


def test_where_there_are_no_locks_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Run.create(tmp_path / "a", {}).log({"kind": "run"})
    assert "cannot be locked (No locks available)" in caplog.text
    assert Run(tmp_path / "a").rows() == [{"kind": "run"}]
