"""The main recipe does what `firm align` does, step by step."""

import pytest

from firm.jobs.alignment import main as align
from recipes import firm_hh
from tests import smoke
from tests.runs import read_rows

OPTIONS = ("--rounds", 2, "--strategy.num_local_steps", 1)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """Configurations name the shipped checkpoints relative to the clone."""
    monkeypatch.chdir(smoke.ROOT)


def without_times(row):
    """Returns a row of the log without what no two runs share."""
    return {key: value for key, value in row.items() if "seconds" not in key}


def test_the_recipe_and_the_command_give_the_same_adapter_log_and_files(
    tmp_path, capsys, monkeypatch
):
    printed = []
    options = (
        *OPTIONS,
        *("--rounds", 3, "--policy.dtype", "auto", "--strategy.name", "fedavg"),
        *("--strategy.schedule.shares", "brevity=1", "positivity=1"),
        *("--guard.stop_when", "[response_length > 1 for 2]"),
    )
    monkeypatch.setattr("firm.jobs.alignment_loading.dtype_name", lambda *_: "float32")
    for main, name in ((align, "command"), (firm_hh.main, "recipe")):
        main(smoke.config(*options, "--out", tmp_path / name))
        printed.append(capsys.readouterr().out.replace(str(tmp_path / name), ""))
    command, recipe = tmp_path / "command", tmp_path / "recipe"
    assert [row["round"] for row in read_rows(recipe, "round")] == [1, 2]
    adapter = "adapter/adapter_model.safetensors"
    assert (recipe / adapter).read_bytes() == (command / adapter).read_bytes()
    assert [*map(without_times, read_rows(recipe))] == [*map(without_times, read_rows(command))]
    files = [{str(file.relative_to(run)) for file in run.rglob("*")} for run in (command, recipe)]
    assert files[0] == files[1]
    assert printed[0].splitlines()[-8:] == printed[1].splitlines()[-8:]


def test_the_recipe_goes_on_from_the_last_checkpoint(tmp_path):
    out, whole = tmp_path / "run", tmp_path / "whole"
    firm_hh.main(smoke.config(*OPTIONS, "--rounds", 1, "--out", out))
    firm_hh.main(smoke.config(*OPTIONS, "--out", out, "--resume"))
    firm_hh.main(smoke.config(*OPTIONS, "--out", whole))
    adapter = "adapter/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (whole / adapter).read_bytes()
