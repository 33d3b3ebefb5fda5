"""Figures that set algorithms of the classic wing side by side, from the rows of their runs.

An algorithm has the same colour in every figure. Lines are means over the seeds, bands and bars
one standard error to both sides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from firm.report.drawing import (
    GRID,
    INK,
    MUTED,
    SURFACE,
    Key,
    Panel,
    Trace,
    axis_title,
    curve,
    error_bars,
    rounds_figure,
    style_layout,
)
from firm.report.scaling import ticks_at
from firm.run.directory import Row

COLORS = (
    "var(--objective-0)",
    "var(--objective-1)",
    "var(--objective-2)",
    "var(--objective-3)",
    "var(--objective-4)",
    "var(--client-0)",
    "var(--client-1)",
    "var(--client-7)",
)
DASHES = ("solid", "dash", "dot")
"""Algorithms past the number of colours are told apart by their line."""

NBSP = "\N{NO-BREAK SPACE}"
NUM_BANDS = 6
"""Around more lines, bands would hide one another."""
SPOKE_WIDTH = 11
"""Characters in a line of an objective's name beside a radar chart."""
DASHED = {"color": INK, "width": 1, "dash": "dash"}

Value = Callable[[Row], float | None]
"""What a figure shows of a row; None where the row does not have it."""
Field = Literal["accuracies", "losses"]


