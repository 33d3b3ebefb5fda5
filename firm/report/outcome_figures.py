"""Figures of final values: radar charts, lines over a parameter, preferences and users.

A setting has the same colour in every figure; bars are ± one standard error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np

from firm.report.drawing import (
    DASHED,
    GRID,
    INK,
    MUTED,
    SURFACE,
    LegendEntry,
    Panel,
    Series,
    annotation,
    axis,
    bars,
    curve,
    error_bars,
    figure,
    scatter,
    straight_line,
    ticks_at,
)
from firm.report.formats import NBSP
from firm.report.tables import mean_and_error

SPOKE_WIDTH = 11
"""Characters in a line of an objective's name beside a radar chart."""
LOG_TICKS = {"type": "log", "tickformat": "~g", "dtick": "D2"}
"""Ticks at 1, 2, 5."""


@dataclass(frozen=True, eq=False)
class PreferenceOutcome:
    """Final losses of a setting's runs with one preference."""

    key: LegendEntry
    preference: tuple[float, float]
    """r, positive: it asks for r₁F₁ = r₂F₂."""
    losses: np.ndarray
    """Final losses of both objectives, shape [S, 2]."""

    @property
    def ratio(self) -> str:
        """The preference as text."""
        return " : ".join(f"{r:g}" for r in self.preference)


def points_panel(
    name: str, title: str, series: Sequence[Series], *, x_title: str, y_title: str, **y_axis: Any
) -> Panel:
    """Returns a quantity against a parameter, such as the local steps or the size of an attack.

    The parameter's values are evenly spaced in rising order, so that 0 can be shown, too.
    """
    values = np.unique(np.concatenate([own.xs for own in series])) if series else np.empty(0)
    hover = f"%{{fullData.name}}<br>{escape(x_title)} %{{customdata:~g}}: %{{y:.4~g}}"
    data = []
    for own in series:
        places = np.searchsorted(values, own.xs).tolist()
        points = zip(places, own.means.tolist(), strict=True)
        trace = curve(own.key, points, size=7, ses=own.ses.tolist())
        data.append(
            trace | {"customdata": own.xs.tolist(), "hovertemplate": f"{hover}<extra></extra>"}
        )
    x_axis = axis(escape(x_title), range=[-0.3, len(values) - 0.7], **ticks_at(values))
    x_axis["tickvals"] = list(range(len(values)))
    return Panel(name, title, figure(data, x_axis, axis(y_title, **y_axis)))


def radar_panel(
    name: str,
    title: str,
    values: Mapping[LegendEntry, Sequence[float]],
    objectives: Sequence[str],
    *,
    span: tuple[float, float],
    **radial_axis: Any,
) -> Panel:
    """Returns a radar chart: one spoke per objective, one closed line per setting.

    All values share one scale, `span`, from the centre to the rim. A centre other than 0 belongs in
    the title.
    """
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
    side = max(40, 16 + 6 * max(len(line) for name in broken for line in name))  # CSS pixels
    lines = {"gridcolor": GRID, "linecolor": GRID}
    ticks = {"nticks": 5, "angle": 90, "tickangle": 90, "tickfont": {"color": MUTED, "size": 10}}
    font = {"color": INK, "size": 11 if len(objectives) <= 16 else 9}
    polar = {
        "bgcolor": SURFACE,
        "radialaxis": {**lines, **ticks, "range": list(span), **radial_axis},
        "angularaxis": {**lines, "rotation": 90, "direction": "clockwise", "tickfont": font},
    }
    margin = {"l": side, "r": side, "t": 40, "b": 40}
    made = figure(data, {}, {}, height=460, margin=margin, polar=polar)
    del made["layout"]["xaxis"], made["layout"]["yaxis"]
    return Panel(name, title, made)


def preference_plane(
    name: str,
    title: str,
    outcomes: Sequence[PreferenceOutcome],
    *,
    objectives: Sequence[str],
    limits: tuple[float, float] | None = None,
) -> Panel:
    """Returns the losses that each preference asks for, as a ray, and the losses reached.

    On the ray of r, r₁F₁ equals r₂F₂ (Figure 4 of Askin et al., 2024). The limits are the lowest
    loss of each objective trained alone; the region beyond them is grey, since no model is expected
    there.
    """
    reached = [mean_and_error(outcome.losses) for outcome in outcomes]
    reach = np.array([means + ses for means, ses in reached] + [limits or (0.0, 0.0)]).max(axis=0)
    width, height = (1.12 * reach).tolist()
    x_name, y_name = (escape(objective) for objective in objectives)
    rays, points, notes = [], [], []
    for outcome, (means, ses) in zip(outcomes, reached, strict=True):
        key, slope = outcome.key, outcome.preference[0] / outcome.preference[1]
        x = min(width, height / slope)
        at = ("left", "middle") if x == width else ("center", "bottom")
        note = annotation(x, x * slope, outcome.ratio, key.color, xanchor=at[0], yanchor=at[1])
        notes.append(note)
        wanted = replace(key, label=f"{key.label}, wanted", mark="dot")
        rays.append(scatter(wanted, [0, x], [0, x * slope], mode="lines", width=1.5))
        hover = f"%{{fullData.name}}, wanted {outcome.ratio}<br>{x_name} %{{x:.3~g}}"
        points.append(
            scatter(
                key,
                means[:1].tolist(),
                means[1:].tolist(),
                hover=f"{hover}<br>{y_name} %{{y:.3~g}}",
                error_x=error_bars(ses[:1].tolist(), key.color),
                error_y=error_bars(ses[1:].tolist(), key.color),
                marker={"color": key.color, "size": 11, "line": {"color": INK, "width": 1}},
            )
        )
    shapes = {}
    if limits is not None:
        shapes["shapes"] = [
            _grey(x1=limits[0], y1=height),
            _grey(x0=limits[0], x1=width, y1=limits[1]),
            straight_line(x=limits[0]),
            straight_line(y=limits[1]),
        ]
    made = figure(
        [*rays, *points],
        axis(f"loss, {x_name}", range=[0, width]),
        axis(f"loss, {y_name}", range=[0, height]),
        height=460,
        annotations=notes,
        margin={"l": 52, "r": 44, "t": 28, "b": 40},  # the notes are outside the axes
        **shapes,
    )
    return Panel(name, title, made)


