"""FIRM and TRL are compared at equal KL, on curves of equal runs and on unseen questions."""

import argparse
import csv
import json

import numpy as np
import pytest

from benchmarks import real_trl
from benchmarks.findings import (
    METHODS,
    TRL_SEEDS,
    at_common_kl,
    draw_reward_kl,
    family_l,
    gain_at,
    trl_claims,
    trl_table,
    verdicts,
)
from firm.jobs.alignment_config import AlignmentConfig
from firm.run.config import compose
from tests.smoke import ROOT


def model(kl, warm, plain, **more):
    return {"test": {"reward warm": warm, "reward plain": plain, "KL": kl}, **more}


def seed_models(lift=0.0):
    """A base model, and two models of each method, FIRM's with other rewards."""
    cost = {"seconds": 90.0, "memory": 3e9}
    models = {"base": model(0.0, 0.5, 0.4)}
    for method in METHODS:
        own = lift if method == "FIRM" else 0.0
        models[f"{method} 2"] = model(1.0, 0.5, 0.6 + own)
        models[f"{method} 4"] = model(5.0, 0.7, 0.6 + own, cost=cost)
    return models


def test_gains_are_linear_in_kl_between_the_measured_models():
    models = seed_models()
    assert gain_at(models, "FIRM", 0.5) == pytest.approx(0.05)
    assert gain_at(models, "FIRM", 2.0) == pytest.approx((0.05 + 0.2) / 2)
    assert gain_at(models, "FIRM", 2.0, smaller=True) == pytest.approx(0.05)
    assert np.isnan(gain_at(models, "FIRM", 6.0))


def test_sides_are_compared_at_the_smaller_end_if_one_ends_early():
    models = seed_models(lift=0.1)
    assert at_common_kl(models, "TRL's GRPO", 2.0) == pytest.approx(0.05)
    models["TRL's GRPO 4"] = model(0.5, 0.5, 0.4)
    models["TRL's GRPO 2"] = model(3.0, 0.5, 0.4)  # from where its guard went back
    assert at_common_kl(models, "TRL's GRPO", 2.0) == pytest.approx(0.075)
    assert np.isnan(gain_at(models, "TRL's GRPO", 2.0))


def test_claims_are_open_until_all_seeds_are_there(tmp_path):
    for count, seed in enumerate(TRL_SEEDS, start=1):
        path = tmp_path / f"real_trl_{seed}.json"
        whole = seed_models(0.1 + 1e-4 * count)
        part = {name: own for name, own in whole.items() if not name.startswith(METHODS[-1])}
        path.write_text(json.dumps(part))
        assert len(family_l(tmp_path)[0].differences) == count - 1
        path.write_text(json.dumps(whole))
        expected = "FIRM ahead" if count == len(TRL_SEEDS) else f"open: {count} of 3 seeds"
        assert verdicts(family_l(tmp_path)) == [expected] * 3
    assert "FIRM ahead" in trl_claims(tmp_path)
    assert trl_table(tmp_path).count("| 90 ± 0 | 3.0 ± 0.0 |") == len(METHODS)
    draw_reward_kl(tmp_path / "picture", tmp_path)
    rows = list(csv.DictReader((tmp_path / "picture.csv").read_text().splitlines()))
    ends = {row["setting"]: float(row["mean"]) for row in rows if row["panel"] == "smaller gain"}
    assert ends["TRL's GRPO"] == pytest.approx(0.2)  # the last place is the largest KL
    assert ends["FIRM"] == pytest.approx(0.2)


def test_sides_take_the_same_replies_and_steps_without_a_penalty():
    assert {*real_trl.KEYS, *real_trl.AGGREGATIONS} == set(METHODS)
    for keys in real_trl.KEYS.values():
        own = [*real_trl.WORLD.common.items(), *keys.items()]
        cfg = compose(AlignmentConfig, [real_trl.WORLD.base], own)
        estimator = cfg.estimator
        assert cfg.rounds * cfg.num_clients * estimator.batch_size == 256
        assert estimator.batch_size // estimator.minibatch_size == 2
        assert estimator.num_epochs == 1
        assert estimator.kl.coefficient == 0.0
        if estimator.name == "critic_free":  # PPO has no groups
            assert estimator.replies_per_prompt == 4


def test_a_seed_grows_by_one_method_at_a_time(tmp_path, monkeypatch):
    trained = []

    def run(options, seed, method):
        if method == "TRL's GRPO":
            raise KeyboardInterrupt
        trained.append(method)
        return {"adapters": {"2": "a", "3": "b", "4": "c"}, "seconds": 90.0, "memory": 3e9}

    def measured(self, adapters, *, splits, has_base):
        names = ["base", *adapters] if has_base else adapters
        return {name: {split: {"KL": 1.0} for split in splits} for name in names}

    monkeypatch.setattr(real_trl, "in_own_process", run)
    monkeypatch.setattr(real_trl.Lab, "measured", measured)
    options = argparse.Namespace(
        out=tmp_path, runs=tmp_path, rate=1e-3, methods=METHODS, split="test"
    )
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            real_trl.measure(options, 840)
    assert trained == ["FIRM", "FIRM with PPO"]
    figures = json.loads((tmp_path / "real_trl_840.json").read_text())
    points = [f"{method} {point}" for method in METHODS[:2] for point in (2, 3, 4)]
    assert list(figures) == ["base", *points]
    assert figures["FIRM 4"]["cost"] == {"seconds": 90.0, "memory": 3e9}


def test_unseen_questions_are_in_no_other_split():
    folder = ROOT / "firm/questions"
    prompts = {
        path.stem: [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }
    unseen = prompts.pop("unseen")
    assert len(set(unseen)) == 200
    assert set(prompts) == {"train", "validation", "test"}
    assert not set(unseen) & {prompt for own in prompts.values() for prompt in own}
