"""Runs whose logs hold what no log should: they have a page, which says what it left out."""

import copy
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from firm.cli.main import COMMANDS
from firm.fronts import Front, Point
from firm.report import page, read_record, run_page, update_report, write_report
from firm.report.front_page import write_front_page
from firm.report.settings_page import study_figures, write_settings_page
from tests.runs import figures_in, read_rows, write_rows

cli = COMMANDS["report"].run

Place = tuple[str | int, ...]


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "1.0" + "]" * depth)


VALUES: dict[str, Any] = {
    "NaN": math.nan,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "huge": 1e308,
    "huge integer": 10**400,
    "negative": -1,
    "text": "x",
    "empty text": "",
    "half a character": "\ud800",
    "none": None,
    "true": True,
    "list of nothing": [None],
    "list of infinity": [math.inf],
    "list of text": ["x"],
    "empty list": [],
    "empty mapping": {},
    "mapping to text": {"a": "b"},
    "mapping to mapping": {"helpful": {"mean": {}}},
    "huge matrix": [[1e308, 1e308]],
    "matrix of another width": [[0.5], [0.2, 0.3, 0.5]],
    "negative matrix": [[-1.0, 0.5]],
    "asymmetric matrix": [[1.0, 0.5], [-0.5, 1.0]],
    "deep list": nested(60),
    "deep mapping": json.loads('{"a":' * 60 + "1" + "}" * 60),
}
COST = ("megabytes_up", "megabytes_down", "seconds", "stages")
NUM_VALUES = 3
"""So many of them are tried in each place, drawn by a fixed seed."""


def last(rows: list[dict[str, Any]], kind: str) -> int:
    return max(place for place, row in enumerate(rows) if row["kind"] == kind)


def places(entry: dict[str, Any]) -> Iterator[Place]:
    """The place of every value of a row, with those of the mappings below it."""
    for key, value in entry.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *place) for place in places(value))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from ((key, 0, *place) for place in places(value[0]))


