"""The theory laboratory: its files, equal for equal configurations, and its page."""

import csv
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from firm.run import parse, run_cli
from recipes.theory import __main__ as theory
from recipes.theory.__main__ import TheoryConfig, main
from recipes.theory.sweeps import LAWS
from tests.smoke import ROOT

SMOKE = str(ROOT / "recipes/theory/smoke.yaml")


def run(out: Path) -> tuple[Path, str]:
    """The directory of a small measurement, and what it printed."""
    with redirect_stdout(io.StringIO()) as printed:
        path = main(parse(TheoryConfig, ["--config", SMOKE, "--out", str(out)]))
    return path, printed.getvalue()


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    return run(tmp_path_factory.mktemp("theory") / "first")


@pytest.fixture(scope="module")
def results(measured) -> Path:
    return measured[0]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_equal_configurations_give_equal_files(results, tmp_path):
    again, _ = run(tmp_path / "again")
    for name in ("theory.csv", "slopes.csv"):
        assert (again / name).read_bytes() == (results / name).read_bytes()


def test_every_point_of_every_seed_is_written(results):
    points = rows(results / "theory.csv")
    chosen = {(row["x"], row["seed"]) for row in points if row["sweep"] == "beta"}
    assert chosen == {(x, seed) for x in ("0.0", "0.01", "0.1", "1.0") for seed in ("0", "1")}
    lemma = {row["x"] for row in points if (row["sweep"], row["quantity"]) == LEMMA}
    assert lemma == {"0.01", "0.1", "1.0"}
    assert len(rows(results / "slopes.csv")) == len(LAWS)
    assert json.loads((results / "run.json").read_text())["status"] == "finished"
    assert parse(TheoryConfig, ["--config", str(results / "config.yaml")]).num_seeds == 2


LEMMA = ("beta", "lemma_1_ratio")


def test_the_terminal_says_how_lemma_1_fared_and_what_departs(measured):
    results, printed = measured
    points = rows(results / "theory.csv")
    count = sum(float(r["value"]) for r in points if r["quantity"] == "lemma_1_comparisons")
    worst = max(float(r["value"]) for r in points if r["quantity"] == "lemma_1_ratio")
    assert f"Lemma 1 held in all {count:,.0f} comparisons" in printed
    assert f"at most {worst:.3f} of the right one" in printed
    slopes = rows(results / "slopes.csv")
    lines = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    table = [cells for cells in lines if len(cells) == 5 and "±" in cells[2]]
    assert [cells[-1] for cells in table] == [row["verdict"] for row in slopes]
    equal = sum(row["verdict"] == "as the theorem" for row in slopes)
    assert f"Of {len(LAWS)} slopes {equal} are the theorem's" in printed
    spread = {
        (row["x"], row["seed"]): float(row["value"])
        for row in points
        if (row["sweep"], row["quantity"]) == ("beta", "spread")
    }
    ratios = [spread["0.0", seed] / spread["0.1", seed] for seed in ("0", "1")]
    assert f"{(ratios[0] * ratios[1]) ** 0.5:.2g} times as far" in printed


def test_the_page_stands_alone(results):
    page = (results / "theory.html").read_text()
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    panels = {law.panel for law in LAWS} | {"lemma", "unregularised"}
    assert figures.keys() == panels
    assert set(re.findall(r'data-figure="([^"]+)"', page)) == panels
    assert all(entry["figure"]["data"] for entry in figures.values())
    body = page[: page.index('<script type="application/json"')]
    assert not re.findall(r'(?:src|href)="(?!#|data:)', body)


def test_panels_show_points_fit_and_theorem(results):
    page = (results / "theory.html").read_text()
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    theorem, fitted, points = figures["variance_batch"]["figure"]["data"]
    assert points["x"] == [8, 32]
    # theorem: -1, so a quarter at four times the batch
    assert theorem["y"][1] == pytest.approx(theorem["y"][0] / 4)
    assert fitted["y"] == pytest.approx(points["y"])  # two points, one line
    assert all(error > 0 for error in points["error_y"]["array"])


def test_a_page_that_cannot_be_drawn_leaves_the_figures(tmp_path, monkeypatch, undrawn):
    def fail(*_):
        raise ValueError("no")

    monkeypatch.setattr(theory, "write_page", fail)
    out, _ = run(tmp_path / "theory")
    assert (out / "slopes.csv").exists()
    assert undrawn == ["The page theory.html could not be drawn (ValueError: no)."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment.mdp.gamma", "1.0"], "experiment.mdp.gamma must be greater than 0 and less"),
        (["--num_seeds", "1"], "num_seeds must be at least 2"),
        (["--beta", "1.0"], "did you mean"),
        (["--experiment.client.critic.name", "none"], "td, exact"),
    ],
)
def test_bad_input_ends_in_one_line(arguments, message, refusal, tmp_path):
    out = str(tmp_path / "out")
    assert message in refusal(
        run_cli, main, TheoryConfig, ["--config", SMOKE, "--out", out, *arguments]
    )
    assert not (tmp_path / "out").exists()


def test_results_are_never_overwritten(results, refusal):
    assert str(results) in refusal(
        run_cli, main, TheoryConfig, ["--config", SMOKE, "--out", str(results)]
    )
