"""LoRA's options in whole runs: A frozen, and products averaged."""

import shutil
from pathlib import Path

import pytest
import torch

from firm.federation import Processes
from firm.jobs.alignment import main
from firm.jobs.plan import make_plan
from firm.run import UserError
from tests import smoke
from tests.runs import read_adapter, read_rows

SHORT = ("--strategy.num_local_steps", 1, "--evaluation.num_validation_prompts", 0)


def test_a_run_with_a_frozen_sends_b_alone_saves_both_and_resumes_to_the_same(tmp_path):
    options = ("--policy.lora.freeze_a", "true", "--policy.lora.r", 16)
    cfg = smoke.config(*SHORT, *options, "--out", tmp_path / "whole")
    whole = main(cfg)
    (about,) = read_rows(whole, "run")
    plan = make_plan(cfg, about["clients"], Processes(0, 1, 1))
    assert plan.policy is not None
    assert plan.policy.adapter_bytes == about["adapter_bytes"]
    for row in read_rows(whole, "client"):
        assert abs(row["bytes_up"] - plan.policy.bytes_up) < 0.03 * row["bytes_up"]

    adapter = read_adapter(whole)
    sizes = {c: sum(t.nbytes for n, t in adapter.items() if f"lora_{c}" in n) for c in "AB"}
    assert sizes["B"] == about["adapter_bytes"]
    assert sizes["A"] > 0
    assert all(tensor.any() for tensor in adapter.values())

    stopped = Path(shutil.copytree(whole, tmp_path / "stopped"))
    shutil.rmtree(stopped / "checkpoints/round_0002")
    shutil.rmtree(stopped / "adapter")
    smoke.run(*SHORT, *options, "--out", stopped, "--resume", "true")
    assert len(read_rows(stopped, "round")) == 2
    for name, tensor in read_adapter(stopped).items():
        assert torch.equal(tensor, adapter[name]), name


@pytest.mark.slow
def test_a_run_of_lora_xs_sends_little_saves_an_ordinary_adapter_and_starts_from_it(tmp_path):
    options = ("--policy.adapter", "lora_xs", "--policy.lora.r", 4)
    cfg = smoke.config(*SHORT, *options, "--out", tmp_path / "whole")
    whole = main(cfg)
    (about,) = read_rows(whole, "run")
    plan = make_plan(cfg, about["clients"], Processes(0, 1, 1))
    assert plan.policy is not None
    adapter = read_adapter(whole)
    num_layers = sum("lora_A" in name for name in adapter)
    assert plan.policy.adapter_bytes == about["adapter_bytes"] == num_layers * 4 * 4 * 4
    assert {tuple(values.shape)[1] for name, values in adapter.items() if "lora_B" in name} == {4}

    stopped = Path(shutil.copytree(whole, tmp_path / "stopped"))
    shutil.rmtree(stopped / "checkpoints/round_0002")
    shutil.rmtree(stopped / "adapter")
    smoke.run(*SHORT, *options, "--out", stopped, "--resume", "true")
    for name, tensor in read_adapter(stopped).items():
        assert torch.equal(tensor, adapter[name]), name

    (_, end) = read_rows(whole, "evaluation", split="test")
    for own in (options, ()):  # as one of LoRA-XS, and as an ordinary one
        start = ("--start", f"{{{whole / 'adapter'}: 1}}", "--rounds", 0)
        rank = ("--policy.lora.r", 4)
        again = smoke.run(*own, *rank, *start, "--out", tmp_path / f"again_{len(own)}")
        _, row = read_rows(again, "evaluation", split="test")
        assert row["scores"] == end["scores"]
        assert row["kl"] == pytest.approx(end["kl"], abs=1e-4)
    with pytest.raises(ValueError, match=r"does not fit policy\.lora: its alpha / r is .*, got 16"):
        smoke.run(*rank, *start, "--policy.lora.alpha", 64, "--out", tmp_path / "other_scale")
    with pytest.raises(
        UserError, match=r"strategy\.lora_mean must be factors with policy\.adapter"
    ):
        smoke.config(*options, "--strategy.lora_mean", "products")


def test_a_run_can_average_products(tmp_path):
    options = ("--strategy.lora_mean", "products", "--rounds", 1)
    products = read_adapter(smoke.run(*SHORT, *options, "--out", tmp_path / "products"))
    factors = read_adapter(smoke.run(*SHORT, *options[2:], "--out", tmp_path / "factors"))
    distances = [(products[n] - t).norm() / t.norm() for n, t in factors.items()]
    assert 0 < max(distances) < 0.5
