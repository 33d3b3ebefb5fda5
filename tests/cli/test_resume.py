"""A run that was interrupted continues by the line that it left, and by no other."""

import io
import json
import shlex
import shutil
from contextlib import redirect_stderr

import pytest

from firm.cli.main import main
from firm.federation.strategies import STRATEGIES
from firm.run import Run
from tests.runs import read_rows
from tests.smoke import ROOT, SMOKE


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of two rounds that Ctrl-C ends in its second, a copy of it, and the words it leaves.

    No test changes the copy.
    """
    strategy, words = STRATEGIES["firm"], io.StringIO()

    def stops(state, *arguments):
        if state.round == 1:
            raise KeyboardInterrupt
        return strategy(state, *arguments)

    path = tmp_path_factory.mktemp("ended") / "run"
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(words):
        patch.chdir(ROOT)
        patch.setitem(STRATEGIES, "firm", stops)
        with pytest.raises(SystemExit) as end:
            main(["align", "--config", str(SMOKE), "--seed", "3", "--out", str(path)])
    assert end.value.code == 130
    return path, shutil.copytree(path, path.parent / "copy"), words.getvalue()


@pytest.fixture
def interrupted(ended, tmp_path):
    """The interrupted run, for one test alone."""
    _, copy, _ = ended
    return shutil.copytree(copy, tmp_path / "run")


def test_ctrl_c_prints_the_line_that_continues_the_run(ended):
    path, _, words = ended
    last = words.splitlines()[-1]  # after those on what takes long
    line = last.removeprefix("interrupted; continue with: ")
    assert line == f"firm resume {path}"
    main(shlex.split(line)[1:])
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    assert [row["round"] for row in read_rows(path, "round")] == [1, 2]
    assert Run(path).settings()["seed"] == 3  # its own, no default


def test_keys_are_laid_over_the_runs_own_configuration(interrupted, refusal):
    line = refusal(main, ["align", "--resume", interrupted, "--seed", "4"])
    assert f"the run at {interrupted} has another configuration: seed was 3, is 4" in line
    main(["align", "--resume", str(interrupted), "--rounds", "1"])
    assert [row["round"] for row in read_rows(interrupted, "round")] == [1]


def test_a_folder_that_is_no_run_is_an_error_and_stays_as_it_is(interrupted, tmp_path, refusal):
    path = interrupted
    (tmp_path / "rum").mkdir()
    given = ["--config", SMOKE]
    for arguments, message in {
        ("--resume", tmp_path / "rum"): f"no run to resume at {tmp_path}/rum; did you mean {path}?",
        ("--resume", tmp_path / "nowhere"): f"there is no run to resume at {tmp_path}/nowhere",
        ("--resume", SMOKE): f"there is no run to resume at {SMOKE}",
        (*given, "--out", tmp_path / "rum", "--resume"): f"did you mean {path}?",
        (*given, "--resume"): "resume needs the run's folder, got True without `out`",
        (*given, "--resume", path, "--out", path): "--out must not be given with --resume",
    }.items():
        assert message in refusal(main, ["align", *arguments])
    assert list((tmp_path / "rum").iterdir()) == []
    for command in ("study", "sweep", "classic"):
        line = refusal(main, [command, "--resume", path])
        assert f"there is no run to resume at {path}" in line


def test_auto_begins_a_run_and_continues_it(tmp_path, capsys):
    arguments = ["align", "--config", str(SMOKE), "--out", str(tmp_path / "run")]
    main([*arguments, "--resume", "auto", "--rounds", "1"])
    main([*arguments, "--resume", "auto"])
    assert [row["round"] for row in read_rows(tmp_path / "run", "round")] == [1, 2]


def test_a_folder_tells_whether_it_is_a_run_a_study_or_a_sweep(tmp_path, refusal):
    for content, message in {
        "algorithms: {}": "algorithms must have at least one entry",
        "settings: {}": "settings must have at least one entry",
        "methods: {}": "methods must have at least one entry",
    }.items():
        (tmp_path / "study.yaml").write_text(content)
        assert message in refusal(main, ["resume", tmp_path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "study.yaml is not a study's configuration; restore the file"),
        ("- a", "study.yaml is not a study's configuration; restore the file"),
        ("a: [1", "malformed YAML"),
    ],
)
def test_a_damaged_study_ends_in_one_line(tmp_path, refusal, content, message):
    (tmp_path / "study.yaml").write_text(content)
    assert message in refusal(main, ["resume", tmp_path])


def test_resume_starts_nothing_without_a_folder(tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "first, got nothing" in refusal(main, ["resume"])
    assert "first, got --rounds" in refusal(main, ["resume", "--rounds", "3"])
    assert list(tmp_path.iterdir()) == []
