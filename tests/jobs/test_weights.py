"""Weights by round, rewards on a condition and advantages of one's own, by the default command."""

import pytest

from firm.run import UserError
from tests import smoke
from tests.runs import read_rows

SHORT = (
    *("--estimator.name", "critic_free", "--strategy.num_local_steps", 1),
    *("--evaluation.num_validation_prompts", 0, "--rounds", 3),
)
OWN = """
from reward_models import reward_model

@reward_model("even")
def even(completions, **kwargs):
    return [float(len(text) % 2 == 0) for text in completions]

def doubled(advantages):
    return 2 * advantages

def shares(number):
    return {"even": 1 / number}
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_a_run_follows_its_schedule_and_conditions(own, tmp_path):
    rewards = (
        f"{{even: {{name: even, file: {own}, normalization: none}}, "
        "brevity: {name: brevity, only_if: 'even >= 0.5'}}"
    )
    common = (*SHORT, "--rewards", rewards, "--estimator.zero_variance", "leave_out")
    course = (
        "--strategy.schedule.shares",
        "even=1",
        "even=0.5",
        "--strategy.schedule.rounds",
        1,
        3,
    )
    scheduled = (*common, "--strategy.name", "fedavg", *course)
    fixed = smoke.run(*scheduled, "--out", tmp_path / "fixed")
    by_round = {row["round"]: row["weights"][0] for row in read_rows(fixed, "client")}
    assert by_round == {1: [1.0, 0.0], 2: [0.75, 0.25], 3: [0.5, 0.5]}
    for row in read_rows(fixed, "client"):
        for key in ("zero_variance_share", "saturated_share", "tail_share"):
            assert 0 <= row[key]["brevity"] <= 1
        assert row["advantage_covariance"]["even"] > 0
        assert row["tail_share"]["even"] is None  # without normalization
        if row["round"] == 1:
            assert row["step_share"] == {"even": 1.0, "brevity": 0.0}
    page = (fixed / "report.html").read_text()
    assert "Reward against the combined advantage" in page
    assert "Replies with the largest score" in page
    assert "Replies in the upper tail of the base model" in page
    evaluated = read_rows(fixed, "evaluation")[-1]["scores"]
    assert evaluated["brevity"].get("num_prompts", 8) == 8  # conditions are of training alone
    hooks = (
        *("--estimator.advantages", f"{own}:doubled", "--estimator.scale", "none"),
        *("--strategy.schedule.function", f"{own}:shares"),
    )
    hooks += ("--guard.stop_when", '["advantage_covariance.even > 0 for 2"]')
    solved = smoke.run(*common, *hooks, "--out", tmp_path / "solved")
    assert len(read_rows(solved, "round")) == 2
    first = [row["weights"][0] for row in read_rows(solved, "client") if row["round"] == 1]
    assert all(weights == pytest.approx([1, 0]) for weights in first)
    assert "Share of the step by objective" in (solved / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--rewards.brevity.only_if", "positivty > 0"],
            "rewards.brevity.only_if must compare one of positivity, got 'positivty > 0'; did you",
        ),
        (
            [
                *("--rewards.brevity.only_if", "positivity > 0"),
                *("--groups", "{a: {clients: [0], objectives: [brevity]}}"),
            ],
            "rewards.brevity.only_if needs positivity wherever brevity is trained",
        ),
        (
            ["--strategy.schedule.shares", "[[1, 1, 1]]"],
            "the shares of round 1 must have one entry for each of the 2 objectives",
        ),
        (
            ["--strategy.schedule.shares", "brevity=2"],
            r"strategy.schedule.shares.0 has no share for positivity",
        ),
        (
            ["--strategy.preference", "brevity=0", "positivity=0"],
            r"strategy.preference must have a share above 0",
        ),
        (
            [*smoke.FRONT, "--strategy.schedule.shares", "[[1, 1]]"],
            "strategy.schedule must be left out with policy.conditioning.kind preference",
        ),
    ],
)
def test_what_fits_no_objective_is_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        smoke.config(*arguments)
    rest = smoke.config("--strategy.preference", "brevity=0")
    assert rest.strategy.preference == (0.0, 1.0)
