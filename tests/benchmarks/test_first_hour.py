import ast
import json

import pytest

from benchmarks.first_hour import REAL, TASKS, Task, run, write_files
from firm.cli.main import COMMANDS


def test_the_files_of_a_newcomer_are_whole(tmp_path):
    write_files(tmp_path)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    for name, keys in (("prompts", {"prompt"}), ("pairs", {"prompt", "chosen", "rejected"})):
        rows = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert len(rows) == 400
        assert set(json.loads(rows[0])) == keys
    for name in ("rewards.py", "momentum.py"):
        assert ast.parse((tmp_path / name).read_text()).body


def test_every_task_but_the_installation_is_a_command_of_firm():
    commands = [command for task in (*TASKS, *REAL) for command in task.commands]
    for program, *words in (command.rpartition("| ")[2].split() for command in commands):
        assert program == "firm"
        assert {words[0], " ".join(words[:2])} & {*COMMANDS}


def test_a_task_returns_the_line_that_it_must_print_or_fails(tmp_path):
    assert run(Task("a", ("echo first", "echo the end"), "the"), tmp_path, tmp_path) == "the end"
    assert run(Task("a", ("echo a mistake; exit 2",), "mis", 2), tmp_path, tmp_path) == "a mistake"
    with pytest.raises(RuntimeError, match="did not print other"):
        run(Task("b", ("echo the end",), "other"), tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="ended with 3"):
        run(Task("c", ("exit 3", "echo the end"), "the"), tmp_path, tmp_path)
