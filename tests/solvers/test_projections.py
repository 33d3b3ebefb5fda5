"""Projections: the nearest point, told by what every nearest point of a convex set has."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.solvers import project_to_simplex

VECTORS = arrays(np.float64, (5,), elements=st.floats(-3, 3, width=32))


def _is_nearest(point, nearest, others) -> bool:
    """No point of the set lies beyond the plane through the nearest one (the obtuse angle)."""
    return all((point - nearest) @ (other - nearest) <= 1e-12 for other in others)


@given(values=VECTORS)
def test_the_projection_is_the_nearest_point_of_the_simplex(values):
    nearest = project_to_simplex(values)
    assert nearest.min() >= 0
    assert nearest.sum() == pytest.approx(1, abs=1e-15)
    assert _is_nearest(values, nearest, np.eye(5))  # the corners stand for all


def test_projections_by_hand():
    # 0.5, 2, -1: the shift 1 leaves (0, 1, 0)
    values = torch.tensor([0.5, 2.0, -1.0])
    assert project_to_simplex(values).tolist() == [0.0, 1.0, 0.0]
    assert project_to_simplex(torch.zeros(4)).tolist() == [0.25] * 4
    assert project_to_simplex(torch.tensor([0.3, 0.7])).tolist() == pytest.approx([0.3, 0.7])


def test_huge_values_and_single_ones_are_projected():
    assert project_to_simplex(np.array([1e300, 1e300, 0.0])).tolist() == [0.5, 0.5, 0.0]
    assert project_to_simplex(np.array([-7.0])).tolist() == [1.0]


def test_leading_dimensions_are_a_batch_and_the_input_stays():
    values = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    before = values.clone()
    together = project_to_simplex(values)
    for i in range(2):
        for j in range(3):
            np.testing.assert_array_equal(together[i, j], project_to_simplex(values[i, j]))
    assert together.dtype == torch.float32
    assert torch.equal(values, before)


@pytest.mark.parametrize("values", [torch.ones(()), torch.ones(3, 0), torch.tensor([np.nan, 1.0])])
def test_what_is_no_vector_is_refused(values):
    with pytest.raises(ValueError, match=r"values must (have shape|be finite)"):
        project_to_simplex(values)
