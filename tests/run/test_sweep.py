"""A sweep is a folder of runs that survives whatever happens to those who work on it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from firm.run import Run, Sweep, UserError, exit_on_user_error
from firm.run.sweep import Outcome, summarise

WORK = """
import os, signal, time
from pathlib import Path
from firm.run import Run

def work(place, settings):
    print("working on", settings["n"])
    print("round 1/2  ETA 0:00:05", flush=True)
    with Run.open(place, settings, resume="auto") as run:
        if settings["n"] < 0:
            raise ValueError(f"n must not be negative, got {settings['n']}.")
        run.log({"kind": "result", "n": settings["n"], "pid": os.getpid()})
        if settings["n"] == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        if settings["n"] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        while settings["n"] == 99 and not Path(place).with_suffix(".go").exists():
            time.sleep(0.05)
"""

SWEEPER = """
import sys
sys.path.insert(0, sys.argv[2])
import sweep_work
from firm.run import Sweep

if __name__ == "__main__":
    points = {"first": {"n": 1}, "second": {"n": 99}, "third": {"n": 3}}
    sweep = Sweep.open(sys.argv[1], {}, points, resume="auto")
    for outcome in sweep.work(sweep_work.work, points, num_workers=2):
        print(outcome.name, flush=True)
"""

POINTS = {"one": {"n": 1}, "two": {"n": 2}}


@contextmanager
def imported_work(folder: Path) -> Iterator[Callable[[str, dict], None]]:
    """A function that other processes can import."""
    (folder / "sweep_work.py").write_text(WORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "sweep_work", raising=False)
        import sweep_work  # pyright: ignore[reportMissingImports]

        yield sweep_work.work


@pytest.fixture
def work(tmp_path) -> Iterator[Callable[[str, dict], None]]:
    with imported_work(tmp_path) as function:
        yield function


def rows(sweep: Sweep, name: str) -> list[dict]:
    return Run(sweep.run_path(name)).rows()


def test_every_point_is_run_once_in_another_process_and_says_so(tmp_path, work):
    sweep = Sweep.open(tmp_path / "sweep", {"a": 1}, POINTS, resume=False)
    assert sweep.pending() == ["one", "two"]
    outcomes = list(sweep.work(work, POINTS, num_workers=2))
    assert sorted(outcome.name for outcome in outcomes) == ["one", "two"]
    assert not any(outcome.problem for outcome in outcomes)
    assert sweep.pending() == []
    for name, settings in POINTS.items():
        (row,) = rows(sweep, name)
        assert row["n"] == settings["n"]
        assert row["pid"] != os.getpid()
        assert f"working on {settings['n']}" in (sweep.path / "logs" / f"{name}.txt").read_text()
    assert list(sweep.work(work, POINTS)) == []


def test_the_rounds_of_a_running_point_are_told(tmp_path, work, monkeypatch):
    monkeypatch.setattr("firm.run.sweep.PROGRESS_SECONDS", 0.1)
    points = {"endless": {"n": 99}}
    sweep = Sweep.open(tmp_path / "sweep", {}, points, resume=False)
    told = []

    def tell(name, line):
        told.append((name, line))
        sweep.run_path(name).with_suffix(".go").touch()  # the point waits for it

    (outcome,) = sweep.work(work, points, on_progress=tell)
    assert outcome.problem is None
    assert told == [("endless", "round 1/2  ETA 0:00:05")]


@pytest.fixture(scope="module")
def eventful(tmp_path_factory) -> tuple[Sweep, list[Outcome]]:
    """A sweep of which one point failed, its idle process was killed, and others did two points."""
    points = {"bad": {"n": -1}, "held": {"n": 1}, "done": {"n": 2}}
    points |= {"terminated": {"n": 8}, "killed": {"n": 9}, "good": {"n": 3}}
    folder = tmp_path_factory.mktemp("sweeps")
    sweep = Sweep.open(folder / "sweep", {}, points, resume=False)
    with imported_work(folder) as work, Run.create(sweep.run_path("held"), {}):
        threads, others = threading.active_count(), multiprocessing.active_children()
        outcomes = sweep.work(work, points)
        first = next(outcomes)
        (idle,) = set(multiprocessing.active_children()) - set(others)
        idle.kill()
        deadline = time.monotonic() + 240
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.02)  # until its pool knows
        with Run.create(sweep.run_path("done"), {}):
            pass
        return sweep, [first, *outcomes]


def test_a_point_that_fails_leaves_the_others_to_go_on_and_is_named(eventful):
    sweep, outcomes = eventful
    assert [outcome.name for outcome in outcomes] == ["bad", "terminated", "killed", "good"]
    assert outcomes[1].problem == "its process was terminated"
    assert outcomes[2].problem == "its process was killed, perhaps for lack of memory"
    assert not sweep.is_done("bad")
    assert sweep.is_done("good")
    assert "Traceback" in (sweep.path / "logs" / "bad.txt").read_text()
    with pytest.raises(UserError, match=r"3 of 4 runs.*\n  bad: ValueError: n must not be neg"):
        summarise(outcomes, sweep.path)
    summarise([Outcome("good", 1.0)], sweep.path)
    alike = [Outcome(f"point_{index}", 1.0, "no such model") for index in range(12)]
    with pytest.raises(UserError, match=r"12 of 13 runs") as failure:
        summarise([*alike, Outcome("good", 1.0)], sweep.path)
    (line,) = str(failure.value).splitlines()[1:]
    assert line == "  point_0, point_1, point_2 and 9 more: no such model"


def test_a_point_that_another_process_is_at_is_left_to_it(eventful):
    sweep, outcomes = eventful
    assert "held" not in [outcome.name for outcome in outcomes]
    assert rows(sweep, "held") == []


def test_a_point_that_another_process_has_finished_meanwhile_is_not_run_again(eventful):
    sweep, outcomes = eventful
    assert "done" not in [outcome.name for outcome in outcomes]
    assert rows(sweep, "done") == []


def test_a_sweep_that_is_terminated_ends_its_workers_and_their_runs_say_so(tmp_path, work):
    sweep = Sweep.open(tmp_path / "sweep", {}, {"endless": {"n": 99}}, resume=False)
    log = sweep.run_path("endless") / "metrics.jsonl"

    def terminate_when_it_works() -> None:
        deadline = time.monotonic() + 240
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    helper = threading.Thread(target=terminate_when_it_works)
    helper.start()
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        list(sweep.work(work, {"endless": {"n": 99}}))
    helper.join()
    assert end.value.code == 143
    assert Run(sweep.run_path("endless")).record()["status"] == "interrupted"


WATCHED = """
import os, threading, time
from pathlib import Path

