"""Clients that differ, and runs that start from adapters."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firm.run import UserError
from tests import smoke
from tests.runs import read_adapter, read_rows

ROOT = Path(__file__).parents[2]
TINY = (
    "--rounds", 1, "--evaluation.num_validation_prompts", 0, "--strategy.num_local_steps", 1,
)  # fmt: skip


def test_groups_have_reward_models_and_objectives_of_their_own(tmp_path):
    groups = (
        "{other: {clients: [1], rewards: {positivity: {name: brevity}}},"
        " partial: {clients: [2], objectives: [brevity]}}"
    )
    out = smoke.run(*TINY, "--out", tmp_path / "run", "--num_clients", 3, "--groups", groups)
    (header,) = read_rows(out, "run")
    assert set(header["calibration"]) == {"brevity", "positivity", "other/positivity"}
    usual, other, partial = read_rows(out, "client")
    # judged as short by one model and counted by the other
    assert other["scores"]["positivity"] == pytest.approx(other["scores"]["brevity"])
    assert usual["scores"]["positivity"] != pytest.approx(usual["scores"]["brevity"])
    assert all(row["rewards"]["positivity"] is not None for row in (usual, other))
    assert partial["rewards"]["positivity"] is None
    assert partial["weights"] == [[1.0, 0.0]] * len(partial["weights"])
    assert all(weights != [1.0, 0.0] for weights in usual["weights"])


def test_groups_attack_by_their_updates_or_their_rewards_and_a_rule_tells(tmp_path):
    groups = (
        "{liar: {clients: [1], attack: {kind: reward_bias, bias: 1000, objective: brevity}},"
        " far: {clients: [2], attack: {kind: sign_flip, scale: 100}}}"
    )
    robust = "{rule: norm_clipping, num_attackers: 1}"
    arguments = ["--num_clients", 3, "--groups", groups, "--strategy.robust", robust]
    out = smoke.run(*TINY, "--out", tmp_path / "run", *arguments)
    honest, liar, far = read_rows(out, "client")
    for name, is_attacked in (("brevity", True), ("positivity", False)):
        assert (liar["scores"][name] - honest["scores"][name] > 900) == is_attacked
    assert abs(far["scores"]["brevity"] - honest["scores"]["brevity"]) < 100
    (row,) = read_rows(out, "round")
    told = row["robust"]
    assert told["clipped"] == ["client_2"]
    assert told["lengths"]["client_2"] > 20 * told["clip_norm"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("{a: {clients: [2]}}", r"groups\.a\.clients must be numbers from 0 to 1, got 2"),
        ("{a: {clients: [0]}, b: {clients: [0]}}", "client 0 is already in the group a"),
        ("{a: {clients: []}}", r"groups\.a needs at least one client"),
        (
            "{a: {clients: [0], objectives: []}}",
            r"groups\.a needs at least one client and one objective",
        ),
        ("{a: {clients: [0], objectives: [kindness]}}", "has the unknown objective 'kindness'"),
        ("{a: {clients: [0], rewards: {kindness: {name: brevity}}}}", "choose from brevity, posit"),
        (
            "{a: {clients: [0], objectives: [brevity],"
            " attack: {kind: label_flip, objective: positivity}}}",
            r"groups\.a\.attack\.objective must be an objective of the group \(brevity\), got",
        ),
        ("{a: {clients: [0], attack: {kind: scaling}}}", "scaling by 1 has no effect"),
    ],
)
def test_groups_that_fit_nobody_are_refused(groups, message):
    with pytest.raises(UserError, match=message):
        smoke.config(*TINY, "--groups", groups)


def test_a_run_without_rounds_measures_the_mean_of_adapters(run, tmp_path):
    first = load_file(run / "adapter/adapter_model.safetensors")
    moved = shutil.copytree(run / "adapter", tmp_path / "moved")
    save_file(
        {name: value + 0.1 for name, value in first.items()}, moved / "adapter_model.safetensors"
    )
    start = f"{{{run / 'adapter'}: 1, {moved}: 3}}"
    out = smoke.run(*TINY, "--out", tmp_path / "mean", "--rounds", 0, "--start", start)
    for name, parameter in read_adapter(out).items():
        assert torch.allclose(parameter, first[name] + 0.075, atol=1e-6)
    base, final = read_rows(out, "evaluation")
    assert (base["round"], final["round"]) == (0, 0)
    assert base["kl"] == pytest.approx(0, abs=1e-4)  # the base model, not the start
    assert abs(final["kl"]) > 1e-3
    assert "report.html" in {path.name for path in out.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "at least 1 without a start"),
        (["--start", "{a: -1, b: 2}"], "start.a must be non-negative"),
        (["--start", "{a: 0}"], "must have a share above zero"),
        (["--start", "{a: 1}", "--policy.lora.freeze_a", "true"], "must be empty with policy"),
        (
            ["--policy.lora.freeze_a", "true", "--strategy.lora_mean", "products"],
            "must be factors with policy.lora.freeze_a",
        ),
    ],
)
def test_a_start_that_means_nothing_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        smoke.config(*TINY, *arguments)


def test_a_start_that_is_no_adapter_ends_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="there is no adapter in"):
        smoke.run(*TINY, "--out", tmp_path / "run", "--start", f"{{{tmp_path}: 1}}")
    assert list(tmp_path.iterdir()) == []
