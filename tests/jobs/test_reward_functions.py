"""Runs with reward functions of users, as they have them for TRL."""

import json
import shutil

import pytest
import torch

from firm.cli.main import COMMANDS
from firm.federation import RoundFailed
from tests import smoke
from tests.runs import read_adapter, read_rows

cli = COMMANDS["align"].run

SHORT = ("--strategy.num_local_steps", 1, "--estimator.num_epochs", 1, "--rounds", 1)

LEAVING = """
import sys

from reward_models import reward_model

calls = []

@reward_model("leaving")
def leaving(completions, *, after=0, **kwargs):
    calls.append(len(completions))
    if len(calls) > after:
        sys.exit(0)
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def leaving(tmp_path, new_plugins):
    """The rewards of a run, one of which ends the program after so many calls."""
    file = tmp_path / "leaving.py"
    file.write_text(LEAVING)

    def rewards(after: int) -> str:
        own = f"{{name: leaving, file: {file}, options: {{after: {after}}}}}"
        return f"{{brief: {{name: brevity}}, leaving: {own}}}"

    return rewards


def test_a_reward_that_exits_in_the_calibration_ends_the_run_in_one_line(
    leaving, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(smoke.ROOT)
    arguments = ["--config", smoke.SMOKE, "--rewards", leaving(0), "--out", tmp_path / "run"]
    with pytest.raises(SystemExit) as end:
        cli([*map(str, arguments)])
    assert end.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()  # after what tells that the file is run
    assert f"reward 'leaving' raised SystemExit: 0 ({tmp_path}/leaving.py:12); repair" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["local", "stacked"])
def test_a_reward_that_exits_in_training_fails_its_clients_and_leaves_its_traceback(
    engine, leaving, tmp_path
):
    options = (*SHORT, "--engine", engine, "--evaluation.num_validation_prompts", 0)
    with pytest.raises(RoundFailed, match=r"raised SystemExit: 0 \(.*leaving\.py:12\)"):
        smoke.run(*options, "--rewards", leaving(2), "--out", tmp_path / "run")
    assert 'leaving.py", line 12, in leaving' in (tmp_path / "run/error.txt").read_text()


JUDGE = """
import json

from reward_models import reward_model

@reward_model("judge")
def judge(completions, *, file, **kwargs):
    with open(file, "a") as calls:
        calls.write(f"{len(completions)}\\n")
    long = [float(len(text.split())) for text in completions]
    return {"long": long, "brief": [-value for value in long], "letters": [*map(len, completions)]}
"""


@pytest.fixture
def judged(tmp_path, new_plugins):
    """Rewards of a run, two of one function, and that of a group; and where calls are noted."""
    file, calls = tmp_path / "judge.py", tmp_path / "calls.txt"
    file.write_text(JUDGE)
    own = f"name: judge, file: {file}, options: {{file: {calls}}}"
    group = f"{{others: {{clients: [1], rewards: {{brief: {{{own}, output: letters}}}}}}}}"
    rewards = f"{{wordy: {{{own}, output: long}}, brief: {{{own}}}}}"
    return ("--rewards", rewards, "--groups", group), calls


@pytest.mark.slow
def test_one_function_serves_all_objectives_groups_and_engines_by_one_call(judged, tmp_path):
    options, calls = judged
    local = smoke.run(*SHORT, *options, "--out", tmp_path / "local")
    assert set(calls.read_text().split()) == {"32", "8"}  # calibration; evaluations and clients
    figures = read_rows(local, "run")[0]["calibration"]
    assert figures["wordy"]["mean"] == pytest.approx(-figures["brief"]["mean"])
    assert figures["others/brief"]["mean"] > figures["wordy"]["mean"]  # letters
    for row in read_rows(local, "client"):
        same = row["scores"]["wordy"] == pytest.approx(-row["scores"]["brief"])
        assert same == (row["client"] != "client_1")

    calls.unlink()
    stacked = smoke.run(*SHORT, *options, "--engine", "stacked", "--out", tmp_path / "stacked")
    assert calls.read_text().split().count("16") == 1  # both clients, both objectives
    expected = read_adapter(local)
    for name, values in read_adapter(stacked).items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-5)

    shutil.copytree(local, tmp_path / "resumed")
    more = (*SHORT, *options, "--rounds", 2)
    resumed = smoke.run(*more, "--out", tmp_path / "resumed", "--resume", "true")
    whole = smoke.run(*more, "--out", tmp_path / "whole")
    assert json.loads((resumed / "run.json").read_text())["status"] == "finished"
    assert all(
        torch.equal(v, read_adapter(whole)[name]) for name, v in read_adapter(resumed).items()
    )