def work(place, settings):
    watcher = next(each for each in threading.enumerate() if each.name == "end with parent")
    status = Path(f"/proc/self/task/{watcher.native_id}/status")

    def num_switches():
        lines = status.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    time.sleep(0.5)  # on a busy machine the watcher may not wait yet
    before = num_switches()
    time.sleep(1.5)
    Path(settings["out"]).write_text(str(num_switches() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts switches between threads in /proc")
def test_a_worker_notices_the_end_of_its_parent_without_checking_at_intervals(tmp_path):
    out = tmp_path / "switches.txt"
    (tmp_path / "sweep_watched.py").write_text(WATCHED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        import sweep_watched  # pyright: ignore[reportMissingImports]

        points = {"one": {"out": str(out)}}
        sweep = Sweep.open(tmp_path / "sweep", {}, points, resume=False)
        (outcome,) = sweep.work(sweep_watched.work, points)
    assert outcome.problem is None
    assert out.read_text() == "0"


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_no_process_behind_and_goes_on_where_it_was(tmp_path):
    (tmp_path / "sweep_work.py").write_text(WORK)
    (tmp_path / "sweeper.py").write_text(SWEEPER)
    out = tmp_path / "sweep"
    command = [sys.executable, str(tmp_path / "sweeper.py"), str(out), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first == "first\n"
    log = out / "points/second/metrics.jsonl"
    deadline = time.monotonic() + 240
    while not log.exists() or not log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    worker = json.loads(log.read_text())["pid"]
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    (out / "points/second.go").touch()
    sweep = Sweep(out)
    assert "second" in sweep.pending()
    finished = (out / "points/first/metrics.jsonl").read_bytes()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert sweep.pending() == []
    assert (out / "points/first/metrics.jsonl").read_bytes() == finished


@pytest.mark.parametrize(
    ("config", "points", "resume", "message"),
    [
        ({"a": 2}, POINTS, True, r"has another configuration: a was 1, is 2"),
        ({"a": 1}, {"one": {"n": 1}}, True, r"points\.two\.n was 2, is 'absent'|was 2, is absent"),
        ({"a": 1}, POINTS, False, "there is already a sweep at"),
    ],
)
def test_a_sweep_is_not_mixed_with_another(tmp_path, config, points, resume, message):
    Sweep.open(tmp_path / "sweep", {"a": 1}, POINTS, resume=False)
    before = (tmp_path / "sweep/sweep.json").read_bytes()
    with pytest.raises(UserError, match=message):
        Sweep.open(tmp_path / "sweep", config, points, resume=resume)
    assert (tmp_path / "sweep/sweep.json").read_bytes() == before


def test_only_keys_without_a_finished_point_change(tmp_path):
    config = {"all": 1, "own": {"a": {"n": 1}, "a.b": {"n": 2}}}
    keys = {"one": ("own", "a"), "two": ("own", "a.b")}
    path, changes = tmp_path / "sweep", list[dict]()

    def opened(own: dict, all: int = 1) -> Sweep:
        before = json.loads((path / "sweep.json").read_text())["config"]
        return Sweep.open(
            path,
            {"all": all, "own": own},
            POINTS,
            resume=True,
            own_keys=keys,
            on_change=lambda: changes.append(before),
        )

    first = Sweep.open(path, config, POINTS, resume=False)
    assert opened({"a": {"n": 1}, "a.b": {"n": 2}}, all=2).id == first.id  # nothing is finished
    opened(config["own"])
    with Run.create(first.run_path("two"), {}):
        pass
    opened({"a": {"n": 5}, "a.b": {"n": 2}})
    assert [each["all"] for each in changes] == [1, 2, 1]
    before = (path / "sweep.json").read_bytes()
    for own, all, message in (
        ({"a": {"n": 5}, "a.b": {"n": 3}}, 1, r"own\.a\.b\.n was 2, is 3"),
        ({"a": {"n": 5}, "a.b": {"n": 2}}, 2, r"all was 1, is 2"),
    ):
        with pytest.raises(UserError, match=message):
            opened(own, all)
    assert (path / "sweep.json").read_bytes() == before
    assert json.loads(before)["config"]["own"]["a"] == {"n": 5}


def test_points_are_added_and_none_is_taken_away(tmp_path):
    path, keys = tmp_path / "sweep", {"one": ("own", "a"), "two": ("own", "a")}

    def opened(seeds: list[int], points: dict, own: dict | None = None, resume=True) -> Sweep:
        config = {"seeds": seeds, "own": own or {"a": 1}, "others": len(points)}
        more = {name: keys.get(name, ("own", "b")) for name in points}
        options = {"own_keys": more, "lists": {"seeds": 1, "others": 0}}
        return Sweep.open(path, config, points, resume=resume, **options)

    first = opened([0, 1], POINTS, resume=False)
    for name in POINTS:
        with Run.create(first.run_path(name), {}):
            pass
    for given in ({"seeds": [0, 1, 2]}, {"seeds": [0, 2, 1], "own": {"a": 1, "b": 2}}):
        points = {"new": {"n": 3}, **POINTS} | {name: {} for name in given.get("own", {})}
        assert opened(points=points, **given).id == first.id
        assert list(Sweep(path).manifest["points"]) == list(points)
        assert Sweep(path).pending() == [name for name in points if name not in POINTS]
    before = (path / "sweep.json").read_bytes()
    for given, points, message in (
        ([1, 0, 2], Sweep(path).manifest["points"], r"seeds\.0 was 0, is 1"),
        ([0, 2], {"one": {"n": 1}}, r"points\.\S+ was \S+, is absent"),
    ):
        with pytest.raises(UserError, match=message):
            opened(given, points, {"a": 1, "b": 2})
    assert (path / "sweep.json").read_bytes() == before


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, "auto"):
        with pytest.raises(UserError, match="contains no sweep"):
            Sweep.open(tmp_path, {}, POINTS, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="there is no study or sweep at"):
        Sweep(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "sweep.json is empty; restore it"),
        (b"{}", "sweep.json is malformed"),
        (b'{"a": 1,\n"b": "\xff"}', "sweep.json, line 2: the byte 0xff is not UTF-8; restore it"),
        (b"[" * 100_000, "sweep.json is nested too deeply; restore it"),
        (
            b'{"id": "a", "config": {}, "points": {"../../x": {}}}',
            "a point's name must be a valid folder name",
        ),
        (b'{"id": "a/b", "config": {}, "points": {}}', "id must be at most 64 letters"),
        (b'{"id": "a", "config": {}, "points": []}', "sweep.json is malformed"),
    ],
)
def test_a_manifest_of_a_stranger_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "sweep.json").write_bytes(content)
    with pytest.raises(UserError) as refused:
        Sweep(tmp_path)
    assert message in str(refused.value)


