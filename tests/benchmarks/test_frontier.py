"""Learning rates by the rule, and gains beside a yardstick's, of figures that are known."""

from types import SimpleNamespace

import pytest
import yaml

from benchmarks.frontier import chosen, contrasts, means, validation_gains
from tests.smoke import ROOT


def runs(**figures):
    """Gains of two seeds that are alike."""
    return {seed: {"rewards": 0.1, "kl": 1.0, **figures} for seed in (7, 8)}


def starred(by_seed):
    """The chosen rates."""
    return [row[1] for row in chosen(by_seed)[1] if row[-1] == "*"]


def test_the_rewards_choose_among_the_rates_below_the_kl_cap():
    rates = {
        "LoRA, rate 1": runs(rewards=0.1),
        "LoRA, rate 2": runs(rewards=0.2, kl=3.0),
        "LoRA, rate 3": runs(rewards=0.5, kl=3.1),
    }
    assert starred(rates) == ["2"]
    assert starred(dict(reversed(rates.items()))) == ["2"]


def test_what_is_reported_later_chooses_nothing():
    """The gains that choose are those on validation prompts, without a figure of the truth."""

    def row(reward, kl, truth):
        rewards = {"a": {"mean": reward}, "b": {"mean": 0.4}}
        return {"rewards": rewards, "scores": {"true_a": {"mean": truth}}, "kl": kl}

    record = SimpleNamespace(
        name="run",
        objectives=("a", "b"),
        evaluations={
            "validation": [row(0.5, 0.0, 0.0), row(0.9, 9.0, 1.0), row(0.6, 1.5, -1.0)],
            "test": [row(0.5, 0.0, 0.0), row(0.1, 7.0, 2.0)],
        },
    )
    assert validation_gains(record) == pytest.approx({"rewards": 0.1, "kl": 1.5})
    del record.evaluations["validation"]
    with pytest.raises(ValueError, match="run was not measured on validation prompts"):
        validation_gains(record)


@pytest.mark.parametrize("name", ["frontier_rates", "hh_frontier_rates"])
def test_the_studies_of_rates_measure_validation_prompts(name):
    settings = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    assert settings["overrides"]["evaluation.num_validation_prompts"] >= 100


def test_tables_have_the_figures_that_all_runs_have():
    paired = {
        "large": [{"rewards": 0.2, "kl": 1.0, "megabytes": 8.0, "parse": 0.0}],
        "small": [{"rewards": 0.1, "kl": 1.0, "megabytes": 2.0}],
    }
    header, rows = means(paired, "large")
    assert header == ["", "MB up", "of its bytes", "sum of rewards", "KL"]
    assert rows[1] == ["small", "2", "0.250", "+0.100", "+1.000"]


def test_a_contrast_is_the_gain_less_the_share_of_the_yardsticks():
    paired = {
        "large": [{"rewards": 0.2}, {"rewards": 0.4}],
        "small": [{"rewards": 0.2}, {"rewards": 0.38}],
    }
    _, rows = contrasts(paired, "large", 0.9)
    mean = float(rows[1][1].split()[0])
    assert mean == pytest.approx(0.02)