def poisoned(row: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    row = copy.deepcopy(row)
    entry: Any = row
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    return row


def html_of(run_path: Path) -> str:
    return page.render(run_page.run_page(read_record(run_path)), script=page.PLOTLY_NAME)


def values_of(html: str, panel: str, client: str) -> list[float]:
    """What a client's line shows in a panel of the page."""
    lines = figures_in(html)[panel]["figure"]["data"]
    return next((line["y"] for line in lines if line["name"] == client), [])


@pytest.fixture
def run_path(make_run) -> Path:
    """A run of two clients and two rounds with every field that a row can have."""
    path = make_run(
        num_clients=2,
        num_rounds=2,
        num_done=2,
        has_gram=True,
        failures={1: ("client_0", "late")},
        alarms={2: "β does nothing"},
    )
    rows = read_rows(path)
    for row in rows:
        if row["kind"] == "client":
            row["gram"] = [[1.0, 0.5], [0.5, 1.0]]
        if row["kind"] == "round":
            row["failures"] = [{"client": "client_9", "reason": "late"}]
            row["weights"] = {"helpful": 0.5, "harmless": 0.5}
            row["privacy"] = {"epsilon": 1.0, "epsilon_server": 2.0, "delta": 1e-5, "clipped": 0.5}
            row["secure"] = {"num_updates": 2, "masked_bytes": 9, "seconds": 0.1, "rounding": 1e-9}
            row["dropped_fields"] = {"client_1": 2}
            row["norm_ratio"] = row["disagreement_bound"] = 1.5
    of_client = rows[last(rows, "client")]
    own = {key: of_client[key] for key in ("rewards", "kl", "seconds", "weights", "value_loss")}
    by_objective = {"helpful": own, "harmless": copy.deepcopy(own)}
    rows.append({**of_client, "client": "client_9", "by_objective": by_objective})
    for key in own:
        del rows[-1][key]
    write_rows(path, rows)
    return path


@pytest.mark.parametrize("kind", ["client", "round", "evaluation"])
def test_whatever_stands_in_a_field_the_page_is_drawn_and_shows_the_rest(run_path, kind):
    rows, rng = read_rows(run_path), random.Random(kind)
    at = last(rows, kind)
    other = html_of(run_path)
    expected = values_of(other, "entropy", "client_0")
    tried, drawn = set(), []  # what is left out is drawn once: the rest of such logs is the same
    for place in places(rows[at]):
        for name in rng.sample(sorted(VALUES), NUM_VALUES):
            tried.add(name)
            changed = poisoned(rows[at], place, VALUES[name])
            write_rows(run_path, [*rows[:at], changed, *rows[at + 1 :]])
            record = read_record(run_path)
            rest = replace(record, left_out=())
            if rest not in [other for other, _ in drawn]:
                drawn.append((rest, run_page.run_page(record)))
            own = next(own for other, own in drawn if other == rest)
            note = page.left_out_note(f"the log of {record.name}", record.left_out)
            html = page.render(replace(own, notices=[note, *own.notices]), script=page.PLOTLY_NAME)
            assert values_of(html, "entropy", "client_0") == expected, (place, name)
            for text in record.left_out:
                assert escape(text, quote=True).replace("&#x27;", "&#39;") in html, (place, name)
    assert tried == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_a_row_of_which_nothing_is_valid_hides_no_other(run_path, name):
    rows = read_rows(run_path)
    for kind in ("client", "round", "evaluation"):
        row = rows[last(rows, kind)]
        row |= dict.fromkeys(row.keys() - {"kind", "round", "client", "split"}, VALUES[name])
    before = values_of(html_of(run_path), "entropy", "client_0")
    write_rows(run_path, rows)
    html = html_of(run_path)
    assert values_of(html, "entropy", "client_0") == before
    assert "scores-helpful" in figures_in(html)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("kl", math.nan, "kl of client_1 in round 2: nan"),
        ("entropy", math.inf, "entropy of client_1 in round 2: inf"),
        ("beta_effect", 5, "beta_effect of client_1 in round 2: 5"),
        ("beta_effect", "x", "beta_effect of client_1 in round 2: &#39;x&#39;"),
        ("beta_effect", [None], "beta_effect of client_1 in round 2: [None]"),
        ("by_objective", 5, "by_objective of client_1 in round 2: 5"),
        ("score_length_correlation", "a", "score_length_correlation of client_1 in round 2"),
        ("gradient_norms", [[-1.0, 1.0]], "gradient_norms of client_1 in round 2: [[-1.0, 1.0]]"),
        ("weights", [[1e308, 1e308]], "weights of client_1 in round 2: [[1e+308, 1e+308]]"),
        ("weights", [[10**400, 1]], "weights of client_1 in round 2: [[1000"),
        ("bytes_up", 10**400, "bytes_up of client_1 in round 2: 1000"),
    ],
)
def test_the_page_names_what_is_not_valid_and_keeps_it_out_of_the_figures(
    make_run, field, value, told
):
    run_path = make_run(num_clients=2, num_rounds=2, num_done=2)
    rows = read_rows(run_path)
    rows[last(rows, "client")][field] = value
    write_rows(run_path, rows)
    html = html_of(run_path)
    assert f"1 entry in the log of demo is not valid and left out: {told}" in html
    if field in ("kl", "entropy"):
        rest = [row[field] for row in rows if row.get("client") == "client_1"][:1]
        assert values_of(html, field, "client_1") == rest


def test_a_ratio_of_valid_norms_past_all_floats_is_left_out_of_its_line(make_run):
    run_path = make_run(num_clients=2, num_rounds=2, num_done=2)
    rows = read_rows(run_path)
    rows[last(rows, "client")]["gradient_norms"] = [[1e30, 1e-300]]
    write_rows(run_path, rows)
    html = html_of(run_path)
    assert len(values_of(html, "norm_ratio", "client_0")) == 2
    assert len(values_of(html, "norm_ratio", "client_1")) == 1


def test_of_many_entries_that_are_not_valid_the_first_are_named(make_run):
    run_path = make_run(num_clients=2, num_rounds=8)
    rows = read_rows(run_path)
    for row in rows:
        if row["kind"] == "client":
            row["kl"] = math.nan
    write_rows(run_path, rows)
    html = html_of(run_path)
    assert "16 entries in the log of demo are not valid and left out: kl of client_0 in" in html
    assert html.count("kl of client_") == page.NUM_LEFT_OUT
    assert "and 11 more." in html
    assert "not valid" not in html_of(make_run("calm"))


def test_a_row_that_a_client_passes_off_as_the_runs_own_does_not_become_it(run_path):
    rows = read_rows(run_path)
    evil = {"kind": "run", "objectives": [], "clients": [], "rounds": 0}
    write_rows(run_path, [*rows, evil])
    record = read_record(run_path)
    assert record.objectives == ("helpful", "harmless")
    assert len(record.left_out) == 1


