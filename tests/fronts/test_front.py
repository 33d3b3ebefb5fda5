import dataclasses
import json
import math

import numpy as np
import pytest

from firm.fronts import (
    Front,
    by_preference,
    check_comparable,
    hypervolume,
    mean_front,
    non_dominated,
    seed_hypervolumes,
)


def test_rows_and_columns_follow_points_and_objectives(build_point, build_front):
    points = [
        build_point((0.1, 0.9), preference=(1.0, 3.0), objectives=("b", "a")),
        build_point((0.3, 0.4)),
    ]
    front = build_front(points)
    assert front.rewards().tolist() == [[0.9, 0.1], [0.3, 0.4]]
    np.testing.assert_equal(front.preferences(), [[0.25, 0.75], [np.nan, np.nan]])
    assert build_front([]).rewards().shape == (0, 2)


def test_a_front_judges_its_points(build_point, build_front):
    rewards = [(0.5, 0.25), (0.25, 0.5), (0.25, 0.25)]
    front = build_front([build_point(r) for r in rewards], reference=(0.125, 0.0))
    assert non_dominated(front.rewards()).tolist() == [True, True, False]
    assert front.hypervolume == hypervolume(rewards, (0.125, 0.0))


@pytest.mark.parametrize("num_points", [0, 1])
def test_fewer_than_two_points_are_no_front(build_point, build_front, num_points):
    front = build_front([build_point((0.5, 0.5))] * num_points)
    words = ["no points", "one point"][num_points]
    with pytest.raises(ValueError, match=f"a front with {words} has no trade-off"):
        _ = front.hypervolume
    with pytest.raises(ValueError, match=f"a front with {words}"):
        seed_hypervolumes(front)


@pytest.mark.parametrize("split", ["test", "validation"])
def test_values_of_a_split_have_one_number_for_each_prompt(build_point, build_front, split):
    points = [build_point((0.5, 0.5), name=name) for name in ("one", "two")]
    values = {"one": {"a": (0.1, 0.2), "b": (0.1, 0.2)}, "two": {"a": (0.1, 0.2), "b": (0.1,)}}
    with pytest.raises(ValueError, match=f"the {split} values must have one number for each"):
        build_front(points, **{f"{split}_values": values})


def test_a_point_below_the_reference_is_named(build_point, build_front):
    points = [build_point((0.5, 0.5)), build_point((0.5, 0.1), name="late")]
    with pytest.raises(ValueError, match=r"point 'late' has 0\.1 in objective 'b'"):
        build_front(points, reference=(0.2, 0.2)).hypervolume  # noqa: B018


def test_a_front_says_how_many_prompts_its_rewards_are_of(build_front, build_point, tmp_path):
    front = build_front([build_point((0.1, 0.2))], num_scored={"b": 31})
    assert front.prompts() == "100 prompts (b on 31)"
    front.save(tmp_path / "front.json")
    assert Front.load(tmp_path / "front.json") == front
    content = json.loads((tmp_path / "front.json").read_text())
    del content["num_scored"]  # which fronts whose prompts all have scores may lack
    (tmp_path / "front.json").write_text(json.dumps(content))
    assert Front.load(tmp_path / "front.json").prompts("test prompts") == "100 test prompts"


def test_a_file_gives_back_what_was_saved(grid_front, build_point, tmp_path):
    odd = build_point((0.5, 0.5), name="Ω", collapse="one reply", scores={})
    front = dataclasses.replace(grid_front, points=(*grid_front.points, odd))
    front.save(tmp_path / "front.json")
    assert Front.load(tmp_path / "front.json") == front


