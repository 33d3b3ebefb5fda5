"""The page of a study: curves, tables and plane are those of its runs, over the seeds."""

import re
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats

from firm.report import read_record
from firm.report.criteria import comparable_groups, criteria_of
from firm.report.formats import measure, number, size
from firm.report.ledger import stage_seconds, total_bytes, uploads_so_far
from firm.report.plane import KL
from firm.report.record import final_row
from firm.report.settings_page import (
    setting_clouds,
    settings_page,
    study_figures,
    write_settings_page,
)
from firm.report.settings_sections import shared_samples
from firm.report.settings_tables import difference_table
from firm.report.tables import Setting, scales, settings_of
from firm.run.comparison import Measure
from firm.run.errors import UserError
from firm.run.tracking import means
from tests.runs import edit_rows, figures_in, read_rows


@pytest.fixture
def make_study(make_run):
    """Runs by setting: `make_study("FIRM", "FSMGDA", seeds=(0, 1))`, each with other figures."""

    def make(*names, seeds=(0, 1), offset=10, **fields):
        def record(name, seed, number):
            path = make_run(f"{name}-{seed}", seed=number, num_rounds=3, num_done=3, **fields)
            return read_record(path)

        return {
            name: [record(name, seed, seed + offset * place) for seed in seeds]
            for place, name in enumerate(names)
        }

    return make


def edited(record, change):
    """Rewrites a run's rows by `change(row)`, None to drop one, and reads it again."""
    edit_rows(record.path, change)
    return read_record(record.path)


def as_fsmgda(row):
    """A row as FSMGDA would have written it."""
    if row["kind"] == "client":
        own = {key: row.pop(key) for key in ("rewards", "scores", "kl", "seconds", "weights")}
        row["by_objective"] = dict.fromkeys(("helpful", "harmless"), own)
    if row["kind"] == "round":
        row.pop("weights_spread")
        row["weights"] = {"helpful": 0.25, "harmless": 0.75}
    return row


def line(figures, panel, name):
    """The line of a setting in a panel, without its band."""
    data = figures[panel]["figure"]["data"]
    (found,) = [trace for trace in data if trace["name"] == name and "fill" not in trace]
    return found


def cells(path, first):
    """The cells of all table rows that begin with a name, with plain spaces."""
    text = path.read_text(encoding="utf-8")
    rows = re.findall(rf"<th[^>]*>{re.escape(first)}</th>(.*?)</tr>", text, re.DOTALL)
    return [
        [
            cell.replace("\N{NO-BREAK SPACE}", " ")
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)
        ]
        for row in rows
    ]


def test_curves_are_means_over_the_seeds_with_a_band(make_study, tmp_path):
    runs = make_study("FIRM", "fixed")
    shown = figures_in(write_settings_page(tmp_path / "report.html", runs))
    for name, records in runs.items():
        values = [
            [row["rewards"]["harmless"]["mean"] for row in r.evaluations["validation"]]
            for r in records
        ]
        curve = line(shown, "rewards-harmless", name)
        assert curve["x"] == [0, 1, 2, 3]
        assert curve["y"] == pytest.approx(np.mean(values, axis=0).tolist())
        band = [t for t in shown["rewards-harmless"]["figure"]["data"] if "fill" in t]
        error = np.std(values, axis=0, ddof=1) / 2**0.5
        (own,) = [trace for trace in band if trace["name"] == name]
        assert own["y"][:4] == pytest.approx((np.mean(values, axis=0) + error).tolist())


def test_weights_are_means_over_solves_clients_and_seeds(make_study, tmp_path):
    runs = make_study("FIRM")
    shown = figures_in(write_settings_page(tmp_path / "report.html", runs))
    curve = line(shown, "weights-helpful", "FIRM")
    for at, value in zip(curve["x"], curve["y"], strict=True):
        own = [
            fmean(weights[0] for weights in row["weights"])
            for record in runs["FIRM"]
            for rows in record.trainings.values()
            for row in rows
            if row["round"] == at
        ]
        assert value == pytest.approx(fmean(own))
    spread = line(shown, "weights_spread-helpful", "FIRM")
    assert spread["y"][0] == pytest.approx(
        fmean(record.rounds[0]["weights_spread"]["helpful"] for record in runs["FIRM"])
    )
    drift = line(shown, "drift", "FIRM")
    assert drift["y"][2] == pytest.approx(fmean(r.rounds[2]["drift"] for r in runs["FIRM"]))


