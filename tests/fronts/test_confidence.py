"""Bounds hold as often as they say, with few values, ties and skew."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, multinomial, t

from benchmarks.certificates import SETTINGS, wrong_choices, wrong_passes
from firm.fronts.confidence import (
    half_width,
    lower_bound,
    paired_interval,
    share_interval,
    upper_bound,
)

shares = st.lists(st.floats(0, 1), min_size=1, max_size=40).map(np.array)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bound_is_wrong_in_at_most_5_percent(name):
    share, distance = wrong_passes(SETTINGS[name], 300)
    assert share <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 300) * (not SETTINGS[name].is_bounded)
    assert math.isfinite(distance)
    assert distance > 0


@pytest.mark.parametrize("is_validated", [True, False])
def test_the_best_of_many_passes_as_rarely(is_validated):
    assert wrong_choices(40, is_validated=is_validated) <= 0.05


def test_a_proportion_has_the_exact_bound():
    assert lower_bound(np.ones(5), 0.95, is_bounded=True) == pytest.approx(0.05**0.2)
    assert lower_bound(np.zeros(5), 0.95, is_bounded=True) == 0
    assert upper_bound(np.zeros(5), 0.95, is_bounded=True) == pytest.approx(1 - 0.05**0.2)
    assert upper_bound(np.zeros(5), 0.95, is_bounded=False) == pytest.approx(1 - 0.05**0.2)
    for num in (0, 1, 7, 20):
        own = binomtest(num, 20).proportion_ci(0.95, method="exact")
        assert share_interval(num / 20, 20) == pytest.approx((own.low, own.high))


@pytest.mark.slow
@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=2, max_size=40).map(np.array))
def test_a_paired_interval_excludes_no_change_only_where_the_sign_test_does(changes):
    num, mean, error = len(changes), changes.mean(), changes.std(ddof=1) / len(changes) ** 0.5
    low, high = paired_interval(mean, error, num)
    rises, num_changed = int((changes > 0).sum()), int((changes != 0).sum())
    p = binomtest(rises, num_changed).pvalue if num_changed else 1.0
    assert p < 0.05 or not (low > 0 or high < 0)
    assert paired_interval(-mean, error, num) == pytest.approx((-high, -low))
    assert -1 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert low < high


def test_a_paired_interval_covers_the_change_in_95_percent_of_samples():
    num = 30
    counts = np.array([(up, down) for up in range(num + 1) for down in range(num + 1 - up)])
    means = (counts[:, 0] - counts[:, 1]) / num
    errors = np.sqrt((counts.sum(1) / num - means**2) / (num - 1))
    pairs = zip(means, errors, strict=True)
    low, high = np.array([paired_interval(mean, error, num) for mean, error in pairs]).T
    every = np.column_stack([counts, num - counts.sum(1)])
    for up, down in [(0, 0.02), (0, 0.3), (0.2, 0), (0.1, 0.1), (0.7, 0.1), (0.9, 0.02), (0, 0.98)]:
        odds = multinomial.pmf(every, num, [up, down, 1 - up - down])
        assert odds[(low <= up - down) & (up - down <= high)].sum() >= 0.95, (up, down)


def test_bounds_of_shares_of_two_replies_are_wrong_in_at_most_5_percent_of_samples():
    """Samples of 0 and 1 alone have another kind of bound than those with a 1/2."""
    counts = np.array([(low, half, 8 - low - half) for low in range(9) for half in range(9 - low)])
    samples = [np.repeat([0.0, 0.5, 1.0], own) for own in counts]
    lows = np.array([lower_bound(own, 0.95, is_bounded=True) for own in samples])
    highs = np.array([upper_bound(own, 0.95, is_bounded=True) for own in samples])
    for low, half in [(0, 0.01), (0, 0.6), (0.6, 0), (0.8, 0.005), (0.1, 0.1), (0.9, 0)]:
        odds = multinomial.pmf(counts, 8, [low, half, 1 - low - half])
        mean = half / 2 + 1 - low - half
        assert odds[lows > mean + 1e-9].sum() <= 0.05, (low, half)
        assert odds[highs < mean - 1e-9].sum() <= 0.05, (low, half)


@given(shares)
def test_bounds_enclose_the_mean_and_widen_with_the_confidence(values):
    lows = [lower_bound(values, c, is_bounded=True) for c in (0.6, 0.9, 0.99)]
    highs = [upper_bound(values, c, is_bounded=True) for c in (0.6, 0.9, 0.99)]
    assert 0 <= lows[2] <= lows[1] <= lows[0] <= values.mean() + 1e-9
    assert values.mean() - 1e-9 <= highs[0] <= highs[1] <= highs[2] <= 1


def test_the_test_by_betting_has_the_exact_bound_where_all_values_are_1():
    """A gambler who stakes all on each of n wins at odds 1 / m has m⁻ⁿ."""
    almost = np.full(60, 1 - 1e-9)  # not counted as a proportion
    exact = lower_bound(np.ones(60), 0.95, is_bounded=True)
    assert exact - 0.03 < lower_bound(almost, 0.95, is_bounded=True) <= exact


def test_values_without_a_bound_have_student_s_at_least():
    values = np.random.default_rng(0).normal(size=200)
    error = values.std(ddof=1) / math.sqrt(200)
    student = values.mean() - t.ppf(0.95, 199) * error
    assert student - 0.6 * error <= lower_bound(values, 0.95, is_bounded=False) <= student
    assert half_width(error, 200, 0.95) == pytest.approx(t.ppf(0.95, 199) * error)


@pytest.mark.parametrize("values", [[], [2.0], [2.0, 2.0, 2.0], [2.0, 3.0]])
def test_values_that_are_equal_or_may_well_be_say_nothing_without_a_bound(values):
    assert lower_bound(np.array(values), 0.95, is_bounded=False) == -math.inf
    assert upper_bound(np.array(values), 0.95, is_bounded=False) == math.inf
    assert half_width(0.0, 9, 0.95) == half_width(1.0, 1, 0.95) == math.inf
    rare = np.array([0.5] * 99 + [3.0])  # another sample may well lack it
    assert upper_bound(rare, 0.95, is_bounded=False) == math.inf


@pytest.mark.parametrize("confidence", [0.1, 0.5, 1.0, math.nan])
def test_a_confidence_outside_its_range_is_refused(confidence):
    with pytest.raises(ValueError, match=r"confidence must be greater than 0\.5 and less than 1"):
        lower_bound(np.ones(5), confidence, is_bounded=True)


def test_values_outside_their_bounds_are_refused():
    with pytest.raises(ValueError, match=r"values must be in \[0, 1\], got 0 to 2"):
        lower_bound(np.array([0.0, 2.0]), 0.95, is_bounded=True)
