"""Draws the figures of all pages in one style, as plain data for plotly.js.

The objects of plotly.py would spend half a second of every round on checks that tests make once.
Colours are CSS variables, such as `var(--objective-0)`, which the page's script resolves for light
or dark.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import repeat
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

INK, MUTED, GRID, SURFACE = "var(--ink)", "var(--muted)", "var(--grid)", "var(--surface)"
DASHED = {"color": INK, "width": 1, "dash": "dash"}

Trace = dict[str, Any]
Error = float | tuple[float, float]
"""Standard error, or the distances from a value to both ends of its interval."""
Axis = dict[str, Any]
"""Attributes of one of plotly's axes."""
Over = Literal["rounds", "megabytes"]
"""Unit of an x-axis: rounds, or megabytes (10⁶ bytes) uploaded so far."""


@dataclass(frozen=True)
class LegendEntry:
    """An entry of the legend that several panels share."""

    label: str
    color: str
    mark: str = "solid"
    """A dash, or "path" for the coloured path of the rounds."""
    is_thin: bool = False


@dataclass(frozen=True, eq=False)
class Series:
    """A line: means at N places, for example over the seeds of a setting."""

    key: LegendEntry
    xs: np.ndarray
    means: np.ndarray
    ses: np.ndarray
    """Standard errors; zeros with one seed."""
    num_seeds: int = 1

    @classmethod
    def of(cls, key: LegendEntry, xs: ArrayLike, values: ArrayLike) -> "Series":
        """Returns means over the seeds from the values of each seed, [S, N]."""
        places, table = np.asarray(xs, dtype=float), np.asarray(values, dtype=float)
        return cls(key, places, *mean_and_error(table), len(table))


def mean_and_error(values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard error over the seeds, [S, N] to [N]; no error from one seed."""
    table = np.asarray(values, dtype=float)
    # the spread of a single seed is unknown; zeros draw no band
    if len(table) == 1:
        return table[0], np.zeros(table.shape[1])
    return table.mean(axis=0), table.std(axis=0, ddof=1) / len(table) ** 0.5


@dataclass(frozen=True)
class Panel:
    """A figure and the title above it."""

    name: str
    """Unique on its page."""
    title: str
    figure: dict[str, Any]
    """Data and layout."""
    series: Sequence[Series] = ()
    """The lines over the rounds, if they are means over seeds."""


# --- Traces ---------------------------------------------------------------------------------------


def scatter(
    key: LegendEntry,
    xs: Iterable[float],
    ys: Iterable[float],
    *,
    mode: str = "markers",
    size: float = 5,
    width: float = 2,
    hover: str = "",
    **attributes: Any,
) -> Trace:
    """Returns lines or markers in the colour and dash of a key; its label names the trace.

    The mode is one of plotly's: markers, lines, or both; sizes are in CSS pixels. `hover` is the
    template of the tooltip; without one there is no tooltip.
    """
    pointer = {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    return {
        "type": "scatter",
        "x": list(xs),
        "y": list(ys),
        "name": escape(key.label),
        "mode": mode,
        "line": {"color": key.color, "width": width, "dash": key.mark},
        "marker": {"color": key.color, "size": size},
        **pointer,
        **attributes,
    }


def curve(
    key: LegendEntry,
    points: Iterable[tuple[float, float | None]],
    *,
    width: float = 2,
    size: float = 5,
    ses: Sequence[Error | None] | None = None,
) -> Trace:
    """Returns a line over the rounds, with the error bar of each point.

    Rounds without a finite value are omitted. A size of 0 draws no markers.
    """
    rows = zip(points, repeat(None) if ses is None else ses, strict=False)
    kept = [(x, y, se) for (x, y), se in rows if y is not None and isfinite(y)]
    size = 5 if len(kept) == 1 else size  # a line needs two points
    return scatter(
        key,
        [x for x, _, _ in kept],
        [y for _, y, _ in kept],
        mode="lines+markers" if size else "lines",
        size=size,
        width=width,
        hover="%{fullData.name}<br>round %{x}: %{y:.4~g}",
        error_y=error_bars([se for _, _, se in kept], key.color),
    )


def error_bars(errors: Sequence[Error | None], color: str) -> dict[str, Any]:
    """Returns an error bar for each point that has one."""
    if not any(errors):
        return {"visible": False}
    below, above = zip(*map(reach, errors), strict=True)
    caps = 0 if None in errors else 3  # plotly draws the caps of missing bars, too
    bars = {"array": list(above), "color": color, "thickness": 1, "width": caps}
    return bars if below == above else bars | {"symmetric": False, "arrayminus": list(below)}


def reach(error: Error | None) -> tuple[float | None, float | None]:
    """Returns the lengths of an error bar below and above its point."""
    return error if isinstance(error, tuple) else (error, error)


def annotation(x: float, y: float, text: str, color: str, **attributes: Any) -> dict[str, Any]:
    """Returns a text in a figure, without an arrow."""
    font = {"color": color, "size": 11}
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, **attributes}


def straight_line(
    *, x: float | None = None, y: float | None = None, line: Any = DASHED, layer: str = "above"
) -> dict[str, Any]:
    """Returns a line across the figure, upright at x or level at y."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "y domain"}
    if y is not None:
        ends = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y}
    return {"type": "line", **ends, "line": line, "layer": layer}


