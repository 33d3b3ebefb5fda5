"""Figures that set settings of the classic wing side by side.

A setting has the same colour in every figure. Lines are means over the seeds, bands and bars one
standard error to both sides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np

from firm.report.drawing import (
    GRID,
    INK,
    MUTED,
    SURFACE,
    Key,
    Panel,
    Trace,
    annotation,
    axis_title,
    curve,
    error_bars,
    scatter,
    style_layout,
)
from firm.report.formats import NBSP
from firm.report.scaling import ticks_at
from firm.report.tables import Series, mean_and_error

SPOKE_WIDTH = 11
"""Characters in a line of an objective's name beside a radar chart."""
DASHED = {"color": INK, "width": 1, "dash": "dash"}


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the runs of a setting with one preference ended."""

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
    """The users' accuracies under one setting."""

    key: Key
    accuracies: np.ndarray
    """Of each seed and user, shape [S, C]."""


# --- Against a parameter --------------------------------------------------------------------------


def points_panel(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    **y_axis: Any,
) -> Panel:
    """Returns a quantity against a parameter, such as the local steps or the size of an attack.

    Its values stand side by side in rising order, whatever they are, 0 too.

    Args:
        name: Of the panel.
        title: Of the panel.
        series: One per line.
        x_title: The parameter.
        y_title: The quantity.
        y_axis: Further attributes of plotly's y-axis.
    """
    values = np.unique(np.concatenate([own.xs for own in series])) if series else np.empty(0)
    place = dict(zip(values.tolist(), range(len(values)), strict=True))
    data = []
    for own in series:
        xs = [place[x] for x in own.xs.tolist()]
        points = list(zip(xs, own.means.tolist(), strict=True))
        trace = curve(points, own.key.label, own.key.color, size=7, dash=own.key.mark)
        trace["error_y"] = error_bars(own.ses.tolist(), own.key.color)
        trace["customdata"] = own.xs.tolist()
        trace["hovertemplate"] = (
            f"%{{fullData.name}}<br>{escape(x_title)} %{{customdata:~g}}: %{{y:.4~g}}"
            "<extra></extra>"
        )
        data.append(trace)
    x_axis = {
        "title": axis_title(escape(x_title)),
        "range": [-0.3, len(values) - 0.7],
        **ticks_at(values),
        "tickvals": list(range(len(values))),
    }
    layout = style_layout(340, x_axis, {"title": axis_title(y_title), **y_axis})
    return Panel(name, title, {"data": data, "layout": layout})


