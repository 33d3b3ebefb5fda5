"""The command `firm`: every word reaches its job, and shipped configurations are found by name."""

import json
import subprocess
import sys

import pytest

from firm.cli.help_pages import commands_with_pages, made_page
from firm.cli.main import COMMANDS, PAGES, main
from firm.extras import install_command


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
    assert "unknown command 'algin'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_keys(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"firm {name}: {COMMANDS[name].text}\n")
    assert printed.count("\n") > 5


@pytest.mark.parametrize("command", commands_with_pages(), ids=lambda command: command.page.stem)
def test_the_page_of_a_command_is_what_its_configuration_has(command):
    text = command.page.read_text(encoding="utf-8")
    assert text == made_page(command), "run: python -m firm.cli.help_pages"


def test_every_page_belongs_to_a_command():
    assert {command.page for command in commands_with_pages()} == {*PAGES.iterdir()}


def test_the_words_of_a_group_print_its_commands(capsys):
    for words, code in ((["network"], 0), (["network", "--help"], 0), (["network", "stp"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code
        printed = capsys.readouterr()
        assert "  network submit  " in printed.out
        assert "  align  " not in printed.out
        assert ("unknown command 'network stp'" in printed.err) == (code == 2)


def test_help_loads_none_of_the_libraries_that_take_seconds():
    code = "import sys; from firm.cli.main import main\ntry: main(['align', '--help'])\n"
    code += "except SystemExit: print(sorted({'torch', 'pydantic', 'numpy'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr


def test_a_command_whose_extra_is_not_installed_names_it_in_one_line():
    code = "import sys; sys.modules['nvflare'] = None; from firm.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "network", "status"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "firm: error: firm network status needs the package nvflare, which is not installed: "
        f"{install_command('network')}.\n"
    )


def test_a_run_begins_and_ends_in_an_empty_folder(tmp_path):
    command = [sys.executable, "-m", "firm", "align", "--config", "smoke", "--out", "mine"]
    command += ["--rounds", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "report   mine/report.html" in ended.stdout
    assert json.loads((tmp_path / "mine/run.json").read_text())["status"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
