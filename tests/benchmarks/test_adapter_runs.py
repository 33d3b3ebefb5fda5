"""Runs of family E: rates are chosen on validation prompts alone, and levels by bisection."""

import json
from math import inf

import numpy as np
import pytest

from benchmarks import adapter_runs
from benchmarks.adapter_runs import ADAPTERS, CHOSEN, CLIP, LEVELS, PARTS, RATE, lab_of, privacy
from benchmarks.findings import PROTOCOL, family_e, uploads_table
from benchmarks.frontier import chosen, stored_gains
from benchmarks.private import by_adapter, needed_clients
from firm.jobs.alignment_config import AlignmentConfig
from firm.run.config import compose
from tests.smoke import ROOT


def figures(reward, *, truth, kl=1.0):
    rewards = {f"reward {name}": reward for name in ("helpful", "harmless")}
    return {**rewards, "true_helpful": truth, "true_harmless": truth, "parse": 0.9, "KL": kl}


def starred(folder):
    rows = chosen(stored_gains(folder, "rates", "validation"))[1]
    return {adapter: float(rate) for adapter, rate, *_, star in rows if star == "*"}


def test_rates_are_chosen_on_validation_prompts_by_rewards_alone(tmp_path):
    """Test prompts and true scores favour another rate, and so does the KL cap's other side."""
    validation = {"0.001": figures(0.5, truth=0.9), "0.0025": figures(0.6, truth=0.0)}
    validation["0.006"] = figures(0.9, truth=1.0, kl=3.1)
    test = {"0.001": figures(0.9, truth=0.9), "0.0025": figures(0.4, truth=-1.0)}
    test["0.006"] = figures(0.8, truth=1.0)
    for splits in ({"validation": validation}, {"validation": validation, "test": test}):
        models = {
            f"LoRA, rate {rate}": {split: own[rate] for split, own in splits.items()}
            for rate in validation
        }
        models["base"] = {split: figures(0.4, truth=0.0, kl=0.0) for split in splits}
        (tmp_path / "rates_1.json").write_text(json.dumps(models))
        assert starred(tmp_path) == {"LoRA": 0.0025}


def test_the_rates_of_the_runs_are_those_that_the_stored_data_choose():
    assert starred(PROTOCOL) == CHOSEN
    for path in PROTOCOL.glob("rates_*.json"):
        assert {tuple(own) for own in json.loads(path.read_text()).values()} == {("validation",)}
    assert PARTS["rates"][1] == "validation"


@pytest.mark.parametrize("part", PARTS)
def test_every_run_has_a_valid_configuration(part, tmp_path):
    for adapter in CHOSEN if part != "rates" else ADAPTERS:
        world = lab_of(adapter, 1, tmp_path).world
        for name, overrides in PARTS[part][0](adapter, 1).items():
            keys = {**world.common, **overrides}
            cfg = compose(AlignmentConfig, [world.base], list(keys.items()))
            assert cfg.num_clients * cfg.estimator.batch_size == 128, name
            assert cfg.estimator.actor_learning_rate == overrides[RATE]


def test_eight_clients_represent_the_levels():
    (_, whole), *noisy = privacy("LoRA r = 16", 1).items()
    assert whole["strategy.privacy.noise_multiplier"] == 0.0
    for (name, keys), clients in zip(noisy, LEVELS["LoRA r = 16"][1:], strict=True):
        assert name.endswith(f", {clients} clients")
        # z = 5.10 for N clients; the mean of eight has as much noise with 8z/N
        assert keys["strategy.privacy.noise_multiplier"] == pytest.approx(8 * 5.10 / clients, 2e-3)
        assert keys["strategy.privacy.clip_norm"] == CLIP["LoRA r = 16"]
    assert LEVELS["LoRA r = 16"][0] == inf


def test_pages_state_the_bracket_of_the_stored_runs():
    stored = stored_gains(PROTOCOL, "privacy", "test")
    seeds = sorted(set.intersection(*(set(runs) for runs in stored.values())))
    levels = by_adapter({name: [runs[seed] for seed in seeds] for name, runs in stored.items()})
    rewards = {
        clients: np.array([run["rewards"] for run in runs])
        for clients, runs in levels["LoRA r = 16"].items()
    }
    low, high = needed_clients(rewards, 0.5)
    for page in ("results.md", "results/aggregation.md", "guide/privacy.md"):
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        assert f"between {low:g} and {high:g}" in text, page


def test_a_seeds_file_gains_the_models_that_it_lacks(tmp_path, monkeypatch):
    measured = []

    def made_up(jobs, lab, split):
        measured.append(set(jobs))
        return {name: {split: figures(0.5, truth=0.0)} for name in ("base", *jobs)}

    monkeypatch.setattr(adapter_runs, "measured", made_up)
    run = ["uploads", "--seeds", "7", "--runs", str(tmp_path), "--out", str(tmp_path)]
    path = tmp_path / "uploads_7.json"
    path.write_text(json.dumps({"base": {}, "LoRA r = 16, float32": {"test": {}}}))
    adapter_runs.main(run)
    adapter_runs.main(run)
    assert measured == [{"LoRA r = 16, 2 bits"}]
    assert set(json.loads(path.read_text())) == {
        "base", "LoRA r = 16, float32", "LoRA r = 16, 2 bits"
    }  # fmt: skip


def test_the_claim_is_the_gain_less_nine_tenths_of_the_gain_of_whole_uploads(tmp_path):
    for seed, small in ((1, 0.55), (2, 0.6)):
        rows = {
            "base": figures(0.4, truth=0.0),
            "LoRA r = 16, float32": figures(0.6, truth=0.0),
            "LoRA r = 16, 2 bits": figures(small, truth=0.0),
        }
        named = {name: {"test": row} for name, row in rows.items()}
        (tmp_path / f"uploads_{seed}.json").write_text(json.dumps(named))
    (claim,) = family_e(tmp_path)
    assert claim.differences == pytest.approx([0.3 - 0.36, 0.4 - 0.36])
    assert "-0.050" in uploads_table(tmp_path)
