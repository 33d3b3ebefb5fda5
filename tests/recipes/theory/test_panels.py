"""Figures on log-log axes: what is drawn is what was measured."""

import numpy as np
import pytest

from firm.report.drawing import INK, LegendEntry, Series
from recipes.theory.panels import Fit, scaling_panel

XS = np.array([1.0, 10.0, 100.0])


def _fit(exponent: float, *, height: float = 1.0, **options) -> Fit:
    points = Series(LegendEntry("drift", INK), XS, height * XS**-2, np.full(3, np.log(2)))
    return Fit(points, -2.0, exponent, "−2.00 ± 0.01", **options)


def test_a_panel_shows_the_expected_slope_the_fit_and_the_points():
    panel = scaling_panel("a", "Against B", [_fit(-1.0)], x_title="B")
    expected, fitted, points = panel.figure["data"]
    assert fitted["y"] == pytest.approx([1.0, 1e-4])
    assert expected["y"] == pytest.approx([1.0, 1e-2])  # through the fit's first point
    assert points["y"] == pytest.approx([1.0, 1e-2, 1e-4])
    # a standard error of log 2: half to twice the mean
    assert points["error_y"]["array"] == pytest.approx([1.0, 1e-2, 1e-4])
    assert points["error_y"]["arrayminus"] == pytest.approx([0.5, 5e-3, 5e-5])
    assert panel.figure["layout"]["xaxis"]["ticktext"] == ["1", "10", "100"]


def test_a_fit_begins_where_it_was_told_to():
    panel = scaling_panel("a", "Against B", [_fit(-1.0, fitted_from=10.0)], x_title="B")
    expected, fitted, points = panel.figure["data"]
    assert fitted["x"] == [10.0, 100.0]
    assert fitted["y"] == pytest.approx([1e-2, 1e-4])
    assert expected["y"] == pytest.approx([1e-2, 1e-3])
    assert len(points["x"]) == 3


def test_labels_of_curves_that_end_together_do_not_overlap():
    fits = [_fit(-1.0), _fit(-1.0), _fit(-1.0, height=10.0)]
    panel = scaling_panel("a", "Against B", fits, x_title="B")
    heights = sorted(label["y"] for label in panel.figure["layout"]["annotations"])
    span = 5  # decades from 1e-4 to 10
    assert min(np.diff(heights)) >= 0.06 * span - 1e-9
    assert heights[0] == pytest.approx(-4)
