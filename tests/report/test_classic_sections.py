"""Sections of the comparison page: each shows what the rows hold, or is left out."""

import json

import plotly.graph_objects as go
import pytest

from firm.quantities import QUANTITIES
from firm.report.classic_sections import (
    STATIONARITY,
    further_section,
    parameter_section,
    preferences_section,
    progress_section,
    users_section,
    weights_section,
)
from firm.report.tables import Setting
from tests.figures import lines

NAN = float("nan")


def improved_section(settings):
    return further_section(settings, QUANTITIES["round", "improved"])


def stationarity_section(settings):
    return further_section(settings, STATIONARITY)


def rows(*losses, **fields):
    """Rows of one evaluation each, of objectives named a, b and so on, with the same fields."""
    return [
        {"round": at, "losses": dict(zip("abcdefghij", values, strict=False)), **fields}
        for at, values in enumerate(losses)
    ]


def rounds(field, *values):
    """Rows of a run with two objectives that has a field from round 1 on."""
    measured = [{"round": at, field: value} for at, value in enumerate(values, start=1)]
    return [*rows([1.0, 1.0]), *measured]


def algorithm(*seeds, name="FedCMOO", color=0):
    return Setting(name, color, seeds)


def users(*accuracies, at=0):
    return {
        "round": at,
        "losses": {"a": 1.0},
        "users": {f"user {place}": value for place, value in enumerate(accuracies)},
    }


# --- Users ----------------------------------------------------------------------------------------


def test_the_last_accuracies_of_every_user_and_seed_are_shown():
    early, late = users(*[0.0] * 11), users(*[0.5] * 10, 1.0, at=7)
    runs = algorithm([late, early], [users(*[0.5] * 10, 0.6, at=7)])
    section = users_section([runs])
    (panel,) = section.panels
    assert panel.title.replace("\xa0", " ").startswith("FedCMOO: mean 52.7 %")
    assert sum(panel.figure["data"][0]["y"]) == pytest.approx(1)
    assert "11 users" in section.text


def test_ten_users_have_room_in_the_table():
    assert users_section([algorithm([users(*[0.5] * 10)])]) is None
    assert users_section([algorithm(rows([1.0]))]) is None


def test_an_algorithm_without_users_has_no_histogram():
    both = [algorithm([users(*[0.5] * 11)]), algorithm(rows([1.0]), name="FSMGDA", color=1)]
    assert [panel.title[:7] for panel in users_section(both).panels] == ["FedCMOO"]


def test_a_user_whom_a_seed_does_not_know_is_left_out():
    runs = algorithm([users(*[0.5] * 11, 1.0)], [users(*[0.5] * 11)])
    (panel,) = users_section([runs]).panels
    assert panel.title.replace("\xa0", " ") == "FedCMOO: mean 50.0 %, SD 0.0"


# --- Preferences ----------------------------------------------------------------------------------


def test_every_algorithm_with_a_preference_ends_in_the_plane_in_its_own_colour():
    wanted = algorithm(rows([2, 2], [0.1, 0.4]), rows([2, 2], [0.3, 0.4]), name="4 to 1", color=2)
    other = algorithm(rows([2, 2], [0.3, 0.3]), name="FSMGDA", color=1)
    section = preferences_section([other, wanted], {"4 to 1": (4, 1)})
    plane, ratios = section.panels
    assert lines(plane) == {"4 to 1": [(pytest.approx(0.2), pytest.approx(0.4))]}
    assert lines(ratios) == {"4 to 1": [(0.25, 0.25), (0.25, pytest.approx(0.75))]}
    assert section.legend == [wanted.key]
    assert plane.figure["data"][-1]["marker"]["color"] == wanted.key.color


def test_a_seed_that_diverged_has_no_place_in_the_plane():
    runs = algorithm(rows([0.2, 0.4]), rows([NAN, 0.4]))
    lost = algorithm(rows([NAN, NAN]), name="lost")
    section = preferences_section([runs, lost], {"FedCMOO": (2, 1), "lost": (1, 1)})
    assert lines(section.panels[0]) == {"FedCMOO": [(0.2, 0.4)]}
    assert preferences_section([lost], {"lost": (1, 1)}) is None


def test_the_grey_region_and_the_correlation_are_explained_where_they_are_known():
    runs = [algorithm(rows([0.2, 0.4]))]
    bare = preferences_section(runs, {"FedCMOO": (2, 1)})
    assert "grey" not in bare.text
    assert "correlation" not in bare.text
    full = preferences_section(runs, {"FedCMOO": (2, 1)}, limits=(0.1, 0.1), correlation=0.925)
    assert "grey region" in full.text
    assert "wanted and reached ratios is +0.925\xa0(−1.00\xa0to\xa01.00)" in full.text
    shapes = [section.panels[0].figure["layout"].get("shapes") for section in (bare, full)]
    assert shapes[0] is None
    assert len(shapes[1]) == 4


