"""A number that a run logs of its own, registered by one call, stands wherever numbers stand."""

import csv

import pytest

from firm.base.quantities import Quantity, drawn, register
from firm.base.schema import NonNegative
from firm.federation.strategies import STRATEGIES
from firm.report import read_record, write_report
from firm.report.settings_page import study_figures, write_settings_page
from firm.report.static import save_figure
from firm.run.tracking import flatten
from tests.runs import edit_rows, figures_in, read_rows


@pytest.fixture
def surprise(new_plugins):
    """A quantity of the clients by objective, and one of the round."""
    register(Quantity("surprise", "Surprise at {}", "bits", "How new replies are.", by="objective"))
    register(Quantity("calm", "Calm of the server", "beats", kind="round", type=NonNegative))
    register(
        Quantity("excess", "Length over 30", "tokens", of=lambda row: row["response_length"] - 30)
    )


@pytest.fixture
def run_path(make_run, surprise):
    path = make_run(num_clients=2, num_rounds=3, num_done=3)

    def with_numbers(row):
        if row["kind"] == "client":
            row["surprise"] = {"helpful": 0.25 * row["round"], "harmless": 1.0}
        if row["kind"] == "round":
            row["calm"] = 2.0 + row["round"] if row["round"] < 3 else -1.0
        return row

    edit_rows(path, with_numbers)
    return path


def test_it_stands_on_the_page_of_the_run_with_its_title_unit_and_help(run_path):
    path = write_report(run_path, final=False)
    shown = figures_in(path)
    panel = shown["surprise-helpful"]
    assert panel["title"] == "Surprise at helpful"
    assert panel["figure"]["layout"]["yaxis"]["title"]["text"] == "bits"
    assert [line["y"] for line in panel["figure"]["data"]] == [[0.25, 0.5, 0.75]] * 2
    assert shown["excess"]["figure"]["data"][0]["x"] == [1, 2, 3]
    html = path.read_text(encoding="utf-8")
    assert "How new replies are." in html
    assert "calm of round 3: -1.0" in html  # its range is checked when the log is read
    assert shown["calm"]["figure"]["data"][0]["y"] == [3.0, 4.0]


def test_a_constant_is_named_not_drawn(run_path):
    path = write_report(run_path, final=False)
    assert "surprise-harmless" not in figures_in(path)
    html = path.read_text(encoding="utf-8")
    assert "Constant over the rounds: Surprise at harmless 1." in html


def test_a_section_of_constants_is_one_sentence(make_run):
    path = make_run(num_clients=2, num_rounds=3, num_done=3)

    def fixed(row):
        if row["kind"] == "client":
            row["weights"] = [[0.25, 0.75]] * len(row["weights"])
        if row["kind"] == "round":
            row["weights_spread"] = dict.fromkeys(row["weights_spread"], 0.0)
        return row

    edit_rows(path, fixed)
    html = write_report(path, final=False).read_text(encoding="utf-8")
    assert not [name for name in figures_in(path / "report.html") if name.startswith("weights")]
    sentence = "Constant over the rounds: λ of helpful 0.25; Spread of λ over clients 0."
    assert sentence in html
    assert "Weights of the clients" in html


def test_it_stands_in_the_study_and_in_the_data_of_its_figures(run_path, tmp_path):
    runs = {"FIRM": [read_record(run_path)]}
    shown = figures_in(write_settings_page(tmp_path / "study.html", runs))
    assert shown["surprise-helpful"]["figure"]["data"][0]["y"] == [0.25, 0.5, 0.75]
    assert shown["calm"]["title"] == "Calm of the server"
    figure = study_figures(runs, folder=tmp_path)["further"]
    *_, path = save_figure(figure, tmp_path / "surprise")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["panel"] == "Surprise at helpful"]
    assert [float(row["mean"]) for row in rows] == [0.25, 0.5, 0.75]


def test_it_reaches_wandb_under_its_name_derived_or_not(run_path):
    (row,) = read_rows(run_path, client="client_1", round=2)
    series = flatten(row, ["helpful", "harmless"])
    assert series["surprise/helpful/client_1"] == 0.5
    assert series["excess/client_1"] == row["response_length"] - 30


def test_a_round_has_no_objective_to_name_in_a_title():
    assert STRATEGIES  # each registers its own
    assert [q.name for q in drawn() if q.kind == "round" and "{}" in q.title] == []
