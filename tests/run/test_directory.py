import importlib.metadata
import logging
import os
import random
import time
from pathlib import Path

import pytest
import torch

from firm.run import Run, UserError, exit_on_user_error
from firm.run.directory import CheckpointConfig


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


CONFIG = {"seed": 1, "strategy": {"name": "firm", "beta": 0.01}, "targets": ["q", "v"], "out": "a"}


def test_a_new_run_states_what_was_asked_for_and_by_whom(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs" / "a", CONFIG)
    record = run.record()
    assert record["status"] == "running"
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"started", "command", "commit"} <= set(record)
    assert (run.path / "config.yaml").read_text().startswith("seed: 1\nstrategy:\n")
    assert os.listdir(tmp_path / "runs") == ["a"]


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    Run.create(path, CONFIG).close()
    before = contents(path)
    with pytest.raises(
        UserError, match=r"exists and is not empty; continue it with `firm resume /"
    ):
        Run.create(path, {**CONFIG, "resume": False})
    with pytest.raises(UserError, match=r"exists and is not empty; choose another path\.$"):
        Run.create(path, CONFIG)
    assert contents(path) == before


def test_a_run_may_be_beside_the_current_folder_but_not_be_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Run.create("../runs/a", CONFIG).close()
    assert (tmp_path / "runs/a/run.json").exists()
    with pytest.raises(UserError, match="is the current folder, which a run replaces"):
        Run.check(".", CONFIG, resume=False)


def test_rows_come_back_in_order_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    rows = [{"kind": "run", "text": "Zürich\u2028\n"}, {"kind": "round", "round": 1, "kl": None}]
    assert run.rows() == []
    for row in rows:
        run.log(row)
    run.log_samples([{"round": 0, "prompt": "p"}, {"round": 0, "prompt": "q"}])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "rou')
    assert run.rows() == rows
    assert run.samples() == [{"round": 0, "prompt": "p"}, {"round": 0, "prompt": "q"}]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    (run.path / "metrics.jsonl").write_text('{"kind": "run"}\noops\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        run.rows()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "line 2 is empty"),
        (b'{"text": "\xe9"}', "line 2: the byte 0xe9 is not UTF-8"),
        (b"5", "line 2 must be a JSON object, got int"),
    ],
)
def test_a_line_that_is_no_row_is_named_with_what_to_do(tmp_path: Path, line, message) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    for name, read in (("metrics.jsonl", run.rows), ("samples.jsonl", run.samples)):
        (run.path / name).write_bytes(b'{"kind": "run"}\n' + line + b"\n")
        with pytest.raises(UserError) as refused:
            read()
        assert str(refused.value) == (
            f"{run.path / name}, {message}; restore the file from a backup, or start a new run."
        )