def test_without_validation_rewards_are_those_of_the_training(make_study, tmp_path):
    runs = make_study("FIRM", seeds=(0,))

    def forget(row):
        return None if row.get("split") == "validation" else row

    runs["FIRM"] = [edited(record, forget) for record in runs["FIRM"]]
    path = write_settings_page(tmp_path / "report.html", runs)
    curve = line(figures_in(path), "rewards-helpful", "FIRM")
    assert (curve["x"], curve["y"]) == ([1, 2, 3], pytest.approx([0.6] * 3))
    assert "during training" in path.read_text(encoding="utf-8")


def test_a_strategy_that_trains_by_objective_is_shown_with_its_servers_weights(
    make_study, tmp_path
):
    runs = make_study("FIRM", "FSMGDA", seeds=(0,))
    runs["FSMGDA"] = [edited(record, as_fsmgda) for record in runs["FSMGDA"]]
    shown = figures_in(write_settings_page(tmp_path / "report.html", runs))
    assert line(shown, "weights-helpful", "FSMGDA")["y"] == [0.25] * 3
    first, second = settings_of(runs)
    sent = means(read_rows(runs["FSMGDA"][0].path, round=2), second.objectives)
    assert (sent["train/weight/helpful"], sent["train/kl"]) == (0.25, second.curves("kl")[0][2])
    rewards = [s.curves("rewards", name) for s in (first, second) for name in s.objectives]
    assert rewards[0].equals(rewards[2])
    assert rewards[1].equals(rewards[3])
    assert stage_seconds(second)["reward"] == pytest.approx(2 * 4 * 0.4)


def test_the_table_has_mean_and_standard_deviation_over_the_seeds(make_study, tmp_path):
    runs = make_study("FIRM", "fixed")
    path = write_settings_page(tmp_path / "report.html", runs)
    for name, records in runs.items():
        final, *differences, ledger = cells(path, name)[: 2 if name == "FIRM" else 3]
        rows = [record.evaluations["test"][-1] for record in records]
        rewards = [[row["rewards"][key]["mean"] for key in records[0].objectives] for row in rows]
        columns = [
            *zip(*rewards, strict=True),
            [fmean(own) for own in rewards],
            [min(own) for own in rewards],
            *([row["scores"][key]["mean"] for row in rows] for key in records[0].extra_scores()),
            [row["kl"] for row in rows],
        ]
        told = [
            measure(Measure(fmean(values), stdev(values))).replace("\N{NO-BREAK SPACE}", " ")
            for values in columns
        ]
        up = fmean(total_bytes(record, "bytes_up") for record in records)
        assert final == [*told, number(up / 1e6), "3", "2"]
        for row in differences:
            assert len(row) == len(final) - 3
        others = [uploads_so_far(records[0], key)[-1][1] for key in ("FedCMOO-A", "FSMGDA")]
        assert ledger[:2] == [size(up / 3), size(up)]
        assert ledger[-2:] == [size(value) for value in others]


def with_reward(value):
    """A change of rows by which the final reward of helpfulness on the test prompts is a value."""

    def change(row):
        if row.get("split") == "test" and row["round"] > 0:
            row["rewards"]["helpful"]["mean"] = value
        return row

    return change


def test_differences_are_paired_by_seed_with_the_interval_of_student_s_t(make_study, tmp_path):
    runs = make_study("first", "second", "third", seeds=(0, 1, 2), offset=0)
    ends = {"first": [0.1, 0.5, 0.3], "second": [0.5, 0.7, 0.6]}  # 0.4, 0.2 and 0.3 more
    for name, values in ends.items():
        runs[name] = [
            edited(record, with_reward(value))
            for record, value in zip(runs[name], values, strict=True)
        ]
    runs["second"].reverse()
    runs["third"] = runs["third"][1:2]  # one seed has no interval
    settings = settings_of(runs)
    table = difference_table(settings, criteria_of(settings)[0])
    assert table.title == "Differences from first"
    assert [row[0] for row in table.rows] == ["second", "third"]
    error = 0.1 / 3**0.5
    reach = stats.t.ppf(0.95, 2) * error
    column = list(table.headings).index("helpful")
    assert table.rows[0][column] == f"+0.300 [+{0.3 - reach:.3f}, +{0.3 + reach:.3f}]"
    assert set(table.rows[1][1:]) == {"–"}
    text = write_settings_page(tmp_path / "report.html", runs).read_text(encoding="utf-8")
    assert "Differences from first" in text
    only = {"first": runs["first"]}
    assert "Differences from" not in write_settings_page(tmp_path / "one.html", only).read_text()
    one_each = {name: records[:1] for name, records in runs.items()}
    text = write_settings_page(tmp_path / "seed.html", one_each).read_text(encoding="utf-8")
    assert "Differences from" not in text


