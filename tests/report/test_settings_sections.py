"""Sections of the comparison page: each shows what the rows hold, or is left out."""

import json
from functools import partial
from pathlib import Path

import plotly.graph_objects as go
import pytest

import firm.fmoo.measures  # noqa: F401 - registers what classic studies measure
from firm.base.quantities import QUANTITIES
from firm.fronts import exponential_average
from firm.report import read_record
from firm.report.criteria import criteria_of
from firm.report.page import is_shown
from firm.report.settings_page import setting_clouds
from firm.report.settings_sections import (
    parameter_section,
    preference_section,
    progress_section,
    quantities_section,
    swept_parameters,
    user_section,
)
from firm.report.tables import Setting
from tests.figures import lines
from tests.runs import write_classic_run

NAN = float("nan")


def shown(section):
    return section if section and is_shown(section) else None


def progress_of(settings):
    return shown(progress_section(settings, criteria_of(settings)[0]))


def users_section(settings):
    return shown(user_section(settings, criteria_of(settings)[0]))


def weights_of(settings):
    return training_section(settings, "weights")


def training_section(settings, name):
    return shown(quantities_section(settings, criteria_of(settings)[0].objectives, name))


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
    (box,) = section.panels[0].figure["data"]
    assert sorted(box["y"]) == [*[0.5] * 20, 0.6, 1.0]
    assert box["boxmean"]
    assert "11 users" in section.text


def test_ten_users_have_room_in_the_table():
    assert users_section([algorithm([users(*[0.5] * 10)])]) is None
    assert users_section([algorithm(rows([1.0]))]) is None


def test_an_algorithm_without_users_has_no_box():
    both = [algorithm([users(*[0.5] * 11)]), algorithm(rows([1.0]), name="FSMGDA", color=1)]
    boxes = users_section(both).panels[0].figure["data"]
    assert [box["name"] for box in boxes] == ["FedCMOO"]


def test_a_user_whom_a_seed_does_not_know_is_left_out():
    runs = algorithm([users(*[0.5] * 11, 1.0)], [users(*[0.5] * 11)])
    (panel,) = users_section([runs]).panels
    assert set(panel.figure["data"][0]["y"]) == {0.5}


# --- Preferences ----------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path):
    """Makes a setting of run directories with the strategy's keys."""

    def make(*seeds, name="FedCMOO", color=0, **strategy):
        records = []
        for seed, losses in enumerate(seeds):
            own = [
                {"kind": "evaluation", "split": "test", "round": at}
                | {"losses": dict(zip("abcdefghij", values, strict=False))}
                for at, values in enumerate(losses)
            ]
            kind = "fedcmoo_pref" if "preference" in strategy else "any"
            algorithms = {name: {"strategy": {"name": kind, **strategy}}}
            folder = tmp_path / name.replace("/", "|") / f"seed_{seed}"
            write_classic_run(folder, own, seeds=[seed], algorithms=algorithms)
            records.append(read_record(folder))
        return Setting.of(name, color, records)

    return make


def preferences_of(settings):
    clouds = partial(setting_clouds, folder=Path())
    return shown(preference_section(settings, criteria_of(settings)[0], clouds))


def test_every_algorithm_with_a_preference_ends_in_the_plane_in_its_own_colour(recorded):
    wanted = recorded(
        [[2, 2], [0.1, 0.4]], [[2, 2], [0.3, 0.4]], name="4 to 1", color=2, preference=[4, 1]
    )
    other = recorded([[2, 2], [0.3, 0.3]], name="FSMGDA", color=1)
    section = preferences_of([other, wanted])
    (plane,) = section.panels
    assert lines(plane) == {
        "4 to 1, single seeds": [(0.1, 0.4), (0.3, 0.4)],
        "4 to 1": [(pytest.approx(0.2), pytest.approx(0.4))],
    }
    assert section.legend == [wanted.key]
    ray, *_, point = plane.figure["data"]
    assert point["marker"]["color"] == wanted.key.color
    assert point["error_x"]["array"] == [pytest.approx(0.1)]
    layout = plane.figure["layout"]
    ends = layout["xaxis"]["range"][1], layout["yaxis"]["range"][1]
    assert 4 * ray["x"][1] == pytest.approx(ray["y"][1])  # both scaled losses are equal
    assert max(ray["x"][1] / ends[0], ray["y"][1] / ends[1]) == pytest.approx(1)
    assert [note["text"] for note in layout["annotations"]] == ["4 : 1"]


def test_a_seed_that_diverged_has_no_place_in_the_plane(recorded):
    runs = recorded([[0.2, 0.4]], [[None, 0.4]], preference=[2, 1])
    lost = recorded([[None, None]], name="lost", preference=[1, 1])
    assert lines(preferences_of([runs, lost]).panels[0]) == {"FedCMOO": [(0.2, 0.4)]}
    assert preferences_of([lost]) is None


