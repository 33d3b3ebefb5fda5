import numpy as np
import pytest

from firm.fronts import bootstrap_hypervolume, hypervolume


def _generator():
    return np.random.default_rng(0)


@pytest.mark.parametrize("num_objectives", [1, 2, 3])
def test_it_is_the_interval_of_resampled_means_by_hand(num_objectives):
    points = _generator().uniform(size=(4, 20, num_objectives))
    corner = np.zeros(num_objectives)
    counts = np.random.default_rng(7).multinomial(20, [1 / 20] * 20, size=50)
    figures = []
    for row in counts:
        prompts = np.repeat(np.arange(20), row)  # the same ones for all points
        figures.append(hypervolume(points[:, prompts].mean(axis=1), corner))
    found = bootstrap_hypervolume(
        points, corner, generator=np.random.default_rng(7), num_resamples=50, level=0.8
    )
    assert found == pytest.approx(tuple(np.quantile(figures, [0.1, 0.9])), 1e-12)


def test_rows_of_one_prompt_are_drawn_together():
    points = _generator().uniform(size=(4, 9, 2))
    groups = np.array([0, 1, 1, 2, 3, 3, 3, 4, 0])
    counts = np.random.default_rng(7).multinomial(5, [1 / 5] * 5, size=50)
    figures = []
    for row in counts:
        drawn = [np.flatnonzero(groups == group) for group in np.repeat(np.arange(5), row)]
        figures.append(hypervolume(points[:, np.concatenate(drawn)].mean(axis=1), [0.0, 0.0]))
    found = bootstrap_hypervolume(
        *(points, [0.0, 0.0]),
        generator=np.random.default_rng(7),
        groups=groups,
        num_resamples=50,
        level=0.8,
    )
    assert found == pytest.approx(tuple(np.quantile(figures, [0.1, 0.9])), 1e-12)


def test_a_prompt_without_a_reward_is_left_out_of_its_mean():
    points = _generator().uniform(size=(2, 20, 2))
    points[:, 3:, 1] = np.nan
    counts = np.random.default_rng(7).multinomial(20, [1 / 20] * 20, size=200)
    figures = []
    for row in counts:
        prompts = np.repeat(np.arange(20), row)
        if prompts.min() < 3:  # else the second objective has no mean
            figures.append(hypervolume(np.nanmean(points[:, prompts], axis=1), [0.0, 0.0]))
    assert len(figures) < 200
    found = bootstrap_hypervolume(
        points, [0.0, 0.0], generator=np.random.default_rng(7), num_resamples=200, level=0.8
    )
    assert found == pytest.approx(tuple(np.quantile(figures, [0.1, 0.9])), 1e-12)


def test_it_covers_the_true_length_as_often_as_it_says():
    # one point, one objective: the length is the mean, uniform on [0, 1]
    points = np.random.default_rng(1).uniform(size=(300, 1, 100, 1))
    generator = _generator()
    hits = 0
    for sample in points:
        low, high = bootstrap_hypervolume(
            sample, [0.0], generator=generator, num_resamples=200, level=0.9
        )
        hits += low <= 0.5 <= high
    assert hits / len(points) == pytest.approx(0.9, abs=0.05)  # 3 standard errors


def test_it_is_paired_prompts_that_move_all_points_alike_cancel():
    # what one point gains by a prompt the other loses: only the same prompts keep the sum
    gains = _generator().normal(size=100) * 0.1
    points = np.stack([0.5 + gains, 0.5 - gains])[:, :, None]  # [2, 100, 1]
    first, second = (bootstrap_hypervolume(s[None], [0.0], generator=_generator()) for s in points)
    assert first[0] + second[1] == pytest.approx(1.0, abs=1e-12)


def test_prompts_without_spread_have_an_interval_without_width():
    points = np.tile(np.array([[0.7, 0.5], [0.5, 0.75]])[:, None], (1, 10, 1))
    low, high = bootstrap_hypervolume(points, [0.0, 0.25], generator=_generator())
    assert low == pytest.approx(high)
    assert high == pytest.approx(hypervolume(points[:, 0], [0.0, 0.25]))


def test_a_point_below_the_reference_adds_nothing():
    points = _generator().uniform(0.5, 1.0, size=(2, 30, 2))
    points[1, :, 0] = 0.1
    with_it = bootstrap_hypervolume(points, [0.2, 0.2], generator=_generator())
    assert with_it == bootstrap_hypervolume(points[:1], [0.2, 0.2], generator=_generator())
    assert bootstrap_hypervolume(points[1:], [0.2, 0.2], generator=_generator()) == (0, 0)


def test_equal_generators_give_equal_intervals():
    points = _generator().uniform(size=(3, 30, 2))
    first, second, other = (
        bootstrap_hypervolume(points, [0.0, 0.0], generator=np.random.default_rng(seed))
        for seed in (3, 3, 4)
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.ones((5, 2)), r"shape \[N, R, M\]"),
        (np.ones((3, 1, 2)), "at least 2 rows"),
        (np.full((3, 4, 2), np.inf), "must be finite, got inf"),
        (np.full((3, 4, 2), np.nan), "of each objective on at least 2 rows"),
    ],
)
def test_points_that_do_not_fit_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_hypervolume(points, [0.0, 0.0], generator=_generator())


@pytest.mark.parametrize("change", [{"num_resamples": 0}, {"level": 1.0}, {"level": 0.0}])
def test_numbers_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match="num_resamples must be positive and level in"):
        bootstrap_hypervolume(np.ones((2, 3, 2)), [0.0, 0.0], generator=_generator(), **change)