# --- Figures --------------------------------------------------------------------------------------


def axis(title: str, **attributes: Any) -> Axis:
    """Returns an axis with a title."""
    return {"title": {"text": title, "standoff": 8}, **attributes}


def ticks_at(xs: np.ndarray) -> Axis:
    """Returns the attributes of an axis with ticks at exactly these values."""
    return {"tickvals": xs.tolist(), "ticktext": [f"{x:g}" for x in xs]}


def figure(
    data: Sequence[Trace], x: Axis, y: Axis, *, height: int = 340, **layout: Any
) -> dict[str, Any]:
    """Returns a figure in the common style; heights are in CSS pixels."""
    style = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True}
    style["tickfont"] = {"color": MUTED}
    hover_label = {"bgcolor": SURFACE, "bordercolor": MUTED, "font": {"color": INK}}
    shared = {
        "height": height,
        "paper_bgcolor": SURFACE,
        "plot_bgcolor": SURFACE,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": MUTED},
        "margin": {"l": 52, "r": 12, "t": 12, "b": 40},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {**hover_label, "namelength": -1},
        "xaxis": style | x,
        "yaxis": style | y,
    }
    return {"data": list(data), "layout": shared | layout}


def rounds_figure(
    traces: Iterable[Trace],
    y_title: str,
    *,
    over: Over = "rounds",
    reference: float | None = None,
    height: int = 260,
    **y_axis: Any,
) -> dict[str, Any]:
    """Returns a figure over the rounds or over the megabytes uploaded so far.

    Traces without points are omitted. A dashed horizontal line marks the reference.
    """
    data = [trace for trace in traces if trace["x"]]
    xs = [x for trace in data for x in trace["x"]] or [0]
    values = {y for trace in data for y in trace["y"]}
    has_bars = any("array" in trace.get("error_y", {}) for trace in data)
    if len(values) == 1 and reference is None and not has_bars and not y_axis:
        (value,) = values  # plotly would leave ±1 around it
        gap = 0.1 * abs(value) or 0.05
        y_axis = {"range": [value - gap, value + gap]}
    made = figure(data, _x_axis(xs, over), axis(y_title, **y_axis), height=height)
    if reference is not None:
        line = DASHED | {"color": MUTED}
        made["layout"]["shapes"] = [straight_line(y=reference, line=line, layer="below")]
    return made