def ratios_panel(
    name: str, title: str, outcomes: Sequence[PreferenceOutcome], *, objectives: Sequence[str]
) -> Panel:
    """Returns the ratio of the losses F₁/F₂ of each seed against the ratio asked for, r₂/r₁.

    Both axes are logarithmic; on the dashed diagonal a preference is met. Seeds with a loss of 0
    are omitted.
    """
    data, ends = [], []
    for outcome in outcomes:
        wanted = outcome.preference[1] / outcome.preference[0]
        losses = outcome.losses[(outcome.losses > 0).all(axis=1)]
        reached = (losses[:, 0] / losses[:, 1]).tolist()
        ends += [wanted, *reached]
        hover = f"%{{fullData.name}}, wanted {outcome.ratio}<br>ratio %{{x:.3~g}}"
        marker = {"color": outcome.key.color, "size": 8, "line": {"color": INK, "width": 1}}
        xs, hover = [wanted] * len(reached), f"{hover}, reached %{{y:.3~g}}"
        data.append(scatter(outcome.key, xs, reached, hover=hover, marker=marker))
    low, high = 0.8 * min(ends), 1.25 * max(ends)
    both = {**LOG_TICKS, "range": [math.log10(low), math.log10(high)]}
    quotient = " / ".join(escape(objective) for objective in objectives)
    diagonal = {"type": "line", "x0": low, "y0": low, "x1": high, "y1": high}
    made = figure(
        data,
        axis(f"ratio of losses asked for, {quotient}", **both),
        axis(f"reached ratio, {quotient}", **both),
        height=460,
        shapes=[{**diagonal, "line": DASHED, "layer": "below"}],
    )
    return Panel(name, title, made)


def _grey(*, x0: float = 0, x1: float, y1: float) -> dict[str, Any]:
    """Returns a grey rectangle that starts at the x-axis."""
    box = {"x0": x0, "y0": 0, "x1": x1, "y1": y1, "line": {"width": 0}}
    return {"type": "rect", **box, "fillcolor": MUTED, "opacity": 0.16, "layer": "below"}


def user_histograms(
    name: str, users: Mapping[LegendEntry, np.ndarray], *, num_bins: int = 20
) -> list[Panel]:
    """Returns a histogram of the users' accuracies for each setting, on equal axes.

    The users of all seeds are pooled; their accuracies have shape [S, C]. A dashed line marks the
    mean. The titles give the mean and the standard deviation over the users of a seed, averaged
    over the seeds.
    """
    everyone = np.concatenate([accuracies.ravel() for accuracies in users.values()])
    low, high = everyone.min(), everyone.max()
    if low == high:
        low, high = max(low - 0.05, 0.0), min(high + 0.05, 1.0)
    edges = np.linspace(low, high, num_bins + 1)
    shares = {key: np.histogram(own, edges)[0] / own.size for key, own in users.items()}
    top = 1.08 * max(share.max() for share in shares.values())
    panels = []
    for place, (key, own) in enumerate(users.items()):
        mean, std = float(own.mean()), own.std(axis=1).mean()
        hover, middles = "accuracy %{x:.1%}: %{y:.1%} of the users", (edges[:-1] + edges[1:]) / 2
        width = float(edges[1] - edges[0])
        histogram = bars(key, middles.tolist(), shares[key].tolist(), hover, width=width)
        made = figure(
            [histogram],
            axis("accuracy of a user", range=[float(low), float(high)], tickformat="~%"),
            axis("share of users", range=[0, float(top)], tickformat="~%"),
            height=240,
            shapes=[straight_line(x=mean)],
        )
        title = f"{key.label}: mean{NBSP}{100 * mean:.1f}{NBSP}%, SD{NBSP}{100 * std:.1f}"
        panels.append(Panel(f"{name}-{place}", title, made))
    return panels
