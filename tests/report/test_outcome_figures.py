"""Figures of the classic package: what is drawn is what was measured."""

import json

import numpy as np
import pytest

from firm.base.quantities import Quantity
from firm.report.drawing import INK, NUM_BANDS, LegendEntry, Panel, Series, series_panel
from firm.report.outcome_figures import (
    PreferenceOutcome,
    points_panel,
    preference_plane,
    radar_panel,
    ratios_panel,
    user_histograms,
)
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


def outcome(preference, losses, *, name="FedCMOO-Pref"):
    return PreferenceOutcome(algorithm(name=name).key, preference, np.array(losses))


def band(panel):
    (trace,) = [trace for trace in panel.figure["data"] if trace.get("fill")]
    half = len(trace["x"]) // 2
    assert trace["x"][:half] == trace["x"][: -half - 1 : -1]
    return trace["y"][:half], trace["y"][: -half - 1 : -1]


def every_panel() -> list[Panel]:
    pair = algorithm(run([0.1, 0.5]), run([0.1, 0.7]))
    outcomes = [outcome((1, 2), [[0.4, 0.3]], name="<b>z</b>"), outcome((2, 1), [[0.2, 0.5]])]
    both = ("<b>x</b>", "<b>y</b>")
    users = {pair.key: np.array([[0.5, 0.9]])}
    return [
        curves_panel("a", "A", [pair], *LEFT, y_title="accuracy", tickformat="~%"),
        curves_panel("b", "B", [pair], *LEFT, y_title="accuracy", over="megabytes"),
        points_panel("d", "D", [series([1, 5], [0.2, 0.3], ses=[0.1, 0.1])],
                     x_title="<b>K</b>", y_title="y"),
        points_panel("e", "E", [series([0, 5], [0.2, 0.3])], x_title="bias", y_title="y"),
        radar_panel("f", "F", {pair.key: [0.1, 0.2, 0.3]}, ["a", "b", "<b>c</b>"], span=(0, 1)),
        preference_plane("g", "G", outcomes, objectives=both, limits=(0.1, 0.1)),
        ratios_panel("i", "I", outcomes, objectives=both),
        *user_histograms("h", users),
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


def test_a_running_mean_has_no_point_before_its_first_full_window():
    runs = algorithm(run([0.1, 0.3, 0.5, 0.1]), run([0.1, 0.3, 0.9, 0.1]))
    found = series_of(runs, *LEFT, window=3)
    assert found.xs.tolist() == [2, 3]
    assert found.means == pytest.approx([(0.9 + 1.3) / 6, (0.9 + 1.3) / 6])
    assert found.ses == pytest.approx([0.4 / 6, 0.4 / 6])  # half the difference of two seeds
    assert series_of(runs, *LEFT, window=5) is None


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


def test_many_lines_have_no_bands():
    pair = (run([0.1, 0.2]), run([0.3, 0.2]))
    for count in (NUM_BANDS, NUM_BANDS + 1):
        several = [algorithm(*pair, name=f"{place}") for place in range(count)]
        known = [series for own in several if (series := series_of(own, *LEFT))]
        traces = series_panel("a", "A", known, y_title="accuracy").figure["data"]
        assert len(traces) == (2 * count if count == NUM_BANDS else count)


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
    assert trace["customdata"] == [1, 5, 20]


def test_settings_stand_side_by_side_in_rising_order():
    both = [series([0, 10000], [0.8, 0.7]), series([0, 0.1], [0.8, 0.7], name="AFL")]
    panel = points_panel("a", "A", both, x_title="bias", y_title="y")
    assert lines(panel) == {"FedCMOO": [(0, 0.8), (2, 0.7)], "AFL": [(0, 0.8), (1, 0.7)]}
    x_axis = panel.figure["layout"]["xaxis"]
    assert x_axis["tickvals"] == [0, 1, 2]
    assert x_axis["ticktext"] == ["0", "0.1", "10000"]


def test_a_radar_closes_every_line():
    panel = radar_panel(
        "a", "A", {LegendEntry("FIRM", INK): [0.1, 0.2, 0.5]}, ["x", "y", "z"], span=(0, 0.5)
    )
    (trace,) = panel.figure["data"]
    assert trace["r"] == [0.1, 0.2, 0.5, 0.1]
    assert trace["theta"] == ["x", "y", "z", "x"]
    assert panel.figure["layout"]["polar"]["radialaxis"]["range"] == [0, 0.5]


def test_long_names_beside_a_radar_are_broken_where_words_end():
    names = ["Wearing_Lipstick", "Male", "high cheek <b>bones</b>"]
    panel = radar_panel("a", "A", {LegendEntry("FIRM", INK): [0.1, 0.2, 0.5]}, names, span=(0, 1))
    assert panel.figure["data"][0]["theta"][:3] == [
        "Wearing_<br>Lipstick",
        "Male",
        "high cheek<br>&lt;b&gt;bones&lt;/b&gt;",
    ]


def test_on_a_ray_both_scaled_losses_are_equal():
    outcomes = [outcome((1, 4), [[0.8, 0.1]], name="left"), outcome((3, 1), [[0.1, 0.5]])]
    panel = preference_plane("a", "A", outcomes, objectives=("x", "y"))
    rays = [trace for trace in panel.figure["data"] if trace["mode"] == "lines"]
    layout = panel.figure["layout"]
    for ray, one, note in zip(rays, outcomes, layout["annotations"], strict=True):
        end = ray["x"][1], ray["y"][1]
        assert one.preference[0] * end[0] == pytest.approx(one.preference[1] * end[1])
        assert (note["x"], note["y"]) == end
        reach = layout["xaxis"]["range"][1], layout["yaxis"]["range"][1]
        shares = np.divide(end, reach)
        assert max(shares) == pytest.approx(1)  # it ends at the border
    assert [ray["name"] for ray in rays] == ["left, wanted", "FedCMOO-Pref, wanted"]
    assert [note["text"] for note in layout["annotations"]] == ["1 : 4", "3 : 1"]


def test_outcomes_are_means_with_bars_and_the_infeasible_is_grey():
    losses = np.array([[0.2, 0.6], [0.4, 0.6]])
    panel = preference_plane(
        "a", "A", [outcome((1, 1), losses)], objectives=("x", "y"), limits=(0.1, 0.05)
    )
    point = panel.figure["data"][-1]
    assert (point["x"], point["y"]) == ([pytest.approx(0.3)], [0.6])
    assert point["error_x"]["array"] == [pytest.approx(0.1)]
    boxes = [shape for shape in panel.figure["layout"]["shapes"] if shape["type"] == "rect"]
    x_end, y_end = (panel.figure["layout"][axis]["range"][1] for axis in ("xaxis", "yaxis"))
    corners = [(box["x0"], box["x1"], box["y1"]) for box in boxes]
    assert corners == [(0, 0.1, y_end), (0.1, x_end, 0.05)]  # none lies upon the other


def test_ratios_that_were_met_lie_on_the_diagonal():
    met = outcome((1, 4), [[0.8, 0.2], [0.4, 0.1], [0.3, 0.0]])  # a loss of 0 has no ratio
    missed = outcome((2, 1), [[0.3, 0.3]], name="FSMGDA")
    panel = ratios_panel("a", "A", [met, missed], objectives=("x", "y"))
    assert lines(panel)["FedCMOO-Pref"] == [(4, pytest.approx(4)), (4, pytest.approx(4))]
    assert lines(panel)["FSMGDA"] == [(0.5, 1)]
    (diagonal,) = panel.figure["layout"]["shapes"]
    assert (diagonal["x0"], diagonal["x1"]) == (diagonal["y0"], diagonal["y1"])
    for axis in ("xaxis", "yaxis"):
        low, high = panel.figure["layout"][axis]["range"]
        assert 10**low < 0.5 < 4 < 10**high


def test_histograms_count_every_user_on_equal_axes():
    wide, narrow = algorithm().key, algorithm(name="FSMGDA").key
    users = {wide: np.array([[0.0, 0.5], [1.0, 0.9]]), narrow: np.array([[0.5, 0.5]])}
    first, second = user_histograms("users", users, num_bins=4)
    # edges at 0, 0.25, 0.5, 0.75, 1
    assert first.figure["data"][0]["y"] == [0.25, 0, 0.25, 0.5]
    assert second.figure["data"][0]["y"] == [0, 0, 1, 0]
    assert first.figure["data"][0]["x"] == [0.125, 0.375, 0.625, 0.875]
    for axis in ("xaxis", "yaxis"):
        assert first.figure["layout"][axis]["range"] == second.figure["layout"][axis]["range"]
    assert first.figure["layout"]["shapes"][0]["x0"] == pytest.approx(0.6)
    # 0.25 over the users of the first seed, 0.05 over those of the second
    assert first.title.replace("\xa0", " ") == "FedCMOO: mean 60.0 %, SD 15.0"


def test_users_who_are_all_equal_have_a_histogram():
    (panel,) = user_histograms("users", {algorithm().key: np.full((1, 3), 1.0)})
    (bars,) = panel.figure["data"]
    assert sum(bars["y"]) == pytest.approx(1)
    assert bars["width"] > 0
    assert panel.figure["layout"]["xaxis"]["range"] == [0.95, 1.0]


def test_plotly_accepts_every_figure():
    assert_plotly_accepts(every_panel())


def test_every_colour_is_defined_for_light_and_dark():
    algorithms = (algorithm(color=color).key.color for color in range(8))
    assert_colours_are_defined(every_panel(), *algorithms)


def test_names_cannot_bring_markup_into_a_figure():
    drawn = json.dumps([panel.figure for panel in every_panel()])
    named = algorithm(run([0.5]), name="<b>bold</b>")
    drawn += json.dumps(curves_panel("a", "A", [named], *LEFT, y_title="y").figure)
    drawn += json.dumps(
        radar_panel("a", "A", {named.key: [1, 2, 3]}, ["x", "y", "z"], span=(0, 3)).figure
    )
    assert "<b>" not in drawn
    assert "&lt;b&gt;bold" in drawn
