"""Runs with reward functions of users, as they have them for TRL."""

import pytest

from firm.cli.align import cli
from firm.federation import RoundFailed
from tests import smoke

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
