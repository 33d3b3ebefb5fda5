"""Metrics of classic studies: the papers' tables, hand computations, and what must not matter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.fronts.measures import (
    delta_m,
    improved_share,
    local_progress,
    preference_correlation,
    rounds_to_loss,
    user_summary,
)

SINGLE_TASK = [95.4, 93.1]
"""MultiMNIST, each digit alone: the text below Table 4 of FedCMOO."""


@pytest.mark.parametrize(
    ("accuracies", "printed"),
    [([94.4, 92.6], 0.79), ([92.3, 88.2], 4.26), ([93.8, 91.1], 1.91)],
    ids=["FedCMOO", "FSMGDA", "FedCMOO-Pref"],
)
def test_delta_m_of_table_1_is_what_table_4_of_fedcmoo_prints(accuracies, printed):
    value = delta_m(accuracies, SINGLE_TASK, is_higher_better=True)
    assert round(100 * value, 2) == printed


def test_delta_m_takes_each_objective_in_its_own_sense():
    # accuracy 10 % worse, loss 30 % better: (0.1 - 0.3) / 2
    value = delta_m([0.81, 0.7], [0.9, 1.0], is_higher_better=[True, False])
    assert value == pytest.approx(-0.1)


def test_delta_m_of_the_reference_itself_is_zero():
    assert delta_m(SINGLE_TASK, SINGLE_TASK, is_higher_better=True) == 0.0


def test_user_summary_by_hand():
    summary = user_summary([0.0, 0.25, 0.5, 1.0])
    assert summary.mean == 0.4375
    assert summary.std == pytest.approx(np.sqrt(0.13671875))  # of the population
    assert summary.worst == pytest.approx(0.15 * 0.25)  # place 0.05 · 3
    assert summary.best == pytest.approx(0.5 + 0.85 * 0.5)  # place 0.95 · 3


def test_of_100_users_the_worst_5_per_cent_lie_between_the_fifth_and_the_sixth():
    accuracies = np.arange(100.0)[::-1]
    summary = user_summary(accuracies)
    assert (summary.worst, summary.best) == pytest.approx((4.95, 94.05))


def test_one_user_is_the_worst_and_the_best():
    summary = user_summary([0.7])
    assert (summary.mean, summary.std, summary.worst, summary.best) == (0.7, 0.0, 0.7, 0.7)


@given(arrays(float, st.integers(1, 30), elements=st.floats(0, 1)), st.randoms())
def test_user_summary_does_not_depend_on_the_order_and_its_tails_enclose_the_median(users, random):
    summary = user_summary(users)
    shuffled = users.tolist()
    random.shuffle(shuffled)
    other = user_summary(shuffled)
    assert (other.worst, other.best) == (summary.worst, summary.best)
    assert (other.mean, other.std) == pytest.approx((summary.mean, summary.std))
    assert users.min() <= summary.worst <= np.median(users) <= summary.best <= users.max()


def test_an_unchanged_participant_counts_as_improved():
    assert improved_share([1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 1.1, 2.0]) == 0.5


def test_with_several_objectives_a_participant_must_lose_in_none():
    before, after = [[1.0, 1.0], [1.0, 1.0]], [[0.1, 1.1], [0.9, 1.0]]
    assert improved_share(before, after) == 0.5


def test_local_progress_is_the_mean_fall_of_each_loss():
    progress = local_progress([[2.0, 1.0], [4.0, 1.0]], [[1.0, 1.5], [1.0, 1.5]])
    assert progress.tolist() == [2.0, -0.5]


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_runs_that_reach_their_preferences_correlate_perfectly(num_objectives):
    preferences = np.random.default_rng(0).uniform(0.5, 2.0, (8, num_objectives))
    levels = np.linspace(1, 3, 8)[:, None]
    reached = levels / preferences  # r₁F₁ = ... = r_M F_M
    assert preference_correlation(preferences, reached) == pytest.approx(1.0)
    assert preference_correlation(preferences, levels * preferences) == pytest.approx(-1.0)


def test_pairs_that_all_runs_want_alike_are_left_out():
    preferences = [[1, 1, 1], [1, 1, 2], [1, 1, 3]]
    losses = [[0.5, 0.9, 0.6], [0.7, 0.8, 0.4], [0.9, 0.9, 0.2]]
    assert preference_correlation(preferences, losses) == pytest.approx(1.0)


def test_runs_that_ignore_their_preferences_do_not_correlate():
    assert preference_correlation([[1, 2], [1, 1], [2, 1]], [[0.3, 0.3]] * 3) == 0.0


def test_runs_that_want_two_ratios_alone_have_no_correlation():
    assert preference_correlation([[1, 2]] * 3, [[1, 1]] * 3) is None
    assert preference_correlation([[1, 2], [2, 4], [2, 1]], [[2, 1], [2, 1], [1, 2]]) is None


def test_rounds_to_loss_finds_the_first_round_at_or_below_the_target():
    rounds, losses = [0, 5, 10, 15], [1.0, 0.02, 0.01, 0.001]
    assert rounds_to_loss(rounds, losses, 1e-2) == 10
    assert rounds_to_loss(rounds, losses, 1e-4) is None
    assert rounds_to_loss(rounds, [1.0, 0.01, 0.5, 0.5], 1e-2) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delta_m([1.0], [1.0, 2.0], is_higher_better=True), "reference must have shape"),
        (lambda: delta_m([1.0], [0.0], is_higher_better=True), "reference must be positive"),
        (lambda: delta_m([np.nan], [1.0], is_higher_better=True), r"values .* got nan at \[0\]"),
        (lambda: delta_m([1.0, 1.0], [1.0, 1.0], is_higher_better=[True]), "one for each"),
        (lambda: user_summary([]), "must not be empty"),
        (lambda: user_summary([0.5], share=0.6), r"share must be in \(0, 0.5\]"),
        (lambda: user_summary([[0.5]]), "1 dimension"),
        (lambda: improved_share([1.0], [1.0, 2.0]), "after must have shape"),
        (lambda: improved_share([1.0, 2.0], [1.0, np.inf]), r"got inf at \[1\]"),
        (lambda: improved_share(1.0, 1.0), r"shape \[C\] or \[C, M\]"),
        (lambda: improved_share([], []), "must not be empty"),
        (lambda: local_progress([1.0], [1.0]), "2 dimension"),
        (lambda: preference_correlation([[1, 0]], [[1, 1]]), "preferences must be positive"),
        (lambda: preference_correlation([[1, 1]], [[0, 1]]), "losses must be positive"),
        (lambda: rounds_to_loss([0, 2, 1], [1, 1, 1], 0.1), "rounds must increase"),
        (lambda: rounds_to_loss([0, 1], [1], 0.1), "losses must have shape"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