def test_the_grey_region_and_the_correlation_are_explained_where_they_are_known(recorded):
    wanted = [
        recorded([[x, 0.4]], name=f"p{x}", preference=[1, ratio])
        for x, ratio in ((0.2, 1), (0.4, 2), (0.8, 3))
    ]
    bare = preferences_of(wanted[:2])
    assert "grey" not in bare.text
    assert "correlation" not in bare.text
    alone = [
        recorded([ends], name=f"only {ends}", weights=weights)
        for ends, weights in (([0.1, 9], [1, 0]), ([9, 0.1], [0, 1]))
    ]
    full = preferences_of([*wanted, *alone])
    assert "grey region" in full.text
    assert "requested and reached ratios is +1.00" in full.text
    shapes = [section.panels[0].figure["layout"].get("shapes") for section in (bare, full)]
    assert shapes[0] is None
    assert len(shapes[1]) == 4
    x_end, y_end = (full.panels[0].figure["layout"][a]["range"][1] for a in ("xaxis", "yaxis"))
    corners = [(box["x0"], box["x1"], box["y1"]) for box in shapes[1] if box["type"] == "rect"]
    assert corners == [(0, 0.1, y_end), (0.1, x_end, 0.1)]  # none lies upon the other


def test_preferences_need_two_objectives_and_an_algorithm_that_has_one(recorded):
    assert preferences_of([recorded([[1, 1, 1]], preference=[1, 1, 1])]) is None
    assert preferences_of([recorded([[1, 1]], name="FSMGDA")]) is None
    weighing = recorded([[1, 1]], name="FIRM", preference=[3, 1])
    for record in weighing.records:  # whose preference weighs gradients
        record.settings["algorithms"]["FIRM"]["strategy"]["name"] = "firm"
    assert preferences_of([weighing]) is None


# --- Settings -------------------------------------------------------------------------------------


def parameter_of(settings):
    """The section of the one parameter that the settings sweep, None without one."""
    swept = swept_parameters(settings)
    criteria = criteria_of(settings)
    sections = [parameter_section(key, own, criteria) for key, own in swept.items()]
    return next(map(shown, sections), None)


def sweep(recorded, name, **losses_by_setting):
    """Settings by K from `k5=[[seed], [seed]]`."""
    return [
        recorded(
            *([values] for values in seeds),
            name=f"{name}, K = {setting[1:]}",
            color=place + 3,
            num_local_steps=int(setting[1:]),
        )
        for place, (setting, seeds) in enumerate(losses_by_setting.items())
    ]


def test_each_family_is_a_line_of_final_means_by_rising_setting(recorded):
    first = sweep(recorded, "FSMGDA", k20=[[0.4, 0.8]], k1=[[0.1, 0.3]])
    second = sweep(
        recorded,
        "FedCMOO",
        k1=[[0.1, 0.1], [0.3, 0.3]],
        k20=[[0.2, 0.2], [0.2, 0.2]],
    )
    section = parameter_of([*first, *second])
    (panel,) = section.panels
    assert section.title == "The setting strategy.num_local_steps"
    assert lines(panel) == {
        "FSMGDA": [(0, pytest.approx(0.2)), (1, pytest.approx(0.6))],
        "FedCMOO": [(0, pytest.approx(0.2)), (1, pytest.approx(0.2))],
    }
    assert panel.figure["layout"]["xaxis"]["ticktext"] == ["1", "20"]
    assert panel.figure["data"][1]["error_y"]["array"] == pytest.approx([0.1, 0.0])
    assert [key.label for key in section.legend] == ["FSMGDA", "FedCMOO"]
    assert section.legend[0].color == first[0].key.color
    assert "diverged" not in section.text


def test_a_setting_that_diverged_has_no_point_and_is_mentioned(recorded):
    family = sweep(recorded, "A", k1=[[1.0]], k5=[[2.0]], k20=[[3.0], [None]])
    section = parameter_of(family)
    assert lines(section.panels[0]) == {"A": [(0, 1.0), (1, 2.0)]}
    assert "diverged have no point" in section.text


def test_one_setting_is_no_sweep(recorded):
    assert parameter_of(sweep(recorded, "A", k1=[[1.0]])) is None
    assert parameter_of(sweep(recorded, "B", k1=[[1.0]], k5=[[None]])) is None


def test_settings_that_differ_in_two_numbers_or_in_words_are_no_sweep(recorded):
    def pair(name, **second):
        first = recorded([[1.0]], name=f"{name}, 1", beta=0, rule="mean", is_fast=True)
        other = recorded(
            [[1.0]], name=f"{name}, 2", **{"beta": 0, "rule": "mean", "is_fast": True, **second}
        )
        return [first, other]

    assert swept_parameters(pair("a", beta=1)).keys() == {"strategy.beta"}
    assert not swept_parameters(pair("b", beta=1, rate=2))
    assert not swept_parameters(pair("c", rule="median"))
    assert not swept_parameters(pair("d", is_fast=False))


# --- Over the rounds ------------------------------------------------------------------------------


