import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.fronts import Front, grid, reaching, widest_gap
from firm.fronts.nearest import sound
from firm.fronts.reach import neighbourhoods
from tests.smoke import ROOT

ENTRIES = st.floats(0.0, 1.0)


def _curved(preference, power):
    """Returns rewards on a bulging front, to which equal steps of the preference are unequal."""
    bent = np.array(preference) ** power
    return 0.2 + 0.3 * bent / np.linalg.norm(bent)


@pytest.fixture(scope="module", params=[(2, 1.0), (2, 3.0), (3, 1.0), (3, 2.0)])
def curved_front(request, build_point, build_front):
    """One seed, in steps of a sixth, no point dominated."""
    num_objectives, power = request.param
    return build_front(
        [
            build_point(_curved(preference, power), preference=preference)
            for preference in grid(6, num_objectives)
        ],
        num_objectives=num_objectives,
    )


def _met(front, parts):
    """Returns the gains of a mixture, scaled to sum 1, as the docstring defines them."""
    rewards = front.rewards()
    gains = {
        point.name: (row - rewards.min(axis=0)) / np.ptp(rewards, axis=0)
        for point, row in zip(front.points, rewards, strict=True)
    }
    mixed = sum(share * gains[point.name] for point, share in parts)
    return mixed / mixed.sum()


def _preference(parts):
    return sum(share * np.array(point.preference) for point, share in parts)


@given(data=st.data())
def test_the_mixture_of_neighbours_gains_as_the_wish_asks(curved_front, data):
    num_objectives = len(curved_front.objectives)
    want = np.array(data.draw(st.lists(ENTRIES, min_size=num_objectives, max_size=num_objectives)))
    want[data.draw(st.integers(0, num_objectives - 1))] += 0.5
    parts = reaching(curved_front, want)
    assert len(parts) <= num_objectives
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert min(share for _, share in parts) > 0
    preferences = np.array([point.preference for point, _ in parts])
    assert np.ptp(preferences, axis=0).max() <= 1 / 6 + 1e-9  # neighbours
    np.testing.assert_allclose(_met(curved_front, parts), want / want.sum(), atol=1e-5)


def test_on_a_front_that_bends_the_preference_is_not_the_wish(build_point, build_front):
    points = [build_point(_curved(p, 3.0), preference=p) for p in grid(8, 2)]
    (half,) = reaching(build_front(points), (1, 1))
    assert half[0].preference == (0.5, 0.5)
    shifted = [
        replace(p, preference=(p.preference[0] ** 2, 1 - p.preference[0] ** 2)) for p in points
    ]
    assert _preference(reaching(build_front(shifted), (1, 1))) == pytest.approx((0.25, 0.75))


def test_the_order_of_objectives_and_points_decides_nothing(build_point, build_front):
    points = [build_point(_curved(p, 2.0), preference=p) for p in grid(5, 2)]
    turned = [
        build_point(tuple(p.rewards.values())[::-1], preference=p.preference[::-1])
        for p in reversed(points)
    ]
    first = _preference(reaching(build_front(points), (0.8, 0.2)))
    second = _preference(reaching(build_front(turned), (0.2, 0.8)))
    np.testing.assert_allclose(first, second[::-1], atol=1e-9)


def test_the_ends_are_the_best_sound_models(build_point, build_front):
    points = [build_point(_curved(p, 1.0), preference=p) for p in grid(4, 2)]
    over = build_point((0.49, 0.1), preference=(0.999, 0.001))  # beaten at both
    broken = build_point((0.99, 0.19), preference=(0.99, 0.01), collapse="one reply")
    front = build_front([*points, over, broken])
    assert reaching(front, (1, 0)) == [(points[0], pytest.approx(1))]
    assert reaching(front, (0, 1)) == [(points[-1], pytest.approx(1))]
    # of a dominated model without validation rewards those on test prompts are not comparable
    known = {p.name: {n: own / 2 for n, own in p.rewards.items()} for p in points}
    low = build_point((0.0, 0.0), preference=(0.9, 0.1))
    partly = replace(build_front([*points, low]), validation=known, is_conditioned=True)
    assert reaching(partly, (1, 0)) == [(points[0], pytest.approx(1))]
    with pytest.raises(ValueError, match="none of the 1 models has a preference and is neither"):
        reaching(build_front([broken]), (1, 0))
    with pytest.raises(ValueError, match="the target trade-off"):
        reaching(front, (1, 0, 0))


def test_of_several_seeds_the_one_that_gains_most_answers(build_point, build_front):
    weak, strong = (
        [build_point(_curved(p, 1.0) * scale, preference=p, seed=seed) for p in grid(4, 2)]
        for seed, scale in ((0, 0.9), (1, 1.0))
    )
    parts = reaching(build_front([*weak, *strong]), (0.6, 0.4))
    assert {point.seed for point, _ in parts} == {1}


