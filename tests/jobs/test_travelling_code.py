"""Python files that a run's folder or a configuration names: who runs them, and who says so."""

import shutil
from pathlib import Path

import pytest
import yaml

from firm.cli.main import COMMANDS, main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import parse
from tests import smoke

REWARD = """
from pathlib import Path
from reward_models import reward_model

Path({proof!r}).touch()


@reward_model("travelling")
def travelling(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""
FLAG = "--allow_code true"


@pytest.fixture
def proof(tmp_path):
    """A file that is there once the stranger's code has run."""
    return tmp_path / "proof"


@pytest.fixture
def code(tmp_path, proof, new_plugins):
    """The stranger's Python file."""
    file = tmp_path / "theirs.py"
    file.write_text(REWARD.format(proof=str(proof)))
    return file


def received(run, place, code, section):
    """Returns a copy of a run whose configuration names the file for one of its scores."""
    folder = Path(shutil.copytree(run, place))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    scores = settings["evaluation"]["metrics"] if section == "metrics" else settings["rewards"]
    name = next(iter(settings["rewards"])) if section == "rewards" else "theirs"
    old = settings["rewards"][next(iter(settings["rewards"]))]
    scores[name] = {**old, "name": "travelling", "path": "", "file": str(code)}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


CASES = {
    "chat": ("chat", "--run", "rewards"),
    "evaluate": ("evaluate", "--runs", "rewards"),
    "evaluate, a further score": ("evaluate", "--runs", "metrics"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_runs_folder_gets_no_code_to_run_without_the_flag(
    case, run, code, proof, tmp_path, refusal
):
    command, key, section = CASES[case]
    folder = received(run, tmp_path / "run", code, section)
    line = refusal(COMMANDS[command].run, [key, f"[{folder}]" if key == "--runs" else str(folder)])
    assert str(folder) in line
    assert str(code) in line
    assert FLAG in line
    assert not proof.exists()


@pytest.mark.slow
def test_a_page_of_a_received_run_needs_the_flag_too(bent, code, proof, tmp_path, refusal):
    folder = received(bent, tmp_path / "run", code, "rewards")
    line = refusal(COMMANDS["explore"].run, ["--run", folder])
    assert str(code) in line
    assert FLAG in line
    assert not proof.exists()


def test_with_the_flag_it_runs_and_says_so(run, code, proof, tmp_path, capsys):
    folder = received(run, tmp_path / "run", code, "rewards")
    out = tmp_path / "out"
    COMMANDS["evaluate"].run(["--runs", f"[{folder}]", "--allow_code", "true", "--out", str(out)])
    assert proof.exists()
    assert capsys.readouterr().err.splitlines().count(f"running Python file {code}") == 1
    assert (out / "figures.csv").exists()


def test_a_score_that_is_left_out_needs_no_flag(run, code, proof, tmp_path, monkeypatch, capsys):
    folder = received(run, tmp_path / "run", code, "rewards")
    monkeypatch.setattr("builtins.input", iter(["Hello.", "/quit"]).__next__)
    COMMANDS["chat"].run(["--run", str(folder), "--show_rewards", "false"])
    assert "aligned:" in capsys.readouterr().out
    assert not proof.exists()


def resumable(command, place, settings):
    """Returns a folder that the command takes for what it continues, with these settings."""
    place.mkdir()
    name = "config.yaml" if command == "align" else "study.yaml"
    (place / name).write_text(yaml.safe_dump(settings))
    return place


def reward(code):
    return {"name": "travelling", "file": str(code)}


HIDING_PLACES = {
    "plugins": ("align", lambda code, _: {"plugins": [str(code)]}),
    "a text of plugins": ("align", lambda code, _: {"plugins": f"[{code}]"}),
    "a reward": ("align", lambda code, _: {"rewards": {"theirs": reward(code)}}),
    "a text of rewards": ("align", lambda code, _: {"rewards": f"{{a: {reward(code)}}}"}),
    "a metric": ("align", lambda code, _: {"evaluation": {"metrics": {"m": reward(code)}}}),
    "advantages": ("align", lambda code, _: {"estimator": {"advantages": str(code)}}),
    "a schedule": ("align", lambda code, _: {"strategy.schedule.function": str(code)}),
    "a group": ("align", lambda code, _: {"groups": {"g": {"rewards": {"a": reward(code)}}}}),
    "a study's overrides": (
        "study",
        lambda code, _: {"settings": {"a": {"overrides": {"rewards.a.file": str(code)}}}},
    ),
    "a study's text": (
        "study",
        lambda code, _: {"settings": {"a": {}}, "overrides": f"{{plugins: '[{code}]'}}"},
    ),
    "a study's base": ("study", lambda code, base: {"settings": {"a": {}}, "base": str(base)}),
    "a setting's base": ("study", lambda code, base: {"settings": {"a": {"base": str(base)}}}),
    "a sweep's method": (
        "sweep",
        lambda code, _: {"methods": {"a": {"overrides": {"plugins": [str(code)]}}}},
    ),
    "a classic study": ("classic", lambda code, _: {"plugins": [str(code)]}),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_folder_that_is_resumed_gets_no_code_to_run_without_the_flag(
    place, code, proof, tmp_path, refusal
):
    command, settings = HIDING_PLACES[place]
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({"plugins": [str(code)]}))
    folder = resumable(command, tmp_path / "run", settings(code, base))
    for options in ([], ["--allow_code", "false"], ["--plan"] if command != "classic" else []):
        line = refusal(main, [command, "--resume", folder, *options])
        assert f"{folder} would run Python code ({code}): review it" in line
        assert line.endswith("pass --allow_code.")
    assert not proof.exists()


def test_the_folder_cannot_give_the_flag_to_itself(code, proof, tmp_path, refusal):
    settings = {"plugins": [str(code)], "allow_code": True}
    folder = resumable("align", tmp_path / "run", settings)
    assert "would run Python code" in refusal(main, ["align", "--resume", folder])
    line = refusal(main, ["align", "--config", folder / "config.yaml", "--help"])
    assert "unknown key allow_code" in line
    assert not proof.exists()


def test_all_code_of_a_resumed_folder_is_named_at_once(code, proof, tmp_path, refusal):
    settings = {"plugins": [str(code), "antigravity"], "rewards": {"a": reward("other.py")}}
    folder = resumable("align", tmp_path / "run", settings)
    line = refusal(main, ["align", "--resume", folder, "--plugins", f"[{code}]"])
    assert "(antigravity, other.py)" in line  # the first is the user's own by now
    assert not proof.exists()


@pytest.mark.parametrize("how", ["flag", "key", "file"])
def test_a_resumed_folder_runs_code_that_its_user_allows_or_names(
    how, code, proof, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(smoke.ROOT)
    settings = yaml.safe_load(smoke.SMOKE.read_text())
    folder = resumable("align", tmp_path / "run", {**settings, "plugins": [str(code)]})
    own = tmp_path / "own.yaml"
    own.write_text(f"plugins: [{code}]")
    options = {
        "flag": ["--allow_code"],
        "key": ["--plugins", f"[{code}]"],
        "file": ["--config", str(own)],
    }
    main(["align", "--resume", str(folder), "--plan", *options[how]])
    assert proof.exists()
    printed = capsys.readouterr()
    assert printed.err.splitlines().count(f"running Python file {code}") == 1
    assert "Models" in printed.out


def test_the_flag_without_a_folder_is_an_error(tmp_path, refusal):
    given = ["align", "--config", smoke.SMOKE, "--out", tmp_path / "run", "--resume"]
    line = refusal(main, [*given, "--allow_code"])
    assert "--allow_code needs a folder to resume" in line
    line = refusal(main, ["align", "--resume", tmp_path, "--allow_code", "perhaps"])
    assert "allow_code must be bool, got 'perhaps'" in line


def test_help_on_a_resumed_folder_runs_nothing(code, proof, tmp_path, capsys):
    folder = resumable("align", tmp_path / "run", {"plugins": [str(code)]})
    for flag in ([], ["--allow_code"]):
        with pytest.raises(SystemExit) as end:
            main(["align", "--resume", str(folder), *flag, "--help", "resume"])
        assert not end.value.code
    assert "--allow_code" in capsys.readouterr().out
    assert not proof.exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["plugins", "rewards"])
def test_help_runs_nothing(key, code, proof, tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    content = yaml.safe_load(smoke.SMOKE.read_text())
    if key == "plugins":
        content["plugins"] = [str(code)]
    else:
        content["rewards"] = {"theirs": {"name": "travelling", "file": str(code)}}
    file.write_text(yaml.safe_dump(content))
    for topic in ([], ["strategy"]):
        with pytest.raises(SystemExit) as end:
            main(["align", "--config", str(file), "--help", *topic])
        assert not end.value.code
    with pytest.raises(SystemExit):
        main(["align", "--config", str(file), "--plugins", f"[{code}]", "--help"])
    printed = capsys.readouterr()
    assert "--strategy" in printed.out
    assert "running Python" not in printed.err
    assert not proof.exists()


def test_help_says_why_it_does_not_know_what_a_plugin_registers(code, proof, tmp_path, refusal):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"plugins: [{code}]\nstrategy: {{name: travelling}}\n")
    line = refusal(main, ["align", "--config", str(file), "--help"])
    assert "got 'travelling'. --help imports no plugins" in line
    assert str(code) in line
    assert not proof.exists()


def test_ones_own_configuration_runs_ones_own_code_and_says_so(code, proof, tmp_path, capsys):
    arguments = ["--config", str(smoke.SMOKE), "--plugins", f"[{code}, antigravity_is_none]"]
    with pytest.raises(Exception, match="antigravity_is_none cannot be imported"):
        parse(AlignmentConfig, arguments)
    assert proof.exists()
    assert f"running Python file {code}\n" in capsys.readouterr().err
    parse(AlignmentConfig, [*arguments[:-1], f"[{code}]"])  # which has been imported
    assert "running Python" not in capsys.readouterr().err
