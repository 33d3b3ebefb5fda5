"""The page that compares settings: figures, sentences and tables from the runs' rows."""

import json
import re

import numpy as np
import pytest

import firm.alignment.client
import firm.fmoo.measures  # noqa: F401 - both register what their runs measure
from firm.report import read_record
from firm.report.criteria import criteria_of
from firm.report.page import Section, is_shown, render
from firm.report.settings_page import settings_page
from firm.report.settings_tables import final_table
from firm.report.tables import Setting
from tests.runs import write_classic_run

NAMES = [f"objective {place}" for place in range(9)]


def run(start, end, *, field="accuracies", bytes_up=1_000_000, num_rounds=4):
    """Rows of a run evaluated at its start and its end."""
    rows = [{"round": at, "bytes_up": bytes_up if at else 0} for at in range(num_rounds + 1)]
    for row, values in ((rows[0], start), (rows[-1], end)):
        row[field] = dict(zip(NAMES, values, strict=False))
    return rows


def runs(name, *ends, color=0, **options):
    return Setting(name, color, [run([0.1] * len(end), end, **options) for end in ends])


def study(*algorithms):
    return settings_page(algorithms, method="By running.", config="seed: 0")


def table_of(*algorithms, texts=None):
    return final_table(algorithms, criteria_of(algorithms)[0], texts or {})


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


def test_the_table_holds_means_deviations_the_worst_of_each_run_and_the_upload():
    table = cells(table_of(GOOD, BAD, texts={"Δ_M (%)": {"FSMGDA": "4.26"}}))
    assert table["FedCMOO"] == {
        "objective 0": "0.850 ± 0.071",
        "objective 1": "0.850 ± 0.071",
        "mean": "0.850",
        "worst": "0.800",
        "Δ_M (%)": "–",
        "uploaded (MB)": "4.00",
        "rounds": "4",
        "seeds": "2",
    }
    assert table["FSMGDA"]["worst"] == "0.500"
    assert table["FSMGDA"]["Δ_M (%)"] == "4.26"
    assert table["FSMGDA"]["uploaded (MB)"] == "8.00"


def test_of_losses_the_largest_is_the_worst_and_nothing_is_a_percentage():
    made = study(runs("A", [0.5, 2.0], field="losses"), runs("B", [0.1, 3.0], field="losses"))
    assert cells(made.block("final"))["A"]["worst"] == "2.00"
    assert "lowest with A (1.25), before B (1.55)" in made.summary[0]
    assert "lowest with A (2.00), before B (3.00)" in made.summary[1]


def test_many_quantities_become_rows():
    made = study(runs("A", [0.5] * 8), runs("B", [0.6] * 8))
    assert made.block("final").headings == ["quantity", "initial model", "A", "B"]
    assert [row[0] for row in made.block("final").rows[:2]] == [
        "objective 0",
        "objective 1",
    ]
    assert cells(made.block("final"))["mean"] == {
        "initial model": "0.100",
        "A": "0.500",
        "B": "0.600",
    }


@pytest.mark.parametrize(("num_columns", "is_turned"), [(4, False), (5, True)])
def test_further_columns_count_as_quantities(num_columns, is_turned):
    columns = {f"column {place}": {"FedCMOO": "1"} for place in range(num_columns)}
    table = table_of(GOOD, BAD, texts=columns)  # beside six quantities of every table
    assert (table.headings[0] == "quantity") == is_turned


@pytest.mark.slow
@pytest.mark.parametrize(("count", "is_turned"), [(11, True), (12, False)])
def test_what_is_more_numerous_becomes_rows(count, is_turned):
    made = study(*(runs(f"{place}", [0.5] * 8) for place in range(count)))  # 12 quantities
    assert (made.block("final").headings[0] == "quantity") == is_turned


def test_the_summary_names_the_best_by_mean_and_by_worst_objective():
    first = runs("wide", [0.9, 0.7], [0.91, 0.69])
    second = runs("even", [0.75, 0.75], [0.75, 0.75])
    mean, worst, _ = (text.replace("\xa0", " ") for text in study(first, second).summary)
    assert mean == (
        "The mean accuracy over 2 objectives ends highest with wide (0.800), before even (0.750)."
    )
    assert worst == (
        "The worst objective's accuracy ends highest with even (0.750), "
        "before wide (0.6950 ± 0.0071)."
    )


def test_classic_algorithms_at_one_untuned_rate_are_not_ranked(tmp_path):
    def setting(label, rate, end, **strategy):
        algorithm = {"strategy": strategy, "local": {"lr": rate}}
        rows = [{"kind": "evaluation", "split": "test"} | row for row in run([0.1], [end])]
        path = write_classic_run(tmp_path / label, rows, algorithms={label: algorithm})
        return Setting.of(label, 0, [read_record(path)])

    first = setting("FSMGDA", 0.1, 0.5, name="fsmgda")
    second = setting("FedMGDA+", 0.1, 0.6, name="fedmgda", normalize_updates=True)
    ends, untuned, _ = (text.replace("\xa0", " ") for text in study(first, second).summary)
    assert ends == "Final accuracy: FSMGDA 0.500, FedMGDA+ 0.600."
    assert "Learning rates are untuned here" in untuned
    assert "FedMGDA+ normalises the clients' updates" in untuned
    third = setting("FSMGDA, lr 0.2", 0.2, 0.7, name="fsmgda")  # the rate is what is compared
    assert "ends highest with FSMGDA, lr 0.2" in study(first, third).summary[0]


