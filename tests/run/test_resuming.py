"""Folders that are resumed: a run's own configuration, or one line where there is no run."""

import pytest

from firm.run import Run, Sweep, UserError, continued_later, exit_on_user_error, to_yaml
from firm.run.resuming import STUDY_NAME, check_out, is_resumed, study_to_resume

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


def test_a_study_continues_by_its_own_configuration(tmp_path):
    with pytest.raises(UserError, match="there is no run to resume"):
        study_to_resume(tmp_path)
    (tmp_path / STUDY_NAME).write_text(to_yaml(CONFIG))
    assert study_to_resume(tmp_path) == CONFIG


def test_a_folder_must_be_named():
    check_out(False, None)
    for resume in (True, "auto"):
        with pytest.raises(ValueError, match="resume needs the run's folder"):
            check_out(resume, None)


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


def test_the_line_of_an_interrupt_allows_the_code_that_the_run_had(tmp_path, capsys):
    folder = tmp_path / "run"
    Run.create(folder, {"rewards": {"mine": {"file": "mine.py"}, "shipped": {"file": ""}}}).close()
    with pytest.raises(SystemExit), exit_on_user_error(), continued_later(folder):
        raise KeyboardInterrupt
    assert f"continue with: firm resume {folder} --allow_code\n" in capsys.readouterr().err