@dataclass(frozen=True)
class AlgorithmRuns:
    """One algorithm's runs, which differ by their seed alone."""

    name: str
    color: int
    """Place among the colours, from 0."""
    seeds: Sequence[Sequence[Row]]
    """Rows of each run. "round" is in every row; "bytes_up", the bytes uploaded in that round
    alone, "losses" and "accuracies", both by objective, where they were measured. Round 0 is the
    initial model. What belongs to a round may stand in one row or in several."""
    left_out: Sequence[str] = ()
    """What was not valid in the logs behind the rows."""

    @property
    def key(self) -> Key:
        """Its entry in a legend."""
        dash = DASHES[self.color // len(COLORS) % len(DASHES)]
        return Key(self.name, COLORS[self.color % len(COLORS)], dash)


@dataclass(frozen=True, eq=False)
class Series:
    """One algorithm's means over its seeds, at N places."""

    key: Key
    xs: np.ndarray
    means: np.ndarray
    ses: np.ndarray
    """Standard errors; zeros with one seed."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where an algorithm's runs with one preference ended."""

    key: Key
    preference: tuple[float, float]
    """r, positive: it asks for r₁F₁ = r₂F₂."""
    losses: np.ndarray
    """Final losses of both objectives, shape [S, 2]."""

    @property
    def ratio(self) -> str:
        """The preference as people write it."""
        return " : ".join(f"{r:g}" for r in self.preference)


@dataclass(frozen=True, eq=False)
class Users:
    """The users' accuracies under one algorithm."""

    key: Key
    accuracies: np.ndarray
    """Of each seed and user, shape [S, C]."""


# --- From rows to series --------------------------------------------------------------------------


def of_objective(field: Field, objective: str) -> Value:
    """Returns what takes one objective's loss or accuracy."""
    return lambda row: (row.get(field) or {}).get(objective)


def mean_of(field: Field) -> Value:
    """Returns what takes the mean over the objectives."""
    return lambda row: float(np.mean(_values(row, field))) if row.get(field) else None


def worst_of(field: Field) -> Value:
    """Returns what takes the worst objective's: the lowest accuracy or the highest loss."""
    worst = np.min if field == "accuracies" else np.max
    return lambda row: float(worst(_values(row, field))) if row.get(field) else None


def _values(row: Row, field: Field) -> np.ndarray:
    """The values by objective; NaN for one that was not measured."""
    return np.array(list(row[field].values()), dtype=float)


def values_by_round(rows: Sequence[Row], value: Value) -> dict[int, float]:
    """Returns what one run measured, by rising round; a value that is not finite is left out."""
    values = ((row["round"], value(row)) for row in rows)
    return dict(sorted((at, y) for at, y in values if y is not None and math.isfinite(y)))


def uploaded(rows: Sequence[Row]) -> dict[int, float]:
    """Returns the bytes that one run uploaded up to each round; empty if it did not count them."""
    by_round: dict[int, float] = {}
    for row in rows:
        if row.get("bytes_up") is not None:
            by_round[row["round"]] = by_round.get(row["round"], 0) + row["bytes_up"]
    ends = sorted(by_round)
    return dict(zip(ends, accumulate(by_round[at] for at in ends), strict=True))


def series_of(
    runs: AlgorithmRuns,
    value: Value,
    *,
    over: Literal["rounds", "megabytes"] = "rounds",
    window: int = 1,
) -> Series | None:
    """Returns a quantity's mean over the seeds, in the rounds in which all of them have it.

    A seed that has it in no round is left out.

    Args:
        runs: The algorithm.
        value: The quantity.
        over: What the x-axis counts: rounds, or megabytes (10⁶ bytes) uploaded so far, averaged
            over the seeds.
        window: Each point is the mean of so many values of a seed, up to its round; the error is
            that of these means.

    Returns:
        None where nothing is left to show.
    """
    seeds = [(rows, found) for rows in runs.seeds if (found := values_by_round(rows, value))]
    if not seeds:
        return None
    by_seed = [values for _, values in seeds]
    rounds = [at for at in by_seed[0] if all(at in values for values in by_seed)]
    if over == "megabytes":
        uploads = [uploaded(rows) for rows, _ in seeds]
        if not all(uploads):
            return None
        xs = [np.mean([_up_to(upload, at) for upload in uploads]) / 1e6 for at in rounds]
    else:
        xs = rounds
    if len(rounds) < window:
        return None
    table = np.array([[values[at] for at in rounds] for values in by_seed])  # [S, N]
    means, ses = mean_and_error(sliding_window_view(table, window, axis=1).mean(axis=2))
    return Series(runs.key, np.array(xs[window - 1 :], dtype=float), means, ses)


def mean_and_error(values: Sequence[Sequence[float]] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard error over the seeds, [S, N] to [N]; no error from one seed."""
    table = np.asarray(values, dtype=float)
    if len(table) == 1:
        return table[0], np.zeros(table.shape[1])
    return table.mean(axis=0), table.std(axis=0, ddof=1) / len(table) ** 0.5


def _up_to(upload: Mapping[int, float], round_number: int) -> float:
    """What was uploaded up to a round in which the run may have counted nothing."""
    return max((sent for at, sent in upload.items() if at <= round_number), default=0.0)


# --- Curves ---------------------------------------------------------------------------------------


def curves_panel(
    name: str,
    title: str,
    algorithms: Sequence[AlgorithmRuns],
    value: Value,
    *,
    y_title: str,
    over: Literal["rounds", "megabytes"] = "rounds",
    **y_axis: Any,
) -> Panel:
    """Returns a quantity of all algorithms over the rounds or the uploaded megabytes.

    Args:
        name: Of the panel, unique on its page.
        title: Of the panel.
        algorithms: An algorithm without the quantity is left out.
        value: The quantity.
        y_title: Its name or unit.
        over: What the x-axis counts.
        y_axis: Further attributes of plotly's y-axis.
    """
    series = [series_of(runs, value, over=over) for runs in algorithms]
    return series_panel(name, title, [s for s in series if s], y_title=y_title, over=over, **y_axis)


def series_panel(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    y_title: str,
    over: Literal["rounds", "megabytes"] = "rounds",
    num_bands: int = NUM_BANDS,
    **y_axis: Any,
) -> Panel:
    """Returns lines with bands of one standard error, bands below all lines.

    On a logarithmic axis no band reaches below a tenth of its line. Around more than ``num_bands``
    lines there are none.
    """
    least = 0.1 if y_axis.get("type") == "log" else -math.inf
    has_bands = len(series) <= num_bands
    traces = [_band(one, least) for one in series if has_bands and one.ses.any()]
    for one in series:
        points = list(zip(one.xs.tolist(), one.means.tolist(), strict=True))
        size = 5 if len(points) <= 12 else 0
        line = curve(points, one.key.label, one.key.color, size=size, dash=one.key.mark)
        line["legendgroup"] = escape(one.key.label)  # a line and its band come and go together
        if over == "megabytes":
            line["hovertemplate"] = "%{fullData.name}<br>%{x:.4~g} MB: %{y:.4~g}<extra></extra>"
        traces.append(line)
    figure = rounds_figure(traces, y_title, **y_axis)
    figure["layout"]["height"] = 300
    if over == "megabytes":
        end = max((float(one.xs[-1]) for one in series), default=0.0) or 1.0
        x_axis = {"title": axis_title("uploaded so far (MB)"), "range": [-0.02 * end, 1.03 * end]}
        figure["layout"] |= {"xaxis": style_layout(300, x_axis, {})["xaxis"]}
    return Panel(name, title, figure)


def _band(series: Series, least: float) -> Trace:
    """One standard error to both sides of the means, as a shape without outline.

    Args:
        series: What the band belongs to.
        least: Share of the mean below which it does not reach.
    """
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


# --- Against a setting ----------------------------------------------------------------------------


def points_panel(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    reference: tuple[str, float] | None = None,
    **y_axis: Any,
) -> Panel:
    """Returns a quantity against a setting, such as the local steps or the size of an attack.

    The settings stand side by side in rising order, whatever they are, 0 too.

    Args:
        name: Of the panel.
        title: Of the panel.
        series: One per algorithm.
        x_title: The setting.
        y_title: The quantity.
        reference: Name and height of a dashed horizontal line.
        y_axis: Further attributes of plotly's y-axis.
    """
    settings = np.unique(np.concatenate([one.xs for one in series])) if series else np.empty(0)
    place = dict(zip(settings.tolist(), range(len(settings)), strict=True))
    data = []
    for one in series:
        xs = [place[x] for x in one.xs.tolist()]
        points = list(zip(xs, one.means.tolist(), strict=True))
        trace = curve(points, one.key.label, one.key.color, size=7, dash=one.key.mark)
        trace["error_y"] = error_bars(one.ses.tolist(), one.key.color)
        trace["customdata"] = one.xs.tolist()
        trace["hovertemplate"] = (
            f"%{{fullData.name}}<br>{escape(x_title)} %{{customdata:~g}}: %{{y:.4~g}}"
            "<extra></extra>"
        )
        data.append(trace)
    x_axis = {
        "title": axis_title(escape(x_title)),
        "range": [-0.3, len(settings) - 0.7],
        **ticks_at(settings),
        "tickvals": list(range(len(settings))),
    }
    layout = style_layout(340, x_axis, {"title": axis_title(y_title), **y_axis})
    if reference is not None:
        layout |= {"shapes": [_line(y=reference[1])], "annotations": [_note(*reference)]}
    return Panel(name, title, {"data": data, "layout": layout})


def _line(*, x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """A dashed line across the figure, upright at x or level at y."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "y domain"}
    if y is not None:
        ends = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y}
    return {"type": "line", **ends, "line": DASHED, "layer": "above"}


def _note(text: str, y: float) -> dict[str, Any]:
    """Words on a level line, at its right end."""
    return {
        "xref": "x domain",
        "x": 1,
        "y": y,
        "text": escape(text),
        "showarrow": False,
        "xanchor": "right",
        "yanchor": "bottom",
        "font": {"color": MUTED, "size": 11},
    }


# --- Many objectives ------------------------------------------------------------------------------


def radar_panel(
    name: str,
    title: str,
    values: Mapping[Key, Sequence[float]],
    objectives: Sequence[str],
    *,
    span: tuple[float, float] | None = None,
    **radial_axis: Any,
) -> Panel:
    """Returns a radar chart: one spoke per objective, one closed line per algorithm.

    Args:
        name: Of the panel.
        title: Of the panel.
        values: Each algorithm's value per objective, M of them, on one scale.
        objectives: M names, at least three.
        span: Values at the centre and at the rim; 0 and the largest one by default. Say in the
            title where the centre is not 0.
        radial_axis: Further attributes of plotly's radial axis.

    Raises:
        ValueError: With fewer than three objectives, or another number of values.
    """
    if len(objectives) < 3:
        raise ValueError(f"A radar chart needs at least 3 objectives, got {len(objectives)}.")
    for key, radii in values.items():
        if len(radii) != len(objectives):
            raise ValueError(
                f"{key.label} must have a value for each of the {len(objectives)} objectives, "
                f"got {len(radii)}."
            )
    broken = [
        wrap(name.replace("_", "_ "), SPOKE_WIDTH, break_long_words=False) for name in objectives
    ]
    spokes = ["<br>".join(escape(line.replace("_ ", "_")) for line in name) for name in broken]
    data = [
        {
            "type": "scatterpolar",
            "r": [*radii, radii[0]],
            "theta": [*spokes, spokes[0]],
            "name": escape(key.label),
            "mode": "lines+markers",
            "line": {"color": key.color, "width": 2, "dash": key.mark},
            "marker": {"color": key.color, "size": 4},
            "cliponaxis": False,
            "hovertemplate": "%{fullData.name}<br>%{theta}: %{r:.3~g}<extra></extra>",
        }
        for key, radii in values.items()
    ]
    largest = max((max(radii) for radii in values.values()), default=1.0)
    lines = {"gridcolor": GRID, "linecolor": GRID}
    layout = style_layout(460, {}, {})
    del layout["xaxis"], layout["yaxis"]
    longest = max(len(line) for name in broken for line in name)
    side = max(40, 16 + 6 * longest)  # CSS pixels; the names stand outside the circle
    layout["margin"] = {"l": side, "r": side, "t": 40, "b": 40}
    layout["polar"] = {
        "bgcolor": SURFACE,
        "radialaxis": {
            **lines,
            "range": list(span or (0.0, largest)),
            "nticks": 5,
            "angle": 90,
            "tickangle": 90,
            "tickfont": {"color": MUTED, "size": 10},
            **radial_axis,
        },
        "angularaxis": {
            **lines,
            "rotation": 90,
            "direction": "clockwise",
            "tickfont": {"color": INK, "size": 11 if len(objectives) <= 16 else 9},
        },
    }
    return Panel(name, title, {"data": data, "layout": layout})


# --- The loss plane -------------------------------------------------------------------------------


def preference_plane(
    name: str,
    title: str,
    outcomes: Sequence[Outcome],
    *,
    objectives: tuple[str, str],
    limits: tuple[float, float] | None = None,
) -> Panel:
    """Returns where each preference asked the losses to end, as a ray, and where they ended.

    On the ray of r both r₁F₁ and r₂F₂ are equal (Figure 4 of FedCMOO, Askin et al.).

    Args:
        name: Of the panel.
        title: Of the panel.
        outcomes: One per algorithm with a preference.
        objectives: Names of both objectives.
        limits: Least loss of each objective trained alone; what lies beyond is grey, for no model
            is expected there.

    Raises:
        ValueError: On a preference that is not positive, or losses of another shape.
    """
    _check(outcomes)
    ends = [mean_and_error(outcome.losses) for outcome in outcomes]
    reach = np.array([means + ses for means, ses in ends] + [limits or (0.0, 0.0)]).max(axis=0)
    width, height = (1.12 * reach).tolist()
    rays, points, notes = [], [], []
    for outcome, (means, ses) in zip(outcomes, ends, strict=True):
        key, label, ratio = outcome.key, escape(outcome.key.label), outcome.ratio
        slope = outcome.preference[0] / outcome.preference[1]
        far = min(width, height / slope)
        notes.append(
            {
                "x": far,
                "y": far * slope,
                "text": ratio,
                "showarrow": False,
                "xanchor": "left" if far == width else "center",
                "yanchor": "middle" if far == width else "bottom",
                "font": {"color": key.color, "size": 11},
            }
        )
        rays.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [0, far],
                "y": [0, far * slope],
                "line": {"color": key.color, "width": 1.5, "dash": "dot"},
                "hoverinfo": "skip",
                "name": f"{label}, wanted",
            }
        )
        points.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [float(means[0])],
                "y": [float(means[1])],
                "error_x": error_bars([float(ses[0])], key.color),
                "error_y": error_bars([float(ses[1])], key.color),
                "marker": {"color": key.color, "size": 11, "line": {"color": INK, "width": 1}},
                "name": label,
                "hovertemplate": f"%{{fullData.name}}, wanted {ratio}"
                f"<br>{escape(objectives[0])} %{{x:.3~g}}<br>{escape(objectives[1])} %{{y:.3~g}}"
                "<extra></extra>",
            }
        )
    x_title, y_title = (axis_title(f"loss, {escape(objective)}") for objective in objectives)
    layout = style_layout(
        460, {"title": x_title, "range": [0, width]}, {"title": y_title, "range": [0, height]}
    )
    layout["annotations"] = notes
    layout["margin"] = {"l": 52, "r": 44, "t": 28, "b": 40}  # the notes stand outside the axes
    if limits is not None:
        layout["shapes"] = [
            _grey(x1=limits[0], y1=height),
            _grey(x0=limits[0], x1=width, y1=limits[1]),
            _line(x=limits[0]),
            _line(y=limits[1]),
        ]
    return Panel(name, title, {"data": [*rays, *points], "layout": layout})