def _x_axis(xs: Sequence[float], over: Over) -> Axis:
    first, last = min(xs), max(xs)
    if over == "megabytes":
        end = last or 1.0
        return axis("uploaded so far (MB)", range=[-0.02 * end, 1.03 * end])
    margin = 0.03 * (last - first) + 0.2
    # plotly would mark half rounds in short runs
    steps = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    tick = next(step for step in steps if (last - first) / step <= 8)  # at most nine marks
    ticks = {"tickformat": "d", "tick0": 0, "dtick": tick}
    return axis("round", range=[first - margin, last + margin], **ticks)


def nonempty(panels: Iterable[Panel]) -> list[Panel]:
    """Drops panels without data."""
    return [panel for panel in panels if panel.figure["data"]]


def constant(panel: Panel) -> str:
    """Returns the value that all lines have in all of several rounds, or "" if it varies.

    Values that are equal to three digits count as one.
    """
    data = panel.figure["data"]
    values = {f"{y:.3g}" for trace in data for y in trace["y"]}
    if len(values) != 1 or len({x for trace in data for x in trace["x"]}) == 1:
        return ""
    (value,) = values
    is_share = "%" in panel.figure["layout"]["yaxis"].get("tickformat", "")
    return f"{100 * float(value):g} %" if is_share else value


def series_panel(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    y_title: str,
    over: Over = "rounds",
    **y_axis: Any,
) -> Panel:
    """Returns lines with bands of one standard error, drawn below all lines.

    On a logarithmic axis bands stop at a tenth of their line.
    """
    # a band down to zero would stretch a logarithmic axis over many decades
    least = 0.1 if y_axis.get("type") == "log" else -inf
    traces = [_band(own, least) for own in series if own.ses.any()]
    for own in series:
        points = list(zip(own.xs.tolist(), own.means.tolist(), strict=True))
        line = curve(own.key, points, size=5 if len(points) <= 12 else 0)
        line["legendgroup"] = line["name"]  # a line and its band are shown and hidden together
        if over == "megabytes":
            line["hovertemplate"] = "%{fullData.name}<br>%{x:.4~g} MB: %{y:.4~g}<extra></extra>"
        traces.append(line)
    made = rounds_figure(traces, y_title, over=over, height=300, **y_axis)
    return Panel(name, title, made, series)


def _band(series: Series, least: float) -> Trace:
    """Returns the band of ± one standard error, cut off below at a share of the mean."""
    upper, lower = series.means + series.ses, series.means - series.ses
    if least > 0:
        lower = np.maximum(lower, least * series.means)
    return scatter(
        series.key,
        [*series.xs.tolist(), *series.xs[::-1].tolist()],
        [*upper.tolist(), *lower[::-1].tolist()],
        mode="lines",
        line={"color": series.key.color, "width": 0},
        fill="toself",
        fillcolor=series.key.color,
        opacity=0.18,
        showlegend=False,
        legendgroup=escape(series.key.label),
    )


def points_panel(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    labels: Sequence[str] = (),
    **y_axis: Any,
) -> Panel:
    """Returns a quantity against a parameter, such as the local steps, or against named places.

    The parameter's values are evenly spaced in rising order, so that 0 can be shown, too. Named
    places are numbered from 0, and `labels` has their names.
    """
    values = np.unique(np.concatenate([own.xs for own in series])) if series else np.empty(0)
    ticks = [escape(label) for label in labels] or [f"{value:g}" for value in values]
    data = []
    for own in series:
        places = np.searchsorted(values, own.xs).tolist()
        points = zip(places, own.means.tolist(), strict=True)
        trace = curve(own.key, points, size=7, ses=own.ses.tolist())
        trace["customdata"] = [ticks[place] for place in places]
        trace["legendgroup"] = trace["name"]
        hover = f"%{{fullData.name}}<br>{escape(x_title)} %{{customdata}}: %{{y:.4~g}}"
        data.append(trace | {"hovertemplate": f"{hover}<extra></extra>"})
    span = {"range": [-0.3, len(values) - 0.7], "tickvals": list(range(len(values)))}
    x_axis = axis(escape(x_title), **span, ticktext=ticks)
    return Panel(name, title, figure(data, x_axis, axis(y_title, **y_axis)))
