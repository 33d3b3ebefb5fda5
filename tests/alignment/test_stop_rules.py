"""Rules that end a run: what they read, when they hold, and what is wrong with others."""

import pytest

import firm.alignment.client  # registers the quantities
import firm.jobs.alignment_config  # noqa: F401 # and those of the evaluations
from firm.alignment.stop_rules import StopRule

OBJECTIVES = ["helpful", "harmless"]


def client(round: int, **metrics) -> dict:
    return {"kind": "client", "round": round, "client": "a", **metrics}


def evaluation(round: int, split: str, **metrics) -> dict:
    return {"kind": "evaluation", "round": round, "split": split, **metrics}


@pytest.mark.parametrize(
    ("text", "holds"),
    [("kl > 8", True), ("kl > 9", False), ("kl >= 9", True), ("kl<10", True), ("kl <= 8.9", False)],
)
def test_a_rule_compares_the_clients_mean(text, holds):
    rows = [client(1, kl=1.0), client(2, kl=6.0), client(2, kl=12.0)]
    assert StopRule.parse(text).holds(rows, 2) == holds


def test_one_client_alone_cannot_end_a_run():
    rows = [client(1, kl=1.0), client(1, kl=2.0), client(1, kl=1e30)]
    assert not StopRule.parse("kl > 8").holds(rows, 1)


def test_a_rule_may_have_to_hold_in_several_rounds_in_a_row():
    rule = StopRule.parse("response_length < 4 for 3")
    lengths = [2.0, 5.0, 3.0, 3.0, 3.0]
    rows = [client(n, response_length=own) for n, own in enumerate(lengths, start=1)]
    assert [rule.holds(rows[:n], n) for n in range(1, 6)] == [False, False, False, False, True]


def test_rules_read_objectives_and_validation_prompts():
    rows = [
        client(1, rewards={"helpful": 0.9, "harmless": 0.1}),
        evaluation(1, "test", kl=99.0, rewards={"helpful": {"mean": 0.9}}),
        evaluation(1, "validation", kl=3.0, rewards={"helpful": {"mean": 0.3}}),
        evaluation(1, "validation at 1, 0", kl=99.0, rewards={"helpful": {"mean": 0.9}}),
    ]
    assert StopRule.parse("rewards.helpful >= 0.9").holds(rows, 1)
    assert StopRule.parse("validation.kl <= 3").holds(rows, 1)
    assert StopRule.parse("validation.rewards.helpful < 0.4").holds(rows, 1)
    assert not StopRule.parse("validation.rewards.helpful > 0.4").holds(rows, 1)


def test_the_base_models_evaluation_and_missing_values_do_not_count():
    rows = [evaluation(0, "validation", kl=0.0), client(1, kl=None)]
    assert not StopRule.parse("validation.kl < 1").holds(rows, 1)
    assert not StopRule.parse("kl < 1").holds(rows, 1)


@pytest.mark.parametrize(
    "text", ["", "kl", "kl is 8", "kl > ten", "kl > 8 for 0", "kl > 8 for", "kl > 1..2", "> 8"]
)
def test_a_text_that_is_no_rule_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r'must read like "kl > 8"'):
        StopRule.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("response_lenght < 4", "did you mean 'response_length'"),
        ("validation.entropy < 4", "no quantity 'entropy' of the validation prompts"),
        ("rewards.helpfull > 1", "rewards needs one of helpful, harmless"),
        ("rewards > 1", "rewards needs one of helpful, harmless"),
        ("kl.helpful > 1", "kl is a single number"),
        ("cosines < 0", "cosines has more than one number a round"),
        ("gradient_norms.helpful > 1", "more than one number"),
        ("validation.change > 0.1", "change needs one of helpful, harmless"),
    ],
)
def test_a_rule_about_an_unknown_quantity_is_refused_and_says_what_there_is(text, says):
    with pytest.raises(ValueError, match=says):
        StopRule.parse(text).check(OBJECTIVES)


@pytest.mark.parametrize(
    "text",
    [
        "kl > 8",
        "validation.scores.helpful > 1",
        "drift > 3",
        "validation.change.helpful < 0",
        "kl_by_preference.helpful > 9",
        "seconds.rollout > 60",
        "saturated_share.helpful > 0.9 for 3",
        "zero_variance_share.harmless > 0.9",
        "score_length_correlation.helpful >= 0.8",
        "advantage_covariance.helpful < 0 for 5",
        "tail_share.helpful > 0.2 for 3",
        "step_share.helpful > 0.9 for 3",
    ],
)
def test_known_quantities_are_accepted(text):
    StopRule.parse(text).check(OBJECTIVES)