def test_an_objective_that_nothing_moves_and_a_single_model_are_answered(build_point, build_front):
    flat = [build_point((0.2 + 0.1 * p[0], 0.5), preference=p) for p in grid(2, 2)]
    assert reaching(build_front(flat), (1, 1))[0][0] is flat[0]
    only = build_front(flat[:1])
    assert reaching(only, (0, 1)) == [(flat[0], 1.0)]


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_measuring_in_the_widest_gaps_spaces_a_front_by_its_length(num_objectives):
    def longest(points):
        """The farthest that a point of a fine grid is from the nearest measured one."""
        fine = np.array([_curved(p, 3.0) for p in grid(40, num_objectives)])
        own = np.array([_curved(p, 3.0) for p in points])
        return np.linalg.norm(fine[:, None] - own[None], axis=2).min(axis=1).max()

    points = grid(2, num_objectives)
    count = 9 if num_objectives == 2 else 45
    while len(points) < count:
        points.append(widest_gap(np.array(points), np.array([_curved(p, 3.0) for p in points])))
    assert len(set(points)) == count
    even = grid(8, num_objectives)
    assert len(even) == count
    assert longest(points) < 0.8 * longest(even)


def test_the_widest_gap_of_two_points_is_between_them():
    assert widest_gap(np.eye(2), np.array([[0.1, 0.4], [0.3, 0.2]])) == (0.5, 0.5)


def test_preferences_on_a_line_have_neighbours(build_point, build_front):
    line = [(1 - s, s / 2, s / 2) for s in (0.0, 0.25, 0.5, 0.75, 1.0)]
    front = build_front(
        [build_point(_curved(p, 1.0), preference=p) for p in line], num_objectives=3
    )
    assert reaching(front, (1, 0, 0))[0][0].preference == (1.0, 0.0, 0.0)
    gap = widest_gap(front.preferences(), front.rewards())
    assert gap[1] == pytest.approx(gap[2], abs=1e-6)


@pytest.mark.parametrize("name", ["aligned/one_conditioned_run", "aligned/a_quarter_at_corners"])
def test_of_all_seeds_at_a_trade_off_the_one_that_gains_most_answers(name):
    """Five seeds of a published study."""
    front = Front.load(ROOT / f"docs/fronts/{name}.front.json")
    sound_rewards = sound(front).selection_rewards()
    least, ranges = sound_rewards.min(axis=0), np.ptp(sound_rewards, axis=0)
    rewards = dict(zip([p.name for p in front.points], front.selection_rewards(), strict=True))
    for share in np.linspace(0.05, 0.95, 19):
        ray, found = np.array([share, 1 - share]), {}
        (answer,) = {point.seed for point, _ in reaching(front, ray)}
        for seed in {point.seed for point in front.points}:
            own = front.of_seed(seed)
            for low, high in itertools.pairwise(np.argsort(own.preferences()[:, 0])):
                ends = [(rewards[own.points[i].name] - least) / ranges for i in (low, high)]
                off = [gains @ [ray[1], -ray[0]] for gains in ends]
                if off[0] * off[1] <= 0 and off[0] != off[1]:
                    mixed = (off[1] * ends[0] - off[0] * ends[1]) / (off[1] - off[0])
                    found[seed] = max(found.get(seed, 0.0), mixed.sum())
        assert answer == max(found, key=lambda seed: found[seed])


@pytest.mark.slow
def test_a_conditioned_model_is_what_was_measured_at_its_preference(build_point, build_front):
    ends = [build_point((0.9, 0.1), preference=(1, 0)), build_point((0.1, 0.9), preference=(0, 1))]
    for middle, weak in (((0.6, 0.45), False), ((0.2, 0.2), True)):
        points = [
            ends[0],
            build_point(middle, preference=(0.6, 0.4), collapse="one reply" if weak else None),
            build_point((0.3, 0.3), preference=(0.5, 0.5)),  # beaten by its neighbours
            build_point((0.4, 0.6), preference=(0.4, 0.6)),
            ends[1],
        ]
        front = build_front(points, is_conditioned=True)
        parts = reaching(front, (1, 1))
        assert [point for point, _ in parts] == [points[2]]
        merged = reaching(replace(front, is_conditioned=False), (1, 1))
        assert points[2] not in [point for point, _ in merged]  # another model than any measured
    steps = [points[i] for i in (0, 2, 4)]
    steps[1] = replace(steps[1], collapse="one reply")
    answer = reaching(build_front(steps, is_conditioned=True), (1, 1))
    assert len(answer) == 1
    assert answer[0][0] in ends


def test_several_models_at_one_preference_are_neighbours_of_the_others_each():
    ends = np.eye(3)
    assert sorted(map(sorted, neighbourhoods(np.vstack([ends, ends[:1]])))) == [
        [0, 1, 2],
        [1, 2, 3],
    ]
    assert neighbourhoods(np.full((4, 3), 1 / 3)) == [[0], [1], [2], [3]]
    assert neighbourhoods(np.ones((2, 1))) == [[0], [1]]


def test_too_many_models_of_many_objectives_are_refused():
    rows = np.random.default_rng(0).dirichlet(np.ones(6), 500)
    assert neighbourhoods(rows[:20])
    with pytest.raises(ValueError, match="500 models of 6 objectives have too many neighbourhoods"):
        neighbourhoods(rows)
