"""Learning rates by the rule, and gains beside a yardstick's, of figures that are known."""

import pytest

from benchmarks.frontier import chosen, contrasts, means


def runs(**figures):
    """Gains of two seeds that are alike."""
    return {seed: {"rewards": 0.1, "kl": 1.0, **figures} for seed in (7, 8)}


def starred(by_seed):
    """The chosen rates."""
    return [row[1] for row in chosen(by_seed)[1] if row[-1] == "*"]


def test_of_the_rates_that_stand_to_choice_the_truth_chooses():
    rates = {
        "LoRA, rate 1": runs(true_scores=0.2, parse=-0.01, rewards=0.9),
        "LoRA, rate 2": runs(true_scores=0.3, parse=-0.01),
        "LoRA, rate 3": runs(true_scores=0.8, parse=-0.06),
        "LoRA, rate 4": runs(true_scores=0.9, parse=0.0, kl=3.1),
    }
    assert starred(rates) == ["2"]
    assert starred(dict(reversed(rates.items()))) == ["2"]


def test_a_world_without_truth_chooses_by_rewards_and_kl():
    rates = {
        "LoRA, rate 1": runs(rewards=0.1),
        "LoRA, rate 2": runs(rewards=0.2),
        "LoRA, rate 3": runs(rewards=0.5, kl=3.1),
    }
    assert starred(rates) == ["2"]


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
