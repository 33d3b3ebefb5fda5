"""Python files that a run's folder or a configuration names: who runs them, and who says so."""

import shutil
from pathlib import Path

import pytest
import yaml

from firm.cli import chat, evaluate, explore, main
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


COMMANDS = {
    "chat": (chat.cli, "--run", "rewards"),
    "evaluate": (evaluate.cli, "--runs", "rewards"),
    "evaluate, a further score": (evaluate.cli, "--runs", "metrics"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_runs_folder_gets_no_code_to_run_without_the_flag(
    command, run, code, proof, tmp_path, refusal
):
    cli, key, section = COMMANDS[command]
    folder = received(run, tmp_path / "run", code, section)
    line = refusal(cli, [key, f"[{folder}]" if key == "--runs" else str(folder)])
    assert str(folder) in line
    assert str(code) in line
    assert FLAG in line
    assert not proof.exists()


def test_a_page_of_a_received_run_needs_the_flag_too(bent, code, proof, tmp_path, refusal):
    folder = received(bent, tmp_path / "run", code, "rewards")
    line = refusal(explore.cli, ["--run", folder])
    assert str(code) in line
    assert FLAG in line
    assert not proof.exists()


def test_with_the_flag_it_runs_and_says_so(run, code, proof, tmp_path, capsys):
    folder = received(run, tmp_path / "run", code, "rewards")
    out = tmp_path / "out"
    evaluate.cli(["--runs", f"[{folder}]", "--allow_code", "true", "--out", str(out)])
    assert proof.exists()
    assert capsys.readouterr().err.splitlines().count(f"runs Python file {code}") == 1
    assert (out / "figures.csv").exists()


def test_a_score_that_is_left_out_needs_no_flag(run, code, proof, tmp_path, monkeypatch, capsys):
    folder = received(run, tmp_path / "run", code, "rewards")
    monkeypatch.setattr("builtins.input", iter(["Hello.", "/quit"]).__next__)
    chat.cli(["--run", str(folder), "--show_rewards", "false"])
    assert "aligned:" in capsys.readouterr().out
    assert not proof.exists()


@pytest.mark.parametrize("key", ["plugins", "rewards"])
def test_help_runs_nothing(key, code, proof, tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    content = yaml.safe_load(smoke.SMOKE.read_text())
    if key == "plugins":
        content["plugins"] = [str(code)]
    else:
        content["rewards"] = {"theirs": {"name": "travelling", "file": str(code)}}
    file.write_text(yaml.safe_dump(content))
    for topic in ([], ["all"], ["strategy"]):
        with pytest.raises(SystemExit) as end:
            main.main(["align", "--config", str(file), "--help", *topic])
        assert not end.value.code
    with pytest.raises(SystemExit):
        main.main(["align", "--config", str(file), "--plugins", f"[{code}]", "--help"])
    printed = capsys.readouterr()
    assert "--strategy" in printed.out
    assert "runs Python" not in printed.err
    assert not proof.exists()


def test_help_says_why_it_does_not_know_what_a_plugin_registers(code, proof, tmp_path, refusal):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"plugins: [{code}]\nstrategy: {{name: travelling}}\n")
    line = refusal(main.main, ["align", "--config", str(file), "--help"])
    assert "got 'travelling'. --help imports no plugins" in line
    assert str(code) in line
    assert not proof.exists()


def test_ones_own_configuration_runs_ones_own_code_and_says_so(code, proof, tmp_path, capsys):
    arguments = ["--config", str(smoke.SMOKE), "--plugins", f"[{code}, antigravity_is_none]"]
    with pytest.raises(Exception, match="antigravity_is_none cannot be imported"):
        parse(AlignmentConfig, arguments)
    assert proof.exists()
    assert f"runs Python file {code}\n" in capsys.readouterr().err
    parse(AlignmentConfig, [*arguments[:-1], f"[{code}]"])  # which has been imported
    assert "runs Python" not in capsys.readouterr().err
