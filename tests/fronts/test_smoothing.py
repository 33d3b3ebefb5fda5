import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from firm.fronts import exponential_average, total_variation

CURVES = arrays(
    np.float64, array_shapes(max_dims=2, max_side=20), elements=st.floats(-10, 10, width=32)
)


@given(values=CURVES, half_life=st.floats(0.1, 50))
def test_the_average_is_its_definition(values, half_life):
    found = exponential_average(values, half_life=half_life)
    for step in range(len(values)):
        weights = 0.5 ** (np.arange(step, -1, -1) / half_life)  # of x_0 to x_step
        expected = np.tensordot(weights, values[: step + 1], axes=1) / weights.sum()
        np.testing.assert_allclose(found[step], expected, rtol=1e-9, atol=1e-9)


def test_a_constant_curve_stays_and_the_first_value_is_kept():
    assert exponential_average([3.0] * 4, half_life=20) == pytest.approx([3.0] * 4)
    assert exponential_average([[5.0, 1.0], [0.0, 0.0]], half_life=3)[0].tolist() == [5.0, 1.0]


@pytest.mark.parametrize("half_life", [0, -1.0, np.inf, np.nan])
def test_a_half_life_must_be_positive(half_life):
    with pytest.raises(ValueError, match="half_life must be positive"):
        exponential_average([1.0], half_life=half_life)


@given(values=CURVES)
def test_the_variation_is_at_least_the_way_from_start_to_end(values):
    found = total_variation(values)
    assert found.shape == values.shape[1:]
    assert (found >= np.abs(values[-1] - values[0]) - 1e-9).all()
    np.testing.assert_allclose(found, total_variation(values[::-1]), atol=1e-9)


def test_the_variation_of_a_rising_curve_is_its_rise_and_of_a_swing_its_whole_way():
    assert total_variation([[0.0, 0.5], [0.25, 1.0], [1.0, 0.0]]).tolist() == [1.0, 1.5]
    assert total_variation([[0.5, 0.5]]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("values", [[], 1.0, [1.0, np.nan]])
def test_curves_without_steps_or_with_gaps_are_refused(values):
    with pytest.raises(ValueError, match="values must"):
        total_variation(values)
