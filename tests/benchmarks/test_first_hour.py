import ast
import json

import pytest

from benchmarks.first_hour import TASKS, Task, run, write_files
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
    words = [command.rpartition("| ")[2].split()[:2] for task in TASKS for command in task.commands]
    assert all(program == "firm" and name in COMMANDS for program, name in words)
    assert len(TASKS) == 13


def test_a_task_returns_the_line_that_it_must_print_or_fails(tmp_path):
    assert run(Task("a", ("echo first", "echo the end"), "the"), tmp_path, tmp_path) == "the end"
    with pytest.raises(RuntimeError, match="did not print other"):
        run(Task("b", ("echo the end",), "other"), tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="ended with 3"):
        run(Task("c", ("exit 3", "echo the end"), "the"), tmp_path, tmp_path)
