"""Folders that are resumed: a run's own configuration, or one line where there is no run."""

import pytest

from firm.base.errors import ProcessLost, RolloutError, RoundFailed
from firm.run import Run, Sweep, UserError, continued_later, exit_on_user_error
from firm.run.resuming import is_resumed
from firm.run.sweep import Outcome, summarise

CONFIG = {"seed": 1}


def test_a_run_that_is_to_continue_must_be_there(tmp_path):
    Run.create(tmp_path / "runs/first", CONFIG).close()
    assert is_resumed(tmp_path / "runs/first", True, "config.yaml")
    assert is_resumed(tmp_path / "runs/first", "auto", "config.yaml")
    assert not is_resumed(tmp_path / "runs/first", False, "config.yaml")
    assert not is_resumed(tmp_path / "runs/frist", "auto", "config.yaml")
    (tmp_path / "runs/firsts").mkdir()  # no run, and so not near
    for path, remedy in {
        "runs/frist": rf"did you mean {tmp_path}/runs/first\?",
        "runs/firsts": rf"did you mean {tmp_path}/runs/first\?",
        "nowhere/at/all": "pass the folder of a run.",
    }.items():
        for call in (Run.open, Run.check):
            with pytest.raises(
                UserError, match=rf"no run to resume at {tmp_path}/{path}; {remedy}"
            ):
                call(tmp_path / path, CONFIG, resume=True)
    assert [path.name for path in (tmp_path / "runs/firsts").iterdir()] == []


def test_a_sweep_that_is_to_continue_must_be_there(tmp_path):
    with pytest.raises(UserError, match="there is no run to resume at"):
        Sweep.open(tmp_path / "sweep", CONFIG, {}, resume=True)
    assert Sweep.open(tmp_path / "sweep", CONFIG, {}, resume="auto").manifest["config"] == CONFIG
    with pytest.raises(UserError, match=r"did you mean .*/sweep\?"):
        Sweep.open(tmp_path / "sweeps", CONFIG, {}, resume=True)


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_tells_how_a_run_continues(is_begun, tmp_path, capsys):
    folder = tmp_path / "a run"
    if is_begun:
        Run.create(folder, CONFIG).close()
    with pytest.raises(SystemExit) as end, exit_on_user_error(), continued_later(folder):
        raise KeyboardInterrupt
    assert end.value.code == 130
    line = f"; continue with: firm resume '{folder}'" if is_begun else ""
    assert capsys.readouterr().err == f"interrupted{line}\n"


def test_the_line_of_a_run_in_several_processes_starts_as_many(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    Run.create(folder, CONFIG).close()
    for nodes, rank, ends, told in (
        ("", "0", KeyboardInterrupt(), "interrupted"),
        ("", "0", ProcessLost("process 1 is gone"), "error: process 1 is gone"),
        (" --nnodes 2", "0", KeyboardInterrupt(), "interrupted"),
        ("", "1", KeyboardInterrupt(), ""),  # the first process says it
    ):
        sizes = {"WORLD_SIZE": "8" if nodes else "4", "LOCAL_WORLD_SIZE": "4", "RANK": rank}
        for name, value in sizes.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit), exit_on_user_error(), continued_later(folder):
            raise ends
        line = f"; continue with: torchrun{nodes} --nproc_per_node 4 -m firm resume {folder}"
        printed = capsys.readouterr().err
        assert printed.startswith(f"{told}{line}") if told else printed == ""


def test_a_failed_round_tells_how_the_run_continues(tmp_path, capsys):
    Run.create(tmp_path / "run", CONFIG).close()
    with pytest.raises(SystemExit), exit_on_user_error(), continued_later(tmp_path / "run"):
        raise RoundFailed("no client finished round 3", number=3)
    told = capsys.readouterr().err
    assert told.startswith("error: no client finished round 3; repair the cause, then resume from ")
    assert f"round 2; continue with: firm resume {tmp_path / 'run'}" in told
    with pytest.raises(SystemExit) as end, exit_on_user_error(), continued_later(tmp_path / "run"):
        raise RolloutError("no rollout server is left.")
    told = capsys.readouterr().err
    assert told.startswith(
        f"error: no rollout server is left; continue with: firm resume {tmp_path}"
    )
    assert end.value.code == 2


def test_the_line_of_an_interrupt_allows_the_code_that_the_run_had(tmp_path, capsys):
    folder = tmp_path / "run"
    Run.create(folder, {"rewards": {"mine": {"file": "mine.py"}, "shipped": {"file": ""}}}).close()
    with pytest.raises(SystemExit), exit_on_user_error(), continued_later(folder):
        raise KeyboardInterrupt
    assert f"continue with: firm resume {folder} --allow_code\n" in capsys.readouterr().err


def test_what_a_reward_function_ends_tells_how_the_run_continues(tmp_path, capsys):
    Run.create(tmp_path / "run", CONFIG).close()
    for error, is_told in ((ValueError("the judge is down."), True), (UserError("no."), False)):
        with pytest.raises(SystemExit), exit_on_user_error(), continued_later(tmp_path / "run"):
            raise error
        told = capsys.readouterr().err
        assert ("; continue with: firm resume" in told) == is_told


def test_the_line_of_a_study_allows_the_code_that_it_had(tmp_path):
    (tmp_path / "study.yaml").write_text("overrides: { rewards: { mine: { file: mine.py } } }")
    with pytest.raises(UserError, match=f"`firm resume {tmp_path} --allow_code`"):
        summarise([Outcome("first", 1.0, "the judge is down")], tmp_path)