def test_a_kl_that_is_not_finite_survives_as_nan(build_point, build_front, tmp_path):
    front = build_front([build_point((0.5, 0.5), kl=math.inf, scores={"x": math.nan})])
    front.save(tmp_path / "front.json")
    point = Front.load(tmp_path / "front.json").points[0]
    assert math.isnan(point.kl)
    assert math.isnan(point.scores["x"])


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        ((-0.5, 1.5), "non-negative and not all zero"),
        ((0.0, 0.0), "non-negative and not all zero"),
        ((math.nan, 1.0), "finite, non-negative"),
        ((1.0,), "one entry for each of the 2 objectives"),
        ((), "one entry for each of the 2 objectives"),
        ((0.2, 0.3, 0.5), "one entry for each of the 2 objectives"),
    ],
)
def test_what_is_no_preference_is_refused_with_the_points_name(
    build_point, build_front, preference, message
):
    with pytest.raises(ValueError, match=f"preference of 'odd' must .*{message}"):
        build_front([build_point((0.5, 0.5), preference=preference, name="odd")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objectives": ("a", "a")}, "objectives must be distinct names"),
        ({"objectives": ()}, "objectives must be distinct names"),
        ({"reference": (0.0,)}, "one finite number for each of the 2 objectives"),
        ({"calibrations": {"a": {}}}, r"the calibrations must have one entry .* \(a, b\), got a"),
        ({"base": {"a": 0.5, "b": 0.5, "c": 0.5}}, "base model must have one entry"),
        ({"base": {"a": 0.5, "b": math.nan}}, "got nan for 'b'"),
        ({"num_prompts": 0}, "num_prompts must be positive"),
    ],
)
def test_a_front_that_does_not_fit_together_is_refused(build_front, fields, message):
    with pytest.raises(ValueError, match=message):
        build_front([], **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": {"a": 0.5}}, "the rewards of 'x' must have one entry"),
        ({"errors": {}}, "the errors of 'x' must have one entry .* got none"),
        ({"rewards": {"a": 0.5, "b": math.inf}}, "got inf for 'b'"),
        ({"adapter": "/home/x"}, "adapter of 'x' must be a path relative"),
        (
            {"adapter": "points/../../x"},
            "adapter of 'x' must be inside the front's folder, without '..'",
        ),
        ({"adapter": "points\\x"}, "adapter of 'x' must be inside the front's folder"),
        (
            {"adapter": "points/x\n"},
            r"an adapter's folder must be a single line of printable .* 'points/x\\n'",
        ),
        ({"adapter": ""}, "an adapter's folder must be a single line of printable text"),
        (
            {"name": "x\x1b[2J"},
            r"a point's name must be a single line of printable .* got 'x\\x1b\[2J'",
        ),
        (
            {"collapse": "x\u202e"},
            r"a collapse's reason must be a single line of printable .* got 'x\\u202e'",
        ),
    ],
)
def test_a_point_that_does_not_fit_is_refused(build_point, build_front, fields, message):
    with pytest.raises(ValueError, match=message):
        build_front([dataclasses.replace(build_point((0.5, 0.5), name="x"), **fields)])


@pytest.mark.parametrize("fields", [{"strategy": "firm\r"}, {"objectives": ("a", "b\x07")}])
def test_names_that_a_terminal_would_obey_are_refused(build_front, fields):
    with pytest.raises(
        ValueError, match="an objective or strategy must be a single line of printable text"
    ):
        build_front([], **fields)


def test_two_points_of_one_name_are_refused(build_point, build_front):
    with pytest.raises(ValueError, match="must be unique, got 'x' 2 times"):
        build_front([build_point((0.5, 0.5), name="x"), build_point((0.5, 0.6), name="x")])


def test_points_are_grouped_by_preference_at_any_scale_and_by_rising_seed(build_point, build_front):
    points = [
        build_point((0.5, 0.5), preference=(1, 2), seed=1),
        build_point((0.4, 0.4), preference=(0.1, 0.2), seed=0),
        build_point((0.3, 0.3), preference=(0.1, 0.9), seed=0),
        build_point((0.2, 0.2)),
    ]
    groups = by_preference(build_front(points))
    assert list(groups.values()) == [(points[2],), (points[1], points[0])]
    assert list(groups)[1] == pytest.approx((1 / 3, 2 / 3))
    means = mean_front(build_front(points))
    assert means.keys() == groups.keys()
    np.testing.assert_allclose(list(means.values()), [[0.3, 0.3], [0.45, 0.45]])


