import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import spearmanr

from firm.fronts import (
    Violation,
    correlation_interval,
    monotone_violations,
    preference_correlations,
)
from firm.fronts.correlation import rank_correlation


def test_rewards_that_follow_their_preferences_correlate_fully(grid_front):
    assert preference_correlations(grid_front) == pytest.approx({"a": 1.0, "b": 1.0})


def test_correlations_are_spearmans_over_all_points_of_three_objectives(build_point, build_front):
    generator = np.random.default_rng(0)
    preferences = generator.dirichlet([1, 1, 1], size=12).round(1) + 0.1
    rewards = generator.uniform(size=(12, 3)).round(1)  # with ties
    points = [
        build_point(r, preference=tuple(p), name=str(i))
        for i, (r, p) in enumerate(zip(rewards, preferences, strict=True))
    ]
    found = preference_correlations(build_front(points, num_objectives=3))
    shares = preferences / preferences.sum(axis=1, keepdims=True)
    for index, name in enumerate("abc"):
        oracle = spearmanr(shares[:, index].round(9), rewards[:, index]).statistic
        assert found[name] == pytest.approx(oracle)


def test_what_does_not_vary_correlates_with_nothing(build_point, build_front):
    front = build_front(
        [
            build_point((0.5, 0.2), preference=(1, 3)),
            build_point((0.5, 0.1), preference=(0.5, 0.5)),
            build_point((0.5, 0.05), preference=(3, 1)),
            build_point((0.9, 0.9)),  # without a preference
        ]
    )
    assert preference_correlations(front) == {"a": None, "b": pytest.approx(1.0)}
    assert preference_correlations(build_front(front.points[1:])) == {"a": None, "b": None}
    assert preference_correlations(build_front([])) == {"a": None, "b": None}


def test_two_shares_have_no_correlation_however_many_seeds_they_have(build_point, build_front):
    rows = [((0.2, 0.8), (0.1, 0.9)), ((0.8, 0.2), (0.6, 0.3))]
    points = [
        build_point(rewards, preference=preference, seed=seed, name=f"{preference} {seed}")
        for preference, rewards in rows
        for seed in range(3)
    ]
    assert preference_correlations(build_front(points)) == {"a": None, "b": None}


def test_the_interval_of_a_correlation_by_hand():
    # artanh(0.6) = 0.6931, √((1 + 0.18) / 7) = 0.4106, 1.96 of it 0.8047
    low, high = correlation_interval(0.6, 10)
    assert (low, high) == pytest.approx((-0.1111, 0.9047), abs=1e-3)
    assert correlation_interval(-0.6, 10) == pytest.approx((-high, -low))
    narrow = correlation_interval(0.6, 10, level=0.5)
    assert low < narrow[0] < 0.6 < narrow[1] < high


def test_a_perfect_correlation_of_few_points_is_not_known_to_be_one():
    assert correlation_interval(1.0, 3) == (-1.0, 1.0)
    assert correlation_interval(1.0, 5) == (pytest.approx(correlation_interval(0.9, 5)[0]), 1.0)
    assert correlation_interval(-1.0, 5) == (-1.0, pytest.approx(correlation_interval(-0.9, 5)[1]))


def test_means_over_seeds_that_rise_are_monotone(build_point, build_front):
    rewards = {0.2: (0.5, 0.1), 0.8: (0.4, 0.4)}  # seed 0 falls, the mean rises
    points = [
        build_point((values[seed], 1 - values[seed]), preference=(share, 1 - share), seed=seed)
        for share, values in rewards.items()
        for seed in (0, 1)
    ]
    assert not monotone_violations(build_front(points))
    assert monotone_violations(build_front(p for p in points if p.seed == 0))


def test_a_fall_is_named_with_its_place_and_size(build_point, build_front):
    rewards = {0.0: (0.3, 0.5), 0.5: (0.6, 0.5), 1.0: (0.4, 0.1)}
    front = build_front(build_point(r, preference=(s, 1 - s)) for s, r in rewards.items())
    assert monotone_violations(front) == [Violation("a", 0.5, 1.0, pytest.approx(0.2))]
    assert not monotone_violations(front, tolerance=0.21)
    assert monotone_violations(front, tolerance=0.19)


def test_with_three_objectives_the_mean_runs_over_how_the_rest_is_divided(build_point, build_front):
    rows = {
        (0.0, 1.0, 0.0): (0.1, 0.5, 0.2),
        (0.0, 0.0, 1.0): (0.5, 0.1, 0.9),
        (1.0, 0.0, 0.0): (0.4, 0.3, 0.1),  # of a: below one, above the mean 0.3
    }
    front = build_front((build_point(r, preference=p) for p, r in rows.items()), num_objectives=3)
    assert not monotone_violations(front)


@pytest.mark.parametrize("tolerance", [-0.1, np.nan])
def test_a_tolerance_must_not_be_negative(grid_front, tolerance):
    with pytest.raises(ValueError, match="tolerance must be non-negative"):
        monotone_violations(grid_front, tolerance=tolerance)


def test_rank_correlation_by_hand():
    # ranks 1 2 3 4 and 2 1 4 3: 1 - 6 · 4 / (4 · 15)
    first, second = np.array([1, 2, 3, 4]), np.array([20, 10, 400, 30])
    assert rank_correlation(first, second) == pytest.approx(0.6)
    # ranks 1.5 1.5 3 and 1 2 3: ties share their mean rank
    first, second = np.array([5, 5, 9]), np.array([1, 2, 3])
    assert rank_correlation(first, second) == pytest.approx(np.sqrt(0.75))


@given(arrays(float, 6, elements=st.floats(0.1, 10), unique=True))
def test_rank_correlation_knows_the_order_alone(values):
    assert rank_correlation(values, values**3) == pytest.approx(1.0)
    assert rank_correlation(values, 1 / values) == pytest.approx(-1.0)
