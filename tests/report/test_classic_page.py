"""The page that compares settings: figures, sentences and table from the runs' rows."""

import json
import re

import numpy as np
import pytest

from firm.report.classic_page import comparison_page
from firm.report.drawing import NUM_BANDS, Panel
from firm.report.page import Section, is_shown, render
from firm.report.tables import Setting

NAMES = [f"objective {place}" for place in range(8)]


def run(start, end, *, field="accuracies", bytes_up=1_000_000, num_rounds=4):
    """Rows of a run evaluated at its start and its end."""
    rows = [{"round": at, "bytes_up": bytes_up if at else 0} for at in range(num_rounds + 1)]
    for row, values in ((rows[0], start), (rows[-1], end)):
        row[field] = dict(zip(NAMES, values, strict=False))
    return rows


def runs(name, *ends, color=0, **options):
    return Setting(name, color, [run([0.1] * len(end), end, **options) for end in ends])


def study(*algorithms, **options):
    words = {"title": "A comparison", "facts": {}, "method": "By running.", "config": "seed: 0"}
    return comparison_page(algorithms, **words, **options)


def cells(table):
    """Row name -> heading -> cell, with plain spaces."""
    return {
        row[0]: dict(
            zip(table.headings[1:], (cell.replace("\xa0", " ") for cell in row[1:]), strict=True)
        )
        for row in table.rows
    }


def sections(made):
    return [block for block in made.blocks if isinstance(block, Section) and is_shown(block)]


GOOD = runs("FedCMOO", [0.8, 0.9], [0.9, 0.8])
BAD = runs("FSMGDA", [0.5, 0.7], [0.5, 0.7], color=1, bytes_up=2_000_000)


def test_the_table_holds_means_errors_the_worst_of_each_run_and_the_upload():
    table = cells(study(GOOD, BAD, columns={"Δ_M (%)": {"FSMGDA": "4.26"}}).block("table"))
    assert table["FedCMOO"] == {
        "objective 0 (%)": "85.0 ± 5.0",
        "objective 1 (%)": "85.0 ± 5.0",
        "mean (%)": "85.0",
        "worst (%)": "80.0",
        "Δ_M (%)": "–",
        "uploaded (MB)": "4.00",
        "rounds": "4",
    }
    assert table["FSMGDA"]["worst (%)"] == "50.0"
    assert table["FSMGDA"]["Δ_M (%)"] == "4.26"
    assert table["FSMGDA"]["uploaded (MB)"] == "8.00"


def test_of_losses_the_largest_is_the_worst_and_nothing_is_a_percentage():
    made = study(runs("A", [0.5, 2.0], field="losses"), runs("B", [0.1, 3.0], field="losses"))
    assert cells(made.block("table"))["A"]["worst"] == "2.00"
    assert "lowest with A (1.25), before B (1.55)" in made.summary[0]
    assert "lowest with A (2.00), before B (3.00)" in made.summary[1]


def test_many_quantities_become_rows():
    made = study(runs("A", [0.5] * 8), runs("B", [0.6] * 8))
    assert made.block("table").headings == ["quantity", "A", "B"]
    assert [row[0] for row in made.block("table").rows[:2]] == [
        "objective 0 (%)",
        "objective 1 (%)",
    ]
    assert cells(made.block("table"))["mean (%)"] == {"A": "50.0", "B": "60.0"}


@pytest.mark.parametrize(("num_columns", "is_turned"), [(4, False), (5, True)])
def test_further_columns_count_as_quantities(num_columns, is_turned):
    columns = {f"column {place}": {"FedCMOO": "1"} for place in range(num_columns)}
    made = study(GOOD, BAD, columns=columns)  # beside six quantities of the page's own
    assert (made.block("table").headings[0] == "quantity") == is_turned


@pytest.mark.parametrize(("count", "is_turned"), [(11, True), (12, False)])
def test_what_is_more_numerous_becomes_rows(count, is_turned):
    made = study(*(runs(f"{place}", [0.5] * 8) for place in range(count)))  # 12 quantities
    assert (made.block("table").headings[0] == "quantity") == is_turned


def test_the_summary_names_the_best_by_mean_and_by_worst_objective():
    first = runs("wide", [0.9, 0.7], [0.91, 0.69])
    second = runs("even", [0.75, 0.75], [0.75, 0.75])
    mean, worst = (text.replace("\xa0", " ") for text in study(first, second).summary)
    assert mean == (
        "The mean accuracy over 2 objectives ends highest with wide (80.0 %), before even (75.0 %)."
    )
    assert worst == (
        "The worst objective's accuracy ends highest with even (75.0 %), "
        "before wide (69.50 ± 0.50 %)."
    )


@pytest.mark.parametrize(("gap", "is_clear"), [(0.02, False), (0.2, True)])
def test_a_difference_within_the_noise_of_the_seeds_is_said_to_be_none(gap, is_clear):
    first = runs("A", [0.5], [0.52])
    second = runs("B", [0.5 + gap], [0.52 + gap])
    (sentence,) = study(first, second).summary
    assert ("too near" not in sentence) == is_clear
    assert "highest with B" in sentence


