"""Weights and preferences by round."""

import pytest

from firm.federation.schedule import ScheduleConfig
from firm.federation.strategy_configs import ConstrainedConfig, FedAvgConfig, FirmConfig

OBJECTIVES = ("left", "right")
POINTS = {"rounds": [2, 6], "shares": [[1.0, 0.0], [1.0, 3.0]]}
FUNCTIONS = """
def by_name(number):
    return {"right": number / 4}

def wrong(number):
    return [1.0] * number

def none(number):
    return None

def texts(number):
    return ["a", "b"]
"""


def first_share(schedule, number):
    return schedule.at(number, OBJECTIVES)[0]


def test_shares_go_from_point_to_point_and_stay_before_the_first_and_after_the_last(tmp_path):
    courses = {
        "linear": [1, 1, 0.8125, 0.625, 0.4375, 0.25, 0.25],
        "cosine": [1, 1, 1 - 0.75 * 0.1464466, 0.625, 1 - 0.75 * 0.8535534, 0.25, 0.25],
        "steps": [1, 1, 1, 1, 1, 0.25, 0.25],
    }
    for shape, course in courses.items():
        schedule = ScheduleConfig(**POINTS, shape=shape)
        shares = [first_share(schedule, number) for number in range(1, 8)]
        assert shares == pytest.approx(course, abs=1e-6), shape
        assert all(sum(schedule.at(number, OBJECTIVES)) == pytest.approx(1) for number in range(8))
    by_round = ScheduleConfig(shares=[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert [first_share(by_round, number) for number in range(1, 5)] == [1, 0, 0.5, 0.5]
    file = tmp_path / "own.py"
    file.write_text(FUNCTIONS)
    own = {
        name: ScheduleConfig(function=f"{file}:{name}")
        for name in ("by_name", "wrong", "none", "texts")
    }
    assert own["by_name"].at(1, OBJECTIVES) == (0.75, 0.25)
    assert own["wrong"].at(2, OBJECTIVES) == (0.5, 0.5)
    with pytest.raises(ValueError, match="shares of round 3 must have one entry for each of the"):
        own["wrong"].at(3, OBJECTIVES)
    with pytest.raises(ValueError, match="must be numbers, one for each of left, right, got None"):
        own["none"].at(1, OBJECTIVES)
    with pytest.raises(ValueError, match=r"must be numbers, one for each of left, right, got \['a"):
        own["texts"].at(1, OBJECTIVES)
    with pytest.raises(ValueError, match="no share for left, and the others do not sum to 1"):
        own["by_name"].at(5, OBJECTIVES)


def test_a_schedule_takes_the_place_of_weights_or_preference():
    schedule = ScheduleConfig(**POINTS)
    fixed = FedAvgConfig(schedule=schedule).at_round(4, OBJECTIVES)
    assert fixed == FedAvgConfig(weights=(0.625, 0.375))
    assert FirmConfig(schedule=schedule).at_round(6, OBJECTIVES).preference == (0.25, 0.75)
    own = FirmConfig(schedule=schedule, preferences={"a": (0.5, 0.5)}).at_round(6, OBJECTIVES)
    assert [own.of_client(n).preference for n in ("a", "b")] == [(0.5, 0.5), (0.25, 0.75)]
    plain = FirmConfig(preference=(1.0, 2.0))
    assert plain.at_round(3, OBJECTIVES) is plain
    for build, said in (
        (lambda: FedAvgConfig(schedule=schedule, weights=(1.0, 1.0)), "weights must be left out"),
        (lambda: ConstrainedConfig(schedule=schedule), "needs a strategy with weights or a"),
        (ScheduleConfig, "either shares or a function, got neither"),
        (lambda: ScheduleConfig(**POINTS, function="a:b"), "a function, got both"),
        (lambda: ScheduleConfig(**{**POINTS, "rounds": [6, 2]}), r"increase, .* got \[6, 2\]"),
        (lambda: ScheduleConfig(**{**POINTS, "rounds": [6]}), r"as many as shares \(2\), got"),
    ):
        with pytest.raises(ValueError, match=said):
            build()