def test_weights_by_objective_are_a_line_for_each_algorithm_that_has_them():
    weighed = algorithm(rounds("weights", {"a": 0.2, "b": 0.8}, {"a": 0.4, "b": 0.6}))
    by_client = algorithm(rounds("weights", {"client_0": 1.0}), name="AFL", color=1)
    without = algorithm(rows([1, 1]), name="FedAvg", color=2)
    (panel,) = weights_of([without, by_client, weighed]).panels  # of two shares one says it all
    assert panel.title == "λ of a"
    assert lines(panel) == {"FedCMOO": [(1, 0.2), (2, 0.4)]}
    (line,) = panel.figure["data"]
    assert line["line"]["color"] == weighed.key.color
    assert panel.figure["layout"]["shapes"][0]["y0"] == 0.5  # all objectives count alike
    assert weights_of([without, by_client]) is None


@pytest.mark.parametrize(("count", "is_drawn"), [(1, False), (2, True), (8, True), (9, False)])
def test_weights_are_shown_of_two_to_eight_objectives(count, is_drawn):
    names = "abcdefghij"[:count]
    runs = algorithm([*rows([1.0] * count), {"round": 1, "weights": dict.fromkeys(names, 0.1)}])
    assert (weights_of([runs]) is not None) == is_drawn


@pytest.mark.parametrize(
    ("place", "field"), [("further", "improved"), ("drift", "stationarity"), ("drift", "drift")]
)
def test_a_field_of_the_rows_is_a_line_for_each_algorithm_that_has_it(place, field):
    measured = algorithm(rounds(field, 0.2, 0.9), rounds(field, 0.4, 0.9))
    without = algorithm(rows([1, 1]), name="FedAvg", color=1)
    section = training_section([without, measured], place)
    (panel,) = section.panels
    assert lines(panel) == {"FedCMOO": [(1, pytest.approx(0.3)), (2, pytest.approx(0.9))]}
    assert QUANTITIES["round", field].help in section.text
    assert "running averages" not in section.text
    assert training_section([without], place) is None


def test_stationarity_has_a_log_axis_and_the_share_of_participants_per_cent():
    runs = [algorithm(rounds("stationarity", 0.2)), algorithm(rounds("improved", 0.2), name="B")]
    (stationarity,) = training_section(runs, "drift").panels
    assert stationarity.figure["layout"]["yaxis"]["type"] == "log"
    (improved,) = training_section(runs, "further").panels
    assert "%" in improved.figure["layout"]["yaxis"]["tickformat"]


def test_long_runs_show_running_means_and_say_so():
    alternating = [0.0, 1.0] * 24  # 48 rounds
    section = training_section([algorithm(rounds("improved", *alternating))], "further")
    (points,) = lines(section.panels[0]).values()
    average = exponential_average(alternating, half_life=2)
    assert points == [(at, pytest.approx(y)) for at, y in enumerate(average, start=1)]
    assert "running averages with a half-life of 2 measured values" in section.text


def test_progress_is_a_line_for_each_algorithm_trained_from_the_same_models():
    progress = {"FSMGDA": {"a": 0.1, "b": 0.3}, "FedCMOO": {"a": 0.5, "b": 0.5}, "new": {"a": 0.0}}
    first = algorithm(rows([1, 1], progress=progress), color=0)
    second = algorithm(rows([1, 1]), name="FSMGDA", color=1)
    section = progress_of([first, second])
    (panel,) = section.panels
    assert lines(panel) == {"FSMGDA": [(0, 0.2)], "FedCMOO": [(0, 0.5)], "new": [(0, 0.0)]}
    assert "FedCMOO" in panel.title
    by_name = {key.label: key for key in section.legend}
    assert by_name["FSMGDA"] == second.key
    assert by_name["new"].color not in (first.key.color, second.key.color)
    assert progress_of([second]) is None
    assert "added later" not in section.text
    third = algorithm(rows([1, 1]), name="AFL", color=2)
    added = progress_of([first, second, third])
    assert added.text.endswith("since added later: AFL.")


def test_figures_are_what_plotly_accepts_and_names_are_escaped(recorded):
    fields = {
        "users": {f"user {place}": 0.5 for place in range(12)},
        "progress": {"<b>new</b>": {"<b>a</b>": 0.5}},
        "weights": {"<b>a</b>": 0.5, "b": 0.5},
        "improved": 0.5,
        "stationarity": 0.1,
    }
    row = {"round": 1, "losses": {"<b>a</b>": 0.5, "b": 0.3}, **fields}
    runs = [algorithm([row], name="<b>A</b>")]
    family = sweep(recorded, "<b>f</b>", k1=[[1.0]], k5=[[2.0]])
    sections = [
        users_section(runs),
        preferences_of([recorded([[0.5, 0.3]], name="<b>p</b>", preference=[1, 2])]),
        parameter_of(family),
        weights_of(runs),
        progress_of(runs),
        training_section(runs, "further"),
        training_section(runs, "drift"),
    ]
    panels = [panel for section in sections for panel in section.panels]
    assert len({panel.name for panel in panels}) == len(panels)
    for panel in panels:
        go.Figure(panel.figure)
    drawn = json.dumps([panel.figure for panel in panels], allow_nan=False)
    assert "&lt;b&gt;" in drawn
    assert "<b>" not in drawn
