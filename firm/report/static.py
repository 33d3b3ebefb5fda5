"""Figures for a paper: the pages' figures as PNG and SVG, with their data as CSV.

matplotlib draws them without its global state, in the colours of the pages' light scheme.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import unescape
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

from firm.base.inside import make_folder, replace_bytes
from firm.base.sanitize import legible_data
from firm.report.drawing import Error, Panel, Trace
from firm.report.page import replace_file
from firm.report.plane import Cloud, PlanePoint, planes

COLUMN_IN, PAGE_IN = 3.3, 6.8
"""Width of a figure over one column and over two, in inches."""
PANEL_IN = 2.4
"""Height of a row of panels, in inches."""
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
    "star": "*",
    "pentagon": "p",
    "asterisk-open": "*",
}
LINES = {"solid": "-", "dash": "--", "dot": ":"}
POINTS_PER_PIXEL = {"line": 0.65, "marker": 0.45}
DPI = 300
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "firm",  # equal figures have equal files
}


@dataclass(frozen=True)
class PaperFigure:
    """A figure and the data behind it."""

    figure: Figure
    header: Sequence[str]
    rows: Sequence[Sequence[str | float]]


def save_figure(figure: PaperFigure, stem: str | Path) -> list[Path]:
    """Writes STEM.png, STEM.svg and STEM.csv and returns their paths.

    Equal figures give equal files, byte for byte, with one version of matplotlib. The folder is
    created if absent.

    Raises:
        OSError: A file cannot be written.
    """
    stem = Path(stem)
    make_folder(stem.parent)
    png, svg, table = (stem.with_name(f"{stem.name}.{end}") for end in ("png", "svg", "csv"))
    with matplotlib.rc_context(STYLE):
        for file, unset in ((png, ("Software",)), (svg, ("Date", "Creator"))):
            content = io.BytesIO()
            metadata: Any = dict.fromkeys(unset)
            figure.figure.savefig(content, format=file.suffix[1:], dpi=DPI, metadata=metadata)
            replace_bytes(file, content.getvalue())
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(legible_data([figure.header, *figure.rows]))
    replace_file(table, text.getvalue())
    return [png, svg, table]


def plane_figure(
    clouds: Sequence[Cloud],
    objectives: Sequence[str],
    *,
    unit: str,
    base: PlanePoint | None = None,
) -> PaperFigure:
    """Returns the trade-off plane of `planes`; its data have one row per mean or model.

    The figure is one column wide for one pair of objectives, otherwise two.
    """
    panels = planes("plane", clouds, objectives, unit=unit, base=base)
    figure = static_figure(panels, has_titles=False)
    names = list(dict.fromkeys(name for cloud in clouds for s in cloud.spots for name in s.facts))
    header = ["group", "kind", *names, *objectives, *(f"{n} error" for n in objectives)]
    rows = [
        [
            cloud.key.label,
            "point" if spot in cloud.means else "single seed",
            *(spot.facts.get(name, "") for name in names),
            *(spot.place[name] for name in objectives),
            *(_error_text(spot.errors.get(name)) for name in objectives),
            "yes" if spot.is_dominated else "no",
        ]
        for cloud in clouds
        for spot in cloud.spots
    ]
    return PaperFigure(figure, [*header, "dominated"], rows)


def _error_text(error: Error | None) -> float | str:
    """Returns a standard error, or the distances to both ends of an interval, for a table."""
    return "" if error is None else " ".join(map(str, error)) if isinstance(error, tuple) else error


def curves_figure(panels: Sequence[Panel], *, x_title: str = "round") -> PaperFigure:
    """Returns curves over the rounds: means over the seeds with bands of one standard error.

    One panel is one column wide, several are two. The data are one row per panel, setting and
    round.

    Args:
        panels: Figures of `series_panel`.
        x_title: Unit of the x-axis.
    """
    for panel in panels:
        panel.figure["layout"]["xaxis"]["title"]["text"] = x_title
    figure = static_figure(panels)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    rows = [
        [panel.title, own.key.label, f"{x:g}", float(mean), float(error), own.num_seeds]
        for panel in panels
        for own in panel.series
        for x, mean, error in zip(own.xs, own.means, own.ses, strict=True)
    ]
    header = ["panel", "setting", x_title, "mean", "standard error", "seeds"]
    return PaperFigure(figure, header, rows)


def static_figure(panels: Sequence[Panel], *, has_titles: bool = True) -> Figure:
    """Returns a page's lines, bands and markers side by side, with one legend below them."""
    with matplotlib.rc_context(STYLE):
        names = {t["name"] for panel in panels for t in panel.figure["data"] if _is_named(t)}
        figure = _grid(len(panels), num_keys=len(names))
        for axes, panel in zip(figure.axes, panels, strict=True):
            layout = panel.figure["layout"]
            for trace in panel.figure["data"]:
                _draw(axes, trace)
            for name in ("x", "y"):
                own = layout[f"{name}axis"]
                axes.set(**{f"{name}label": unescape(own["title"]["text"])})
                if own.get("type") == "log":
                    axes.set(**{f"{name}scale": "log"})
            if has_titles:
                axes.set_title(panel.title)
        _legend(figure)
    return figure


