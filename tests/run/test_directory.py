import logging
import os
import random
from pathlib import Path

import pytest
import torch

from firm.run import Run, UserError, exit_on_user_error

CONFIG = {"seed": 1, "strategy": {"name": "firm", "beta": 0.01}, "targets": ["q", "v"], "out": "a"}


def test_a_new_run_states_what_was_asked_for_and_by_whom(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs" / "a", CONFIG)
    record = run.record()
    assert record["status"] == "running"
    assert record["versions"]["torch"] == torch.__version__
    assert {"started", "command", "commit"} <= set(record)
    assert (run.path / "config.yaml").read_text().startswith("seed: 1\nstrategy:\n")
    assert os.listdir(tmp_path / "runs") == ["a"]


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    Run.create(path, CONFIG)
    before = {file: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UserError, match=r"exists and is not empty; continue it with --resume true"):
        Run.create(path, CONFIG)
    assert {file: file.read_bytes() for file in path.iterdir()} == before


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_and_not_logged(tmp_path: Path, value: float) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    row = {"kind": "client", "round": 3, "client": "client_1", "reward": {"helpful": [1.0, value]}}
    with pytest.raises(
        ValueError, match=r"reward\.helpful\.1 is .* kind client, round 3, client cl"
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
    run = Run.resume(run.path, CONFIG)
    run.save_checkpoint(3, {"a": 3}, keep_last=1)
    assert Run(run.path).latest_checkpoint() == (3, {"a": 3})


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
    resumed = Run.resume(run.path, CONFIG)
    assert resumed.rows() == kept
    assert resumed.samples() == [{"round": 0}]
    resumed.log({"kind": "round", "round": 2})
    assert resumed.rows() == [*kept, {"kind": "round", "round": 2}]
    assert len(resumed.record()["resumed"]) == 1


def test_without_a_checkpoint_a_resumed_run_starts_over(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "a", CONFIG, resume=True)  # nothing there: a new run
    run.log({"kind": "run"})
    resumed = Run.open(tmp_path / "a", CONFIG, resume=True)
    assert resumed.rows() == []
    assert resumed.latest_checkpoint() is None
    with pytest.raises(UserError, match="exists and is not empty"):
        Run.open(tmp_path / "a", CONFIG, resume=False)


def test_another_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    path = Run.create(tmp_path / "a", CONFIG).path
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


def test_a_log_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", CONFIG)
    run.log({"kind": "run"})
    run.save_checkpoint(1, {})
    (run.path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has 0 bytes, its checkpoint was written after 16"):
        Run.resume(run.path, CONFIG)


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
run = Run.open(argument, {"seed": 1}, resume=True)
number, state = run.latest_checkpoint() or (0, {"sum": 0})
number += 1
state = {"sum": state["sum"] + number, "tensor": torch.full((2_000,), number)}
run.log({"kind": "round", "round": number, "padding": "x" * 2_000})
run.log_samples([{"round": number}])
run.save_checkpoint(number, state, keep_last=2)
"""


def assert_whole(path: Path) -> int:
    """Round of a run that is as if it had never been killed."""
    run = Run.open(path, {"seed": 1}, resume=True)
    number, state = run.latest_checkpoint() or (0, {"sum": 0})
    assert state["sum"] == number * (number + 1) // 2
    assert [row["round"] for row in run.rows()] == list(range(1, number + 1))
    assert [row["round"] for row in run.samples()] == list(range(1, number + 1))
    assert run.record()["status"] == "running"
    return number


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
    for _ in range(6):
        kill_while(for_ever, str(tmp_path / "run"), delays.uniform(0.01, 0.3))
        rounds.append(assert_whole(tmp_path / "run"))
    assert rounds == sorted(rounds)
    assert rounds[-1] > 0, "no process got as far as one checkpoint: nothing was tested"
