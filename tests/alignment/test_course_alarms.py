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
