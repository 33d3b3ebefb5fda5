"""The trade-off plane of any models: the rounds of a run, settings over seeds, or fronts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from firm.report.drawing import (
    INK,
    MUTED,
    SURFACE,
    Key,
    Panel,
    annotation,
    axis_title,
    error_bars,
    scatter,
    style_layout,
)

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")
"""One for each colour, so that no reader depends on colours."""
KL = "KL from the base model (nats per reply)"
REWARD = "mean reward in [0, 1]"
MARGIN = 0.08
"""Share of the points' span that a plane leaves free around them."""

Place = Mapping[str, float]
"""Rewards by objective, and the KL under `KL`."""


@dataclass(frozen=True)
class Spot:
    """A model, or the mean of several."""

    place: Place
    errors: Mapping[str, float | None]
    """Standard errors of what stands in `place`."""
    facts: Mapping[str, str]
    """What the pointer shows, label to text."""
    is_dominated: bool = False
    """Whether another spot of its kind is better in all; it is drawn hollow."""
    label: str = ""
    """Stands below it."""
    shade: float | None = None
    """From 0, the base model, to 1, the last round; the colour deepens with it."""

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
    """Means over seeds, or single models, drawn large."""
    path: Sequence[int] = ()
    """Which means a line joins, in this order."""

    @property
    def symbol(self) -> str:
        """The form of its markers."""
        return SYMBOLS[self.index % len(SYMBOLS)]

    @property
    def spots(self) -> list[Spot]:
        """All of them, the means first."""
        return [*self.means, *self.models]


def mean_spot(spots: Sequence[Spot], facts: Mapping[str, str]) -> Spot:
    """Returns the mean of models with its standard error over them; a single one is itself."""
    if len(spots) == 1:
        return spots[0]
    keys = [key for key in spots[0].place if all(key in spot.place for spot in spots)]
    values = {key: [spot.place[key] for spot in spots] for key in keys}
    errors = {key: stdev(own) / len(own) ** 0.5 for key, own in values.items()}
    return Spot({key: fmean(own) for key, own in values.items()}, errors, facts)


