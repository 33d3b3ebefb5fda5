"""Slopes of power laws, and what is said of them."""

import numpy as np
import pytest

from recipes.theory.scaling import Slope, fit_slope, geometric_mean, verdict


def test_power_laws_have_their_exponent_as_slope_whatever_their_factor():
    xs = np.array([1, 2, 5, 20])
    slope = fit_slope(xs, np.array([3 * xs**-1.5, 0.1 * xs**-1.5]))
    assert slope.mean == pytest.approx(-1.5)
    assert slope.se == pytest.approx(0, abs=1e-9)


def test_the_error_of_a_slope_is_that_of_the_mean_over_seeds():
    xs = np.array([1.0, 10.0, 100.0])
    slope = fit_slope(xs, np.stack([xs**1.0, xs**2.0, xs**6.0]))
    assert slope.mean == pytest.approx(3)
    assert slope.se == pytest.approx(np.std([1, 2, 6], ddof=1) / 3**0.5)


@pytest.mark.parametrize(
    ("slope", "exponent", "words"),
    [
        (Slope(-0.9, 0.06), -1, "as the theorem"),
        (Slope(-0.96, 0.0), -1, "as the theorem"),
        (Slope(-0.9, 0.04), -1, "falls slower"),
        (Slope(-1.2, 0.04), -1, "falls faster"),
        (Slope(0.5, 0.1), 1, "rises slower"),
        (Slope(4.0, 0.1), 1, "rises faster"),
        (Slope(0.1, 0.1), 1, "flat"),
        (Slope(-0.5, 0.1), 1, "falls instead"),
        (Slope(0.5, 0.1), -1, "rises instead"),
        (Slope(0.7, 0.6), 1, "unclear"),
        (Slope(0.1, 0.1), 0, "as the theorem"),
        (Slope(-0.5, 0.1), 0, "falls"),
    ],
)
def test_verdicts(slope, exponent, words):
    assert verdict(slope, exponent) == words


def test_geometric_means_by_hand():
    mean, se = geometric_mean(np.array([[1.0, 8.0], [4.0, 8.0]]))
    assert mean.tolist() == pytest.approx([2, 8])
    assert se.tolist() == pytest.approx([np.log(4) / 2, 0])


@pytest.mark.parametrize(
    ("xs", "ys", "message"),
    [
        ([1, 2], np.ones((3, 3)), r"2 points and values of shape \[3, 3\]"),
        ([2, 2], np.ones((3, 2)), "a slope needs two points"),
        ([1, 2], np.ones((1, 2)), "at least two seeds, got 1"),
        ([0, 2], np.ones((2, 2)), "needs positive numbers, got 0 and 1"),
        ([1, 2], np.array([[1, 2], [1, -2.0]]), "got 1 and -2"),
    ],
)
def test_what_has_no_slope_is_refused(xs, ys, message):
    with pytest.raises(ValueError, match=message):
        fit_slope(xs, ys)
