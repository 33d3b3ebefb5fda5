import json
from itertools import pairwise
from statistics import fmean

import pytest

from firm.report import read_record
from firm.report import run_figures as figures
from firm.report.drawing import INK, LegendEntry, curve, rounds_figure
from firm.report.ledger import cost_section
from firm.report.run_figures import trade_off_planes
from firm.report.tables import Setting
from firm.run.tracking import means
from tests.figures import assert_colours_are_defined, assert_plotly_accepts
from tests.runs import edit_rows, read_rows

SECTIONS = ("scores", "diagnostics", "weights", "gradients", "training", "further")


def traces(panels, name):
    """Trace name -> round -> value, of the panel of that name."""
    (panel,) = [panel for panel in panels if panel.name == name]
    return {t["name"]: dict(zip(t["x"], t["y"], strict=True)) for t in panel.figure["data"]}


def setting(record):
    return Setting.of(record.name, 0, [record])


def quantities(record, section):
    return figures.quantity_panels(setting(record), section)[0]


def every_figure(record):
    run = setting(record)
    panels = [panel for name in SECTIONS for panel in quantities(record, name)]
    return [
        *trade_off_planes(record),
        *panels,
        *figures.learned_and_true(run),
        *cost_section([run]).panels,
    ]


def test_a_constrained_reward_is_drawn_against_its_bound(make_run):
    run_path = make_run()
    record = read_record(run_path)
    assert figures.constraint_panels(setting(record)) == ([], [])
    record.settings["strategy"] = {"name": "constrained", "min_rewards": {"harmless": 0.6}}
    panels, keys = figures.constraint_panels(setting(record))
    drawn = traces(panels, "constraint-harmless")
    assert [key.label for key in keys] == list(drawn)
    assert drawn["global model, validation"] == {
        row["round"]: row["rewards"]["harmless"]["mean"]
        for row in read_rows(run_path, "evaluation", split="validation")
    }
    rows = read_rows(run_path, "client")
    assert drawn["mean over clients"][1] == pytest.approx(
        fmean(row["rewards"]["harmless"] for row in rows if row["round"] == 1)
    )
    (line,) = panels[0].figure["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 0.6


def test_score_curves_hold_the_logged_values(make_run):
    run_path = make_run()
    panels = quantities(read_record(run_path), "scores")
    for objective in ("helpful", "harmless"):
        drawn = traces(panels, f"scores-{objective}")
        assert drawn.pop("global model, validation") == {
            row["round"]: row["scores"][objective]["mean"]
            for row in read_rows(run_path, "evaluation", split="validation")
        }
        assert drawn == {
            client: {
                row["round"]: row["scores"][objective]
                for row in read_rows(run_path, "client", client=client)
            }
            for client in ("client_0", "client_1", "client_2", "client_3")
        }


def test_reward_curves_carry_the_standard_error_of_their_own_round(make_run):
    run_path = make_run(num_done=3)

    def forget_round_1(row):
        return None if row["kind"] == "evaluation" and row["round"] == 1 else row

    edit_rows(run_path, forget_round_1)
    (panel, _) = quantities(read_record(run_path), "scores")
    curve = panel.figure["data"][-1]
    rows = read_rows(run_path, "evaluation", split="validation")
    assert curve["x"] == [0, 2, 3]
    assert curve["error_y"]["array"] == [row["scores"]["helpful"]["se"] for row in rows]


def test_the_plane_has_one_split_the_validation_prompts_if_there_are_any(make_run):
    run_path = make_run()
    for split in ("validation", "test"):
        rows = read_rows(run_path, "evaluation", split=split)
        (panel,) = trade_off_planes(read_record(run_path))
        (path,) = panel.figure["data"]
        for axis, name in (("x", "helpful"), ("y", "harmless")):
            assert path[axis] == [row["scores"][name]["mean"] for row in rows]
            errors = path[f"error_{axis}"]["array"]
            assert [errors[0], errors[-1]] == [rows[i]["scores"][name]["se"] for i in (0, -1)]
            assert set(errors[1:-1]) <= {None}
        assert [text.split("<br>")[:2] for text in path["customdata"]] == [
            [f"split: {split}", f"round: {row['round']}"] for row in rows
        ]
        assert path["text"] == ["base", *[""] * (len(rows) - 2), "round 8"]
        edit_rows(run_path, lambda row: None if row.get("split") == "validation" else row)
    unfinished = make_run("unfinished", num_done=2, is_over=False)
    edit_rows(unfinished, lambda row: None if row.get("split") == "validation" else row)
    assert trade_off_planes(read_record(unfinished)) == []


def test_with_one_objective_the_plane_is_reward_against_kl(make_run):
    run_path = make_run(objectives=("helpful",))
    (panel,) = trade_off_planes(read_record(run_path))
    rows = read_rows(run_path, "evaluation", split="validation")
    assert panel.figure["data"][0]["x"] == [row["kl"] for row in rows]
    assert panel.figure["data"][0]["y"] == [row["scores"]["helpful"]["mean"] for row in rows]


def test_weights_are_means_over_the_solves_of_a_round(make_run):
    run_path = make_run(objectives=("a", "b", "c"), num_clients=2)
    panels = quantities(read_record(run_path), "weights")
    for index, objective in enumerate("abc"):
        drawn = traces(panels, f"weights-{objective}")
        for client in ("client_0", "client_1"):
            for row in read_rows(run_path, "client", client=client):
                mean = fmean(weights[index] for weights in row["weights"])
                assert drawn[client][row["round"]] == pytest.approx(mean, abs=1e-15)
        for round_number, mean in drawn["mean over clients"].items():
            of_clients = [drawn[client][round_number] for client in ("client_0", "client_1")]
            assert mean == pytest.approx(fmean(of_clients), abs=1e-15)
    spread = traces(panels, "weights_spread")
    for row in read_rows(run_path, "round"):
        drawn = {name: points[row["round"]] for name, points in spread.items()}
        assert drawn == row["weights_spread"]


def test_two_objectives_need_only_the_first_weight_and_one_none(make_run):
    two = quantities(read_record(make_run("two")), "weights")
    one = quantities(read_record(make_run("one", objectives=("helpful",))), "weights")
    assert [panel.name for panel in two] == ["weights-helpful", "weights_spread"]
    assert one == []
    assert two[0].figure["layout"]["shapes"][0]["y0"] == 0.5


def test_gradient_curves_hold_cosines_ratios_and_beta_effect(make_run):
    run_path = make_run(objectives=("a", "b", "c"), num_done=2)

    def known_gradients(row):
        if row["kind"] == "client":
            row["cosines"] = [[0.1, -0.2, 0.3], [0.3, -0.4, 0.5]]
            row["gradient_norms"] = [[1.0, 2.0, 4.0], [0.0, 1.0, 2.0], [9.0, 3.0, 6.0]]
            row["beta_effect"] = [0.02, 0.06]
        return row

    edit_rows(run_path, known_gradients)
    panels = quantities(read_record(run_path), "gradients")
    cosines = [traces(panels, f"cosines-{pair}")["client_1"][2] for pair in ("a-b", "a-c", "b-c")]
    assert cosines == pytest.approx([0.2, -0.3, 0.4])
    # 4 and 3; the solve with a zero gradient has no ratio.
    assert traces(panels, "norm_ratio")["client_1"][2] == pytest.approx(12**0.5)
    assert traces(panels, "beta_effect")["client_1"][2] == pytest.approx(0.04)


def test_the_ratio_of_two_norms_says_which_one_is_larger(make_run):
    run_path = make_run(num_done=1)

    def larger_second(row):
        return {**row, "gradient_norms": [[1.0, 4.0]]} if row["kind"] == "client" else row

    edit_rows(run_path, larger_second)
    panels = quantities(read_record(run_path), "gradients")
    assert traces(panels, "norm_ratio")["client_0"] == {1: pytest.approx(0.25)}


@pytest.mark.parametrize(
    ("value", "span"), [(0.2, [0.18, 0.22]), (0.0, [-0.05, 0.05]), (-3.0, [-3.3, -2.7])]
)
def test_an_axis_is_near_values_that_are_all_one(value, span):
    line = curve(LegendEntry("line", INK), [(1, value), (2, value)])
    assert rounds_figure([line], "y")["layout"]["yaxis"]["range"] == pytest.approx(span)
    other = curve(LegendEntry("other", INK), [(1, value + 1)])
    barred = curve(LegendEntry("barred", INK), [(1, value)], ses=[0.1])
    for lines in ([line, other], [line, barred]):
        assert "range" not in rounds_figure(lines, "y")["layout"]["yaxis"]
    assert "range" not in rounds_figure([line], "y", reference=0.5)["layout"]["yaxis"]
    from_zero = rounds_figure([line], "y", rangemode="tozero")["layout"]["yaxis"]
    assert "range" not in from_zero


def test_means_over_clients_are_the_same_in_wandb(make_run):
    run_path = make_run(objectives=("a", "b", "c"), clients_per_round=3, num_done=4)
    record = read_record(run_path)
    panels = [panel for section in SECTIONS for panel in quantities(record, section)]
    for at in range(1, 5):
        sent = means(read_rows(run_path, round=at), record.objectives)
        for objective in record.objectives:
            weight = traces(panels, f"weights-{objective}")["mean over clients"][at]
            assert sent[f"train/weight/{objective}"] == weight
            assert (
                sent[f"train/scores_std/{objective}"] == traces(panels, "scores_std")[objective][at]
            )
        for pair in ("a-b", "a-c", "b-c"):
            cosine = traces(panels, f"cosines-{pair}")["mean over clients"][at]
            assert sent[f"train/cosine/{pair}"] == cosine
        ratio = traces(panels, "norm_ratio")["mean over clients"][at]
        assert sent["train/norm_ratio"] == ratio


def test_the_norm_ratio_of_a_round_is_no_weighing_by_the_server(make_run):
    run_path = make_run(num_done=1, has_gram=True)
    edit_rows(run_path, lambda row: {**row, "norm_ratio": 3.0} if row["kind"] == "round" else row)
    panels, keys = figures.quantity_panels(setting(read_record(run_path)), "gradients")
    assert figures.SERVER not in keys
    assert figures.SERVER.label not in traces(panels, "norm_ratio")


def test_reward_diagnostics_are_means_over_the_clients_that_have_a_value(make_run):
    run_path = make_run(objectives=("a", "b", "c"), num_clients=2, num_done=2)

    def known_rewards(row):
        if row["kind"] == "client":
            first = row["client"] == "client_0"
            row["scores_std"]["b"] = 1.0 if first else 2.0
            row["score_correlation"]["a-c"] = None if first else -0.5
            row["score_length_correlation"]["b"] = None
            row["truncated_share"]["c"] = 0.25 if first else 0.75
        return row

    edit_rows(run_path, known_rewards)
    panels = quantities(read_record(run_path), "diagnostics")
    assert traces(panels, "scores_std")["b"] == {1: 1.5, 2: 1.5}
    assert traces(panels, "score_correlation")["a / c"] == {1: -0.5, 2: -0.5}
    assert traces(panels, "score_length_correlation").keys() == {"a", "c"}
    assert traces(panels, "truncated_share")["c"] == {1: 0.5, 2: 0.5}


def test_the_stationarity_bound_is_drawn_where_clients_sent_their_gram(make_run):
    sent, kept = read_record(make_run("sent", has_gram=True)), read_record(make_run("kept"))
    assert traces(quantities(sent, "gradients"), "stationarity")[
        "Bound on Pareto stationarity"
    ] == {row["round"]: row["stationarity"] for row in sent.rounds}
    assert "stationarity" not in [panel.name for panel in quantities(kept, "gradients")]


def test_true_and_learned_scores_are_in_standard_deviations_of_the_base_model(make_run):
    run_path = make_run(num_done=1)

    def known_scores(row):
        if row["kind"] == "evaluation" and row["split"] == "validation":
            row["num_prompts"] = 100
            row["scores"]["helpful"] = {"mean": 1.0, "se": 0.2}  # SD 2
            few = {"mean": 1.0, "se": 0.1, "num_prompts": 25}  # SD 0.5
            row["scores"]["true_helpful"] = few
            row["change"] = {
                "helpful": {"mean": 1.0, "se": 0.4},
                "true_helpful": {"mean": -0.25, "se": 0.1},
            }
        return row

    edit_rows(run_path, known_scores)
    panels = figures.learned_and_true(setting(read_record(run_path)))
    drawn = traces(panels, "true-helpful")
    assert drawn["learned score"] == pytest.approx({0: 0.0, 1: 0.5})
    assert drawn["true score"] == pytest.approx({0: 0.0, 1: -0.5})
    (panel,) = [panel for panel in panels if panel.name == "true-helpful"]
    errors = [trace["error_y"]["array"] for trace in panel.figure["data"]]
    assert errors == [pytest.approx([0.0, 0.2]), pytest.approx([0.0, 0.2])]


def test_training_curves_hold_the_logged_values(make_run):
    run_path = make_run()
    panels = quantities(read_record(run_path), "training")
    (row,) = read_rows(run_path, "client", client="client_2", round=5)
    for name in ("kl", "kl_coefficient", "entropy", "response_length", "clip_fraction"):
        assert traces(panels, name)["client_2"][5] == row[name]
    assert traces(panels, "value_loss-harmless")["client_2"][5] == row["value_loss"]["harmless"]
    (row,) = read_rows(run_path, "evaluation", split="validation", round=5)
    assert traces(panels, "kl")["global model, validation"][5] == row["kl"]
    assert traces(panels, "response_length")["global model, validation"][5] == row["length"]


def test_a_client_has_points_only_in_the_rounds_it_was_sampled_in(make_run):
    run_path = make_run(num_clients=6, clients_per_round=2)
    drawn = traces(quantities(read_record(run_path), "training"), "entropy")
    for client, points in drawn.items():
        rows = read_rows(run_path, "client", client=client)
        assert list(points) == [row["round"] for row in rows]


def test_a_client_has_the_same_colour_and_dash_in_every_figure(make_run):
    record = read_record(make_run(num_clients=16))
    looks: dict[str, set] = {}
    for panel in every_figure(record):
        for trace in panel.figure["data"]:
            if trace.get("name", "").startswith("client_"):
                look = (trace["line"]["color"], trace["line"]["dash"])
                looks.setdefault(trace["name"], set()).add(look)
    assert len(looks) == 16
    assert all(len(of_client) == 1 for of_client in looks.values())
    assert len(set.union(*looks.values())) == 16


def test_every_colour_is_defined_for_light_and_dark(make_run):
    record = read_record(make_run(objectives=("a", "b", "c", "d"), num_clients=16))
    assert_colours_are_defined(every_figure(record))


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 4])
def test_plotly_accepts_every_figure(make_run, num_objectives):
    objectives = ("a", "b", "c", "d")[:num_objectives]
    record = read_record(make_run(objectives=objectives))
    assert_plotly_accepts(every_figure(record))
    pairs = num_objectives * (num_objectives - 1) // 2
    assert len(trade_off_planes(record)) == max(pairs, 1)


