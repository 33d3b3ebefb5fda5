"""The page of a sweep: its figures are the fronts', and bad fronts write nothing."""

import re
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest

from firm.cli.main import COMMANDS
from firm.fronts import (
    Front,
    Point,
    bootstrap_hypervolume,
    by_preference,
    hypervolume,
    mean_front,
    non_dominated,
    seed_hypervolumes,
)
from firm.report import formats, read_record
from firm.report.formats import measure
from firm.report.front_page import (
    front_clouds,
    front_page,
    write_front_page,
)
from firm.report.front_sections import BOOTSTRAP_SEED
from firm.report.ledger import total_bytes
from firm.run.comparison import Measure
from firm.run.errors import UserError
from tests.runs import figures_in

cli = COMMANDS["report"].run

OBJECTIVES = ("helpful", "harmless", "humorous")
PREFERENCES = {
    2: [(0.2, 0.8), (0.5, 0.5), (0.8, 0.2)],
    3: [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)],
}
METHODS = {"FIRM": 0.0, "Soups": -0.04}
"""Name to what is taken off every reward."""


@pytest.fixture
def make_sweep(make_run):
    """Fronts of two methods, their runs and rewards by prompt: `make_sweep(num_objectives=2)`."""

    def make(num_objectives=2, seeds=(0, 1), methods=METHODS, num_prompts=40):
        rng = np.random.default_rng(0)
        objectives = OBJECTIVES[:num_objectives]
        fronts, runs, rewards = {}, {}, {}
        for method, shift in methods.items():
            points, tables, runs[method] = [], [], {}
            for seed in seeds:
                for preference in PREFERENCES[num_objectives]:
                    name = f"{method}-{'_'.join(map(str, preference))}-{seed}"
                    path = make_run(
                        name, objectives=objectives, num_rounds=2, num_done=2, seed=len(points)
                    )
                    record = runs[method][name] = read_record(path)
                    mean = 0.5 + shift + 0.2 * np.sqrt(preference) + rng.normal(0, 0.01)
                    table = mean + rng.normal(0, 0.1, (num_prompts, num_objectives))
                    tables.append(table)
                    points.append(
                        Point(
                            name,
                            preference,
                            seed,
                            dict(zip(objectives, table.mean(axis=0).tolist(), strict=True)),
                            dict.fromkeys(objectives, 0.015),
                            {"true_helpful": 0.25, "parse": 0.5},
                            3.5 + seed,
                            f"points/{name}/adapter",
                        )
                    )
            fronts[method] = Front(
                objectives,
                tuple(points),
                (0.25,) * num_objectives,
                record.header["calibration"],
                dict.fromkeys(objectives, 0.45),
                method,
                num_prompts,
            )
            rewards[method] = np.array(tables), None
        return fronts, runs, rewards

    return make


def study(fronts, runs, rewards):
    return front_page(fronts, runs=runs, row_rewards=rewards, config="", title="A sweep")


def table_of(study, title):
    """Row name -> heading -> cell, with plain spaces."""
    table = study.block(title)
    return {
        row[0]: dict(
            zip(
                table.headings[1:],
                (cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row[1:]),
                strict=True,
            )
        )
        for row in table.rows
    }


def method_of(study, method):
    """Figure -> cell of a method, with plain spaces."""
    rows = study.block("methods")
    place = list(rows.headings).index(method)
    return {row[0]: row[place].replace("\N{NO-BREAK SPACE}", " ") for row in rows.rows}


def traces(figure):
    return {trace["name"]: trace for trace in figure["figure"]["data"]}


def test_the_plane_in_the_page_holds_every_model_mean_and_base(make_sweep, tmp_path):
    fronts, runs, rewards = make_sweep()
    path = write_front_page(
        tmp_path / "report.html", fronts, runs=runs, row_rewards=rewards, config="name: x"
    )
    shown = traces(figures_in(path)["front-helpful-harmless"])
    for method, front in fronts.items():
        singles, means = shown[f"{method}, single seeds"], shown[method]
        assert sorted(zip(singles["x"], singles["y"], strict=True)) == sorted(
            (point.rewards["helpful"], point.rewards["harmless"]) for point in front.points
        )
        expected = list(mean_front(front).values())
        np.testing.assert_allclose(np.transpose([means["x"], means["y"]]), expected)
        (first, *_) = mean_front(front)
        values = [p.rewards["helpful"] for p in front.points if p.preference == first]
        assert means["error_x"]["array"][0] == pytest.approx(stdev(values) / 2**0.5)
    assert (shown["base model"]["x"], shown["base model"]["y"]) == ([0.45], [0.45])