def test_one_run_each_claims_no_difference_and_has_no_errors():
    made = study(runs("A", [0.5]), runs("B", [0.51]))
    assert "too near" not in made.summary[0]
    assert "±" not in str(made.block("table").rows)
    assert "One run each" in sections(made)[0].text


def test_errors_are_promised_where_there_are_bands():
    for count in (NUM_BANDS, NUM_BANDS + 1):
        made = study(*(runs(f"{place}", [0.4], [0.5]) for place in range(count)))
        traces = sections(made)[0].panels[0].figure["data"]
        assert sections(made)[0].text.startswith("Of the global model. Means over 2 seeds")
        assert ("error" in sections(made)[0].text) == any(trace.get("fill") for trace in traces)


def test_the_callers_sections_follow_the_pages_own():
    extra = Section("users", "Users", "", [Panel("u", "U", {"data": [{}], "layout": {}})], [])
    made = study(GOOD, sections=[extra])
    assert sections(made)[-1] is extra


@pytest.mark.parametrize(
    ("num_objectives", "panels"), [(1, ["objective 0"]), (2, 3), (4, 5), (5, 2), (8, 2)]
)
def test_few_objectives_have_panels_of_their_own_many_mean_and_worst(num_objectives, panels):
    made = study(runs("A", [0.5] * num_objectives))
    titles = [panel.title for panel in sections(made)[0].panels]
    if isinstance(panels, list):
        assert titles == panels
    else:
        assert len(titles) == panels
        assert ("Worst objective of each round" in titles) == (num_objectives > 4)
    names = [section.name for section in sections(made)]
    assert ("objectives" in names) == (num_objectives >= 3)


def test_every_panel_of_an_objective_shows_that_objective():
    made = study(GOOD)
    titles = {panel.title: panel.figure["data"][-1]["y"] for panel in sections(made)[0].panels}
    assert titles["Mean over the objectives"] == pytest.approx([0.1, 0.85])
    made = study(runs("A", [0.2, 0.8]))
    titles = {panel.title: panel.figure["data"][-1]["y"] for panel in sections(made)[0].panels}
    assert titles["objective 1"] == [0.1, 0.8]


def test_radars_show_losses_over_the_largest_and_say_where_the_centre_is():
    made = study(runs("A", [2.0, 1.0, 0.0], field="losses"),
                 runs("B", [1.0, 4.0, 0.0], field="losses"))  # fmt: skip
    (section,) = [section for section in sections(made) if section.name == "objectives"]
    radii = [trace["r"][:3] for trace in section.panels[0].figure["data"]]
    assert radii == [[1.0, 0.25, 0.0], [0.5, 1.0, 0.0]]
    made = study(runs("A", [0.95, 0.62, 0.7]))
    (section,) = [section for section in sections(made) if section.name == "objectives"]
    assert section.panels[0].title == "Final accuracy, from 50% at the centre"
    assert section.panels[0].figure["layout"]["polar"]["radialaxis"]["range"] == [0.5, 1.0]


def test_without_counted_bytes_there_is_no_section_of_uploads():
    bare = [[{"round": 0, "losses": {"a": 1.0}}]]
    made = study(Setting("A", 0, bare))
    assert [section.name for section in sections(made)] == ["losses"]
    assert cells(made.block("table"))["A"]["uploaded (MB)"] == "–"


def test_an_algorithm_that_diverged_is_named_and_not_ranked():
    lost = runs("lost", [float("nan")] * 3, [0.9] * 3)
    made = study(lost, runs("kept", [0.5] * 3, [0.5] * 3))
    assert cells(made.block("table"))["lost"]["mean (%)"] == "diverged in 1 of 2"
    assert "highest with kept" in made.summary[0]
    assert "lost" not in made.summary[0]
    assert render(made)
    assert "every setting diverged" in study(lost).summary[0]


def test_the_last_evaluation_counts_whatever_the_order_of_the_rows():
    rows = run([0.1], [0.9])[::-1]
    assert Setting("A", 0, [rows]).finals("accuracies", NAMES[:1]).tolist() == [[0.9]]


def test_runs_of_unequal_length_say_so():
    both = Setting("A", 0, [run([0.1], [0.5], num_rounds=3), run([0.1], [0.5])])
    assert cells(study(both).block("table"))["A"]["rounds"] == "3 to 4"


def test_the_split_is_named():
    made = study(GOOD, split="validation")
    assert sections(made)[0].title == "Validation accuracy over the rounds"
    assert made.block("table").text.startswith("Validation accuracy")


def test_losses_can_have_a_log_axis():
    made = study(runs("A", [0.5], field="losses"), is_log_loss=True)
    for section in sections(made):
        assert section.panels[0].figure["layout"]["yaxis"]["type"] == "log"


def test_the_page_holds_every_figure_under_its_own_name():
    generator = np.random.default_rng(0)
    made = study(*(runs(name, *generator.random((3, 3))) for name in ("A", "B")))
    page = render(made)
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    assert len(figures) == sum(len(section.panels) for section in sections(made)) == 6