def axes_of(objectives: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the planes' axes, x and y: every pair, or the KL and a single objective."""
    return list(combinations(objectives, 2)) if len(objectives) > 1 else [(KL, objectives[0])]


def planes(
    name: str,
    clouds: Sequence[Cloud],
    objectives: Sequence[str],
    *,
    unit: str = REWARD,
    base: Place | None = None,
    reference: Place | None = None,
) -> list[Panel]:
    """Returns one plane per pair of objectives; with a single one, its value against the KL.

    The axes hold all models and the base model. A reference point that lies beyond them is among
    the data, and a note says where it is.

    Args:
        name: Opens the panels' names.
        clouds: The models.
        objectives: Their names.
        unit: Of the objectives.
        base: Where the base model is.
        reference: Where hypervolumes begin.
    """
    panels = []
    for x, y in axes_of(objectives):
        traces = [t for cloud in clouds for t in _traces(cloud, x, y) if t["x"]]
        spots = [spot for cloud in clouds for spot in cloud.spots]
        spots = [s for s in [*spots, Spot(base or {}, {}, {})] if _has(s.place, x, y)]
        if base and _has(base, x, y):
            traces.append(_mark(base, x, y, "base model", "asterisk-open", INK))
        layout = style_layout(460, _axis(x, spots, unit), _axis(y, spots, unit))
        layout["margin"] |= {"t": 28, "r": 28}
        if reference and _has(reference, x, y):
            traces.append(_mark(reference, x, y, "reference point", "cross-thin-open", MUTED))
            if any(reference[n] < layout[a]["range"][0] for n, a in ((x, "xaxis"), (y, "yaxis"))):
                layout["annotations"] = [_corner_note(reference, x, y)]
        short = "KL" if x == KL else x
        figure = {"data": traces, "layout": layout}
        panels.append(Panel(f"{name}-{short}-{y}", f"{y} against {short}", figure))
    return panels


def _traces(cloud: Cloud, x: str, y: str) -> list[dict[str, Any]]:
    has_shades = any(spot.shade is not None for spot in cloud.means)
    width = 1 if has_shades else 1.5
    line = {"color": cloud.key.color, "width": width, "dash": cloud.key.mark}
    is_whole = list(cloud.path) == list(range(len(cloud.means)))
    means = _markers(cloud, cloud.means, x, y)
    if is_whole and cloud.path:
        means |= {"mode": f"lines+{means['mode']}", "line": line}
        return [_markers(cloud, cloud.models, x, y), means]
    ends = [cloud.means[index].place for index in cloud.path]
    path = scatter(
        [place[x] for place in ends],
        [place[y] for place in ends],
        f"{cloud.key.label}, front",
        cloud.key.color,
        mode="lines",
        width=width,
        dash=cloud.key.mark,
        legendgroup=escape(cloud.key.label),
        showlegend=False,
    )
    return [path, _markers(cloud, cloud.models, x, y), means]


def _markers(cloud: Cloud, spots: Sequence[Spot], x: str, y: str) -> dict[str, Any]:
    shown = [spot for spot in spots if _has(spot.place, x, y)]
    is_mean = spots is cloud.means
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": [spot.place[x] for spot in shown],
        "y": [spot.place[y] for spot in shown],
        "name": escape(cloud.key.label if is_mean else f"{cloud.key.label}, single seeds"),
        "customdata": [spot.hover for spot in shown],
        "cliponaxis": False,
        "marker": {
            "symbol": [f"{cloud.symbol}{'-open' if s.is_dominated else ''}" for s in shown],
            "size": 12 if is_mean else 7,
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
    if is_mean:
        trace |= {
            f"error_{axis}": error_bars([spot.errors.get(key) for spot in shown], cloud.key.color)
            for axis, key in (("x", x), ("y", y))
        }
    if any(spot.shade is not None for spot in shown):
        scale = [[0, "var(--round-first)"], [1, "var(--round-last)"]]
        shades = {"color": [s.shade for s in shown], "colorscale": scale, "cmin": 0, "cmax": 1}
        trace["marker"] |= {**shades, "size": 10, "line": {"width": 1.5, "color": cloud.key.color}}
    if any(spot.label for spot in shown):
        trace["marker"] |= {"line": {"width": 1, "color": SURFACE}}
        trace |= {
            "mode": "markers+text",
            "text": [escape(spot.label) for spot in shown],
            "textposition": "bottom center",
            "textfont": {"color": INK},
        }
    return trace


def _mark(place: Place, x: str, y: str, name: str, symbol: str, color: str) -> dict[str, Any]:
    marker = {"symbol": symbol, "size": 13, "color": color, "line": {"width": 2}}
    hover = f"{name}<br>{_coordinates(x, y)}"
    return scatter([place[x]], [place[y]], name, color, hover=hover, marker=marker)


def _axis(name: str, spots: Sequence[Spot], unit: str) -> dict[str, Any]:
    """An axis that holds all spots with their error bars."""
    values = [
        spot.place[name] + sign * (spot.errors.get(name) or 0.0)
        for spot in spots
        for sign in (-1, 1)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    gap = MARGIN * (high - low) or 0.05
    title = name if name == KL else f"{escape(name)} ({unit})"
    return {"title": axis_title(title), "range": [low - gap, high + gap]}


def _corner_note(reference: Place, x: str, y: str) -> dict[str, Any]:
    text = f"↙ reference point ({reference[x]:g}, {reference[y]:g}), beyond the corner"
    place = {"xref": "paper", "yref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return annotation(0.99, 0.01, text, MUTED, **place)


def _coordinates(x: str, y: str) -> str:
    return f"{'KL' if x == KL else escape(x)} %{{x:.3f}}<br>{escape(y)} %{{y:.3f}}"


def _has(place: Place, *names: str) -> bool:
    return all(isfinite(place.get(name, float("nan"))) for name in names)