def _line(*, x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """A dashed line across the figure, upright at x or level at y."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "y domain"}
    if y is not None:
        ends = {"x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y}
    return {"type": "line", **ends, "line": DASHED, "layer": "above"}


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
    """Returns a radar chart: one spoke per objective, one closed line per setting.

    Args:
        name: Of the panel.
        title: Of the panel.
        values: Each setting's value per objective, M of them, on one scale.
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
    longest = max(len(line) for name in broken for line in name)
    layout = _radar_layout(
        len(objectives), longest, {"range": list(span or (0.0, largest)), **radial_axis}
    )
    return Panel(name, title, {"data": data, "layout": layout})


def _radar_layout(num_spokes: int, longest: int, radial_axis: dict[str, Any]) -> dict[str, Any]:
    """Room for names of so many characters outside the circle, and its axes."""
    lines = {"gridcolor": GRID, "linecolor": GRID}
    layout = style_layout(460, {}, {})
    del layout["xaxis"], layout["yaxis"]
    side = max(40, 16 + 6 * longest)  # CSS pixels
    layout["margin"] = {"l": side, "r": side, "t": 40, "b": 40}
    layout["polar"] = {
        "bgcolor": SURFACE,
        "radialaxis": {
            **lines,
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
            "tickfont": {"color": INK, "size": 11 if num_spokes <= 16 else 9},
        },
    }
    return layout


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
        outcomes: One per setting with a preference.
        objectives: Names of both objectives.
        limits: Least loss of each objective trained alone; what lies beyond is grey, for no model
            is expected there.

    Raises:
        ValueError: On a preference that is not positive, or losses of another shape.
    """
    _check(outcomes)
    reached = [mean_and_error(outcome.losses) for outcome in outcomes]
    reach = np.array([means + ses for means, ses in reached] + [limits or (0.0, 0.0)]).max(axis=0)
    width, height = (1.12 * reach).tolist()
    data, notes = [], []
    for outcome, (means, ses) in zip(outcomes, reached, strict=True):
        slope = outcome.preference[0] / outcome.preference[1]
        far = min(width, height / slope)
        is_right = far == width
        notes.append(
            annotation(
                far,
                far * slope,
                outcome.ratio,
                outcome.key.color,
                xanchor="left" if is_right else "center",
                yanchor="middle" if is_right else "bottom",
            )
        )
        data += _wanted_and_reached(outcome, (far, far * slope), means, ses, objectives)
    # the rays lie below all points
    data.sort(key=lambda trace: trace["mode"] != "lines")
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
    return Panel(name, title, {"data": data, "layout": layout})


def _wanted_and_reached(
    outcome: Outcome,
    end: tuple[float, float],
    means: np.ndarray,
    ses: np.ndarray,
    objectives: tuple[str, str],
) -> list[Trace]:
    """The ray up to its end at the border, and where the losses ended."""
    key, (x, y) = outcome.key, (escape(name) for name in objectives)
    ray = scatter(
        [0, end[0]],
        [0, end[1]],
        f"{key.label}, wanted",
        key.color,
        mode="lines",
        width=1.5,
        dash="dot",
    )
    point = scatter(
        means[:1].tolist(),
        means[1:].tolist(),
        key.label,
        key.color,
        hover=f"%{{fullData.name}}, wanted {outcome.ratio}<br>{x} %{{x:.3~g}}<br>{y} %{{y:.3~g}}",
        error_x=error_bars(ses[:1].tolist(), key.color),
        error_y=error_bars(ses[1:].tolist(), key.color),
        marker={"color": key.color, "size": 11, "line": {"color": INK, "width": 1}},
    )
    return [ray, point]


def ratios_panel(
    name: str, title: str, outcomes: Sequence[Outcome], *, objectives: tuple[str, str]
) -> Panel:
    """Returns the ratios of the losses F₁/F₂, that of each seed, against the wanted r₂/r₁.

    Both axes are logarithmic; on the dashed diagonal a preference is met. A seed with a loss of 0
    has no place.

    Args:
        name: Of the panel.
        title: Of the panel.
        outcomes: One per setting with a preference.
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
            scatter(
                [wanted] * len(reached),
                reached,
                outcome.key.label,
                color,
                hover=f"%{{fullData.name}}, wanted {outcome.ratio}"
                "<br>ratio %{x:.3~g}, reached %{y:.3~g}",
                marker={"color": color, "size": 8, "line": {"color": INK, "width": 1}},
            )
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
    """Returns how the users' accuracies are spread, one histogram per setting on equal axes.

    The users of all seeds are counted together. A dashed line marks their mean; the titles say mean
    and standard deviation, that of the users of one seed averaged over the seeds.

    Args:
        name: What the panels' names begin with.
        users: One per setting.
        num_bins: Bins between the lowest and the highest accuracy of all.

    Raises:
        ValueError: On accuracies that are not of shape [S, C], or outside [0, 1].
    """
    for own in users:
        values = own.accuracies
        if values.ndim != 2 or not values.size or not ((values >= 0) & (values <= 1)).all():
            raise ValueError(
                f"Accuracies of {own.key.label} must be numbers in [0, 1] of shape [S, C], got "
                f"shape {list(values.shape)} from {values.min(initial=1):g} to "
                f"{values.max(initial=0):g}."
            )
    everyone = np.concatenate([own.accuracies.ravel() for own in users])
    low, high = everyone.min(), everyone.max()
    if low == high:
        low, high = max(low - 0.05, 0.0), min(high + 0.05, 1.0)
    edges = np.linspace(low, high, num_bins + 1)
    shares = [np.histogram(own.accuracies, edges)[0] / own.accuracies.size for own in users]
    top = 1.08 * max(share.max() for share in shares)
    panels = []
    for place, (own, share) in enumerate(zip(users, shares, strict=True)):
        mean, std = own.accuracies.mean(), own.accuracies.std(axis=1).mean()
        bars = {
            "type": "bar",
            "x": ((edges[:-1] + edges[1:]) / 2).tolist(),
            "y": share.tolist(),
            "width": float(edges[1] - edges[0]),
            "name": escape(own.key.label),
            "marker": {"color": own.key.color, "line": {"color": SURFACE, "width": 1}},
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
        title = f"{own.key.label}: mean{NBSP}{100 * mean:.1f}{NBSP}%, SD{NBSP}{100 * std:.1f}"
        panels.append(Panel(f"{name}-{place}", title, {"data": [bars], "layout": layout}))
    return panels
