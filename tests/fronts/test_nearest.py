from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from firm.fronts import expected_rewards, nearest, neighbours

SHARES = st.floats(0.0, 1.0)


@pytest.fixture(scope="module")
def triangle_front(build_point, build_front):
    """Two seeds on the simplex of three objectives in steps of a quarter, no point dominated."""
    steps = [(i, j, 4 - i - j) for i in range(5) for j in range(5 - i)]
    return build_front(
        (
            build_point(np.array(p) / 5 + 0.1, preference=p, seed=seed)
            for seed in (0, 1)
            for p in steps
        ),
        num_objectives=3,
    )


@pytest.mark.parametrize(("want", "share"), [((0.3, 0.7), 0.25), ((9, 1), 1.0), ((4, 4), 0.5)])
def test_the_nearest_model_has_the_nearest_preference(grid_front, want, share):
    assert nearest(grid_front, want).preference == (share, 1 - share)


def test_distance_is_taken_on_the_simplex(build_point, build_front):
    far, near = (
        build_point((0.5, 0.4), preference=(5, 5)),
        build_point((0.4, 0.5), preference=(0, 1)),
    )
    assert nearest(build_front([far, near]), (0.1, 0.9)) is near


def test_of_the_seeds_the_one_with_the_best_mean_under_the_preference_is_taken(
    build_point, build_front
):
    points = [
        build_point((0.4, 0.9), preference=(1, 1), seed=0),
        build_point((0.8, 0.5), preference=(1, 1), seed=1),
    ]
    assert nearest(build_front(points), (0.7, 0.3)) is points[1]
    assert nearest(build_front(points), (0.3, 0.7)) is points[0]


def test_dominated_and_collapsed_models_are_not_taken(build_point, build_front):
    dominated = build_point((0.4, 0.4), preference=(1, 1))
    collapsed = build_point((0.9, 0.9), preference=(3, 2), collapse="one reply")
    sound = build_point((0.5, 0.5), preference=(0, 1))
    front = build_front([dominated, collapsed, sound])
    assert nearest(front, (0.5, 0.5)) is sound  # and the collapsed one dominates nobody


def test_a_front_without_sound_models_is_refused(build_point, build_front):
    front = build_front([build_point((0.5, 0.5), preference=(1, 1), collapse="mute")])
    for find in (nearest, neighbours):
        with pytest.raises(ValueError, match=r"none of the 1 models .* nor collapsed"):
            find(front, (1, 1))


@pytest.mark.parametrize("want", [(-1, 2), (0, 0), (1,), (1, 1, 1), (np.nan, 1)])
def test_what_is_no_preference_is_refused(grid_front, want):
    for find in (nearest, neighbours):
        with pytest.raises(ValueError, match="the target preference must"):
            find(grid_front, want)


def test_between_two_preferences_both_take_part_by_their_distance(grid_front):
    found = neighbours(grid_front, (0.3, 0.7))
    assert {point.preference[0]: share for point, share in found} == pytest.approx(
        {0.25: 0.8, 0.5: 0.2}
    )


def test_a_preference_that_was_trained_is_one_model(grid_front, triangle_front):
    for front, want in ((grid_front, (1, 3)), (triangle_front, (1, 1, 2))):
        [(point, share)] = neighbours(front, want)
        assert share == 1.0
        np.testing.assert_allclose(
            np.array(point.preference) / sum(point.preference), np.array(want) / sum(want)
        )


def test_on_an_edge_of_the_triangles_two_models_do(triangle_front):
    found = neighbours(triangle_front, (0, 3, 5))
    assert sorted(point.preference for point, _ in found) == [(0, 1, 3), (0, 2, 2)]


def test_inside_a_triangle_its_three_corners_do(triangle_front):
    found = neighbours(triangle_front, (6, 5, 5))  # in quarters 1.5, 1.25, 1.25
    assert {point.preference: share for point, share in found} == pytest.approx(
        {(2, 1, 1): 0.5, (1, 2, 1): 0.25, (1, 1, 2): 0.25}
    )


@example(first=0.859375, second=1e-09)
@given(first=SHARES, second=SHARES)
def test_shares_add_up_to_the_wanted_preference_within_one_seed(triangle_front, first, second):
    want = np.array([min(first, second), abs(first - second), 1 - max(first, second)])
    found = neighbours(triangle_front, want)
    points, shares = zip(*found, strict=True)
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(1)
    assert len({point.seed for point in points}) == 1
    preferences = np.array([point.preference for point in points]) / 4
    np.testing.assert_allclose(np.array(shares) @ preferences, want, atol=1e-8)
    # on this grid every side of the smallest simplex is one step long
    sides = [np.linalg.norm(p - q) for p, q in combinations(preferences, 2)]
    assert max(sides, default=0) <= 0.25 * np.sqrt(2) + 1e-9