@pytest.mark.parametrize(("gap", "is_clear"), [(0.02, False), (0.2, True)])
def test_a_difference_within_the_noise_of_the_seeds_is_said_to_be_none(gap, is_clear):
    first = runs("A", [0.5], [0.52])
    second = runs("B", [0.53 + gap], [0.49 + gap])
    sentence, _ = study(first, second).summary
    assert ("not significant" not in sentence) == is_clear
    assert "highest with B" in sentence


def test_one_setting_alone_is_not_ranked():
    mean, worst, _ = (text.replace("\xa0", " ") for text in study(runs("A", [0.5, 0.7])).summary)
    assert mean == "The mean accuracy over 2 objectives ends at 0.600 with A."
    assert worst == "The worst objective's accuracy ends at 0.500 with A."


def test_settings_that_each_seed_tells_apart_are_so_however_far_the_seeds_are():
    first, second = runs("A", [0.1], [0.5], [0.9]), runs("B", [0.12], [0.521], [0.919])
    assert "not significant" not in study(first, second).summary[0]
    assert "ends equal with A (0.500) and B (0.500)." in study(
        runs("A", [0.5]), runs("B", [0.5])
    ).summary[0].replace("\xa0", " ")


def test_one_run_each_claims_no_difference_and_has_no_errors():
    made = study(runs("A", [0.5]), runs("B", [0.51]))
    assert "not significant" not in made.summary[0]
    assert "±" not in str(made.block("final").rows)
    assert "One run each" in made.block("accuracies").text


def test_errors_are_promised_where_there_are_bands():
    made = study(*(runs(f"{place}", [0.4], [0.5]) for place in range(9)))
    section = made.block("accuracies")
    assert section.text.startswith("Global model. Means over 2 seeds ± one standard error")
    assert sum("fill" in trace for trace in section.panels[0].figure["data"]) == 9
    assert made.choice.shown == {f"{place}" for place in range(8)}  # one for each colour


@pytest.mark.parametrize(
    ("num_objectives", "panels"),
    [(1, ["objective 0", "Accuracy, over uploaded data"]), (2, 4), (4, 6), (8, 10), (9, 3)],
)
def test_few_objectives_have_panels_of_their_own_many_mean_and_worst(num_objectives, panels):
    made = study(runs("A", [0.5] * num_objectives))
    titles = [panel.title for panel in made.block("accuracies").panels]
    if isinstance(panels, list):
        assert titles == panels
    else:
        assert len(titles) == panels
        assert ("Worst objective of each round" in titles) == (num_objectives > 8)
    names = [section.name for section in sections(made)]
    assert ("objectives" in names) == (num_objectives >= 3)


def last_lines(made):
    panels = made.block("accuracies").panels
    return {panel.title: panel.figure["data"][-1]["y"] for panel in panels}


def test_every_panel_of_an_objective_shows_that_objective():
    made = study(GOOD)
    titles = {
        panel.title: panel.figure["data"][-1]["y"] for panel in made.block("accuracies").panels
    }
    assert titles["Mean over the objectives"] == pytest.approx([0.1, 0.85])
    made = study(runs("A", [0.2, 0.8]))
    titles = {
        panel.title: panel.figure["data"][-1]["y"] for panel in made.block("accuracies").panels
    }
    assert titles["objective 1"] == [0.1, 0.8]


def test_objectives_may_have_the_names_of_other_figures():
    rows = [{"round": at, "accuracies": {"left": 0.1, "kl": 0.3}, "kl": 5.0} for at in (0, 1)]
    names = [panel.name for panel in study(Setting("A", 0, [rows])).panels]
    assert len(set(names)) == len(names)


def test_three_objectives_are_set_side_by_side_and_losses_are_over_the_largest():
    made = study(runs("A", [2.0, 1.0, 0.0], field="losses"),
                 runs("B", [1.0, 4.0, 0.0], field="losses"))  # fmt: skip
    (section,) = [section for section in sections(made) if section.name == "objectives"]
    lines = [trace["y"] for trace in section.panels[0].figure["data"]]
    assert lines == [[1.0, 0.25, 0.0], [0.5, 1.0, 0.0]]
    made = study(runs("A", [0.95, 0.62, 0.7]))
    (section,) = [section for section in sections(made) if section.name == "objectives"]
    assert section.panels[0].figure["data"][0]["y"] == [0.95, 0.62, 0.7]
    assert section.panels[0].figure["layout"]["xaxis"]["ticktext"] == NAMES[:3]


def test_without_counted_bytes_there_is_no_figure_of_uploads():
    bare = [[{"round": 0, "losses": {"a": 1.0}}]]
    made = study(Setting("A", 0, bare))
    assert [panel.name for panel in made.panels] == ["losses-a"]
    assert cells(made.block("final"))["A"]["uploaded (MB)"] == "–"