def test_samples_of_any_shape_are_shown_as_far_as_they_are_valid(make_run):
    run_path = make_run(num_clients=1, num_rounds=1, num_done=1)
    good = {"round": 0, "prompt": "a good prompt", "completion": "yes", "scores": {"helpful": 1.0}}
    with (run_path / "samples.jsonl").open("a") as file:
        for key in good:
            for value in VALUES.values():
                file.write(json.dumps({**good, key: value}) + "\n")
        file.write(json.dumps(good) + "\n")
    write_report(run_path, final=False)
    assert "a good prompt" in (run_path / "report.html").read_text()


@pytest.mark.parametrize("preference", [None, "high", [], [0.5], [0.5, "x"], [0.2, 0.3, 0.5]])
def test_a_front_row_without_a_valid_preference_is_left_out(make_run, preference):
    run_path = make_run(num_clients=1, num_rounds=1, num_done=1)
    rows = read_rows(run_path)
    own = next(row for row in reversed(rows) if row.get("split") == "test")
    rows += [{**own, "split": f"test at {n}", "preference": preference} for n in range(2)]
    write_rows(run_path, rows)
    samples = [{"round": n, "prompt": "p", "completion": "yes"} for n in range(2)]
    text = "".join(json.dumps({**row, "preference": preference}) + "\n" for row in samples)
    (run_path / "samples.jsonl").write_text(text)
    write_report(run_path, final=False)
    assert "</html>" in (run_path / "report.html").read_text()


@pytest.mark.parametrize("bounds", [["helpful"], 3, {"helpful": "high"}, {"helpful": [0.5]}])
def test_constraints_of_any_shape_leave_the_page(make_run, bounds, undrawn):
    run_path = make_run(num_clients=1, num_rounds=1, num_done=1)
    config = yaml.safe_load((run_path / "config.yaml").read_text())
    config["strategy"] = {"name": "constrained", "min_rewards": bounds}
    (run_path / "config.yaml").write_text(yaml.safe_dump(config))
    write_report(run_path, final=False)
    page = (run_path / "report.html").read_text()
    assert "The constraints" in page  # a note that they are left out
    assert "</html>" in page


def test_the_command_draws_a_poisoned_run(run_path, capsys):
    rows = read_rows(run_path)
    rows[last(rows, "client")] |= {"kl": math.nan, "client\ud800": "\udfff", "bytes_up": 10**400}
    rows[last(rows, "round")]["alarms"] = ["half a character: \ud800"]
    write_rows(run_path, rows)
    cli([str(run_path)])
    assert capsys.readouterr().out.strip() == str(run_path / "report.html")
    html = (run_path / "report.html").read_text(encoding="utf-8")
    assert "half a character: \\ud800" in html
    assert "kl of client_9 in round 2: nan" in html


# --- What fails all the same ----------------------------------------------------------------------


def test_a_section_that_cannot_be_drawn_is_a_note_in_its_place(make_run, monkeypatch, undrawn):
    def fail(record):
        raise ZeroDivisionError("by <b>nothing</b>")

    def infinite(record):
        section = run_page.SECTIONS["training"](record)
        section.panels[0].figure["data"][0]["y"][0] = math.inf
        return section

    run_path = make_run(num_done=2)
    whole = set(figures_in(html_of(run_path)))
    broken = {**run_page.SECTIONS, "scores": fail, "cost": infinite}
    monkeypatch.setattr(run_page, "SECTIONS", broken)
    html = html_of(run_path)
    note = "The section &#39;Scores&#39; could not be drawn (ZeroDivisionError: by &lt;b&gt;nothing"
    start = html.index('<section id="scores">')
    assert start < html.index(note) < html.index("</section>", start)
    assert '<section id="cost">' in html
    left = set(figures_in(html))
    assert left == whole - {"scores-helpful", "scores-harmless", *COST}
    assert [note[:27] for note in undrawn] == [
        "The section 'Scores' could ",
        "The section 'Cost' could no",
    ]
    assert not any("\n" in note for note in undrawn)


def test_summary_facts_comparison_and_samples_have_notes_above_the_figures(
    make_run, monkeypatch, undrawn
):
    def fail(*_):
        raise ValueError("no")

    for name in ("_summary", "_facts", "best_comparison", "samples_of"):
        monkeypatch.setattr(run_page, name, fail)
    html = html_of(make_run(num_done=2))
    assert len(undrawn) == 4
    head, _, body = html.partition("<main>")
    assert head.count("could not be drawn (ValueError: no)") == 3
    assert body.count("could not be drawn (ValueError: no)") == 1  # the samples
    assert "scores-helpful" in figures_in(html)