def test_a_line_that_nothing_can_read_is_left_out_as_no_row(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    run.log({"kind": "run"})
    with (run.path / "metrics.jsonl").open("ab") as log:
        log.write(b'{"kind": ' + b"[" * 100_000 + b"\n")
    rows, left_out = run.checked_rows()
    assert [row["kind"] for row in rows] == ["run"]
    assert len(left_out) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"", "run.json is empty; restore"),
        ("run.json", b"[1]", "run.json must be a JSON object, got list; restore"),
        ("run.json", b'{\n"status": "\xff"}', "run.json, line 2: the byte 0xff is not UTF-8; rest"),
        ("config.yaml", b"seed: 1\nout: \xff", "config.yaml, line 2: the byte 0xff is not UTF-8"),
        ("config.yaml", b"seed: 1\nout: [", "config.yaml is malformed YAML, line 2: "),
    ],
)
def test_a_damaged_file_of_a_run_is_named_before_anything_changes(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    run.log({"kind": "run"})  # cut off by whoever takes the run up
    run.close()
    (run.path / name).write_bytes(content)
    before = contents(run.path)
    for open_again in (Run.check, Run.open):
        with pytest.raises(UserError) as refused:
            open_again(run.path, CONFIG, resume=True)
        assert message in str(refused.value)
        assert contents(run.path) == before


def test_a_stray_file_among_the_checkpoints_stops_nothing(tmp_path: Path, caplog) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    folder = run.path / "checkpoints"
    run.save_checkpoint(1, {"a": 1}, keep_last=1)
    for name in (".DS_Store", ".nfs0001", "round_0000"):
        (folder / name).touch()
    (folder / ".round_0001.draft").mkdir()
    run.save_checkpoint(2, {"a": 2}, keep_last=1)
    assert {path.name for path in folder.iterdir()} == {
        ".DS_Store",
        ".nfs0001",
        "round_0000",
        "round_0002",
    }
    assert run.latest_checkpoint() == (2, {"a": 2})
    assert "round_0000 cannot be removed: Not a directory" in caplog.text


def test_nobody_else_can_enter_a_run_or_its_checkpoints(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = Run.create(tmp_path / "runs" / "a", CONFIG)
        run.save_checkpoint(1, {"a": 1})
    finally:
        os.umask(before)
    for folder in (run.path, run.path / "checkpoints"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_and_not_logged(tmp_path: Path, value: float) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    row = {"kind": "client", "round": 3, "client": "client_1", "rewards": {"helpful": [1.0, value]}}
    with pytest.raises(
        ValueError, match=r"rewards\.helpful\.1 is .* kind client, round 3, client cl"
    ):
        run.log(row)
    assert run.rows() == []


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path, caplog) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    assert run.latest_checkpoint() is None
    for number in (1, 2, 10):
        run.save_checkpoint(number, {"a": torch.tensor(number)})
    (run.path / "checkpoints" / "round_0010" / "tensors.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        checkpoint = Run(run.path).latest_checkpoint()
    assert checkpoint == (2, {"a": torch.tensor(2)})
    [warning] = caplog.messages
    assert "round_0010" in warning


def test_only_the_last_checkpoints_stay(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    folder = run.path / "checkpoints"
    for number in range(1, 6):
        run.save_checkpoint(number, {})
    assert sorted(os.listdir(folder)) == ["round_0003", "round_0004", "round_0005"]
    (folder / ".round_0009.draft").mkdir()
    run.save_checkpoint(6, {}, keep_last=1)
    assert os.listdir(folder) == ["round_0006"]


def test_broken_newer_checkpoints_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    for number in (1, 2, 3, 4):
        run.save_checkpoint(number, {"a": number})
    for number in (3, 4):
        (run.path / "checkpoints" / f"round_000{number}" / "state.json").unlink()
    run.close()
    run = Run.resume(run.path, CONFIG)
    run.save_checkpoint(3, {"a": 3}, keep_last=1)
    assert Run(run.path).latest_checkpoint() == (3, {"a": 3})


def rounds_of(run: Run) -> list[int]:
    return sorted(int(name.removeprefix("round_")) for name in os.listdir(run.path / "checkpoints"))


def test_the_best_checkpoint_stays_beside_the_last_ones(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    for number, quality in enumerate([0.1, 0.5, 0.5, 0.3, 0.4]):
        run.save_checkpoint(number, {"a": number}, keep_last=2, quality=quality)
    assert rounds_of(run) == [1, 3, 4]  # of equal qualities the earlier
    assert run.latest_checkpoint() == (4, {"a": 4})
    run.save_checkpoint(5, {"a": 5}, keep_last=2, quality=0.6)
    assert rounds_of(run) == [1, 4, 5]  # the newest round may be undone
    run.save_checkpoint(6, {"a": 6}, keep_last=2, quality=0.2)
    assert rounds_of(run) == [5, 6]
    run.save_checkpoint(7, {"a": 7}, keep_last=1, quality=0.9)
    run.forget_quality(7)
    run.save_checkpoint(8, {"a": 8}, keep_last=1, quality=0.1)
    assert run.best_checkpoint() == (5, {"a": 5})


def test_the_best_checkpoint_survives_a_resume(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    for number, quality in enumerate([0.1, 0.5, 0.2, 0.3]):
        run.save_checkpoint(number, {"a": number}, keep_last=1, quality=quality)
    run.close()
    run = Run.resume(run.path, CONFIG)
    assert rounds_of(run) == [1, 3]
    run.save_checkpoint(4, {}, keep_last=1, quality=0.4)
    assert rounds_of(run) == [1, 4]
    run.save_checkpoint(5, {}, keep_last=1)  # not measured
    assert rounds_of(run) == [1, 5]


def test_a_forgotten_quality_makes_another_checkpoint_the_best(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    assert run.best_checkpoint() is None
    for number, quality in enumerate([0.1, 0.5, 0.9]):
        run.save_checkpoint(number, {"a": number}, quality=quality)
    assert run.best_checkpoint() == (2, {"a": 2})
    run.forget_quality(2)
    assert run.best_checkpoint() == (1, {"a": 1})
    run.save_checkpoint(3, {"a": 3})
    run.close()
    with Run.resume(run.path, CONFIG) as resumed:
        assert resumed.best_checkpoint() == (1, {"a": 1})


def test_a_round_that_is_saved_again_has_its_new_quality(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    run.save_checkpoint(1, {}, quality=0.9)
    run.save_checkpoint(2, {}, quality=0.5)
    run.save_checkpoint(1, {}, quality=0.1)
    run.save_checkpoint(3, {}, keep_last=1, quality=0.2)
    assert rounds_of(run) == [2, 3]


@pytest.mark.parametrize("quality", [float("nan"), float("inf")])
def test_a_quality_that_is_not_finite_is_refused(tmp_path: Path, quality: float) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    with pytest.raises(ValueError, match="the quality of round 1 must be finite, got"):
        run.save_checkpoint(1, {}, quality=quality)
    assert run.latest_checkpoint() is None


def test_a_run_keeps_at_least_its_last_checkpoint() -> None:
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        CheckpointConfig(keep_last=0)


def test_resuming_cuts_off_what_was_logged_after_the_checkpoint(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    kept = [{"kind": "run"}, {"kind": "round", "round": 1}]
    for row in kept:
        run.log(row)
    run.log_samples([{"round": 0}])
    run.save_checkpoint(1, {"a": 1})
    run.log({"kind": "evaluation", "round": 1, "split": "test"})
    run.log_samples([{"round": 1}])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    run.close()
    resumed = Run.resume(run.path, CONFIG)
    assert resumed.rows() == kept
    assert resumed.samples() == [{"round": 0}]
    resumed.log({"kind": "round", "round": 2})
    assert resumed.rows() == [*kept, {"kind": "round", "round": 2}]
    assert len(resumed.record()["resumed"]) == 1


def test_without_a_checkpoint_a_resumed_run_starts_over(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "a", CONFIG, resume="auto")  # nothing there: a new run
    run.log({"kind": "run"})
    run.close()
    resumed = Run.open(tmp_path / "a", CONFIG, resume="auto")
    assert resumed.rows() == []
    assert resumed.latest_checkpoint() is None
    resumed.close()
    with pytest.raises(UserError, match="exists and is not empty"):
        Run.open(tmp_path / "a", CONFIG, resume=False)


def test_another_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    run.close()
    path = run.path
    other = {**CONFIG, "strategy": {"name": "firm", "beta": 0.5, "new": 1}, "targets": ["q"]}
    with pytest.raises(
        UserError,
        match=r"strategy\.beta was 0\.01, is 0\.5, targets\.1 was 'v', is absent, "
        r"strategy\.new was absent, is 1; resume with",
    ):
        Run.resume(path, other)
    ignored = {**CONFIG, "out": "b", "strategy": {"name": "fedavg"}}
    with pytest.raises(UserError, match=r"strategy\.name"):
        Run.resume(path, ignored, ignore=["out", "strat"])
    Run.resume(path, ignored, ignore=["out", "strategy"])
    with pytest.raises(UserError, match="there is no run to resume"):
        Run.resume(tmp_path / "b", CONFIG)


def test_keys_to_renew_may_differ_and_the_stored_configuration_follows(tmp_path: Path) -> None:
    Run.create(tmp_path / "a", CONFIG).close()
    with pytest.raises(UserError, match="seed was 1, is 2"):
        Run.resume(tmp_path / "a", {**CONFIG, "seed": 2}, renew=["targets"])
    new = {**CONFIG, "seed": 2, "out": "b"}
    run = Run.open(tmp_path / "a", new, resume=True, ignore=["out"], renew=["seed"])
    assert run.settings() == {**CONFIG, "seed": 2}


def test_how_a_run_ended_is_noted(tmp_path: Path) -> None:
    with Run.create(tmp_path / "a", CONFIG) as run:
        pass
    assert run.record()["status"] == "finished"
    with pytest.raises(KeyboardInterrupt), Run.create(tmp_path / "b", CONFIG) as run:
        raise KeyboardInterrupt
    assert run.record()["status"] == "interrupted"
    with (
        pytest.raises(SystemExit),
        exit_on_user_error(),
        Run.create(tmp_path / "c", CONFIG) as run,
    ):
        raise ValueError("a reward is NaN.")
    assert run.record()["status"] == "failed"
    assert "ValueError: a reward is NaN." in (run.path / "error.txt").read_text()


ROUND = """
run = Run.open(argument, {"seed": 1}, resume="auto")
number, state = run.latest_checkpoint() or (0, {"sum": 0})
number += 1
state = {"sum": state["sum"] + number, "tensor": torch.full((2_000,), number)}
run.log({"kind": "round", "round": number, "padding": "x" * 2_000})
run.log_samples([{"round": number}])
run.save_checkpoint(number, state, keep_last=2)
run.close()
"""


def opened(path: Path) -> Run:
    """The run, once its lock is free: a child that it was forking outlives it until its exec."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return Run.open(path, {"seed": 1}, resume="auto")
        except UserError as error:
            if "is in use by process" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def assert_whole(path: Path) -> int:
    """Round of a run that is as if it had never been killed."""
    run = opened(path)
    run.close()
    number, state = run.latest_checkpoint() or (0, {"sum": 0})
    assert state["sum"] == number * (number + 1) // 2
    assert [row["round"] for row in run.rows()] == list(range(1, number + 1))
    assert [row["round"] for row in run.samples()] == list(range(1, number + 1))
    assert run.record()["status"] == "running"
    return number


@pytest.mark.slow
def test_a_run_killed_at_any_moment_is_resumed_as_if_it_had_not_been(
    tmp_path: Path, kill_at_every_step
) -> None:
    path = tmp_path / "run"
    rounds = [assert_whole(path) for _ in kill_at_every_step(ROUND, str(path))]
    assert rounds == sorted(rounds)
    assert len(rounds) > 20, "a round was over before it could be killed: nothing was tested"
    assert assert_whole(path) == rounds[-1] + 1


def test_a_run_killed_at_random_times_is_resumed_as_if_it_had_not_been(
    tmp_path: Path, kill_while
) -> None:
    delays = random.Random(1)
    for_ever = "while True:" + ROUND.replace("\n", "\n    ")
    rounds = [0]
    while len(rounds) < 7 or not rounds[-1]:  # on a busy machine, until there is a checkpoint
        longest = 0.3 * 2 ** (len(rounds) // 7)
        assert longest < 60, "no process got as far as one checkpoint: nothing was tested"
        kill_while(for_ever, str(tmp_path / "run"), delays.uniform(0.01, longest))
        rounds.append(assert_whole(tmp_path / "run"))
    assert rounds == sorted(rounds)


def test_a_run_is_checked_without_a_trace_before_it_is_opened(tmp_path: Path) -> None:
    Run.check(tmp_path / "new/a", CONFIG, resume=False)
    Run.check(tmp_path / "new/a", CONFIG, resume="auto")
    assert os.listdir(tmp_path) == []
    run = Run.create(tmp_path / "a", CONFIG)
    run.save_checkpoint(1, {})
    before = contents(run.path)
    with pytest.raises(UserError, match="is in use by process"):
        Run.check(run.path, CONFIG, resume=True)
    run.close()
    Run.check(run.path, CONFIG, resume=True)
    Run.check(run.path, {**CONFIG, "out": "b"}, resume=True, ignore=["out"])
    with pytest.raises(UserError, match="exists and is not empty"):
        Run.check(run.path, CONFIG, resume=False)
    with pytest.raises(UserError, match="seed was 1, is 2"):
        Run.check(run.path, {**CONFIG, "seed": 2}, resume=True)
    assert contents(run.path) == before
    (run.path / "checkpoints/round_0001/state.json").unlink()
    with pytest.raises(UserError, match="none of its 1 checkpoints is intact"):
        Run.check(run.path, CONFIG, resume=True)


@pytest.mark.parametrize("method", ["check", "open"])
@pytest.mark.parametrize("parent", ["a regular file", "/proc"])
def test_a_place_that_cannot_be_written_to_is_named(
    tmp_path: Path, parent: str, method: str
) -> None:
    (tmp_path / "a regular file").write_text("")
    path = tmp_path / parent / "runs/a"  # an absolute parent outranks tmp_path
    with pytest.raises(
        UserError, match=rf"the run directory {path} cannot be written .*; .* choose another path"
    ):
        getattr(Run, method)(path, CONFIG, resume=False)
    assert os.listdir(tmp_path) == ["a regular file"]


FULL_DISK = """
import resource
run = Run.open(argument, {"seed": 1}, resume="auto")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.stderr = open(argument + ".log", "w")
from firm.run import exit_on_user_error
try:
    with exit_on_user_error(), run:
        number, state = run.latest_checkpoint() or (0, {})
        run.log({"kind": "round", "round": number + 1})
        run.save_checkpoint(number + 1, {"tensor": torch.zeros(50_000)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        for _ in range(LINES):
            run.log({"kind": "round", "round": number + 2, "padding": "x" * 500})
        run.save_checkpoint(number + 2, {"tensor": torch.ones(50_000)})
except SystemExit as end:
    sys.stderr.flush()
    os._exit(end.code)
"""


@pytest.mark.parametrize(
    ("num_lines", "message"),
    [
        (1, "error: the checkpoint of round 2 in {path}/checkpoints cannot be written (File too "
            "large); older checkpoints are intact: free space on the disk, then "
            "continue with `firm resume`."),
        (99, "error: {path}/metrics.jsonl cannot be written (File too large); "
             "free space on the disk, then continue with `firm resume`."),
    ],
)  # fmt: skip
def test_a_full_disk_ends_in_one_line_and_the_run_resumes(
    tmp_path: Path, start_and_wait, num_lines: int, message: str
) -> None:
    path = tmp_path / "a"
    status = start_and_wait(FULL_DISK.replace("LINES", str(num_lines)), str(path))
    assert os.waitstatus_to_exitcode(status) == 2
    assert Path(f"{path}.log").read_text() == message.format(path=path) + "\n"
    assert os.listdir(path / "checkpoints") == ["round_0001"]
    run = Run.resume(path, {"seed": 1})
    assert run.rows() == [{"kind": "round", "round": 1}]
    run.save_checkpoint(2, {"tensor": torch.ones(50_000)})
    number, state = run.latest_checkpoint()
    assert number == 2
    assert torch.equal(state["tensor"], torch.ones(50_000))


def test_a_run_that_fails_on_a_full_disk_says_why_and_not_that_it_could_not_say(
    tmp_path: Path, monkeypatch
) -> None:
    def no_room(*_):
        raise OSError(28, "No space left on device")

    run = Run.create(tmp_path / "a", CONFIG)

    def fail() -> None:
        with run:
            monkeypatch.setattr("os.fsync", no_room)
            raise ValueError("a reward is NaN.")

    with pytest.raises(ValueError, match=r"a reward is NaN\."):
        fail()
    assert sorted(os.listdir(run.path)) == [".lock", "config.yaml", "run.json"]
    assert run.record()["status"] == "running"
