"""The trade-off plane of many models: their means over seeds, the seeds, and the base model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from math import isfinite
from typing import Any

from firm.report.drawing import (
    INK,
    MUTED,
    SURFACE,
    Key,
    Panel,
    axis_title,
    error_bars,
    style_layout,
)

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")
"""One for each colour, so that no reader depends on colours."""
KL = "KL from the base model (nats per reply)"
MARGIN = 0.08
"""Share of the points' span that a plane leaves free around them."""

Place = Mapping[str, float]
"""Rewards by objective, and the KL under `KL`."""


@dataclass(frozen=True)
class Spot:
    """A model, or the mean of some."""

    place: Place
    errors: Mapping[str, float | None]
    """Standard errors of what stands in `place`."""
    facts: Mapping[str, str]
    """What the pointer shows, label to text."""
    is_dominated: bool = False
    """Whether another spot of its kind is better in all; it is drawn hollow."""

    @property
    def hover(self) -> str:
        """The facts as lines."""
        return "<br>".join(escape(f"{label}: {text}") for label, text in self.facts.items())


@dataclass(frozen=True)
class Cloud:
    """Models that share a colour."""

    key: Key
    index: int
    """Place among the symbols, from 0."""
    models: Sequence[Spot]
    """The models behind means of several, drawn small."""
    means: Sequence[Spot]
    """Means over seeds, or a model where there is one seed, drawn large."""
    path: Sequence[int] = ()
    """Which means a line joins, in this order; with two objectives alone."""

    @property
    def symbol(self) -> str:
        """The form of its markers."""
        return SYMBOLS[self.index % len(SYMBOLS)]


def axes_of(objectives: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the planes' axes, x and y: every pair, or the KL and a single objective."""
    return list(combinations(objectives, 2)) if len(objectives) > 1 else [(KL, objectives[0])]


def cloud_planes(
    name: str,
    clouds: Sequence[Cloud],
    objectives: Sequence[str],
    *,
    base: Place | None = None,
    reference: Place | None = None,
) -> list[Panel]:
    """Returns one plane per pair of objectives; with a single one, its reward against the KL.

    The axes hold all models and the base model. A reference point that lies beyond them is among
    the data, and a note says where it is.

    Args:
        name: Opens the panels' names.
        clouds: The models.
        objectives: Their names.
        base: Where the base model is.
        reference: Where hypervolumes begin.
    """
    axes = axes_of(objectives)
    return [
        _plane(f"{name}-{'KL' if x == KL else x}-{y}", clouds, x, y, base, reference)
        for x, y in axes
    ]


def _plane(
    name: str,
    clouds: Sequence[Cloud],
    x: str,
    y: str,
    base: Place | None,
    reference: Place | None,
) -> Panel:
    traces = []
    for cloud in clouds:
        if cloud.path and x != KL:
            traces.append(_line(cloud, x, y))
        if cloud.models:
            traces.append(_markers(cloud, cloud.models, x, y))
        traces.append(_markers(cloud, cloud.means, x, y))
    traces = [trace for trace in traces if trace["x"]]
    spots = [spot for cloud in clouds for spot in [*cloud.models, *cloud.means]]
    if base:
        spots.append(Spot(base, {}, {}))
    spots = [spot for spot in spots if _has(spot.place, x, y)]
    xs, ys = ([end for spot in spots for end in _ends(spot, name)] for name in (x, y))
    if base and _has(base, x, y):
        traces.append(_mark(base, x, y, "base model", "asterisk-open", INK))
    layout = style_layout(460, _axis(x, xs), _axis(y, ys))
    layout["margin"] |= {"t": 28, "r": 28}
    if reference and _has(reference, x, y):
        traces.append(_mark(reference, x, y, "reference point", "cross-thin-open", MUTED))
        if reference[x] < layout["xaxis"]["range"][0] or reference[y] < layout["yaxis"]["range"][0]:
            layout["annotations"] = [_corner_note(reference, x, y)]
    title = f"{y} against {'KL' if x == KL else x}"
    return Panel(name, title, {"data": traces, "layout": layout})


def _line(cloud: Cloud, x: str, y: str) -> dict[str, Any]:
    ends = [cloud.means[index].place for index in cloud.path]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [place[x] for place in ends],
        "y": [place[y] for place in ends],
        "name": escape(f"{cloud.key.label}, front"),
        "line": {"color": cloud.key.color, "width": 1.5, "dash": cloud.key.mark},
        "hoverinfo": "skip",
        "legendgroup": escape(cloud.key.label),
        "showlegend": False,
    }


def _markers(cloud: Cloud, spots: Sequence[Spot], x: str, y: str) -> dict[str, Any]:
    shown = [spot for spot in spots if _has(spot.place, x, y)]
    is_mean = spots is cloud.means
    errors = {
        f"error_{axis}": error_bars([spot.errors.get(key) for spot in shown], cloud.key.color)
        for axis, key in (("x", x), ("y", y))
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [spot.place[x] for spot in shown],
        "y": [spot.place[y] for spot in shown],
        **(errors if is_mean else {}),
        "name": escape(cloud.key.label if is_mean else f"{cloud.key.label}, single seeds"),
        "customdata": [spot.hover for spot in shown],
        "cliponaxis": False,
        "marker": {
            "symbol": [f"{cloud.symbol}{'-open' if s.is_dominated else ''}" for s in shown],
            "size": 13 if is_mean else 7,
            "color": cloud.key.color,
            "opacity": 1.0 if is_mean else 0.6,
            "line": {
                "width": 1.5 if is_mean else 1,
                "color": [cloud.key.color if s.is_dominated else SURFACE for s in shown],
            },
        },
        "legendgroup": escape(cloud.key.label),
        "showlegend": is_mean,
        "hovertemplate": f"%{{customdata}}<br>{_coordinates(x, y)}<extra></extra>",
    }


def _mark(place: Place, x: str, y: str, name: str, symbol: str, color: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [place[x]],
        "y": [place[y]],
        "name": name,
        "marker": {"symbol": symbol, "size": 13, "color": color, "line": {"width": 2}},
        "hovertemplate": f"{name}<br>{_coordinates(x, y)}<extra></extra>",
    }


def _axis(name: str, values: Sequence[float]) -> dict[str, Any]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    gap = MARGIN * (high - low) or 0.05
    title = name if name == KL else f"{escape(name)} (mean reward in [0, 1])"
    return {"title": axis_title(title), "range": [low - gap, high + gap]}


def _corner_note(reference: Place, x: str, y: str) -> dict[str, Any]:
    return {
        "xref": "paper",
        "yref": "paper",
        "x": 0.99,
        "y": 0.01,
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"↙ reference point ({reference[x]:g}, {reference[y]:g}), beyond the corner",
        "font": {"color": MUTED, "size": 11},
    }


def _coordinates(x: str, y: str) -> str:
    return f"{'KL' if x == KL else escape(x)} %{{x:.3f}}<br>{escape(y)} %{{y:.3f}}"


def _ends(spot: Spot, name: str) -> tuple[float, float]:
    """How far a spot reaches with its error bar."""
    error = spot.errors.get(name) or 0.0
    return spot.place[name] - error, spot.place[name] + error


def _has(place: Place, *names: str) -> bool:
    return all(isfinite(place.get(name, float("nan"))) for name in names)