def test_an_empty_record_of_a_point_is_named(tmp_path):
    sweep = Sweep.open(tmp_path / "sweep", {}, POINTS, resume=False)
    sweep.run_path("one").mkdir(parents=True)
    (sweep.run_path("one") / "run.json").touch()
    with pytest.raises(UserError, match=r"points/one/run\.json is empty; restore the file"):
        sweep.pending()


def test_nobody_else_can_enter_a_new_sweep(tmp_path):
    before = os.umask(0)
    try:
        sweep = Sweep.open(tmp_path / "runs/sweep", {}, POINTS, resume=False)
    finally:
        os.umask(before)
    assert sweep.path.stat().st_mode & 0o777 == 0o700


def test_two_who_begin_the_same_sweep_share_it(tmp_path):
    one = Sweep.open(tmp_path / "sweep", {"a": 1}, POINTS, resume="auto")
    other = Sweep.open(tmp_path / "sweep", {"a": 1}, POINTS, resume="auto")
    assert one.id == other.id
    assert sorted(path.name for path in one.path.iterdir()) == ["sweep.json"]


PLACES = ["sweep.json", "study.yaml", "points", "points/one", "points/.one.draft", "logs"]
PLACES += ["logs/one.txt", "points/one/.lock", "points/one/metrics.jsonl"]


