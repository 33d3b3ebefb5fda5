"""Lines over rounds, uploads and parameters: what is drawn is what was measured."""

import json

import numpy as np
import pytest

from firm.base.quantities import Quantity
from firm.fronts import exponential_average
from firm.report.drawing import Panel, Series, points_panel
from firm.report.tables import Setting, quantity_panel, series_of
from tests.figures import assert_colours_are_defined, assert_plotly_accepts, lines

LEFT = ("accuracies", "left")


def curves_panel(name, title, settings, quantity, objective, *, y_title, over="rounds", **axis):
    entry = Quantity(quantity, title, y_title, axis=axis)
    return quantity_panel(name, settings, entry, objective, over=over)


def run(values, *, bytes_up=100, name="left"):
    """Rows of a run that was evaluated after every round."""
    return [
        {"round": at, "bytes_up": bytes_up if at else 0, "accuracies": {name: value}}
        for at, value in enumerate(values)
    ]


def algorithm(*seeds, name="FedCMOO", color=0):
    return Setting(name, color, seeds)


def series(xs, means, *, ses=None, name="FedCMOO"):
    errors = np.zeros(len(xs)) if ses is None else np.array(ses)
    return Series(algorithm(name=name).key, np.array(xs, dtype=float), np.array(means), errors)


def band(panel):
    (trace,) = [trace for trace in panel.figure["data"] if trace.get("fill")]
    half = len(trace["x"]) // 2
    assert trace["x"][:half] == trace["x"][: -half - 1 : -1]
    return trace["y"][:half], trace["y"][: -half - 1 : -1]


def every_panel() -> list[Panel]:
    pair = algorithm(run([0.1, 0.5]), run([0.1, 0.7]))
    return [
        curves_panel("a", "A", [pair], *LEFT, y_title="accuracy", tickformat="~%"),
        curves_panel("b", "B", [pair], *LEFT, y_title="accuracy", over="megabytes"),
        points_panel("d", "D", [series([1, 5], [0.2, 0.3], ses=[0.1, 0.1])],
                     x_title="<b>K</b>", y_title="y"),
        points_panel("e", "E", [series([0, 5], [0.2, 0.3])], x_title="bias", y_title="y"),
        points_panel("f", "F", [series([0, 1], [0.2, 0.3])],
                     x_title="objective", y_title="y", labels=["a", "<b>c</b>"]),
    ]  # fmt: skip


def test_a_value_stands_in_the_round_in_which_all_seeds_have_it():
    first, second = run([0.1, 0.2, 0.3]), run([0.3, 0.4])
    found = series_of(algorithm(first, second), *LEFT)
    assert found.xs.tolist() == [0, 1]
    assert found.means == pytest.approx([0.2, 0.3])
    assert found.ses == pytest.approx([0.1, 0.1])  # half the difference of two seeds


def test_a_curve_ends_where_a_seed_diverges():
    found = series_of(algorithm(run([0.1, 0.2, 0.3]), run([0.1, 0.2, float("nan")])), *LEFT)
    assert found.xs.tolist() == [0, 1]


def test_smoothing_is_the_running_average_of_each_seed():
    rows = [[0.1, 0.3, 0.5, 0.1], [0.1, 0.3, 0.9, 0.1]]
    found = series_of(algorithm(*map(run, rows)), *LEFT, half_life=2)
    smooth = [exponential_average(row, half_life=2) for row in rows]
    np.testing.assert_allclose(found.means, np.mean(smooth, axis=0))
    assert found.num_seeds == 2
    with pytest.raises(ValueError, match="half_life must be positive"):
        series_of(algorithm(*map(run, rows)), *LEFT, half_life=0)


def test_an_algorithm_without_the_quantity_is_left_out():
    unknown = algorithm(run([0.1], name="other"), name="FSMGDA")
    panel = curves_panel("a", "A", [algorithm(run([0.1])), unknown], *LEFT, y_title="y")
    assert list(lines(panel)) == ["FedCMOO"]


def test_mean_and_worst_are_taken_over_the_objectives():
    row = {"round": 3, "accuracies": {"a": 0.2, "b": 0.6}, "losses": {"a": 2.0, "b": 0.5}}
    runs = algorithm([{"round": 0, "losses": {}}, row])
    assert runs.curves("accuracies").loc[3].tolist() == pytest.approx([0.4])
    assert runs.curves("accuracies", how="lowest").loc[3].tolist() == [0.2]
    assert runs.curves("losses", how="highest").loc[3].tolist() == [2.0]
    assert algorithm([{"round": 3}]).curves("losses").empty
    assert runs.curves("losses", how="highest").index.tolist() == [3]


def test_uploaded_bytes_add_up_over_rows_and_rounds():
    rows = [{"round": 2, "bytes_up": 5}, {"round": 1, "bytes_up": 3}, {"round": 2, "bytes_up": 1}]
    assert algorithm(rows).bytes_so_far("bytes_up")[0].to_dict() == {1: 3, 2: 9}
    assert algorithm([{"round": 1, "losses": {"a": 1.0}}]).bytes_so_far("bytes_up").empty


