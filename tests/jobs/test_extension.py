"""A run that is given more rounds ends as one that had them from the start."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firm.alignment import AlignmentClient
from firm.cli.main import COMMANDS
from firm.fronts import Front
from firm.jobs.alignment import align
from firm.report import read_record
from firm.report.record import final_row
from firm.report.run_front import SCORES_NAME
from firm.run import UserError
from firm.run.yaml_text import read_yaml
from tests.runs import read_adapter, read_rows
from tests.smoke import FRONT, SMOKE, config, run

align_cli = COMMANDS["align"].run

OPTIONS = ("--strategy.num_local_steps", 1, "--evaluation.num_test_prompts", 4)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    return run("--out", tmp_path_factory.mktemp("runs") / "run", "--rounds", 2, *OPTIONS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run("--out", tmp_path_factory.mktemp("runs") / "whole", "--rounds", 4, *OPTIONS)


@pytest.fixture
def begun(short, tmp_path) -> Path:
    """A copy of a finished run of 2 rounds, to go on with."""
    return Path(shutil.copytree(short, tmp_path / "run"))


def without_times(row: dict) -> dict:
    """Returns a row without how long things took."""
    return {key: value for key, value in row.items() if key != "seconds"}


@pytest.mark.slow
def test_it_ends_as_an_uninterrupted_run_and_shows_its_end(begun, whole, capsys):
    result = align(config("--out", begun, "--resume", "true", "--rounds", 4, *OPTIONS))
    assert "note: rounds changed from 2 to 4; the run continues" in capsys.readouterr().out
    ours, theirs = read_adapter(begun), read_adapter(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    for kind in ("client", "round", "evaluation"):
        rows = [[without_times(row) for row in read_rows(path, kind)] for path in (begun, whole)]
        assert rows[0] == rows[1]
    scores = [load_file(path / SCORES_NAME) for path in (begun, whole)]
    assert all(torch.equal(scores[0][name], scores[1][name]) for name in scores[1])
    assert read_yaml((begun / "config.yaml").read_text())["rounds"] == 4
    assert result is not None
    record, expected = read_record(begun), read_record(whole)
    assert record.header == expected.header
    assert record.left_out == ()
    last = final_row(record)
    assert last == final_row(expected)
    assert last is not None
    assert last["round"] == 4
    for name, score in last["scores"].items():
        assert result.aligned.scores[name].mean().item() == pytest.approx(score["mean"])
    assert ">4 of 4<" in result.page.read_text()
    assert "| rounds | 4 |" in (begun / "adapter/README.md").read_text()


def test_one_that_was_stopped_on_its_way_goes_on_to_the_new_number(begun, whole, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    options = ("--out", begun, "--resume", "true", "--rounds", 4, *OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr("firm.jobs.loop.Logbook.repeat_to_tracker", stop)  # before a checkpoint
        with pytest.raises(KeyboardInterrupt):
            run(*options)
    run(*options)
    ours, theirs = read_adapter(begun), read_adapter(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_record(begun).header == read_record(whole).header


def test_no_fold_of_an_earlier_end_stays_beside_the_front(tmp_path):
    options = ("--out", tmp_path / "run", *FRONT, "--evaluation.preferences", "[[1, 0], [0, 1]]")
    path = run(*options, "--rounds", 1)
    (path / "front/refined").mkdir()  # as `num_refined` may leave one that no later end has
    run(*options, "--rounds", 2, "--resume", "true")
    front = Front.load(path / "front.json")
    assert {f"front/{folder.name}" for folder in (path / "front").iterdir()} == {
        point.adapter for point in front.points
    }
    rows = [row for row in read_rows(path, "evaluation") if row["split"].startswith("test at ")]
    assert {row["round"] for row in rows} == {2}
    kept = {tuple(row["preference"]): row["rewards"]["brevity"]["mean"] for row in rows}
    assert {point.preference: point.rewards["brevity"] for point in front.points} == kept


def test_a_conditioned_run_that_ends_early_measures_its_last_front(tmp_path, monkeypatch):
    options = ("--out", tmp_path / "run", *FRONT, "--evaluation.preferences", "[[1, 0], [0, 1]]")
    options = (*options, "--evaluation.front_every", 8)
    train = AlignmentClient.batches

    def stopped(client, num_steps):
        if client._round == 3:
            raise KeyboardInterrupt
        return train(client, num_steps)

    with monkeypatch.context() as patch:
        patch.setattr(AlignmentClient, "batches", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(*options, "--rounds", 3)
    path = run(*options, "--rounds", 2, "--resume", "true")
    rows = read_rows(path, "evaluation")
    measured = {row["round"] for row in rows if row["split"].startswith("validation at ")}
    assert measured == {2}
    assert "was not measured" not in final_row(read_record(path))["adapter_reason"]


@pytest.mark.parametrize(
    ("use", "what"), [("train", "the training data"), ("test", "the validation or test data")]
)
def test_data_that_have_changed_are_refused(tmp_path, use, what):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Question {n}?"}) for n in range(40)]
    prompts.write_text("\n".join(lines))
    options = (f"--data.{use}.source", prompts, f"--data.{use}.split", "train", *OPTIONS)
    path = run("--out", tmp_path / "run", "--rounds", 1, *options)
    prompts.write_text("\n".join(lines[1:]))
    with pytest.raises(UserError, match=f"{what} differ from those (that|on which) the run"):
        run("--out", path, "--resume", "true", "--rounds", 2, *options)


def test_fewer_rounds_than_are_done_are_refused(begun, refusal):
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    arguments = ["--config", SMOKE, "--out", begun, "--resume", *OPTIONS, "--rounds", 1]
    line = refusal(align_cli, arguments)
    assert (
        f"rounds must be at least 2, the rounds that the run at {begun} has completed, got 1"
        in line
    )
    assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before


def test_rates_that_fall_towards_the_last_round_keep_it_where_it_is(tmp_path, refusal):
    linear = ("--estimator.learning_rate_schedule", "linear", *OPTIONS)
    path = run("--out", tmp_path / "run", "--rounds", 1, *linear)
    again = ["--config", SMOKE, "--out", path, "--resume", *linear]
    line = refusal(align_cli, [*again, "--rounds", 2])
    assert f"rounds must remain 1 for the run at {path}, since its learning rates so far" in line
    assert "estimator.learning_rate_schedule linear" in line
    assert read_yaml((path / "config.yaml").read_text())["rounds"] == 1
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    run("--out", path, "--resume", "true", "--rounds", 1, *linear)
