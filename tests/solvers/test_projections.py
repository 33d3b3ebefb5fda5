"""Projections: the nearest point, told by what every nearest point of a convex set has."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.solvers import project_to_simplex
from firm.solvers.projections import box_projection

VECTORS = arrays(np.float64, (5,), elements=st.floats(-3, 3, width=32))


def boxed(values, *, lower=0.0, upper=1.0):
    bounds = np.broadcast_to(lower, values.shape[-1]), np.broadcast_to(upper, values.shape[-1])
    return box_projection(np.asarray(values), *bounds)


def _is_nearest(point, nearest, others) -> bool:
    """No point of the set lies beyond the plane through the nearest one (the obtuse angle)."""
    return all((point - nearest) @ (other - nearest) <= 1e-12 for other in others)


@given(values=VECTORS)
def test_the_projection_is_the_nearest_point_of_the_simplex(values):
    nearest = project_to_simplex(values)
    assert nearest.min() >= 0
    assert nearest.sum() == pytest.approx(1, abs=1e-15)
    assert _is_nearest(values, nearest, np.eye(5))  # the corners stand for all


@given(values=VECTORS, seed=st.integers(0, 10**6))
def test_the_projection_is_the_nearest_point_of_the_box(values, seed):
    generator = np.random.default_rng(seed)
    center = generator.dirichlet(np.ones(5))
    lower, upper = np.maximum(center - 0.1, 0), np.minimum(center + 0.15, 1)
    nearest = boxed(values, lower=lower, upper=upper)
    assert (nearest >= lower).all()
    assert (nearest <= upper).all()
    assert nearest.sum() == pytest.approx(1, abs=1e-14)
    # the corner of the box that is furthest along the difference: filled in its order
    corner = lower.copy()
    for index in np.argsort(nearest - values):
        corner[index] += min(upper[index] - lower[index], 1 - corner.sum())
    assert _is_nearest(values, nearest, [corner, center])


@given(values=VECTORS)
def test_a_box_around_everything_is_the_simplex(values):
    np.testing.assert_allclose(boxed(values), project_to_simplex(values), atol=1e-14)


def test_projections_by_hand():
    # 0.5, 2, -1: the shift 1 leaves (0, 1, 0); with at least 0.1 each: 0.1, 0.8, 0.1
    values = torch.tensor([0.5, 2.0, -1.0])
    assert project_to_simplex(values).tolist() == [0.0, 1.0, 0.0]
    assert boxed(values, lower=0.1).tolist() == pytest.approx([0.1, 0.8, 0.1])
    # at most 0.6: the rest 0.4 goes to the next, 0.5 above the last
    assert boxed(values, upper=0.6).tolist() == pytest.approx([0.4, 0.6, 0.0])
    assert project_to_simplex(torch.zeros(4)).tolist() == [0.25] * 4
    assert project_to_simplex(torch.tensor([0.3, 0.7])).tolist() == pytest.approx([0.3, 0.7])


def test_huge_values_and_single_ones_are_projected():
    assert project_to_simplex(np.array([1e300, 1e300, 0.0])).tolist() == [0.5, 0.5, 0.0]
    assert project_to_simplex(np.array([-7.0])).tolist() == [1.0]
    assert boxed(np.array([-7.0])).tolist() == [1.0]


def test_leading_dimensions_are_a_batch_and_the_input_stays():
    values = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    before = values.clone()
    for project in (project_to_simplex, lambda v: boxed(v, lower=0.1, upper=0.5)):
        together = project(values)
        for i in range(2):
            for j in range(3):
                np.testing.assert_array_equal(together[i, j], project(values[i, j]))
    assert project_to_simplex(values).dtype == torch.float32
    assert torch.equal(values, before)


@pytest.mark.parametrize("values", [torch.ones(()), torch.ones(3, 0), torch.tensor([np.nan, 1.0])])
def test_what_is_no_vector_is_refused(values):
    with pytest.raises(ValueError, match=r"values must (have shape|be finite)"):
        project_to_simplex(values)
