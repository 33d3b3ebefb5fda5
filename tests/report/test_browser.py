"""The page as a browser shows it: Chromium, driven over its debugging pipe, opens the real file."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from firm.report import read_record, update_report, write_report
from firm.report.drawing import LegendEntry
from firm.report.page import Page, Section, write_page
from firm.report.plane import Cloud, Spot, planes
from firm.report.settings_page import write_settings_page
from tests.runs import edit_rows, read_rows


@pytest.fixture
def full_run(make_run: Callable[..., Path]) -> Path:
    """A run that has something to show in every part of the page, with long words in it."""
    return make_run(
        objectives=("helpful", "harmless", "humorous"),
        num_done=3,
        failures={2: ("client_1", "the update is not finite in 'layers.0.attention.q.lora_A'" * 3)},
        alarms={1: "β has no effect " + "x" * 80},
        has_gram=True,
    )


@pytest.mark.parametrize(
    ("width", "scheme", "final"),
    [(390, "light", False), (390, "dark", True), (1280, "light", True), (1280, "dark", False)],
)
def test_a_browser_draws_all_without_complaint_network_or_sideways_scrolling(
    page, full_run: Path, width: int, scheme: str, final: bool
) -> None:
    page.open(write_report(full_run, final=final), width=width, scheme=scheme)
    assert page.complaints == []
    num_figures = page("document.querySelectorAll('[data-figure]').length")
    num_drawn = page("document.querySelectorAll('[data-figure]:has(.js-line, .point)').length")
    assert num_drawn == num_figures > 25
    page("document.querySelectorAll('details').forEach((part) => { part.open = true })")
    assert page("innerWidth") == width
    assert page("document.documentElement.scrollWidth") <= width
    assert page(HIDDEN_COLUMNS) == []
    assert page.requests
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}


HIDDEN_COLUMNS = """[...document.querySelectorAll(".scroll")]
    .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.innerText)"""
WORDS_IN_FIGURES = """[...document.querySelectorAll("[data-figure]")].flatMap((plot) => {
    const frame = plot.getBoundingClientRect();
    const words = [...plot.querySelectorAll("text")].filter((node) => node.textContent.trim())
        .map((node) => [node.textContent, node.getBoundingClientRect()]);
    const leaves = ([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    const meet = ([, a], [, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    return [
        ...words.filter(leaves).map(([text]) => `${plot.dataset.figure}: ${text} leaves it`),
        ...words.flatMap((one, place) => words.slice(place + 1).filter((other) => meet(one, other))
            .map(([text]) => `${plot.dataset.figure}: ${one[0]} lies on ${text}`)),
    ];
})"""


@pytest.mark.parametrize("width", [390, 1280])
def test_words_in_figures_neither_overlap_nor_leave_them(page, make_run, width: int) -> None:
    def stand_still(row):
        """The global model scores in every round what the base model did."""
        if row["kind"] == "evaluation" and row["split"] == "validation":
            row["scores"] = {name: {"mean": 0.5, "se": 0.1} for name in row["scores"]}
        return row

    run_path = make_run(num_done=2, num_rounds=2)
    edit_rows(run_path, stand_still)
    page.open(write_report(run_path, final=False), width=width)
    assert page(WORDS_IN_FIGURES) == []


@pytest.mark.parametrize("width", [390, 1440])
def test_labels_of_a_crowded_front_do_not_overlap(page, tmp_path: Path, width: int) -> None:
    shares = [place / 10 for place in range(11)]
    fronts = {  # a line, a knot at its end, one point
        "line": [(share, 1 - share) for share in shares],
        "knot": [(share**0.05, 1 - share**8) for share in shares],
        "point": [(0.5, 0.5) for _ in shares],
    }
    panels = []
    for name, places in fronts.items():
        spots = [
            Spot(
                dict(zip("ab", place, strict=True)), {}, {}, label=f"0.{round(333 * share)}, 0.333"
            )
            for place, share in zip(places, shares, strict=True)
        ]
        cloud = Cloud(LegendEntry(name, "var(--ink)"), 0, [], spots, range(len(spots)))
        base = {"a": 0.5, "b": 0.4}
        panels += planes(name, [cloud], ("a", "b"), base=base)
    made = Page("FIRM", "Fronts", [Section("fronts", "Fronts", "", panels)])
    page.open(write_page(tmp_path / "fronts.html", made, final=False), width=width)
    assert page(WORDS_IN_FIGURES) == []
    labels = [len([t for t in p.figure["data"][0]["text"] if t]) for p in panels]
    assert labels[0] >= 6
    assert labels[1] >= 2
    assert labels[2] == 4  # one on each side


@pytest.mark.parametrize("width", [390, 1280])
def test_words_in_the_figures_of_a_study_have_room(page, make_run, tmp_path, width: int) -> None:
    runs = {
        name: [read_record(make_run(f"{place}", num_done=2, num_rounds=2, seed=place))]
        for place, name in enumerate(("FIRM", "weights of a quarter and three quarters"))
    }
    page.open(write_settings_page(tmp_path / "report.html", runs), width=width)
    assert page(WORDS_IN_FIGURES) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_prose_ends_with_its_cards_and_no_fact_stands_alone(page, full_run, width: int) -> None:
    page.open(write_report(full_run, final=False), width=width)
    edge = "Math.round({}.getBoundingClientRect().right)"
    prose = page(f"[...document.querySelectorAll('section > p')].map((p) => {edge.format('p')})")
    cards = page(f"[...document.querySelectorAll('.panels')].map((p) => {edge.format('p')})")
    assert set(prose) == set(cards)
    facts = page(
        "[...document.querySelectorAll('.facts > div')].map((fact) => {"
        " const { top, width } = fact.getBoundingClientRect(); return [top, width]; })"
    )
    last = [width for top, width in facts if top == facts[-1][0]]
    whole = page("document.querySelector('.facts').clientWidth")
    assert len(last) > 1 or last == [pytest.approx(whole, abs=1)]


def test_every_marker_stands_where_metrics_jsonl_says(page, make_run) -> None:
    run_path = make_run(objectives=("helpful", "harmless", "humorous"), num_done=4, has_gram=True)
    page.open(write_report(run_path, final=False))
    shown = page.shown()
    clients = [f"client_{index}" for index in range(4)]

    def over_rounds(rows, value):
        return [(row["round"], y) for row in rows if (y := value(row)) is not None]

    def per_client(value):
        return {name: over_rounds(read_rows(run_path, client=name), value) for name in clients}

    def client_means(value):
        means = []
        for round_number in range(1, 5):
            values = [value(row) for row in read_rows(run_path, "client", round=round_number)]
            known = [y for y in values if y is not None]
            means += [(round_number, fmean(known))] if known else []
        return means

    rounds = read_rows(run_path, "round")
    validation = read_rows(run_path, "evaluation", split="validation")
    plane = [(e["scores"]["helpful"]["mean"], e["scores"]["harmless"]["mean"]) for e in validation]
    names = ("helpful", "harmless", "humorous")
    expected = {
        "plane-helpful-harmless": {"global model": plane},
        "scores-harmless": per_client(lambda row: row["scores"]["harmless"])
        | {
            "global model, validation": over_rounds(
                validation, lambda row: row["scores"]["harmless"]["mean"]
            )
        },
        "scores_std": {
            name: client_means(lambda row, key=name: row["scores_std"][key]) for name in names
        },
        "score_correlation": {
            f"{a} / {b}": client_means(lambda row, key=f"{a}-{b}": row["score_correlation"][key])
            for a, b in (names[:2], names[::2], names[1:])
        },
        "score_length_correlation": {
            name: client_means(lambda row, key=name: row["score_length_correlation"][key])
            for name in names
        },
        "truncated_share": {
            name: client_means(lambda row, key=name: row["truncated_share"][key]) for name in names
        },
        "weights_spread": {
            name: over_rounds(rounds, lambda row, key=name: row["weights_spread"][key])
            for name in names
        },
        "stationarity": {
            "Bound on Pareto stationarity": over_rounds(rounds, lambda row: row["stationarity"])
        },
        "drift": {"Client drift": over_rounds(rounds, lambda row: row["drift"])},
        "kl": per_client(lambda row: row["kl"])
        | {"global model, validation": over_rounds(validation, lambda row: row["kl"])},
    }
    for figure, points_by_name in expected.items():
        traces = shown[figure]["traces"]
        drawn = {t["name"]: list(zip(t["x"], t["y"], strict=True)) for t in traces}
        assert drawn.keys() == points_by_name.keys(), figure
        # Markers stand at hundredths of a pixel.
        near = [1e-4 * abs(b - a) for a, b in (shown[figure][f"{axis}_range"] for axis in "xy")]
        for trace, markers in zip(traces, shown[figure]["markers"], strict=True):
            points = points_by_name[trace["name"]]
            assert len(markers) == len(points) > 1, (figure, trace["name"])
            for at_data, at_screen, point in zip(
                drawn[trace["name"]], markers, points, strict=True
            ):
                assert at_data == pytest.approx(point, rel=1e-12), (figure, trace["name"])
                for axis in range(2):
                    assert at_screen[axis] == pytest.approx(point[axis], abs=near[axis], rel=0)


def test_the_page_of_a_point_draws_with_the_plotly_of_its_sweep(page, make_run, tmp_path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    path = update_report(make_run("points/first", num_done=2), final=True)
    page.open(path)
    assert page.complaints == []
    assert (tmp_path / "plotly.min.js").as_uri() in page.requests
    assert page("document.querySelectorAll('[data-figure]:has(.js-line, .point)').length") > 10
    assert page("document.querySelector('#no-plotly').hidden")


def test_a_page_without_its_plotly_says_what_it_needs(page, make_run, tmp_path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    path = update_report(make_run("points/first", num_done=2), final=True)
    (tmp_path / "plotly.min.js").unlink()
    page.visit(path.as_uri())
    page.wait_until("document.querySelector('#no-plotly')?.hidden === false")
    assert "need the file ../../plotly.min.js" in page(
        "document.querySelector('#no-plotly').innerText"
    )


def test_an_error_in_the_script_of_the_page_is_seen(page, make_run) -> None:
    path = write_report(make_run(num_done=1), final=False)
    path.write_text(path.read_text().replace("drawAll();", "drawAll(); undefined.thing;"))
    page.open(path)
    assert "Cannot read properties of undefined" in " ".join(page.complaints)


def test_what_the_policy_of_the_page_forbids_is_seen(page, make_run) -> None:
    path = write_report(make_run(num_done=1), final=False)
    picture = "<img src='http://127.0.0.1:9/picture.png'><script nonce"
    path.write_text(path.read_text().replace("<script nonce", picture, 1))
    page.open(path)
    assert "Content Security Policy" in " ".join(page.complaints)


def test_page_and_plots_follow_the_colour_scheme_while_open(page, make_run) -> None:
    page.open(write_report(make_run(num_done=1), final=False), scheme="light")
    paper = "document.querySelector('[data-figure]').layout.paper_bgcolor"
    assert page(paper) == "#ffffff"
    assert page("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 244)"
    page.show("dark")
    page.wait_until(f"{paper} === '#1b1e22'")
    assert page("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 22)"
    text = "document.querySelector('[data-figure] .xtick text').style.fill"
    page.wait_until(f"{text} === 'rgb(163, 171, 181)'")
