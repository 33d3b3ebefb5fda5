"""Runs with a reward that returns None for prompts of other kinds, from training to chat."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firm.jobs.chat import Conversation
from firm.jobs.compare import main as evaluate
from firm.jobs.configs import ChatConfig, CompareConfig
from firm.jobs.finished_runs import parse_over_run
from tests import smoke
from tests.runs import read_adapter, read_rows

TERSE = """
from reward_models import reward_model

@reward_model("terse")
def terse(completions, kind=None, *, of=("harmless", "dual"), **kwargs):
    kinds = kind or [""] * len(completions)
    return [
        -float(len(text)) if kind in of else None
        for text, kind in zip(completions, kinds, strict=True)
    ]
"""
SHORT = (
    *("--strategy.num_local_steps", 1, "--estimator.num_epochs", 1),
    *("--estimator.actor_optimizer", "sgd", "--estimator.actor_learning_rate", 0.1),
)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> str:
    """The rewards of a run, the second of which is of some kinds alone."""
    file = tmp_path_factory.mktemp("rewards") / "terse.py"
    file.write_text(TERSE)
    return f"{{positivity: {{name: positivity}}, terse: {{name: terse, file: {file}}}}}"


@pytest.fixture(scope="module")
def run(rewards, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "in_turn"
    return smoke.run(*SHORT, "--rounds", 1, "--rewards", rewards, "--out", out)


def test_a_log_has_numbers_where_there_are_scores_and_null_elsewhere(run):
    for row in read_rows(run, "evaluation"):
        for figures in ("scores", "rewards", *(["change"] if "change" in row else [])):
            assert all(math.isfinite(value) for value in row[figures]["terse"].values())
            assert 2 <= row[figures]["terse"]["num_prompts"] < row["num_prompts"]
            assert row[figures]["positivity"]["num_prompts"] == row["num_prompts"] == 8
    count = read_rows(run, "evaluation", split="test")[-1]["change"]["terse"]["num_prompts"]
    page = (run / "report.html").read_text()
    assert f"terse, {count} prompts" in page
    assert f"on {count} prompts" in page
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {type(sample["scores"]["terse"]) for sample in samples} == {float, type(None)}
    by_prompt = load_file(run / "test_scores.safetensors")
    assert 2 <= (~by_prompt["rewards/terse"].isnan()).sum() < 8
    assert by_prompt["rewards/positivity"].isfinite().all()
    for file in ("metrics.jsonl", "samples.jsonl", "adapter/README.md"):
        assert "nan" not in (run / file).read_text().lower().split()


@pytest.mark.slow
def test_clients_end_stacked_as_in_turn_and_a_resumed_run_as_a_whole_one(run, rewards, tmp_path):
    shutil.copytree(run, tmp_path / "resumed")
    options = (*SHORT, "--rounds", 2, "--rewards", rewards)
    resumed = smoke.run(*options, "--out", tmp_path / "resumed", "--resume", "true")
    whole = smoke.run(*options, "--out", tmp_path / "whole")
    stacked = smoke.run(*options, "--out", tmp_path / "stacked", "--engine", "stacked")
    expected, last = read_adapter(whole), read_rows(whole, "evaluation")[-1]
    assert not all(torch.equal(v, expected[name]) for name, v in read_adapter(run).items())
    assert all(torch.equal(v, expected[name]) for name, v in read_adapter(resumed).items())
    assert read_rows(resumed, "evaluation")[-1] == last
    for name, values in read_adapter(stacked).items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-5)
    pairs = zip(read_rows(whole, "client"), read_rows(stacked, "client"), strict=True)
    assert all(one["scores"] == other["scores"] for one, other in pairs)


def test_a_conditioned_policy_is_solved_for_what_each_preference_has_scores_of(rewards, tmp_path):
    out = smoke.run(
        *(*SHORT, "--rounds", 1, *smoke.FRONT, "--strategy.name", "firm"),
        *("--rewards", rewards, "--out", tmp_path / "run"),
    )
    assert json.loads((out / "front.json").read_text())["num_scored"].keys() == {"terse"}
    sums = [sum(w) for row in read_rows(out, "client") for w in row["weights"]]
    assert all(0 <= total <= 1 + 1e-9 for total in sums)
    front = json.loads((out / "front.json").read_text())
    assert all(
        math.isfinite(value) for point in front["points"] for value in point["rewards"].values()
    )


def test_an_evaluation_and_a_chat_say_what_has_no_score(run, tmp_path):
    allowed = ["--allow_code", "true"]
    arguments = [
        "--runs",
        f"[{run}]",
        "--num_prompts",
        "8",
        "--out",
        str(tmp_path / "out"),
        *allowed,
    ]
    out = evaluate(parse_over_run(CompareConfig, arguments, key="runs", description=""))
    with (out / "samples.csv").open(newline="") as file:
        cells = [row["terse"] for row in csv.DictReader(file)]
    assert 0 < cells.count("") < len(cells)
    assert all(math.isfinite(float(cell)) for cell in cells if cell)
    cfg = parse_over_run(ChatConfig, ["--run", str(run), *allowed], key="run", description="")
    answers = Conversation(cfg).answer("Hello.", 0)
    assert [answer.scores[1] for answer in answers.values()] == ["terse not applicable"] * 2


def test_a_reward_that_never_applies_is_refused_before_training(rewards, tmp_path):
    never = rewards.replace("file:", "options: {of: []}, file:")
    with pytest.raises(ValueError, match=r"^calibrating 'terse' requires .*, got 0 on 32"):
        smoke.run(*SHORT, "--rewards", never, "--out", tmp_path / "run")