def put_link(sweep: Path, place: str, target: Path) -> None:
    (sweep / place).parent.mkdir(parents=True, exist_ok=True)
    (sweep / place).unlink(missing_ok=True)
    (sweep / place).symlink_to(target)


@pytest.mark.parametrize("place", PLACES)
def test_a_sweep_with_a_link_is_not_continued(tmp_path, place):
    sweep = Sweep.open(tmp_path / "sweep", {}, POINTS, resume=False)
    put_link(sweep.path, place, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for act in (
        lambda: Sweep.open(sweep.path, {}, POINTS, resume=True),
        lambda: Sweep(sweep.path),
    ):
        with pytest.raises(UserError, match=rf"sweep/{place} is a link, which may lead out of"):
            act()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[2:])
def test_a_link_that_comes_while_a_sweep_is_run_leads_nowhere(tmp_path, work, place):
    (tmp_path / "outside").mkdir()
    sweep = Sweep.open(tmp_path / "sweep", {}, POINTS, resume=False)
    put_link(sweep.path, place, tmp_path / "outside")
    try:
        outcomes = [outcome.problem or "" for outcome in sweep.work(work, POINTS)]
    except UserError as error:  # of a folder that concerns all points
        outcomes = [str(error)]
    assert any("is a link" in problem or "is not empty" in problem for problem in outcomes)
    assert os.listdir(tmp_path / "outside") == []