def light_color(color: str) -> str:
    """Returns the value of a page's colour, such as `var(--objective-0)`, in the light scheme.

    >>> light_color("var(--objective-0)")
    '#0072b2'
    """
    return _palette()[color.removeprefix("var(--").removesuffix(")")]


@cache
def _palette() -> dict[str, str]:
    """Returns colours by name from the style sheet's first block, the light scheme."""
    style = (files("firm.report") / "style.css").read_text(encoding="utf-8")
    return dict(findall(r"--([\w-]+): (#\w{6})", style.partition("}")[0]))


def _is_named(trace: Trace) -> bool:
    return trace.get("showlegend", True) and trace.get("hoverinfo") != "skip"


def _draw(axes: Axes, trace: Trace) -> None:
    """Draws a line, a band or markers with error bars."""
    xs, ys = np.array(trace["x"], dtype=float), np.array(trace["y"], dtype=float)
    if "fill" in trace:
        color = light_color(trace["fillcolor"])
        axes.fill(xs, ys, color=color, alpha=trace["opacity"], linewidth=0)
        return
    label = unescape(trace["name"]) if _is_named(trace) else None
    if "lines" in trace["mode"]:
        line = trace["line"]
        width = POINTS_PER_PIXEL["line"] * line["width"]
        color, style = light_color(line["color"]), LINES.get(line.get("dash", "solid"), "-")
        axes.plot(xs, ys, style, color=color, linewidth=width, label=label)
        # the first artist of a trace carries its label, so that the legend lists it once
        label = None
    marker = trace.get("marker", {})
    if "markers" not in trace["mode"] or not isinstance(marker.get("color"), str):
        return
    symbols = marker.get("symbol", "circle")
    symbols = [symbols] * len(xs) if isinstance(symbols, str) else symbols
    color = light_color(marker["color"])
    bars = [trace.get(f"error_{name}", {}) for name in ("y", "x")]
    for place, symbol in enumerate(symbols):
        shape = symbol if symbol in MARKERS else symbol.removesuffix("-open")
        axes.errorbar(
            xs[place],
            ys[place],
            *(_lengths(own, place) for own in bars),
            fmt=MARKERS[shape],
            color=color,
            markersize=POINTS_PER_PIXEL["marker"] * marker["size"],
            markerfacecolor=color if shape == symbol else "white",
            alpha=marker.get("opacity", 1.0),
            elinewidth=0.7,
            label=label,
        )
        label = None


def _lengths(bars: dict[str, Any], place: int) -> list[list[float]] | None:
    """Returns the lengths of an error bar below and above its point; None without one."""
    above = bars.get("array")
    if above is None or above[place] is None:
        return None
    return [[own[place]] for own in (bars.get("arrayminus", above), above)]


def _grid(number: int, *, num_keys: int) -> Figure:
    """Returns a figure with `number` panels and space for a legend below them."""
    num_columns = min(number, 3)
    num_rows = -(-number // max(num_columns, 1))
    width = COLUMN_IN if number == 1 else PAGE_IN
    legend_in = 0.16 * -(-num_keys // (2 if number == 1 else 4)) + 0.1
    figure = Figure(figsize=(width, num_rows * PANEL_IN + legend_in), layout="constrained")
    FigureCanvasAgg(figure)
    for place in range(number):
        figure.add_subplot(num_rows, num_columns, place + 1)
    return figure


def _legend(figure: Figure) -> None:
    """Draws one legend for all panels, below them."""
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if "base model" in entries:  # matplotlib lists lines before markers; the base model goes last
        entries["base model"] = entries.pop("base model")
    if len(entries) > 1:
        handles, labels = list(entries.values()), list(entries)
        ncols = 2 if figure.get_figwidth() == COLUMN_IN else 4
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