def ratios_panel(
    name: str, title: str, outcomes: Sequence[Outcome], *, objectives: tuple[str, str]
) -> Panel:
    """Returns the ratios of the losses F₁/F₂, that of each seed, against the wanted r₂/r₁.

    Both axes are logarithmic; on the dashed diagonal a preference is met. A seed with a loss of 0
    has no place.

    Args:
        name: Of the panel.
        title: Of the panel.
        outcomes: One per algorithm with a preference.
        objectives: Names of both objectives.

    Raises:
        ValueError: On a preference that is not positive, or losses of another shape.
    """
    _check(outcomes)
    data, ends = [], []
    for outcome in outcomes:
        wanted = outcome.preference[1] / outcome.preference[0]
        losses = outcome.losses[(outcome.losses > 0).all(axis=1)]
        reached = (losses[:, 0] / losses[:, 1]).tolist()
        ends += [wanted, *reached]
        color = outcome.key.color
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [wanted] * len(reached),
                "y": reached,
                "marker": {"color": color, "size": 8, "line": {"color": INK, "width": 1}},
                "name": escape(outcome.key.label),
                "hovertemplate": f"%{{fullData.name}}, wanted {outcome.ratio}"
                "<br>ratio %{x:.3~g}, reached %{y:.3~g}<extra></extra>",
            }
        )
    low, high = 0.8 * min(ends), 1.25 * max(ends)
    axis = {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickformat": "~g",
        "dtick": "D2",  # ticks at 1, 2, 5
    }
    quotient = f"{escape(objectives[0])} / {escape(objectives[1])}"
    layout = style_layout(
        460,
        {"title": axis_title(f"wanted ratio of losses, {quotient}"), **axis},
        {"title": axis_title(f"reached ratio, {quotient}"), **axis},
    )
    diagonal = {"x0": low, "y0": low, "x1": high, "y1": high, "layer": "below"}
    layout["shapes"] = [{"type": "line", **diagonal, "line": DASHED}]
    return Panel(name, title, {"data": data, "layout": layout})