def test_the_page_of_a_sweep_can_be_made_one_file(make_sweep, tmp_path, capsys):
    fronts, runs, _ = make_sweep(seeds=(0,))
    path = write_front_page(tmp_path / "report.html", fronts, runs=runs)
    linked = path.read_text()
    assert 'src="plotly.min.js"></script>' in linked
    assert "The figures need plotly.min.js;" in linked
    (tmp_path / "sweep.json").write_text("{}")
    for _ in range(2):  # what is one file already stays as it is
        cli([str(tmp_path)])
        whole = path.read_text()
        assert " src=" not in re.sub(r"<script nonce.*", "", whole)
        assert "plotly.js v" in whole
        assert "One file, no network needed." in whole
    figures = [
        text.partition('id="figures">')[2].partition("</script>")[0] for text in (linked, whole)
    ]
    assert figures[0] == figures[1] != ""
    path.unlink()
    with pytest.raises(SystemExit):
        cli([str(tmp_path)])
    assert "there is no page" in capsys.readouterr().err


def test_the_plane_is_as_wide_as_what_is_drawn(make_sweep):
    fronts, runs, rewards = make_sweep()
    wide = [replace(p, errors=dict.fromkeys(p.errors, 3.0)) for p in fronts["FIRM"].points]
    loose = {**fronts, "FIRM": replace(fronts["FIRM"], points=tuple(wide))}
    ranges = [
        study(own, runs, rewards).block("front").panels[0].figure["layout"]["xaxis"]["range"]
        for own in (fronts, loose)
    ]
    assert ranges[0] == ranges[1]  # of the seeds of a preference only the mean has bars


def test_with_three_objectives_there_are_three_planes_without_lines(make_sweep, tmp_path):
    fronts, runs, rewards = make_sweep(num_objectives=3, seeds=(0,))
    path = write_front_page(
        tmp_path / "report.html", fronts, runs=runs, row_rewards=rewards, config=""
    )
    planes = {name: f for name, f in figures_in(path).items() if name.startswith("front-")}
    assert list(planes) == [
        "front-helpful-harmless",
        "front-helpful-humorous",
        "front-harmless-humorous",
    ]
    for name, figure in planes.items():
        x, y = name.split("-")[1:]
        shown = traces(figure)
        assert not any(trace["mode"] == "lines" for trace in shown.values())
        rewards = [point.rewards for point in fronts["FIRM"].points]
        assert sorted(shown["FIRM"]["x"]) == sorted(row[x] for row in rewards)
        assert sorted(shown["FIRM"]["y"]) == sorted(row[y] for row in rewards)


def test_the_only_front_labels_its_points_with_their_preferences(make_sweep):
    fronts, _, _ = make_sweep()
    (cloud,) = front_clouds({"FIRM": fronts["FIRM"]})
    preferences = {formats.shares(preference) for preference in by_preference(fronts["FIRM"])}
    assert {spot.label for spot in cloud.means} == preferences
    several = [*cloud.models, *(spot for each in front_clouds(fronts) for spot in each.spots)]
    assert not any(spot.label for spot in several)


def test_the_pointer_finds_method_preference_seed_adapter_kl_and_collapse(make_sweep):
    fronts, runs, rewards = make_sweep(seeds=(4,))
    front = fronts["FIRM"]
    broken = replace(front.points[0], collapse="one reply to 75 % of 40 prompts")
    fronts["FIRM"] = replace(front, points=(broken, *front.points[1:]))
    spot = front_clouds(fronts)[0].means[0]
    for text in (
        "method: FIRM",
        "preference: 0.2, 0.8",
        "seed: 4",
        "KL: 7.50 nats",
        f"adapter: {broken.adapter}",
        "collapsed: one reply to 75 % of 40 prompts",
    ):
        assert text in spot.hover
    made = study(fronts, runs, rewards)
    assert method_of(made, "FIRM")["collapsed"] == "1"
    assert made.facts["Models"].endswith("1 collapsed")
    assert table_of(made, "models")[broken.name]["collapsed"] == broken.collapse


