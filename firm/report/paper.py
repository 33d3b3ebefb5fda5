"""Figures for a paper: the plane and curves over the rounds as PNG and SVG, with their data as CSV.

Drawn by matplotlib without its global state. The colours are those of the pages in light.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from re import findall
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from firm.fronts import exponential_average
from firm.report.cloud_plane import KL, Cloud, Place, Spot, axes_of
from firm.report.drawing import Key
from firm.report.page import replace_file

COLUMN_IN, PAGE_IN = 3.3, 6.8
"""Width of a figure over one column and over two, in inches."""
PANEL_IN = 2.4
"""Height of a row of panels, in inches."""
MARKERS = ("o", "s", "D", "^", "P", "X", "*", "p")
"""One for each colour, in the order of the page's."""
LINES = {"solid": "-", "dash": "--", "dot": ":"}
DPI = 300
BASE = "base model"
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "firm",  # equal figures have equal files
}


@dataclass(frozen=True)
class Curve:
    """A quantity of one setting over the rounds."""

    key: Key
    xs: Sequence[float]
    """Rounds, [T]."""
    values: np.ndarray
    """Of each seed, [S, T]."""


@dataclass(frozen=True)
class PaperFigure:
    """A figure and the data behind it."""

    figure: Figure
    header: Sequence[str]
    rows: Sequence[Sequence[str | float]]


def save_figure(figure: PaperFigure, stem: str | Path) -> list[Path]:
    """Writes STEM.png, STEM.svg and STEM.csv and returns their paths.

    Equal figures give equal files, byte for byte, with one version of matplotlib.

    Args:
        figure: What to draw.
        stem: Path without an ending; its folder is made when absent.

    Raises:
        OSError: A file cannot be written.
    """
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg, table = (stem.with_name(f"{stem.name}.{end}") for end in ("png", "svg", "csv"))
    with matplotlib.rc_context(STYLE):
        figure.figure.savefig(png, dpi=DPI, metadata={"Software": None})
        figure.figure.savefig(svg, metadata={"Date": None, "Creator": None})
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([figure.header, *figure.rows])
    replace_file(table, text.getvalue())
    return [png, svg, table]


def plane_figure(
    clouds: Sequence[Cloud],
    objectives: Sequence[str],
    *,
    base: Place | None = None,
) -> PaperFigure:
    """Returns the trade-off plane: one column wide with one pair of objectives, else two.

    Means over the seeds are large with one standard error, models small, dominated ones hollow.
    The data are one row per mean or model.

    Args:
        clouds: What is drawn, one colour and marker each.
        objectives: Their names; with a single one its reward stands against the KL.
        base: Where the base model is.
    """
    axes = axes_of(objectives)
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(len(axes), num_keys=len(clouds) + bool(base))
        for panel, (x, y) in zip(panels, axes, strict=True):
            for cloud in clouds:
                _draw_cloud(panel, cloud, x, y)
            if base:
                panel.plot([base[x]], [base[y]], "*", color="black", markersize=7, label=BASE)
            panel.set(xlabel=x if x == KL else f"{x} (mean reward)", ylabel=f"{y} (mean reward)")
        _legend(figure, panels[0])
    names = list(dict.fromkeys(name for cloud in clouds for s in _spots(cloud) for name in s.facts))
    header = ["group", "kind", *names, *objectives, *(f"{n} error" for n in objectives)]
    rows = [
        [
            cloud.key.label,
            "point" if spot in cloud.means else "single seed",
            *(spot.facts.get(name, "") for name in names),
            *(spot.place[name] for name in objectives),
            *(_cell(spot.errors.get(name)) for name in objectives),
            "yes" if spot.is_dominated else "no",
        ]
        for cloud in clouds
        for spot in _spots(cloud)
    ]
    return PaperFigure(figure, [*header, "dominated"], rows)