def _check(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if min(outcome.preference) <= 0:
            raise ValueError(f"A preference must be positive, got {outcome.preference}.")
        if outcome.losses.ndim != 2 or outcome.losses.shape[1] != 2:
            raise ValueError(
                f"Losses must have shape [S, 2] for S seeds, got {list(outcome.losses.shape)}."
            )


def _grey(*, x0: float = 0, x1: float, y1: float) -> dict[str, Any]:
    """A grey rectangle that stands on the x-axis."""
    box = {"x0": x0, "y0": 0, "x1": x1, "y1": y1, "line": {"width": 0}}
    return {"type": "rect", **box, "fillcolor": MUTED, "opacity": 0.16, "layer": "below"}


# --- Users ----------------------------------------------------------------------------------------


def user_histograms(name: str, users: Sequence[Users], *, num_bins: int = 20) -> list[Panel]:
    """Returns how the users' accuracies are spread, one histogram per algorithm on equal axes.

    The users of all seeds are counted together. A dashed line marks their mean; the titles say mean
    and standard deviation, that of the users of one seed averaged over the seeds.

    Args:
        name: What the panels' names begin with.
        users: One per algorithm.
        num_bins: Bins between the lowest and the highest accuracy of all.

    Raises:
        ValueError: On accuracies that are not of shape [S, C], or outside [0, 1].
    """
    for one in users:
        values = one.accuracies
        if values.ndim != 2 or not values.size or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(
                f"Accuracies of {one.key.label} must be numbers in [0, 1] of shape [S, C], got "
                f"shape {list(values.shape)} from {values.min(initial=1):g} to "
                f"{values.max(initial=0):g}."
            )
    everyone = np.concatenate([one.accuracies.ravel() for one in users])
    low, high = everyone.min(), everyone.max()
    if low == high:
        low, high = max(low - 0.05, 0.0), min(high + 0.05, 1.0)
    edges = np.linspace(low, high, num_bins + 1)
    shares = [np.histogram(one.accuracies, edges)[0] / one.accuracies.size for one in users]
    top = 1.08 * max(share.max() for share in shares)
    panels = []
    for place, (one, share) in enumerate(zip(users, shares, strict=True)):
        mean, std = one.accuracies.mean(), one.accuracies.std(axis=1).mean()
        bars = {
            "type": "bar",
            "x": ((edges[:-1] + edges[1:]) / 2).tolist(),
            "y": share.tolist(),
            "width": float(edges[1] - edges[0]),
            "name": escape(one.key.label),
            "marker": {"color": one.key.color, "line": {"color": SURFACE, "width": 1}},
            "hovertemplate": "accuracy %{x:.1%}: %{y:.1%} of the users<extra></extra>",
        }
        x_axis = {
            "title": axis_title("accuracy of a user"),
            "range": [float(low), float(high)],
            "tickformat": "~%",
        }
        y_axis = {
            "title": axis_title("share of users"),
            "range": [0, float(top)],
            "tickformat": "~%",
        }
        layout = style_layout(240, x_axis, y_axis) | {"shapes": [_line(x=float(mean))]}
        title = f"{one.key.label}: mean{NBSP}{100 * mean:.1f}{NBSP}%, SD{NBSP}{100 * std:.1f}"
        panels.append(Panel(f"{name}-{place}", title, {"data": [bars], "layout": layout}))
    return panels