def test_training_goes_on_where_the_page_cannot_be_written(make_run, monkeypatch, undrawn):
    run_path = make_run(num_done=2, is_over=False)
    assert update_report(run_path) == run_path / "report.html"
    before = (run_path / "report.html").read_text()

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        update_report(run_path)
        with pytest.raises(OSError, match="No space"):
            write_report(run_path, final=False)
    assert len(undrawn) == 1
    assert undrawn[0].startswith("The page report.html could not be drawn (OSError: ")
    assert (run_path / "report.html").read_text() == before


# --- Pages of many runs ---------------------------------------------------------------------------


def ruin(run_path: Path, value: Any) -> None:
    """Replaces every figure of every row but the run's own."""
    rows = read_rows(run_path)
    for row in rows[1:]:
        row |= dict.fromkeys(row.keys() - {"kind", "round", "client", "split"}, value)
    write_rows(run_path, rows)


RUINS = (
    *("NaN", "huge integer", "half a character", "negative", "none", "list of nothing"),
    *("deep list", "list of text", "empty mapping", "deep mapping", "mapping to mapping"),
)
"""Values that between them leave every record that one of `VALUES` can leave of a run."""


def test_every_value_ruins_a_run_as_one_of_a_few_does(make_run):
    run_path = make_run("FIRM-0", num_clients=2, num_rounds=2, num_done=2, seed=0)
    rows, records = read_rows(run_path), {}
    for name, value in VALUES.items():
        write_rows(run_path, rows)
        ruin(run_path, value)
        record = read_record(run_path)
        records[name] = (bool(record.left_out), replace(record, left_out=()))
    few = [records[name] for name in RUINS]
    assert [name for name, record in records.items() if record not in few] == []


@pytest.mark.parametrize("name", RUINS)
def test_a_ruined_run_hides_no_other_of_a_study(make_run, tmp_path, name):
    paths = {
        setting: [
            make_run(f"{setting}-{seed}", num_clients=2, num_rounds=2, num_done=2, seed=seed)
            for seed in (0, 1)
        ]
        for setting in ("FIRM", "FSMGDA")
    }
    ruin(paths["FIRM"][0], VALUES[name])
    runs = {setting: [read_record(path) for path in found] for setting, found in paths.items()}
    html = write_settings_page(tmp_path / "page.html", runs).read_text()
    drawn = figures_in(html)
    for panel in (
        "rewards-helpful",
        "weights-helpful",
        "drift",
        "trade-off-helpful-harmless",
    ):
        names = [trace["name"] for trace in drawn[panel]["figure"]["data"] if trace["x"]]
        assert {"FIRM", "FSMGDA"} <= set(names), panel
    (line,) = [t for t in drawn["rewards-helpful"]["figure"]["data"] if t["name"] == "FIRM"]
    other = runs["FIRM"][1].evaluations["validation"]
    assert line["y"] == [row["rewards"]["helpful"]["mean"] for row in other]
    assert ("in the log of FIRM-0 are not valid" in html) == bool(runs["FIRM"][0].left_out)
    figures = study_figures(runs, folder=tmp_path)
    assert set(figures) == {"rewards", "weights", "drift", "plane"}
    for kind in ("rewards", "weights"):
        assert {row[1] for row in figures[kind].rows} == {"FIRM", "FSMGDA"}, kind


@pytest.mark.parametrize("name", RUINS)
def test_a_ruined_run_hides_no_other_of_a_sweep(make_run, tmp_path, name):
    preferences = [(0.2, 0.8), (0.8, 0.2)]
    paths = [make_run(str(i), num_clients=2, num_rounds=2, num_done=2, seed=i) for i in (0, 1)]
    ruin(paths[0], VALUES[name])
    records = [read_record(path) for path in paths]
    rewards = [{"helpful": 0.4, "harmless": 0.6}, {"helpful": 0.6, "harmless": 0.4}]
    points = tuple(
        Point(f"p{i}", preferences[i], 0, rewards[i], dict.fromkeys(rewards[i], 0.01), {}, 1.0, "a")
        for i in (0, 1)
    )
    front = Front(
        ("helpful", "harmless"),
        points,
        (0.0, 0.0),
        records[1].header["calibration"],
        {"helpful": 0.3, "harmless": 0.3},
        "FIRM",
        40,
    )
    html = write_front_page(
        tmp_path / "page.html",
        {"FIRM": front},
        runs={"FIRM": {"p0": records[0], "p1": records[1]}},
        row_rewards={"FIRM": (np.full((2, 40, 2), 0.5), None)},
    ).read_text()
    drawn = figures_in(html)
    names = [trace["name"] for trace in drawn["weights-helpful"]["figure"]["data"] if trace["x"]]
    assert "FIRM (0.8, 0.2)" in names
    assert ("in the log of 0 are not valid" in html) == bool(records[0].left_out)