def test_names_cannot_bring_markup_into_a_figure(make_run):
    record = read_record(make_run(objectives=("<b>bold</b>", "plain")))
    drawn = json.dumps([panel.figure for panel in every_figure(record)])
    assert "<b>" not in drawn
    assert "&lt;b&gt;" in drawn


@pytest.mark.parametrize("num_rounds", [1, 7, 8, 9, 16, 40, 100, 1000])
def test_rounds_are_marked_at_most_nine_times_at_whole_numbers(num_rounds):
    points = [(round_number, 0.5) for round_number in range(num_rounds + 1)]
    figure = rounds_figure([curve(LegendEntry("c", INK), points)], "y")
    axis = figure["layout"]["xaxis"]
    ticks = range(0, num_rounds + 1, axis["dtick"])
    assert 2 <= len(ticks) <= 9
    assert all(step == axis["dtick"] for step in (b - a for a, b in pairwise(ticks)))
    assert axis["range"][0] < 0
    assert axis["range"][1] > num_rounds


def test_the_weights_of_the_server_are_a_line_of_their_own(make_run):
    run_path = make_run(num_done=3)

    def weigh(row):
        if row["kind"] == "client":
            row.pop("weights")
        if row["kind"] == "round":
            row["weights"] = {"helpful": 0.1 * row["round"], "harmless": 1 - 0.1 * row["round"]}
            row.pop("weights_spread")
        return row

    edit_rows(run_path, weigh)
    record = read_record(run_path)
    (panel,) = quantities(record, "weights")
    (line,) = panel.figure["data"]
    assert line["name"] == "weights of the server"
    assert line["y"] == pytest.approx([0.1, 0.2, 0.3])
    assert figures.SERVER in figures.quantity_panels(setting(record), "weights")[1]
