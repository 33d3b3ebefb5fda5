"""Shares, calibration, length bias and agreement of reward models on pairs."""

import numpy as np
import pytest

from firm.report.page import render
from firm.report.reward_page import Share, report_of, reward_page


def report(differences: dict[str, np.ndarray], lengths: np.ndarray):
    return report_of(differences, lengths, num_training=10, losses=[0.7, 0.6], seconds=3.0)


def test_a_share_has_its_exact_interval() -> None:
    share = Share.of(np.array([1.0] * 8 + [0.0] * 2))
    assert share.value == 0.8
    # statsmodels.stats.proportion.proportion_confint(8, 10, method="beta")
    assert (share.low, share.high) == pytest.approx((0.443905, 0.974789), abs=1e-6)


def test_scores_that_state_their_odds_are_calibrated() -> None:
    generator = np.random.default_rng(0)
    stated = generator.uniform(0, 3, 20_000)
    right = generator.random(20_000) < 1 / (1 + np.exp(-stated))
    differences = np.where(right, stated, -stated)
    lengths = generator.choice([-1, 1], 20_000)
    own = report({"honest": differences, "bold": 5 * differences}, lengths)
    assert own.verdicts["honest"].calibration_error < 0.01
    assert own.verdicts["bold"].calibration_error > 0.1
    assert own.verdicts["bold"].accuracy == own.verdicts["honest"].accuracy
    assert own.verdicts["honest"].log_loss < own.verdicts["bold"].log_loss
    assert own.agreement["honest, bold"].value == 1


def test_a_model_of_length_alone_is_seen() -> None:
    lengths = np.array([3, 1, 2, -1, -4, 5, -2, 6, 1, 1], dtype=float)
    verdicts = report({"long": lengths}, lengths).verdicts["long"]
    assert verdicts.prefers_longer.value == 1
    assert (verdicts.longer_chosen.value, verdicts.shorter_chosen.value) == (1, 0)
    assert report({"long": lengths}, lengths).longer_is_better.value == 0.7


def test_ties_count_half_and_missing_judgements_not_at_all() -> None:
    differences = np.array([1.0, 0.0, np.nan, -1.0])
    own = report({"r": differences, "s": np.array([1.0, 1.0, 1.0, -1.0])}, np.ones(4))
    assert (own.verdicts["r"].accuracy.value, own.verdicts["r"].accuracy.num) == (0.5, 3)
    assert (own.agreement["r, s"].value, own.agreement["r, s"].num) == (2 / 3, 3)
    silent = report({"r": differences, "none": np.full(4, np.nan)}, np.ones(4))
    held_out = silent.tables()[0]
    assert held_out.rows[1] == ["none", "no pairs", "–", "–"]


def test_the_page_says_when_length_would_do_as_well() -> None:
    lengths = np.array([1.0] * 7 + [-1.0] * 3)
    page = reward_page(report({"r": lengths}, lengths), title="Reward model 'r'")
    assert "which is within the model's interval" in page.summary[0]
    assert page.summary[0].endswith("It is not measurably better than chance.")
    text = render(page, script="plotly.min.js")
    for words in ("0.700 [0.348, 0.933]", "Length bias", "Calibration", "10"):
        assert words in text
    differences = np.array([1.0, -1.0] * 20)
    worse, better = (
        reward_page(report({"r": differences}, np.full(40, sign)), title="r").summary[0]
        for sign in (1.0, -1.0)
    )
    assert "would be right more often, in 100%." in worse
    assert "would be right in 0%." in better
    sure = reward_page(report({"r": np.ones(40)}, np.full(40, -1.0)), title="r").summary[0]
    assert sure.endswith("would be right in 0%.")
