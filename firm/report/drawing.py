"""How every figure of the page is drawn: plain data for plotly.js in one style.

The objects of plotly.py would spend half a second of every round on checks that tests make once.
Colours are names of CSS variables, `var(--objective-0)`, which the page's script resolves for light
or dark.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import repeat
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from firm.report.tables import Series

INK, MUTED, GRID, SURFACE = "var(--ink)", "var(--muted)", "var(--grid)", "var(--surface)"

NUM_BANDS = 6
"""Around more lines, bands would hide one another."""

Points = Iterable[tuple[float, float | None]]
Trace = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """A figure and the title that stands above it."""

    name: str
    title: str
    figure: dict[str, Any]
    """Data and layout."""


@dataclass(frozen=True)
class Key:
    """An entry of the legend that several panels share."""

    label: str
    color: str
    mark: str = "solid"
    """A dash, "path" for the coloured path of the rounds, or "diamond"."""
    is_thin: bool = False


def curve(
    points: Points,
    name: str,
    color: str,
    *,
    width: float = 2,
    size: float = 5,
    dash: str = "solid",
    ses: Sequence[float | None] | None = None,
) -> Trace:
    """Returns a line over the rounds.

    Args:
        points: Rounds and values; a round without a finite value is left out.
        name: What the pointer shows.
        color: A CSS variable.
        width: Of the line, in CSS pixels.
        size: Of the markers, in CSS pixels; 0 for none.
        dash: One of plotly's dashes.
        ses: Standard error of each point.
    """
    errors = repeat(None) if ses is None else ses
    rows = zip(points, errors, strict=False)
    kept = [(x, y, se) for (x, y), se in rows if y is not None and isfinite(y)]
    return scatter(
        [x for x, _, _ in kept],
        [y for _, y, _ in kept],
        name,
        color,
        mode="lines+markers" if size else "lines",
        size=size,
        width=width,
        dash=dash,
        hover="%{fullData.name}<br>round %{x}: %{y:.4~g}",
        error_y=error_bars([se for _, _, se in kept], color),
    )


def scatter(
    xs: Iterable[float],
    ys: Iterable[float],
    name: str,
    color: str,
    *,
    mode: str = "markers",
    size: float = 5,
    width: float = 2,
    dash: str = "solid",
    hover: str = "",
    **attributes: Any,
) -> Trace:
    """Returns lines or markers.

    Args:
        xs: Places, [N].
        ys: Places, [N].
        name: What the legend shows.
        color: A CSS variable.
        mode: Of plotly: markers, lines, or both.
        size: Of the markers, in CSS pixels.
        width: Of the lines, in CSS pixels.
        dash: One of plotly's dashes.
        hover: What the pointer shows, a template of plotly; it shows nothing where it is empty.
        attributes: Further attributes of the trace.
    """
    pointer = {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    return {
        "type": "scatter",
        "x": list(xs),
        "y": list(ys),
        "name": escape(name),
        "mode": mode,
        "line": {"color": color, "width": width, "dash": dash},
        "marker": {"color": color, "size": size},
        **pointer,
        **attributes,
    }


def annotation(x: float, y: float, text: str, color: str, **attributes: Any) -> dict[str, Any]:
    """Returns words in a figure, without an arrow."""
    font = {"color": color, "size": 11}
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, **attributes}


def error_bars(ses: Sequence[float | None], color: str) -> dict[str, Any]:
    """Returns bars of one standard error to both sides of each point that has one."""
    if not any(ses):
        return {"visible": False}
    return {"array": list(ses), "color": color, "thickness": 1, "width": 3}


def rounds_figure(
    traces: Sequence[Trace], y_title: str, *, reference: float | None = None, **y_axis: Any
) -> dict[str, Any]:
    """Returns a figure whose x-axis counts the rounds so far.

    Args:
        traces: Those without points are left out.
        y_title: Quantity or unit.
        reference: Where a dashed horizontal line lies.
        y_axis: Further attributes of plotly's y-axis.
    """
    data = [trace for trace in traces if trace["x"]]
    rounds = [x for trace in data for x in trace["x"]] or [0]
    first, last = min(rounds), max(rounds)
    has_bars = any(trace["type"] == "bar" for trace in data)
    margin = 0.6 if has_bars else 0.03 * (last - first) + 0.2
    x_axis = {
        "title": axis_title("round"),
        "range": [first - margin, last + margin],
        "tickformat": "d",
        "tick0": 0,
        "dtick": _round_tick(last - first),
    }
    layout = style_layout(260, x_axis, {"title": axis_title(y_title), **y_axis})
    if reference is not None:
        line = {"color": MUTED, "width": 1, "dash": "dash"}
        ends = {"x0": 0, "x1": 1, "y0": reference, "y1": reference}
        layout["shapes"] = [
            {"type": "line", "xref": "x domain", **ends, "line": line, "layer": "below"}
        ]
    return {"data": data, "layout": layout}


def _round_tick(span: float) -> int:
    """The smallest of 1, 2, 5, 10, 20... that marks at most nine rounds."""
    steps = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    return next(step for step in steps if span / step <= 8)


def style_layout(height: int, x_axis: dict[str, Any], y_axis: dict[str, Any]) -> dict[str, Any]:
    """Returns what all figures share; heights are in CSS pixels."""
    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "automargin": True,
        "tickfont": {"color": MUTED},
    }
    return {
        "height": height,
        "paper_bgcolor": SURFACE,
        "plot_bgcolor": SURFACE,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": MUTED},
        "margin": {"l": 52, "r": 12, "t": 12, "b": 40},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": SURFACE,
            "bordercolor": MUTED,
            "font": {"color": INK},
            "namelength": -1,
        },
        "xaxis": axis | x_axis,
        "yaxis": axis | y_axis,
    }


def axis_title(text: str) -> dict[str, Any]:
    """Returns the title of an axis."""
    return {"text": text, "standoff": 8}


def nonempty(panels: Iterable[Panel]) -> list[Panel]:
    """Returns the panels that show anything."""
    return [panel for panel in panels if panel.figure["data"]]


def series_panel(
    name: str,
    title: str,
    series: Sequence["Series"],
    *,
    y_title: str,
    over: Literal["rounds", "megabytes"] = "rounds",
    num_bands: int = NUM_BANDS,
    **y_axis: Any,
) -> Panel:
    """Returns lines with bands of one standard error, bands below all lines.

    On a logarithmic axis no band reaches below a tenth of its line.

    Args:
        name: Of the panel, unique on its page.
        title: Of the panel.
        series: Means over seeds.
        y_title: Quantity or unit.
        over: What the x-axis counts.
        num_bands: Around more lines there are no bands.
        y_axis: As for `rounds_figure`.
    """
    least = 0.1 if y_axis.get("type") == "log" else -inf
    has_bands = len(series) <= num_bands
    traces = [_band(own, least) for own in series if has_bands and own.ses.any()]
    for own in series:
        points = list(zip(own.xs.tolist(), own.means.tolist(), strict=True))
        size = 5 if len(points) <= 12 else 0
        line = curve(points, own.key.label, own.key.color, size=size, dash=own.key.mark)
        line["legendgroup"] = escape(own.key.label)  # a line and its band come and go together
        if over == "megabytes":
            line["hovertemplate"] = "%{fullData.name}<br>%{x:.4~g} MB: %{y:.4~g}<extra></extra>"
        traces.append(line)
    figure = rounds_figure(traces, y_title, **y_axis)
    figure["layout"]["height"] = 300
    if over == "megabytes":
        end = max((float(own.xs[-1]) for own in series), default=0.0) or 1.0
        x_axis = {"title": axis_title("uploaded so far (MB)"), "range": [-0.02 * end, 1.03 * end]}
        figure["layout"] |= {"xaxis": style_layout(300, x_axis, {})["xaxis"]}
    return Panel(name, title, figure)


def _band(series: "Series", least: float) -> Trace:
    """One standard error to both sides of the means, never below that share of a mean."""
    upper, lower = series.means + series.ses, series.means - series.ses
    if least > 0:
        lower = np.maximum(lower, least * series.means)
    return {
        "type": "scatter",
        "x": [*series.xs.tolist(), *series.xs[::-1].tolist()],
        "y": [*upper.tolist(), *lower[::-1].tolist()],
        "mode": "lines",
        "line": {"color": series.key.color, "width": 0},
        "fill": "toself",
        "fillcolor": series.key.color,
        "opacity": 0.18,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": escape(series.key.label),
        "name": escape(series.key.label),
    }