def test_megabytes_count_the_rounds_between_two_evaluations():
    rows = [{"round": at, "bytes_up": 2_000_000} for at in (1, 2, 3)]
    rows += [{"round": 0, "accuracies": {"left": 0.1}}, {"round": 3, "accuracies": {"left": 0.5}}]
    other = [row | ({"bytes_up": 4_000_000} if "bytes_up" in row else {}) for row in rows]
    panel = curves_panel(
        "a", "A", [algorithm(rows, other)], *LEFT, y_title="accuracy", over="megabytes"
    )
    assert lines(panel) == {"FedCMOO": [(0, 0.1), (9, 0.5)]}
    assert panel.figure["layout"]["xaxis"]["title"]["text"] == "uploaded so far (MB)"


def test_without_counted_bytes_there_is_no_curve_over_megabytes():
    rows = [{"round": 0, "accuracies": {"left": 0.1}}]
    assert series_of(algorithm(rows), *LEFT, over="megabytes") is None


def test_bands_are_one_standard_error_to_both_sides_and_lie_below_the_lines():
    panel = curves_panel(
        "a", "A", [algorithm(run([0.1, 0.2]), run([0.3, 0.2]))], *LEFT, y_title="accuracy"
    )
    upper, lower = band(panel)
    assert upper == pytest.approx([0.3, 0.2])
    assert lower == pytest.approx([0.1, 0.2])
    assert panel.figure["data"][-1]["y"] == pytest.approx([0.2, 0.2])


def test_one_seed_has_no_band():
    panel = curves_panel("a", "A", [algorithm(run([0.1, 0.2]))], *LEFT, y_title="accuracy")
    assert len(panel.figure["data"]) == 1


def test_on_a_log_axis_a_band_stays_positive():
    runs = algorithm(run([0.0]), run([0.2]), run([0.0]))  # the standard error is the mean
    upper, lower = band(curves_panel("a", "A", [runs], *LEFT, y_title="loss", type="log"))
    assert upper == pytest.approx([0.4 / 3])
    assert lower == pytest.approx([0.2 / 30])
    assert band(curves_panel("a", "A", [runs], *LEFT, y_title="loss"))[1] == pytest.approx([0.0])


def test_algorithms_past_the_colours_are_told_apart_by_their_line():
    keys = [algorithm(color=color).key for color in range(24)]
    assert len({(key.color, key.mark) for key in keys}) == 24
    assert keys[0].mark == "solid"


def test_points_carry_their_bars_and_what_the_pointer_shows():
    panel = points_panel(
        "a", "A", [series([1, 5, 20], [0.9, 0.8, 0.7], ses=[0.1, 0.2, 0.3])],
        x_title="local steps", y_title="accuracy",
    )  # fmt: skip
    (trace,) = panel.figure["data"]
    assert trace["y"] == [0.9, 0.8, 0.7]
    assert trace["error_y"]["array"] == [0.1, 0.2, 0.3]
    assert trace["customdata"] == ["1", "5", "20"]


def test_settings_stand_side_by_side_in_rising_order():
    both = [series([0, 10000], [0.8, 0.7]), series([0, 0.1], [0.8, 0.7], name="AFL")]
    panel = points_panel("a", "A", both, x_title="bias", y_title="y")
    assert lines(panel) == {"FedCMOO": [(0, 0.8), (2, 0.7)], "AFL": [(0, 0.8), (1, 0.7)]}
    x_axis = panel.figure["layout"]["xaxis"]
    assert x_axis["tickvals"] == [0, 1, 2]
    assert x_axis["ticktext"] == ["0", "0.1", "10000"]


def test_named_places_keep_their_order():
    own = series([0, 1, 2], [0.3, 0.2, 0.1])
    panel = points_panel("a", "A", [own], x_title="x", y_title="y", labels=["b", "c", "a"])
    assert panel.figure["layout"]["xaxis"]["ticktext"] == ["b", "c", "a"]
    assert panel.figure["data"][0]["customdata"] == ["b", "c", "a"]


def test_plotly_accepts_every_figure():
    assert_plotly_accepts(every_panel())


def test_every_colour_is_defined_for_light_and_dark():
    algorithms = (algorithm(color=color).key.color for color in range(8))
    assert_colours_are_defined(every_panel(), *algorithms)


def test_names_cannot_bring_markup_into_a_figure():
    drawn = json.dumps([panel.figure for panel in every_panel()])
    named = algorithm(run([0.5]), name="<b>bold</b>")
    drawn += json.dumps(curves_panel("a", "A", [named], *LEFT, y_title="y").figure)
    assert "<b>" not in drawn
    assert "&lt;b&gt;bold" in drawn