def curves_figure(
    panels: Mapping[str, Sequence[Curve]],
    *,
    y_title: str,
    x_title: str = "round",
    half_life: float | None = None,
) -> PaperFigure:
    """Returns curves over the rounds: means over the seeds with bands of one standard error.

    One panel is one column wide, several are two. The data are one row per panel, setting and
    round, smoothed as drawn.

    Args:
        panels: Curves by the title of their panel.
        y_title: Quantity or unit.
        x_title: What the x-axis counts.
        half_life: Of the running average of each seed's curve, in the steps that the curves
            count; None draws them as they are.

    Raises:
        ValueError: A half-life that is not positive, or values that are not finite.
    """
    rows = []
    keys = {curve.key.label for curves in panels.values() for curve in curves}
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(len(panels), num_keys=len(keys))
        for panel, (title, curves) in zip(axes, panels.items(), strict=True):
            for curve in curves:
                means, errors = _smoothed(curve, half_life)
                color = light_color(curve.key.color)
                style = LINES.get(curve.key.mark, "-")
                panel.plot(curve.xs, means, style, color=color, label=curve.key.label)
                if errors.any():
                    panel.fill_between(
                        curve.xs, means - errors, means + errors, color=color, alpha=0.18, lw=0
                    )
                rows += [
                    [title, curve.key.label, x, float(mean), float(error), len(curve.values)]
                    for x, mean, error in zip(curve.xs, means, errors, strict=True)
                ]
            panel.set(title=title, xlabel=x_title, ylabel=y_title)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        _legend(figure, *axes)
    header = ["panel", "setting", x_title, "mean", "standard error", "seeds"]
    return PaperFigure(figure, header, rows)


def light_color(color: str) -> str:
    """Returns a colour of the pages, `var(--objective-0)`, as they show it in light.

    >>> light_color("var(--objective-0)")
    '#0072b2'
    """
    return _palette()[color.removeprefix("var(--").removesuffix(")")]


@cache
def _palette() -> dict[str, str]:
    """Colours by name, of the style sheet's first block, which is for light."""
    style = (files("firm.report") / "style.css").read_text(encoding="utf-8")
    return dict(findall(r"--([\w-]+): (#\w{6})", style.partition("}")[0]))


def _panels(number: int, *, num_keys: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, and room for a legend below them."""
    num_columns = min(number, 3)
    num_rows = -(-number // max(num_columns, 1))
    width = COLUMN_IN if number == 1 else PAGE_IN
    legend_in = 0.16 * -(-num_keys // (2 if number == 1 else 4)) + 0.1
    figure = Figure(figsize=(width, num_rows * PANEL_IN + legend_in), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(num_rows, num_columns, place + 1) for place in range(number)]
    return figure, axes


def _legend(figure: Figure, *axes: Axes) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Artist] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if BASE in entries:  # lines come before error bars, and the base model is to be last
        entries[BASE] = entries.pop(BASE)
    if len(entries) > 1:
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=2 if figure.get_figwidth() == COLUMN_IN else 4,
            frameon=False,
        )


def _draw_cloud(panel: Axes, cloud: Cloud, x: str, y: str) -> None:
    color = light_color(cloud.key.color)
    marker = MARKERS[cloud.index % len(MARKERS)]
    if cloud.path and x != KL:
        ends = [cloud.means[index].place for index in cloud.path]
        panel.plot(
            [place[x] for place in ends],
            [place[y] for place in ends],
            LINES.get(cloud.key.mark, "-"),
            color=color,
            linewidth=0.9,
        )
    labels = iter([cloud.key.label])
    for spots, size in ((cloud.models, 2.2), (cloud.means, 5.5)):
        for spot in spots:
            is_mean = spots is cloud.means
            panel.errorbar(
                [spot.place[x]],
                [spot.place[y]],
                xerr=spot.errors.get(x) if is_mean else None,
                yerr=spot.errors.get(y) if is_mean else None,
                fmt=marker,
                color=color,
                markersize=size,
                markerfacecolor="white" if spot.is_dominated else color,
                alpha=1.0 if is_mean else 0.6,
                elinewidth=0.7,
                label=next(labels, None) if is_mean else None,
            )


def _spots(cloud: Cloud) -> list[Spot]:
    return [*cloud.means, *cloud.models]


def _smoothed(curve: Curve, half_life: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the seeds, [T], of the curves as they are drawn."""
    values = np.asarray(curve.values, dtype=float)
    if half_life is not None:
        values = exponential_average(values.T, half_life=half_life).T
    if len(values) == 1:
        return values[0], np.zeros_like(values[0])
    return values.mean(axis=0), values.std(axis=0, ddof=1) / len(values) ** 0.5


def _cell(value: float | None) -> float | str:
    return "" if value is None else value