def test_the_plane_holds_every_run_and_its_setting_seed_adapter_and_kl(make_study, tmp_path):
    runs = make_study("FIRM", "fixed")
    path = write_settings_page(tmp_path / "report.html", runs)
    shown = figures_in(path)["trade-off-helpful-harmless"]["figure"]["data"]
    by_name = {trace["name"]: trace for trace in shown}
    for name, records in runs.items():
        rows = [record.evaluations["test"][-1]["rewards"] for record in records]
        singles = by_name[f"{name}, single seeds"]
        assert singles["x"] == [row["helpful"]["mean"] for row in rows]
        assert singles["y"] == [row["harmless"]["mean"] for row in rows]
        assert by_name[name]["x"] == pytest.approx([fmean(r["helpful"]["mean"] for r in rows)])
        for record, hover in zip(records, singles["customdata"], strict=True):
            assert f"seed: {record.seed}" in hover
            assert f"adapter: {name}-{records.index(record)}/adapter" in hover
            assert "KL: " in hover
    base = runs["FIRM"][0].evaluations["test"][0]["rewards"]
    assert by_name["base model"]["x"] == [base["helpful"]["mean"]]


def test_with_one_objective_the_reward_stands_against_the_kl(make_study, tmp_path):
    runs = make_study("FIRM", objectives=("helpful",))
    shown = figures_in(write_settings_page(tmp_path / "report.html", runs))
    trace = shown["trade-off-KL-helpful"]["figure"]["data"][0]
    assert trace["x"] == [record.evaluations["test"][-1]["kl"] for record in runs["FIRM"]]
    assert not any(name.startswith("weights") for name in shown)
    assert setting_clouds(settings_of(runs), folder=tmp_path)[0].means[0].place[KL] > 0


def test_settings_with_other_objectives_are_in_the_study_too(make_study, tmp_path):
    more = make_study("more")["more"]
    fewer = make_study("fewer", objectives=("helpful",))["fewer"]
    groups, notices = comparable_groups(settings_of({"more": more, "fewer": fewer}))
    assert [[setting.name for setting in group] for group in groups] == [["more"], ["fewer"]]
    assert notices == []
    page = write_settings_page(tmp_path / "report.html", {"more": more, "fewer": fewer}).read_text()
    assert "is left out" not in page


def rescaled(row):
    if row["kind"] == "run":
        row["calibration"]["helpful"]["scale"] *= 2
    return row


def test_settings_whose_rewards_mean_different_things_are_kept_apart(make_study, tmp_path):
    runs = make_study("aligned: FIRM", "FIRM", "aligned: fixed", seeds=(0,))
    for name in ("aligned: FIRM", "aligned: fixed"):
        runs[name] = [edited(record, rescaled) for record in runs[name]]
    groups = scales(settings_of(runs))
    assert [[s.name for s in group] for group in groups] == [
        ["aligned: FIRM", "aligned: fixed"],
        ["FIRM"],
    ]
    path = write_settings_page(tmp_path / "report.html", runs)
    shown = figures_in(path)
    planes = [
        {t["name"] for t in figure["figure"]["data"]} - {"base model"}
        for name, figure in shown.items()
        if name.startswith("trade-off")
    ]
    assert planes == [{"aligned: FIRM", "aligned: fixed"}, {"FIRM"}]
    assert "The trade-off, aligned" in path.read_text(encoding="utf-8")
    assert {name.partition("-")[0] for name in study_figures(runs, folder=tmp_path)} == {"1", "2"}


def test_seeds_whose_rewards_mean_different_things_write_nothing(make_study, tmp_path):
    runs = make_study("FIRM")
    runs["FIRM"][1] = edited(runs["FIRM"][1], rescaled)
    place = tmp_path / "page"
    place.mkdir()
    with pytest.raises(UserError, match="runs of 'FIRM' cannot be averaged"):
        write_settings_page(place / "report.html", runs)
    with pytest.raises(UserError, match="none of 1 settings"):
        write_settings_page(place / "report.html", {"FIRM": []})
    assert list(place.iterdir()) == []


def test_a_study_under_way_has_a_page(make_study, make_run, tmp_path):
    runs = make_study("FIRM", seeds=(0,))
    runs["late"] = [read_record(make_run("late", num_done=1, is_over=False))]
    runs["unstarted"] = []
    assert final_row(runs["late"][0]) is None
    path = write_settings_page(tmp_path / "report.html", runs)
    assert "Without a final evaluation so far: late." in path.read_text(encoding="utf-8")
    assert cells(path, "late")[0] == [*["–"] * 8, "0.398", "0", "0"]