def test_hollow_is_what_another_of_its_kind_dominates_whatever_its_method(make_sweep):
    fronts, _, _ = make_sweep()
    scores = np.concatenate([front.rewards() for front in fronts.values()])
    means = np.concatenate([list(mean_front(front).values()) for front in fronts.values()])
    clouds = front_clouds(fronts)
    for kind, kept in (("models", non_dominated(scores)), ("means", non_dominated(means))):
        spots = [spot for cloud in clouds for spot in getattr(cloud, kind)]
        hollow = {tuple(s.place[n] for n in OBJECTIVES[:2]) for s in spots if s.is_dominated}
        rows = scores if kind == "models" else means
        expected = [tuple(row) for row in rows[~kept]]
        np.testing.assert_allclose(sorted(hollow), sorted(expected))
        assert 0 < len(hollow) < len(spots)


def test_a_line_joins_the_means_that_their_own_front_does_not_dominate(make_sweep):
    fronts, _, _ = make_sweep()
    for cloud, front in zip(front_clouds(fronts), fronts.values(), strict=True):
        means = np.array(list(mean_front(front).values()))
        kept = means[non_dominated(means)]
        drawn = [[cloud.means[i].place[n] for n in front.objectives] for i in cloud.path]
        np.testing.assert_allclose(drawn, kept[kept[:, 0].argsort()])


def test_the_hypervolumes_are_those_of_the_fronts(make_sweep):
    fronts, runs, rewards = make_sweep()
    made = study(fronts, runs, rewards)
    for method, front in fronts.items():
        low, high = bootstrap_hypervolume(
            rewards[method][0], front.reference, generator=np.random.default_rng(BOOTSTRAP_SEED)
        )
        seeds = seed_hypervolumes(front)
        expected = {
            "models": "6",
            "seeds": "2",
            "hypervolume": f"{front.hypervolume:.4f}",
            "interval over prompts": f"{low:.4f} to {high:.4f}",
            "hypervolume by seed": measure(Measure(seeds.mean, seeds.sd)),
            "not dominated in its front": f"{non_dominated(front.rewards()).sum()}",
        }
        expected = {key: text.replace("\N{NO-BREAK SPACE}", " ") for key, text in expected.items()}
        assert dict(list(method_of(made, method).items())[:6]) == expected


def test_the_hypervolume_over_the_rounds_is_that_of_the_validation(make_sweep):
    fronts, runs, rewards = make_sweep()
    front, records = fronts["FIRM"], runs["FIRM"]
    panel = study(fronts, runs, rewards).block("hypervolume").panels[0]
    line = next(t for t in panel.figure["data"] if t["name"] == "FIRM" and "fill" not in t)
    assert line["x"] == [0, 1, 2]
    for at, value in zip(line["x"], line["y"], strict=True):
        volumes = []
        for seed in {point.seed for point in front.points}:
            own = [records[p.name] for p in front.points if p.seed == seed]
            rows = [r.evaluations["validation"][int(at)]["rewards"] for r in own]
            scores = [[row[name]["mean"] for name in front.objectives] for row in rows]
            volumes.append(hypervolume(scores, front.reference))
        assert value == pytest.approx(fmean(volumes))


def test_means_of_adapters_which_have_no_rounds_have_no_curve(make_sweep, make_run):
    fronts, runs, rewards = make_sweep()
    name = fronts["Soups"].points[1].name
    path = make_run("untrained", objectives=OBJECTIVES[:2], num_rounds=0, num_done=0)
    runs["Soups"][name] = read_record(path)
    made = study(fronts, runs, rewards)
    drawn = made.block("hypervolume").panels[0].figure["data"]
    assert {trace["name"] for trace in drawn} == {"FIRM"}
    cost = method_of(made, "Soups")
    assert (cost["models"], cost["trainings"]) == ("6", "5")


def test_shares_stand_against_rewards_and_falls_are_told_in_words(make_sweep):
    fronts, runs, rewards = make_sweep(seeds=(0,))
    front = fronts["FIRM"]
    worse = replace(front.points[2], rewards={"helpful": 0.3, "harmless": 0.3})
    fronts["FIRM"] = replace(front, points=(*front.points[:2], worse))
    made = study(fronts, runs, rewards)
    (section,) = [s for s in made.blocks if s.name == "preference"]
    line = next(t for t in section.panels[0].figure["data"] if t["name"] == "FIRM")
    assert line["x"] == [0.2, 0.5, 0.8]
    assert line["y"] == [p.rewards["helpful"] for p in fronts["FIRM"].points]
    assert line["error_y"]["array"] == [0.015] * 3  # over the prompts
    row = method_of(made, "FIRM")
    fall = front.points[1].rewards["helpful"] - 0.3
    assert row["falls"] == f"helpful from share 0.5 to 0.8 by {fall:.3f}"
    assert row["ρ helpful"] == "−0.500 (−1.00 to 1.00)"


