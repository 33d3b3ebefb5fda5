import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from firm.fronts import dominators, non_dominated

# few values, so that ties and equal points are common
SCORES = arrays(
    np.float64, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(0, 3)
)


@given(points=SCORES)
def test_a_dominator_is_nowhere_worse_and_somewhere_better(points):
    for index, found in enumerate(dominators(points)):
        for other in range(len(points)):
            pairs = list(zip(points[other], points[index], strict=True))
            is_dominator = all(o >= s for o, s in pairs) and any(o > s for o, s in pairs)
            assert (other in found) == is_dominator


@given(points=SCORES)
def test_the_non_dominated_are_those_without_dominators(points):
    kept = non_dominated(points)
    assert kept.dtype == bool
    assert kept.tolist() == [not found for found in dominators(points)]
    assert kept.any()


@given(points=SCORES)
def test_every_dominated_point_has_a_dominator_that_is_not(points):
    kept = non_dominated(points)
    assert all(any(kept[i] for i in found) for found in dominators(points) if found)


def test_equal_points_do_not_dominate_each_other():
    assert dominators([[1, 2], [1, 2], [0, 2]]) == [[], [], [0, 1]]


@pytest.mark.parametrize("points", [[], [[]], [1.0, 2.0], [[[1.0]]]])
def test_points_of_another_shape_are_refused(points):
    with pytest.raises(ValueError, match=r"shape \[N, M\]"):
        non_dominated(points)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_points_that_are_not_finite_are_refused_with_their_place(value):
    with pytest.raises(ValueError, match=f"got {value} at point 1, objective 0"):
        dominators([[0.0, 1.0], [value, 1.0]])