def test_an_algorithm_that_diverged_is_named_and_not_ranked():
    lost = runs("lost", [float("nan")] * 3, [0.9] * 3)
    made = study(lost, runs("kept", [0.5] * 3, [0.5] * 3))
    assert cells(made.block("final"))["lost"]["mean"] == "diverged in 1 of 2"
    assert "highest with kept" in made.summary[0]
    assert "lost" not in made.summary[0]
    assert render(made)
    assert "every setting diverged" in study(lost).summary[0]


def test_the_last_evaluation_counts_whatever_the_order_of_the_rows():
    rows = run([0.1], [0.9])[::-1]
    assert Setting("A", 0, [rows]).finals("accuracies", NAMES[:1]).tolist() == [[0.9]]


def test_runs_of_unequal_length_say_so():
    both = Setting("A", 0, [run([0.1], [0.5], num_rounds=3), run([0.1], [0.5])])
    assert cells(study(both).block("final"))["A"]["rounds"] == "3 to 4"


def evaluations(*losses, split="test", **fields):
    """Rows of evaluations of one run, of objectives named a, b and so on."""
    return [
        {"kind": "evaluation", "split": split, "round": at} | fields
        | {"losses": dict(zip("abc", values, strict=False))}
        for at, values in enumerate(losses)
    ]  # fmt: skip


def recorded(folder, name, *seeds, color=0, **settings):
    """A setting of run directories, with their configuration."""
    paths = [
        write_classic_run(folder / name / f"seed_{seed}", rows, **{"seeds": [seed]} | settings)
        for seed, rows in enumerate(seeds)
    ]
    return Setting.of(name, color, [read_record(path) for path in paths])


def test_the_split_is_named():
    made = study(Setting("A", 0, [evaluations([0.5], [0.4], split="validation")]))
    assert sections(made)[0].title == "Validation loss over the rounds"
    assert made.block("final").text.startswith("Validation loss")


def test_losses_that_approach_a_target_have_a_log_axis_and_their_rounds_a_column(tmp_path):
    rows = evaluations([2.0], [0.9], [0.4])
    made = study(recorded(tmp_path, "A", rows, target_loss=0.5, rounds=7))
    assert made.block("losses").panels[0].figure["layout"]["yaxis"]["type"] == "log"
    assert cells(made.block("final"))["A"]["rounds to 0.5, a"] == "2"
    early = study(recorded(tmp_path, "D", rows, evaluations([2.0], [0.4]), target_loss=0.5))
    assert cells(early.block("final"))["D"]["rounds to 0.5, a"] == "1.5"
    late = study(recorded(tmp_path, "B", rows[:2], target_loss=0.5, rounds=7))
    assert cells(late.block("final"))["B"]["rounds to 0.5, a"] == "> 7"
    plain = study(recorded(tmp_path, "C", rows))
    assert "type" not in plain.block("losses").panels[0].figure["layout"]["yaxis"]


def test_objectives_trained_alone_give_the_relative_loss_whatever_the_algorithm(tmp_path):
    def setting(name, end, **strategy):
        algorithm = {name: {"strategy": {"name": "any", **strategy}}}
        return recorded(tmp_path, name, evaluations([3, 3], end), algorithms=algorithm)

    alone = [setting("a", [1, 2], weights=[1, 0]), setting("b", [2, 1], weights=[0, 1])]
    table = cells(study(*alone, setting("both", [1.5, 1.1], weights=[0.5, 0.5])).block("final"))
    assert table["both"]["Δ_M, %"] == "30.0"  # the mean of 50 and 10
    assert table["a"]["Δ_M, %"] == "–"


def test_of_many_warnings_the_first_are_listed_and_the_others_counted(tmp_path):
    rows = evaluations([1.0], [0.5])
    alarms = [{"kind": "round", "round": at, "alarms": [f"number {at}"]} for at in range(1, 24)]
    made = study(recorded(tmp_path, "A", [*rows, *alarms]))
    assert [text for _, text in made.alarms] == [f"number {at}" for at in range(1, 21)]
    assert "3 more warnings in the logs of the runs." in made.notices


def test_a_run_without_valid_evaluations_is_left_out_and_named(tmp_path):
    good, bad = evaluations([1.0], [0.5]), [{"kind": "round", "round": 1}]
    made = study(recorded(tmp_path, "A", good, bad), recorded(tmp_path, "B", bad, color=1))
    assert list(cells(made.block("final"))) == ["initial model", "A"]
    assert made.notices == [
        "A, seed 1, is left out: no row of its log has valid losses.",
        "B, seed 0, is left out: no row of its log has valid losses.",
    ]


def test_the_page_holds_every_figure_under_its_own_name():
    generator = np.random.default_rng(0)
    made = study(*(runs(name, *generator.random((3, 3))) for name in ("A", "B")))
    page = render(made)
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    assert len(figures) == sum(len(section.panels) for section in sections(made)) == 10