def test_the_hypervolume_of_each_seed_is_of_its_own_points(build_point, build_front):
    rewards = {0: [(0.5, 0.25), (0.25, 0.5)], 1: [(0.5, 0.5), (0.75, 0.25)]}
    points = [
        build_point(values, preference=preference, seed=seed)
        for seed, rows in rewards.items()
        for values, preference in zip(rows, [(1, 0), (0, 1)], strict=True)
    ]
    found = seed_hypervolumes(build_front(points))
    assert found.by_seed == {0: 0.1875, 1: 0.3125}  # 1/8 + 1/16 and 1/4 + 1/16
    assert found.mean == 0.25
    assert found.sd == pytest.approx(0.125 / math.sqrt(2))
    assert seed_hypervolumes(build_front(points[:2])).sd is None


def test_seeds_with_other_preferences_are_not_averaged(build_point, build_front):
    preferences = [(0, (1, 0)), (0, (0, 1)), (1, (1, 0)), (1, (1, 1))]
    points = [build_point((0.5, 0.5), preference=p, seed=s) for s, p in preferences]
    with pytest.raises(ValueError, match=r"seed 0 has no point of preference \(0\.5, 0\.5\)"):
        seed_hypervolumes(build_front(points))


def test_fronts_that_differ_in_what_is_compared_are_comparable(build_point, build_front):
    first = build_front([build_point((0.5, 0.5))])
    calibrations = {
        name: {"method": "sigmoid", "mean": 0.25 + 1e-9, "scale": 2.0, "num_samples": 99}
        for name in "ab"
    }
    points = [build_point((0.1, 0.2), seed=3)]
    second = build_front(points, strategy="fedavg", num_prompts=7, calibrations=calibrations)
    check_comparable(first, second)
    pairs = [dict.fromkeys("ab", own) for own in ({}, {"method": "pairs"})]
    check_comparable(*(build_front([], calibrations=own) for own in pairs))  # old and new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": 0.26}, r"calibration of 'b' has mean 0\.25 in the first and 0\.26"),
        ({"method": "none"}, "calibration of 'b' has method sigmoid in the first and none"),
        ({"low": 0.0}, r"calibration of 'b' has low missing in the first and 0\.0"),
    ],
)
def test_other_calibrations_are_not_comparable(build_front, change, message):
    first = build_front([])
    second = build_front([])
    second.calibrations["b"].update(change)
    with pytest.raises(ValueError, match=message):
        check_comparable(first, second)


def test_the_figures_of_a_front_are_rewards_or_accuracies(build_front):
    raw = {"a": {"method": "none"}, "b": {"method": "sigmoid"}}
    assert build_front([], calibrations=raw).measure == "reward"
    assert build_front([]).measure == "reward in [0, 1]"
    pairs = {name: {"method": "pairs"} for name in raw}
    assert build_front([], calibrations=pairs).measure == "accuracy on pairs"


def test_other_objectives_or_reference_points_are_not_comparable(build_front):
    first = build_front([])
    swapped = dataclasses.replace(first, objectives=("b", "a"))
    with pytest.raises(ValueError, match="are a, b in the first and b, a in the second"):
        check_comparable(first, swapped)
    with pytest.raises(ValueError, match="not comparable: the objectives"):
        check_comparable(first, build_front([], num_objectives=3))
    with pytest.raises(ValueError, match=r"reference point is \[0\.0, 0\.0\] in the first"):
        check_comparable(first, build_front([], reference=(0.0, 0.1)))


def test_a_front_has_at_most_ten_thousand_points(build_point, build_front):
    points = [build_point((0.1, 0.2), name=str(index)) for index in range(10_001)]
    with pytest.raises(ValueError, match="points must be at most 10,000, got 10,001"):
        build_front(points)