def test_preferences_need_two_objectives_and_an_algorithm_that_has_one():
    assert preferences_section([algorithm(rows([1, 1, 1]))], {"FedCMOO": (1, 1)}) is None
    assert preferences_section([algorithm(rows([1, 1]))], {"FSMGDA": (1, 1)}) is None


# --- Settings -------------------------------------------------------------------------------------


def sweep(name, **losses_by_setting):
    """Runs by K from `k5=[[seed], [seed]]`."""
    return {
        int(setting[1:]): algorithm(
            *(rows(values) for values in seeds), name=f"{name} {setting}", color=place + 3
        )
        for place, (setting, seeds) in enumerate(losses_by_setting.items())
    }


def test_each_family_is_a_line_of_final_means_by_rising_setting():
    families = {
        "FSMGDA": sweep("FSMGDA", k20=[[0.4, 0.8]], k1=[[0.1, 0.3]]),
        "FedCMOO": sweep("FedCMOO", k1=[[0.1, 0.1], [0.3, 0.3]], k20=[[0.2, 0.2], [0.2, 0.2]]),
    }
    section = parameter_section(families, title="Local steps", x_title="K")
    (panel,) = section.panels
    assert lines(panel) == {
        "FSMGDA": [(0, pytest.approx(0.2)), (1, pytest.approx(0.6))],
        "FedCMOO": [(0, pytest.approx(0.2)), (1, pytest.approx(0.2))],
    }
    assert panel.figure["layout"]["xaxis"]["ticktext"] == ["1", "20"]
    assert panel.figure["data"][1]["error_y"]["array"] == pytest.approx([0.1, 0.0])
    assert [key.label for key in section.legend] == ["FSMGDA", "FedCMOO"]
    assert section.legend[0].color == families["FSMGDA"][20].key.color
    assert "diverged" not in section.text


def test_accuracies_come_before_losses_and_a_log_axis_is_the_losses_own():
    both = {
        at: algorithm([{"round": 0, "losses": {"a": 1.0}, "accuracies": {"a": at / 10}}])
        for at in (1, 2)
    }
    section = parameter_section({"A": both}, title="T", x_title="K", name="eps", is_log_loss=True)
    assert section.name == "eps"
    assert [panel.name for panel in section.panels] == ["eps-accuracy", "eps-loss"]
    types = [panel.figure["layout"]["yaxis"].get("type") for panel in section.panels]
    assert types == [None, "log"]
    assert lines(section.panels[0]) == {"A": [(0, 0.1), (1, 0.2)]}


def test_a_setting_that_diverged_has_no_point_and_is_mentioned():
    family = sweep("A", k1=[[1.0]], k5=[[2.0]], k20=[[3.0], [NAN]])
    section = parameter_section({"A": family}, title="T", x_title="K")
    assert lines(section.panels[0]) == {"A": [(0, 1.0), (1, 2.0)]}
    assert "diverged have no point" in section.text


def test_one_setting_is_no_sweep():
    assert parameter_section({"A": sweep("A", k1=[[1.0]])}, title="T", x_title="K") is None
    lost = sweep("A", k1=[[1.0]], k5=[[NAN]])
    assert parameter_section({"A": lost}, title="T", x_title="K") is None


# --- Over the rounds ------------------------------------------------------------------------------


def test_weights_by_objective_have_a_panel_for_each_algorithm_that_has_them():
    weighed = algorithm(rounds("weights", {"a": 0.2, "b": 0.8}, {"a": 0.4, "b": 0.6}))
    by_client = algorithm(rounds("weights", {"client_0": 1.0}), name="AFL", color=1)
    without = algorithm(rows([1, 1]), name="FedAvg", color=2)
    section = weights_section([without, by_client, weighed])
    (panel,) = section.panels
    assert panel.title == "FedCMOO"
    assert lines(panel) == {"a": [(1, 0.2), (2, 0.4)], "b": [(1, 0.8), (2, 0.6)]}
    assert [key.label for key in section.legend] == ["a", "b"]
    colors = [trace["line"]["color"] for trace in panel.figure["data"]]
    assert colors == [key.color for key in section.legend]
    assert weights_section([without, by_client]) is None


