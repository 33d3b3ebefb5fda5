"""Figures for a paper: their size, their data, and files that are the same every time."""

import csv

import matplotlib
import numpy as np
import pytest

from firm.base.inside import LinkFound, give
from firm.report.drawing import LegendEntry, Series, series_panel
from firm.report.plane import Cloud, Spot
from firm.report.static import (
    COLUMN_IN,
    DPI,
    PAGE_IN,
    PaperFigure,
    curves_figure,
    light_color,
    plane_figure,
    save_figure,
)

KEYS = [
    LegendEntry("FIRM", "var(--objective-0)"),
    LegendEntry("fixed, β = 1", "var(--objective-1)", "dash"),
]
VALUES = np.array([[0.1, 0.4, 0.3], [0.3, 0.6, 0.5]])


def curves(values=VALUES):
    lines = [Series.of(key, [1, 2, 3], values + place) for place, key in enumerate(KEYS)]
    return curves_figure([series_panel("helpful", "helpful", lines, y_title="reward")])


def plane(num_objectives=2):
    objectives = ("a", "b", "c")[:num_objectives]
    spots = [
        Spot(
            dict(zip(objectives, (0.1 * place, 0.2, 0.3), strict=False)),
            dict.fromkeys(objectives, 0.01),
            {"seed": str(place)},
            is_dominated=place == 1,
        )
        for place in range(3)
    ]
    clouds = [Cloud(KEYS[0], 0, spots[:2], spots[2:], [0]), Cloud(KEYS[1], 1, [], spots[:1])]
    base = dict.fromkeys(objectives, 0.0)
    return plane_figure(clouds, objectives, unit="share of pairs", base=base)


def width(path):
    """The width of a PNG in pixels, which its header tells."""
    return int.from_bytes(path.read_bytes()[16:20])


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_three_files_lie_beside_each_other_and_are_the_same_every_time(tmp_path):
    for make in (curves, plane):
        first = save_figure(make(), tmp_path / "new" / "one.5")
        second = save_figure(make(), tmp_path / "two")
        assert [path.name for path in first] == ["one.5.png", "one.5.svg", "one.5.csv"]
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes(), one.name


def test_the_text_of_the_svg_stays_text(tmp_path):
    _, svg, _ = save_figure(curves(), tmp_path / "curves")
    text = svg.read_text(encoding="utf-8")
    for label in ("helpful", "reward", "FIRM", "fixed, β = 1"):
        assert f">{label}</text>" in text
    assert "<dc:date>" not in text


def test_one_panel_is_a_column_wide_and_several_are_two(tmp_path):
    narrow, *_ = save_figure(plane(), tmp_path / "narrow")
    wide, *_ = save_figure(plane(3), tmp_path / "wide")
    assert width(narrow) == round(COLUMN_IN * DPI)
    assert width(wide) == round(PAGE_IN * DPI)


def test_curves_are_means_over_seeds_and_their_data_are_what_is_drawn(tmp_path):
    made = curves()
    drawn = made.figure.axes[0].lines[0]
    np.testing.assert_allclose(drawn.get_ydata(), [0.2, 0.5, 0.4])
    rows = table(save_figure(made, tmp_path / "curves")[2])
    own = [row for row in rows if row["setting"] == "FIRM"]
    assert [float(row["mean"]) for row in own] == pytest.approx([0.2, 0.5, 0.4])
    assert [float(row["standard error"]) for row in own] == pytest.approx([0.1] * 3)
    assert {row["seeds"] for row in rows} == {"2"}
    assert drawn.get_color() == light_color(KEYS[0].color) == "#0072b2"


def test_one_seed_has_no_band():
    assert not curves(VALUES[:1]).figure.axes[0].patches
    assert curves().figure.axes[0].patches


def test_the_data_of_the_plane_are_its_spots(tmp_path):
    rows = table(save_figure(plane(), tmp_path / "plane")[2])
    assert [(r["group"], r["kind"], r["seed"], r["a"], r["dominated"]) for r in rows] == [
        ("FIRM", "point", "2", "0.2", "no"),
        ("FIRM", "single seed", "0", "0.0", "no"),
        ("FIRM", "single seed", "1", "0.1", "yes"),
        ("fixed, β = 1", "point", "0", "0.0", "no"),
    ]
    assert {row["b error"] for row in rows} == {"0.01"}
    assert "share of pairs" in (tmp_path / "plane.svg").read_text()


def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    def settings():
        # the backend is chosen when somebody first asks for it
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before = settings()
    save_figure(curves(), tmp_path / "curves")
    assert settings() == before


def test_figures_are_not_written_through_a_link(tmp_path):
    import matplotlib.pyplot as plt

    give(tmp_path / "study")
    (tmp_path / "study").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "study/figures").symlink_to(tmp_path / "outside")
    figure = PaperFigure(plt.figure(), ["a"], [[1.0]])
    with pytest.raises(LinkFound, match="study/figures is a link"):
        save_figure(figure, tmp_path / "study/figures/a")
    (tmp_path / "study/figures").unlink()
    (tmp_path / "study/figures").mkdir()
    for name in ("a.png", "a.svg", "a.csv"):
        (tmp_path / "study/figures" / name).symlink_to(tmp_path / "outside" / name)
        with pytest.raises(LinkFound, match=rf"{name} is a link"):
            save_figure(figure, tmp_path / "study/figures/a")
        (tmp_path / "study/figures" / name).unlink()
    plt.close()
    assert list((tmp_path / "outside").iterdir()) == []