def test_of_equally_close_seeds_the_one_with_the_best_expectation_is_taken(
    build_point, build_front
):
    points = [
        build_point(rewards, preference=preference, seed=seed)
        for seed, gain in ((0, 0.0), (1, 0.2), (2, 0.1))
        for rewards, preference in (((0.7 + gain, 0.1), (1, 0)), ((0.1, 0.7), (0, 1)))
    ]
    assert {point.seed for point, _ in neighbours(build_front(points), (1, 1))} == {1}


def test_collapsed_and_dominated_models_take_no_part(build_point, build_front):
    rewards = {0: (0.1, 0.9), 1: (0.45, 0.45), 2: (0.5, 0.5), 3: (0.8, 0.2), 4: (0.9, 0.1)}
    points = [
        build_point(r, preference=(n, 4 - n), collapse="mute" if n == 3 else None)
        for n, r in rewards.items()
    ]
    for want, corners in (((1, 3), [0, 2]), ((3, 1), [2, 4])):
        found = neighbours(build_front(points), want)
        assert sorted(point.preference[0] for point, _ in found) == corners
    best = build_point((1, 1), preference=(1, 1), seed=1)
    assert neighbours(build_front([*points, best]), (1, 3)) == [(best, 1.0)]


def test_models_are_selected_by_their_rewards_on_validation_prompts(build_point, build_front):
    lucky = build_point((0.9, 0.9), preference=(1, 1), seed=0)
    good = build_point((0.5, 0.5), preference=(1, 1), seed=1)
    front = build_front([lucky, good])
    assert nearest(front, (1, 1)) == lucky
    means = {lucky.name: {"a": 0.4, "b": 0.4}, good.name: {"a": 0.6, "b": 0.6}}
    assert nearest(replace(front, validation=means), (1, 1)) == good
    assert neighbours(replace(front, validation=means), (1, 1)) == [(good, 1.0)]
    only_one = {good.name: means[good.name]}
    assert nearest(replace(front, validation=only_one), (1, 1)) == lucky


def test_outside_of_every_seeds_models_it_is_the_nearest(build_point, build_front):
    front = build_front(
        [
            build_point((0.3, 0.6), preference=(1, 2), seed=0),
            build_point((0.6, 0.3), preference=(2, 1), seed=0),
            build_point((0.1, 0.9), preference=(0, 1), seed=1),
        ]
    )
    assert neighbours(front, (9, 1)) == [(front.points[1], 1.0)]
    assert neighbours(front, (1, 9)) == [(front.points[2], 1.0)]  # never between two seeds


def test_expected_rewards_lie_between_and_errors_add_up(build_point):
    first = build_point((0.2, 0.8), errors={"a": 0.01, "b": 0.02})
    second = build_point((0.6, 0.4), errors={"a": 0.03, "b": 0.02})
    found = expected_rewards([(first, 0.25), (second, 0.75)])
    assert found.rewards == pytest.approx({"a": 0.5, "b": 0.5})
    assert found.errors == pytest.approx({"a": 0.025, "b": 0.02})


@pytest.mark.parametrize("shares", [(), (0.5,), (1.5, -0.5), (np.nan,)])
def test_shares_off_the_simplex_are_refused(build_point, shares):
    with pytest.raises(ValueError, match="non-negative and sum to 1"):
        expected_rewards([(build_point((0.5, 0.5)), share) for share in shares])


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_the_mixture_is_the_closest_and_then_the_best_of_all_sets(
    build_point, build_front, num_objectives
):
    random = np.random.default_rng(0)
    for _ in range(20):
        rows = random.dirichlet(np.ones(num_objectives), 12).round(random.integers(1, 4))
        rows = [*rows[:9] / rows[:9].sum(1, keepdims=True), *np.eye(num_objectives)]
        points = [
            build_point(0.1 + 0.5 * row, preference=tuple(row), name=str(index))
            for index, row in enumerate(np.unique(rows, axis=0))
        ]
        front = build_front(points, num_objectives=num_objectives)
        values, preferences = front.selection_rewards(), front.preferences()
        for target in (random.dirichlet(np.ones(num_objectives)), rows[0]):
            found = neighbours(front, target)
            assert len(found) <= num_objectives
            ours = np.zeros(len(points))
            for point, share in found:
                ours[front.points.index(point)] = share
            assert ours @ preferences == pytest.approx(target, abs=1e-8)
            distances = ((preferences - target) ** 2).sum(1)
            expected = min(
                (round(float(shares @ distances[own]), 9), -float(shares @ values[own] @ target))
                for size in range(1, num_objectives + 1)
                for own in map(list, combinations(range(len(points)), size))
                if (shares := target @ np.linalg.pinv(preferences[own])).min() > 1e-9
                and np.abs(shares @ preferences[own] - target).max() < 1e-9
            )
            got = float(ours @ distances), -float(ours @ values @ target)
            assert got == pytest.approx(expected, abs=1e-8)