def test_samples_are_the_prompts_that_all_answered(make_study):
    settings = settings_of(make_study("FIRM", "fixed", seeds=(0,)))
    block = shared_samples(settings)
    samples = block.samples
    assert block.models == ["base model", "FIRM, seed 0", "fixed, seed 10"]
    assert len(samples) == 5
    for sample in samples:
        assert len(sample.replies) == 3
        assert sample.replies[0].text.startswith("I do not know")


def test_figures_for_a_paper_follow_the_sets(make_study, tmp_path):
    runs = make_study("FIRM", "fixed", "unused")
    figures = study_figures(runs, sets={"figure_1": ["FIRM", "fixed"]}, folder=tmp_path)
    assert set(figures) == {f"figure_1-{name}" for name in ("rewards", "weights", "drift", "plane")}
    rows = [row for row in figures["figure_1-rewards"].rows if row[:2] == ["helpful", "FIRM"]]
    values = [
        [row["rewards"]["helpful"]["mean"] for row in r.evaluations["validation"]]
        for r in runs["FIRM"]
    ]
    assert [row[3] for row in rows] == pytest.approx(np.mean(values, axis=0).tolist())
    assert {row[1] for row in figures["figure_1-rewards"].rows} == {"FIRM", "fixed"}


def test_adapters_without_rounds_leave_the_base_model_what_it_is(make_study, make_run):
    runs = make_study("FIRM", seeds=(0,))
    merged = [read_record(make_run("merged", num_rounds=0, num_done=0))]
    for row in merged[0].evaluations["test"]:
        row["kl"] = 3.0 * ("change" in row)
        row["rewards"]["helpful"]["mean"] = 0.9 if "change" in row else 0.4
    (setting,) = settings_of({"merged": merged})
    criterion = criteria_of([setting])[0]
    assert setting.starts(criterion.final, criterion.objectives)["helpful"].tolist() == [0.4]
    assert setting.ends(criterion.final, criterion.objectives)["helpful"].tolist() == [0.9]
    assert settings_page(settings_of({**runs, "merged": merged})).block("final").rows


def test_warnings_of_a_runs_start_are_on_the_page(make_study):
    runs = make_study("FIRM", seeds=(0,))
    runs["FIRM"][0].header["alarms"] = ["the rewards are still the miniature's"]
    assert settings_page(settings_of(runs)).alarms == [
        ("FIRM, seed 0, before round 1", "the rewards are still the miniature's")
    ]


def test_a_set_without_runs_hides_nothing(make_study):
    runs = {**make_study("FIRM", seeds=(0,)), "later": []}
    made = settings_page(settings_of(runs), sets={"one": ["later"], "two": ["FIRM"]})
    assert made.choice.shown == {"FIRM"}


def test_settings_without_runs_keep_their_colour_free(make_study):
    runs = {"missing": [], **make_study("FIRM", seeds=(0,))}
    assert [(s.name, s.index) for s in settings_of(runs)] == [("FIRM", 1)]
    assert Setting("FIRM", 1, ()).key.label == "FIRM"


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_the_page_and_shows_what_its_reader_chooses(
    page, make_study, tmp_path, width
):
    runs = make_study("FIRM", "fixed <b>", has_gram=True)
    path = write_settings_page(tmp_path / "report.html", runs, sets={"one": ["FIRM"]})
    page.open(path, width=width)
    assert page.complaints == []
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}
    assert page("document.documentElement.scrollWidth") <= width
    markers = page.shown()["trade-off-helpful-harmless"]["markers"]
    assert [len(own) for own in markers] == [2, 1, 1]  # seeds, mean, base model
    page("document.querySelectorAll('[data-choice]')[1].click()")
    count = "document.querySelectorAll('[data-figure^=trade-off] .scatterlayer .trace').length"
    page.wait_until(f"{count} === 5")
    plane = page.shown()["trade-off-helpful-harmless"]
    near = [1e-4 * abs(b - a) for a, b in (plane[f"{axis}_range"] for axis in "xy")]
    for (name, records), own in zip(runs.items(), plane["markers"][::2], strict=False):
        for record, marker in zip(records, own, strict=True):
            rewards = record.evaluations["test"][-1]["rewards"]
            for axis, objective in enumerate(record.objectives):
                point = rewards[objective]["mean"]
                assert marker[axis] == pytest.approx(point, abs=near[axis], rel=0), name
    page("document.querySelector('[data-set]').click()")
    assert page.complaints == []
