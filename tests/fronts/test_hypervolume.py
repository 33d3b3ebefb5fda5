"""Oracles: inclusion and exclusion over all subsets, cells counted on a grid, and moocore."""

import re
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.base.extras import install_command
from firm.fronts import hypervolume, non_dominated
from firm.fronts.hypervolume import PackageMissing, volumes


def points(num_objectives):
    """Up to six points on a grid of five values, so that ties are common."""
    shape = st.tuples(st.integers(1, 6), st.just(num_objectives))
    return arrays(np.float64, shape, elements=st.integers(1, 5))


ANY_POINTS = st.integers(1, 3).flatmap(points)


def by_inclusion_and_exclusion(scores):
    """The union of the boxes from 0: what any k of them share is the box of their minimum."""
    return sum(
        (-1) ** (size - 1) * np.min(subset, axis=0).prod()
        for size in range(1, len(scores) + 1)
        for subset in combinations(scores, size)
    )


@given(scores=ANY_POINTS)
def test_it_is_the_union_of_the_points_boxes(scores):
    corner = np.zeros(scores.shape[1])
    assert hypervolume(scores, corner) == pytest.approx(by_inclusion_and_exclusion(scores), 1e-12)


@given(scores=ANY_POINTS)
def test_it_is_the_number_of_unit_cells_below_a_point(scores):
    cells = np.indices((5,) * scores.shape[1]).reshape(scores.shape[1], -1).T  # lower corners
    is_below = (cells[:, None] < scores[None]).all(axis=2).any(axis=1)
    assert hypervolume(scores, np.zeros(scores.shape[1])) == is_below.sum()


@pytest.mark.parametrize("num_objectives", [2, 3, 4, 5])
def test_it_is_moocores(num_objectives):
    moocore = pytest.importorskip("moocore", reason="the oracle moocore is not installed")
    generator = np.random.default_rng(num_objectives)
    for num_points in (1, 2, 7, 30):
        scores = generator.normal(size=(num_points, num_objectives))
        corner = scores.min(axis=0) - generator.uniform(0.01, 1, num_objectives)
        oracle = moocore.hypervolume(scores, ref=corner, maximise=True)
        assert hypervolume(scores, corner) == pytest.approx(oracle, 1e-12)


def test_an_area_and_a_solid_are_as_by_hand():
    assert hypervolume([[0.7]], [0.2]) == pytest.approx(0.5)
    # 3x1 + 2x1 + 1x1 above (1, 1)
    assert hypervolume([[4, 2], [3, 3], [2, 4]], [1, 1]) == 6
    # three slabs 2x1x1 that share the unit cube: 3*2 - 3*1 + 1
    assert hypervolume([[2, 1, 1], [1, 2, 1], [1, 1, 2]], [0, 0, 0]) == 4


@given(scores=ANY_POINTS, seed=st.integers(0, 100))
def test_order_equal_points_and_dominated_points_do_not_matter(scores, seed):
    corner = np.zeros(scores.shape[1])
    whole = hypervolume(scores, corner)
    order = np.random.default_rng(seed).permutation(len(scores))
    assert hypervolume(np.concatenate([scores[order], scores]), corner) == whole
    assert hypervolume(scores[non_dominated(scores)], corner) == whole


@given(scores=ANY_POINTS)
def test_moving_points_and_reference_together_changes_nothing(scores):
    corner = np.zeros(scores.shape[1])
    assert hypervolume(scores - 7, corner - 7) == hypervolume(scores, corner)


@pytest.mark.parametrize("num_objectives", [1, 2, 3])
def test_a_batch_of_sets_has_the_volumes_of_each(num_objectives):
    sets = np.random.default_rng(0).uniform(size=(4, 3, 5, num_objectives))
    corner = np.zeros(num_objectives)
    found = volumes(sets)
    assert found.shape == (4, 3)
    assert found[2, 1] == pytest.approx(hypervolume(sets[2, 1], corner), 1e-14)


@pytest.mark.parametrize("num_objectives", [1, 2, 3])
def test_what_lies_below_the_origin_adds_no_volume(num_objectives):
    inside = np.full((1, num_objectives), 0.5)
    below = np.full((1, num_objectives), 2.0)
    below[0, -1] = -1.0
    assert volumes(np.concatenate([inside, below])) == volumes(inside) == 0.5**num_objectives


def test_a_reference_that_a_point_does_not_exceed_is_refused_by_name():
    scores, corner = [[0.5, 0.6], [0.7, 0.3]], [0.1, 0.3]
    with pytest.raises(ValueError, match=r"point 1 has 0\.3 in objective 1, the reference 0\.3"):
        hypervolume(scores, corner)
    with pytest.raises(ValueError, match=r"point late has 0\.3 in objective brevity"):
        hypervolume(scores, corner, names=["early", "late"], objectives=["care", "brevity"])


@pytest.mark.parametrize("reference", [[0.0], [0.0, 0.0, 0.0], 0.0, [0.0, np.nan]])
def test_a_reference_of_another_shape_or_not_finite_is_refused(reference):
    with pytest.raises(ValueError, match="one finite number for each of the 2 objectives"):
        hypervolume([[1.0, 1.0]], reference)


def test_four_objectives_without_moocore_name_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "moocore", None)
    with pytest.raises(PackageMissing, match=re.escape(install_command("fronts"))):
        hypervolume([[1.0] * 4], [0.0] * 4)
