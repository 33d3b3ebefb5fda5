"""Alarms about a run's course: each is raised by its own collapse, once, and by no healthy run."""

import pytest

from firm.alignment.course_alarms import course_alarms

HEALTHY = {"response_length": 14.0, "end_share": 0.98, "entropy": 1.2, "approx_kl": 0.01}


def run(rounds: list[dict], validation: list[float] | None = None) -> list[list[str]]:
    """Returns the alarms after each round of two equal clients."""
    rows, alarms = [], []
    for number, metrics in enumerate(rounds, start=1):
        own = {"kind": "client", "round": number, **HEALTHY, **metrics}
        rows += [{**own, "client": "a"}, {**own, "client": "b", "approx_kl": 0.0}]
        if validation:
            mean = {"mean": validation[number - 1], "se": 0.01}
            rewards = {"x": mean, "y": mean}
            rows.append(
                {"kind": "evaluation", "split": "validation", "round": number, "rewards": rewards}
            )
        alarms.append(course_alarms(rows, max_approx_kl=0.5))
    return alarms


@pytest.mark.parametrize(
    ("collapse", "says"),
    [
        ({"response_length": 1.4}, "shrunk from 14.0 tokens in the first round to 1.4"),
        ({"response_length": 60.0}, "grown from 14.0 tokens"),
        ({"end_share": 0.02}, "2% of the replies end by themselves, 98% in the first round"),
        ({"entropy": 0.01}, "entropy has fallen from 1.2 nats per token"),
    ],
    ids=["short", "long", "endless", "certain"],
)
def test_a_collapse_that_lasts_three_rounds_is_an_alarm_once(collapse, says):
    alarms = run([{}, {}, collapse, collapse, collapse, collapse])
    assert [len(own) for own in alarms] == [0, 0, 0, 0, 1, 0]
    assert says in alarms[4][0]
    assert "estimator." in alarms[4][0]  # what to do


def test_objectives_that_are_sacrificed_or_teach_nothing_are_an_alarm_once():
    def by_name(key, **figures):
        return {key: {"kind": 0.1, "brief": None, **figures}}

    flat = by_name("zero_variance_share", brief=0.95)
    alarms = run([{}, flat, flat, flat, flat])
    assert [len(own) for own in alarms] == [0, 0, 0, 1, 0]
    seldom = by_name("zero_variance_share")  # its client is not drawn
    assert [len(own) for own in run([flat, seldom] * 4)] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert alarms[3][0].startswith("95% of the groups of replies have equal rewards of brief")
    full = by_name("saturated_share", kind=0.97)
    (alarm,) = run([full] * 3)[2]
    assert alarm.startswith("97% of the replies have the largest score of kind")
    (alarm,) = run([by_name("tail_share", kind=0.25)] * 3)[2]
    assert alarm.startswith("25% of the replies have scores of kind in the upper tail")
    early, late = (by_name("score_length_correlation", kind=own) for own in (0.2, 0.7))
    (alarm,) = run([early, late, late, late])[3]
    assert "correlation of kind with the length of replies has risen from 0.20" in alarm
    assert not any(run([late] * 4))  # a reward of length from the first round on

    def course(*figures, weights=(0.5, 0.5)):
        key = "advantage_covariance"
        return [{key: {"kind": 0.2, "brief": own}, "weights": [list(weights)]} for own in figures]

    falling = [-0.1, -0.12, -0.09, -0.11, -0.1, -0.1, -0.1, -0.1, -0.1, -0.1, -0.1]
    alarms = run(course(*falling))
    assert [len(own) for own in alarms] == [0] * 7 + [1, 0, 0, 0]
    assert alarms[7][0].startswith("brief is sacrificed to the other objectives: for 3 rounds")
    assert "strategy.weights" in alarms[7][0]
    assert not any(run(course(*falling, weights=(1.0, 0.0))))  # left out on purpose
    assert not any(run(course(*[-0.1, 0.12, -0.2, -0.05, 0.1, -0.1] * 2)))
    for weights in ([[0.5, 0.5]], [[1.0, 0.0]]), ([[1.0, 0.0]], [[0.5, 0.5]]):  # of two clients
        rows = [
            {**HEALTHY, **own, "kind": "client", "round": number, "client": name, "weights": each}
            for number, own in enumerate(course(*falling[:8]), start=1)
            for name, each in zip("ab", weights, strict=True)
        ]
        assert len(course_alarms(rows, max_approx_kl=0.5)) == 1


def test_a_collapse_that_passes_is_none():
    short = {"response_length": 1.4}
    assert not any(run([{}, short, short, {}, short, short, {}]))


def test_validation_rewards_that_stay_below_their_best_are_an_alarm():
    alarms = run([{}] * 6, validation=[0.5, 0.6, 0.5, 0.5, 0.5, 0.5])
    assert [len(own) for own in alarms] == [0, 0, 0, 0, 1, 0]
    assert "below its best, 0.600" in alarms[4][0]
    assert "now 0.500" in alarms[4][0]


def test_validation_rewards_within_their_noise_are_none():
    assert not any(run([{}] * 6, validation=[0.5, 0.6, 0.59, 0.59, 0.59, 0.585]))


def test_a_client_that_ends_its_training_early_is_named_once():
    early = {"approx_kl": 0.7}
    alarms = run([{}, early, early])
    assert [len(own) for own in alarms] == [0, 1, 0]
    assert alarms[1][0].startswith("the policy of a (0.7 nats per token) has left the one")


def test_pairs_have_neither_ends_nor_entropy():
    rows = [
        {"kind": "client", "round": n, "client": "a", "response_length": 20.0} for n in (1, 2, 3)
    ]
    assert course_alarms(rows, max_approx_kl=None) == []
