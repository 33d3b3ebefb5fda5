"""Processes that are kept running: started again, ended with all they started, and never twice."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from firm.base.inside import LinkFound
from firm.network.daemons import MANY, Daemons
from firm.run import UserError

WAITS = [sys.executable, "-c", "import time; time.sleep(100)"]
WITH_CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(100)
"""
WATCHER = """
import sys, time
from pathlib import Path
from firm.network.daemons import Daemons

command = [sys.executable, "-c", "import time; time.sleep(100)"]
with Daemons({"process": command}, output=Path(sys.argv[1]), environment={}) as daemons:
    print(daemons.process_id("process"), flush=True)
    time.sleep(100)
"""


def _daemons(folder: Path, *command: str) -> Daemons:
    return Daemons({"process": command}, output=folder / "output.txt", environment={"KEY": "own"})


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def _until(condition, patience=90.0):  # a busy machine is no failure
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.02)


def _watch_when_ended(daemons: Daemons) -> None:
    process = daemons.process_id("process")
    _until(lambda: not _lives(process))
    daemons.watch()


def test_a_process_that_ends_is_started_again_with_its_variables(tmp_path):
    command = (sys.executable, "-c", "import os; print(os.environ['KEY'], flush=True)")
    output = tmp_path / "output.txt"
    with _daemons(tmp_path, *command) as daemons:
        for count in (1, 2, 3):
            _until(lambda count=count: output.read_text().count("own\n") == count)
            _watch_when_ended(daemons)
            holders = f"{os.getpid()}, {daemons.process_id('process')} on "
            assert (tmp_path / ".lock").read_text().startswith(holders)


def test_a_process_that_fails_again_and_again_is_given_up(tmp_path):
    with _daemons(tmp_path, sys.executable, "-c", "raise SystemExit(3)") as daemons:
        for _ in range(MANY - 1):
            _watch_when_ended(daemons)
        with pytest.raises(UserError, match=rf"the process ended {MANY} times soon after its"):
            _watch_when_ended(daemons)


def test_the_end_is_that_of_all_that_was_started(tmp_path):
    output = tmp_path / "output.txt"
    with _daemons(tmp_path, sys.executable, "-c", WITH_CHILD) as daemons:
        _until(lambda: output.read_text().endswith("\n"))
        processes = [daemons.process_id("process"), int(output.read_text())]
        assert all(map(_lives, processes))
    _until(lambda: not any(map(_lives, processes)))


def test_processes_that_ignore_the_end_are_killed_by_a_second_interruption(tmp_path):
    output, command = tmp_path / "output.txt", (sys.executable, "-c", STUBBORN)
    interrupt = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    processes = []

    def run():
        with Daemons({"a": command, "b": command}, output=output, environment={}) as daemons:
            processes.extend(daemons.process_id(name) for name in ("a", "b"))
            _until(lambda: output.read_text().count("1\n") == 2)
            interrupt.start()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(processes) == 2
    assert not any(map(_lives, processes))


def test_a_folder_whose_processes_run_gets_no_second_ones(tmp_path):
    with _daemons(tmp_path, *WAITS) as daemons:
        holders = f"{os.getpid()}, {daemons.process_id('process')} on "
        with pytest.raises(UserError, match=f"in use by process {holders}"):
            _daemons(tmp_path, *WAITS).__enter__()
    with _daemons(tmp_path, *WAITS):
        pass


def test_processes_that_a_killed_watcher_left_behind_are_named(tmp_path):
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(tmp_path / "output.txt")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout
    with watcher.stdout as printed:
        left = int(printed.readline())
    watcher.kill()
    watcher.wait()
    try:
        with pytest.raises(UserError, match=rf"in use by process {left} on "):
            _daemons(tmp_path, *WAITS).__enter__()
    finally:
        os.kill(left, signal.SIGKILL)
    _until(lambda: not _lives(left))
    with _daemons(tmp_path, *WAITS):
        pass


def test_what_processes_write_is_for_their_owner_alone(tmp_path):
    program = "import os; os.mkdir('made'); open('made/file', 'w').close()"
    made = tmp_path / "made"
    command = (sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {program}")
    with _daemons(tmp_path, *command):
        _until((made / "file").exists)
    assert made.stat().st_mode & 0o777 == 0o700
    assert (made / "file").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "output.txt").stat().st_mode & 0o777 == 0o600


def test_the_output_does_not_go_through_a_link(tmp_path):
    (tmp_path / "kit").mkdir()
    (tmp_path / "outside").write_text("own")
    (tmp_path / "kit/output.txt").symlink_to(tmp_path / "outside")
    with (
        pytest.raises(LinkFound, match=r"output\.txt is a link"),
        _daemons(tmp_path / "kit", "true"),
    ):
        pass
    assert (tmp_path / "outside").read_text() == "own"