def test_means_over_seeds_have_bars_over_the_seeds_where_preferences_steer(make_sweep):
    fronts, runs, rewards = make_sweep()
    (panel, _) = study(fronts, runs, rewards).block("preference").panels
    bars = next(t for t in panel.figure["data"] if t["name"] == "FIRM")["error_y"]["array"]
    pairs = [
        [p.rewards["helpful"] for p in fronts["FIRM"].points if p.preference == preference]
        for preference in PREFERENCES[2]
    ]
    assert bars == pytest.approx([stdev(pair) / 2**0.5 for pair in pairs])


def test_two_preferences_have_no_rank_correlation(make_sweep):
    fronts, runs, rewards = make_sweep(methods={"FIRM": 0.0})
    assert method_of(study(fronts, runs, rewards), "FIRM")["ρ helpful"] != "–"
    front = fronts["FIRM"]
    two = [point for point in front.points if point.preference != (0.5, 0.5)]
    made = study({"FIRM": replace(front, points=tuple(two))}, runs, {})
    assert method_of(made, "FIRM")["ρ helpful"] == "–"


def test_models_name_what_dominates_them_in_any_method(make_sweep):
    fronts, runs, rewards = make_sweep(seeds=(0,))
    best = replace(fronts["Soups"].points[0], rewards={"helpful": 0.99, "harmless": 0.99})
    fronts["Soups"] = replace(fronts["Soups"], points=(best, *fronts["Soups"].points[1:]))
    rows = table_of(study(fronts, runs, rewards), "models")
    assert rows[best.name]["dominated by"] == "none"
    assert all(best.name in rows[p.name]["dominated by"] for p in fronts["FIRM"].points)


def test_the_cost_is_what_the_runs_sent(make_sweep):
    fronts, runs, rewards = make_sweep()
    row = method_of(study(fronts, runs, rewards), "FIRM")
    up = sum(total_bytes(record, "bytes_up") for record in runs["FIRM"].values())
    assert row["up"] == f"{up / 1e6:.3g} MB"


def test_fronts_that_are_not_comparable_write_nothing(make_sweep, tmp_path):
    fronts, runs, rewards = make_sweep(seeds=(0,))
    fronts["Soups"] = replace(fronts["Soups"], reference=(0.1, 0.1))
    place = tmp_path / "page"
    place.mkdir()
    with pytest.raises(UserError, match=r"FIRM and Soups: .* reference point"):
        write_front_page(place / "report.html", fronts, runs=runs, row_rewards=rewards, config="")
    with pytest.raises(UserError, match="got none of any"):
        write_front_page(place / "report.html", {}, runs={}, config="")
    assert list(place.iterdir()) == []


def test_a_front_that_has_no_hypervolume_says_why_and_has_a_page(make_sweep):
    fronts, runs, rewards = make_sweep(seeds=(0,))
    fronts = {name: replace(front, reference=(0.65, 0.25)) for name, front in fronts.items()}
    made = study(fronts, runs, rewards)
    assert method_of(made, "FIRM")["hypervolume"] == "–"
    assert any("strictly below every point" in sentence for sentence in made.summary)


def test_names_are_shown_and_never_run(make_sweep, tmp_path):
    hostile = "</script><script>alert(1)</script>"
    fronts, runs, _ = make_sweep(seeds=(0,))
    fronts[hostile] = fronts.pop("Soups")
    path = write_front_page(tmp_path / "report.html", fronts, runs=runs, config=hostile)
    assert hostile not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_the_page_and_its_points_where_the_fronts_are(
    page, make_sweep, tmp_path, width
):
    fronts, runs, rewards = make_sweep()
    path = write_front_page(
        tmp_path / "report.html", fronts, runs=runs, row_rewards=rewards, config=""
    )
    page.open(path, width=width)
    assert page.complaints == []
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}
    assert page("document.documentElement.scrollWidth") <= width
    plane = page.shown()["front-helpful-harmless"]
    near = [1e-4 * abs(b - a) for a, b in (plane[f"{axis}_range"] for axis in "xy")]
    num_seen = 0
    for trace, markers in zip(plane["traces"], plane["markers"], strict=True):
        if trace["name"] == "FIRM":
            expected = list(mean_front(fronts["FIRM"]).values())
            for marker, point in zip(markers, expected, strict=True):
                for axis in range(2):
                    assert marker[axis] == pytest.approx(point[axis], abs=near[axis], rel=0)
                num_seen += 1
    assert num_seen == 3