def test_weights_have_one_axis_that_holds_them_all():
    first = algorithm(
        rounds("weights", {"a": 0.2, "b": 0.3}), rounds("weights", {"a": 0.6, "b": 0})
    )
    second = algorithm(rounds("weights", {"a": 0.3, "b": 0.3}), name="FSMGDA", color=1)
    panels = weights_section([first, second]).panels
    ranges = [panel.figure["layout"]["yaxis"]["range"] for panel in panels]
    assert ranges[0] == ranges[1]
    assert ranges[0][0] < 0 < 0.6 < ranges[0][1] < 0.7  # the mean of a is 0.4, its error 0.2


@pytest.mark.parametrize(("count", "is_shown"), [(1, False), (2, True), (8, True), (9, False)])
def test_weights_are_shown_of_two_to_eight_objectives(count, is_shown):
    names = "abcdefghij"[:count]
    runs = algorithm([*rows([1.0] * count), {"round": 1, "weights": dict.fromkeys(names, 0.1)}])
    assert (weights_section([runs]) is not None) == is_shown


@pytest.mark.parametrize(
    ("make", "field"), [(improved_section, "improved"), (stationarity_section, "stationarity")]
)
def test_a_field_of_the_rows_is_a_line_for_each_algorithm_that_has_it(make, field):
    measured = algorithm(rounds(field, 0.2, 0.9), rounds(field, 0.4, 0.9))
    without = algorithm(rows([1, 1]), name="FedAvg", color=1)
    section = make([without, measured])
    (panel,) = section.panels
    assert lines(panel) == {"FedCMOO": [(1, pytest.approx(0.3)), (2, pytest.approx(0.9))]}
    assert section.legend == [measured.key]
    assert "the mean of" not in section.text
    assert make([without]) is None


def test_stationarity_has_a_log_axis_and_the_share_of_participants_per_cent():
    runs = [algorithm(rounds("stationarity", 0.2)), algorithm(rounds("improved", 0.2), name="B")]
    assert stationarity_section(runs).panels[0].figure["layout"]["yaxis"]["type"] == "log"
    assert "%" in improved_section(runs).panels[0].figure["layout"]["yaxis"]["tickformat"]


def test_long_runs_show_running_means_and_say_so():
    alternating = [0.0, 1.0] * 14  # each point takes 2 of 28 rounds
    section = improved_section([algorithm(rounds("improved", *alternating))])
    (points,) = lines(section.panels[0]).values()
    assert points == [(at, 0.5) for at in range(2, 29)]
    assert "Each point is the mean of the last 2 values" in section.text


def test_progress_is_a_line_for_each_algorithm_trained_from_the_same_models():
    progress = {"FSMGDA": {"a": 0.1, "b": 0.3}, "FedCMOO": {"a": 0.5, "b": 0.5}, "new": {"a": 0.0}}
    first = algorithm(rows([1, 1], progress=progress), color=0)
    second = algorithm(rows([1, 1]), name="FSMGDA", color=1)
    section = progress_section([first, second])
    (panel,) = section.panels
    assert lines(panel) == {"FSMGDA": [(0, 0.2)], "FedCMOO": [(0, 0.5)], "new": [(0, 0.0)]}
    assert "FedCMOO" in panel.title
    by_name = {key.label: key for key in section.legend}
    assert by_name["FSMGDA"] == second.key
    assert by_name["new"].color not in (first.key.color, second.key.color)
    assert progress_section([second]) is None


def test_every_section_has_a_name_of_its_own_and_figures_that_plotly_accepts():
    fields = {
        "users": {f"user {place}": 0.5 for place in range(12)},
        "progress": {"<b>new</b>": {"<b>a</b>": 0.5}},
        "weights": {"<b>a</b>": 0.5, "b": 0.5},
        "improved": 0.5,
        "stationarity": 0.1,
    }
    row = {"round": 1, "losses": {"<b>a</b>": 0.5, "b": 0.3}, **fields}
    runs = [algorithm([row], name="<b>A</b>")]
    sections = [
        users_section(runs),
        preferences_section(runs, {"<b>A</b>": (1, 2)}, limits=(0.1, 0.1), correlation=1.0),
        parameter_section({"<b>f</b>": {1: runs[0], 5: runs[0]}}, title="K", x_title="<b>K</b>"),
        weights_section(runs),
        improved_section(runs),
        progress_section(runs),
        stationarity_section(runs),
    ]
    panels = [panel for section in sections for panel in section.panels]
    assert len({section.name for section in sections}) == len(sections)
    assert len({panel.name for panel in panels}) == len(panels)
    for panel in panels:
        go.Figure(panel.figure)
    drawn = json.dumps([panel.figure for panel in panels], allow_nan=False)
    assert "&lt;b&gt;" in drawn
    assert "<b>" not in drawn
