"""The command `firm`: every word reaches its job, and shipped configurations are found by name."""

import json
import subprocess
import sys
from importlib import import_module

import pytest

from firm.cli.main import COMMANDS, main


def test_without_a_command_all_of_them_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_a_command_that_does_not_exist_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["algin"])
    assert ended.value.code == 2
    assert "there is no command 'algin'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_keys(name, capsys):
    module = import_module(f"firm.cli.{COMMANDS[name][0]}")
    assert callable(module.cli)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"firm {name}: {COMMANDS[name][1]}" in capsys.readouterr().out


def test_a_run_begins_and_ends_in_an_empty_folder(tmp_path):
    command = [sys.executable, "-m", "firm", "align", "--config", "smoke", "--out", "mine"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "report   mine/report.html" in ended.stdout
    assert json.loads((tmp_path / "mine/run.json").read_text())["status"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
