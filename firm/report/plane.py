"""The trade-off plane, for the rounds of a run, settings over seeds, or fronts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import combinations
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from firm.fronts.dominance import non_dominated
from firm.report import formats
from firm.report.drawing import (
    INK,
    MUTED,
    SURFACE,
    Axis,
    Error,
    LegendEntry,
    Panel,
    Trace,
    annotation,
    axis,
    error_bars,
    figure,
    reach,
    scatter,
)
from firm.report.tables import Setting

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")
"""One symbol per colour, for readers who cannot distinguish the colours."""
KL = "KL from the base model (nats per reply)"
REWARD = "mean reward in [0, 1]"
ACCURACY = "share of pairs ranked as by people"
MARGIN = 0.08
"""Margin around the points, as a share of their span."""
SIDES = ("top right", "bottom left", "top left", "bottom right")
"""Sides of a marker on which its label may stand, the preferred ones first."""
WIDTHS, HEIGHT = (250.0, 980.0), 380.0
"""Size of the axes in CSS pixels, on a telephone and on a wide screen."""
LETTER, LINE, RADIUS = 6.8, 16.0, 6.0
"""Width and height of a letter of a label, and radius of a marker, in CSS pixels."""

Box = tuple[float, float, float, float]
PlanePoint = Mapping[str, float]
"""Rewards by objective, and the KL under `KL`."""


@dataclass(frozen=True)
class Spot:
    """A model, or the mean of several."""

    place: PlanePoint
    errors: Mapping[str, Error | None]
    """Error bars of the values in `place`."""
    facts: Mapping[str, str]
    """Lines of the tooltip, text by label."""
    is_dominated: bool = False
    """True if another spot of its kind is better in all objectives; it is drawn hollow."""
    label: str = ""
    """Text beside the marker."""
    shade: float | None = None
    """Progress from 0, the base model, to 1, the last round; the colour deepens with it."""

    @property
    def hover(self) -> str:
        """The facts as lines."""
        return "<br>".join(escape(f"{label}: {text}") for label, text in self.facts.items())


@dataclass(frozen=True)
class Cloud:
    """Models that share a colour."""

    key: LegendEntry
    index: int
    """Place among the symbols, from 0."""
    models: Sequence[Spot]
    """The models behind means of several, drawn small."""
    means: Sequence[Spot]
    """Means over seeds, or single models, drawn large."""
    path: Sequence[int] = ()
    """Indices of the means that a line joins, in order."""

    @property
    def symbol(self) -> str:
        """Symbol of the markers."""
        return SYMBOLS[self.index % len(SYMBOLS)]

    @property
    def spots(self) -> list[Spot]:
        """All spots, means first."""
        return [*self.means, *self.models]


def clouds_of(
    groups: Mapping[Setting, Sequence[tuple[Mapping[str, str], Sequence[Spot]]]],
    objectives: Sequence[str],
    *,
    sign: int = 1,
) -> list[Cloud]:
    """Returns the means of groups of models, by setting, and the models behind means of several.

    A mean is dominated if another one, of any setting, is at least as good in all objectives and
    better in one. Each group of models comes with the first facts of its mean. With a sign of -1,
    lower values are better.
    """
    means = {setting: [_mean(*group) for group in own] for setting, own in groups.items()}
    everything = [mean for own in means.values() for mean in own]
    places = [[sign * mean.place[name] for name in objectives] for mean in everything]
    # settings compete with each other, so all means are judged together
    kept = iter(non_dominated(places)) if places else iter(())
    clouds = []
    for setting, own in means.items():
        several = [spot for _, spots in groups[setting] if len(spots) > 1 for spot in spots]
        models = [replace(spot, label="") for spot in several]
        judged = [replace(mean, is_dominated=not next(kept)) for mean in own]
        clouds.append(Cloud(setting.key, setting.index, models, judged))
    return clouds


def _mean(facts: Mapping[str, str], spots: Sequence[Spot]) -> Spot:
    """Returns the mean of models with its standard error over them; a single one is itself."""
    if len(spots) == 1:
        return spots[0]
    keys = [key for key in spots[0].place if all(key in spot.place for spot in spots)]
    values = {key: [spot.place[key] for spot in spots] for key in keys}
    errors = {key: stdev(own) / len(own) ** 0.5 for key, own in values.items()}
    means = {key: fmean(own) for key, own in values.items()}
    facts = {**facts, "mean over": f"{len(spots)} seeds, ± standard error"}
    if KL in means:
        facts["KL"] = f"{formats.number(means[KL])} nats"
    return Spot(means, errors, facts, label=spots[0].label)


def planes(
    name: str,
    clouds: Sequence[Cloud],
    objectives: Sequence[str],
    *,
    unit: str = REWARD,
    base: PlanePoint | None = None,
    base_name: str = "base model",
    reference: PlanePoint | None = None,
) -> list[Panel]:
    """Returns one plane per pair of objectives; for a single objective, its value against the KL.

    The axes cover all models, the base model and the error bars. The reference point of
    hypervolumes is part of the data; if it is outside the axes, a note gives its coordinates.
    """
    panels = []
    for x, y in combinations(objectives, 2) if len(objectives) > 1 else [(KL, objectives[0])]:
        # single models have no error bars, which must not widen the axes
        means = [spot for cloud in clouds for spot in cloud.means]
        bare = [replace(spot, errors={}) for cloud in clouds for spot in cloud.models]
        spots = [*means, *bare, Spot(base or {}, {}, {})]
        spots = [spot for spot in spots if _has(spot.place, x, y)]
        axes = _axis(x, spots, unit), _axis(y, spots, unit)
        area = _Area(x, y, axes[0]["range"], axes[1]["range"], [spot.place for spot in spots])
        traces = [t for cloud in clouds for t in _traces(cloud, area) if t["x"]]
        if base and _has(base, x, y):
            traces.append(_mark(base, x, y, LegendEntry(base_name, INK), "asterisk-open"))
        notes = {}
        if reference and _has(reference, x, y):
            key = LegendEntry("reference point", MUTED)
            traces.append(_mark(reference, x, y, key, "cross-thin-open"))
            if any(reference[n] < own["range"][0] for n, own in zip((x, y), axes, strict=True)):
                notes["annotations"] = [_corner_note(reference, x, y)]
        margin = {"l": 52, "r": 28, "t": 28, "b": 40}
        made = figure(traces, *axes, height=460, margin=margin, **notes)
        short = "KL" if x == KL else x
        panels.append(Panel(f"{name}-{short}-{y}", f"{y} against {short}", made))
    return panels


@dataclass(frozen=True)
class _Area:
    """The axes of a plane, and the markers in it."""

    x: str
    y: str
    x_range: Sequence[float]
    y_range: Sequence[float]
    markers: Sequence[PlanePoint]

    def box(self, place: PlanePoint, width: float, text: str = "", side: str = "") -> Box:
        """Returns left, bottom, right and top of a marker, or of its label, in CSS pixels."""
        left = width * (place[self.x] - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = HEIGHT * (place[self.y] - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        if not text:
            return left - RADIUS, up - RADIUS, left + RADIUS, up + RADIUS
        length = LETTER * len(text)
        left += RADIUS if side.endswith("right") else -RADIUS - length
        up += RADIUS if side.startswith("top") else -RADIUS - LINE
        return left, up, left + length, up + LINE


def _traces(cloud: Cloud, area: _Area) -> list[Trace]:
    """Returns the traces of a cloud: path, models behind means, and means."""
    x, y = area.x, area.y
    width = 1 if any(spot.shade is not None for spot in cloud.means) else 1.5
    models, means = (_markers(cloud, spots, area) for spots in (cloud.models, cloud.means))
    # the path joins all means in order, so that one trace can draw line and markers
    if cloud.path and list(cloud.path) == list(range(len(cloud.means))):
        line = {"color": cloud.key.color, "width": width, "dash": cloud.key.mark}
        return [models, means | {"mode": f"lines+{means['mode']}", "line": line}]
    ends = [cloud.means[index].place for index in cloud.path]
    path = scatter(
        replace(cloud.key, label=f"{cloud.key.label}, front"),
        [place[x] for place in ends],
        [place[y] for place in ends],
        mode="lines",
        width=width,
        legendgroup=escape(cloud.key.label),
        showlegend=False,
    )
    return [path, models, means]


def _markers(cloud: Cloud, spots: Sequence[Spot], area: _Area) -> Trace:
    x, y = area.x, area.y
    shown = [spot for spot in spots if _has(spot.place, x, y)]
    key, is_mean = cloud.key, spots is cloud.means
    marker = {
        "symbol": [f"{cloud.symbol}{'-open' if s.is_dominated else ''}" for s in shown],
        "size": 12 if is_mean else 7,
        "color": key.color,
        "opacity": 1.0 if is_mean else 0.6,
        "line": {
            "width": 1.5 if is_mean else 1,
            "color": [key.color if s.is_dominated else SURFACE for s in shown],
        },
    }
    is_shaded = any(spot.shade is not None for spot in shown)
    if is_shaded:
        scale = [[0, "var(--round-first)"], [1, "var(--round-last)"]]
        shades = {"color": [s.shade for s in shown], "colorscale": scale, "cmin": 0, "cmax": 1}
        marker |= {**shades, "size": 10, "line": {"width": 1.5, "color": key.color}}
    attributes = {}
    if any(spot.label for spot in shown):
        marker["line"] = {"width": 1, "color": SURFACE} if is_shaded else marker["line"]
        sides = _label_sides(shown, area)
        attributes = {
            "mode": "markers+text",
            "text": [
                escape(spot.label) if side else "" for spot, side in zip(shown, sides, strict=True)
            ],
            "textposition": [side or SIDES[0] for side in sides],
            "textfont": {"color": INK},
        }
    if is_mean:
        attributes |= {
            f"error_{name}": error_bars([spot.errors.get(at) for spot in shown], key.color)
            for name, at in (("x", x), ("y", y))
        }
    return scatter(
        key if is_mean else replace(key, label=f"{key.label}, single seeds"),
        [spot.place[x] for spot in shown],
        [spot.place[y] for spot in shown],
        hover=f"%{{customdata}}<br>{_coordinates(x, y)}",
        customdata=[spot.hover for spot in shown],
        cliponaxis=False,
        marker=marker,
        legendgroup=escape(key.label),
        showlegend=is_mean,
        **attributes,
    )


def _label_sides(spots: Sequence[Spot], area: _Area) -> list[str]:
    """Returns the side of each marker on which its label has room, "" if it has none.

    No label leaves the axes or overlaps another one, in a narrow and in a wide figure. Of the free
    sides, a label takes the one with the fewest markers below it. The ends of a path are first,
    then those between, the most distant ones first.
    """
    sides, last = [""] * len(spots), len(spots) - 1
    taken: list[tuple[Box, ...]] = []
    for index in sorted(range(len(spots)), key=lambda i: (i not in (0, last), -(i & -i))):
        place, text = spots[index].place, spots[index].label
        free = {}
        for side in SIDES if text else ():
            boxes = tuple(area.box(place, width, text, side) for width in WIDTHS)
            others = [own for label in taken for own in zip(boxes, label, strict=True)]
            is_inside = all(
                box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= HEIGHT
                for box, width in zip(boxes, WIDTHS, strict=True)
            )
            if is_inside and not any(_meet(*pair) for pair in others):
                free[side] = (
                    boxes,
                    sum(
                        _meet(box, area.box(marker, width))
                        for box, width in zip(boxes, WIDTHS, strict=True)
                        for marker in area.markers
                    ),
                )
        if free:
            sides[index] = min(free, key=lambda side: free[side][1])
            taken.append(free[sides[index]][0])
    return sides


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _mark(place: PlanePoint, x: str, y: str, key: LegendEntry, symbol: str) -> Trace:
    marker = {"symbol": symbol, "size": 13, "color": key.color, "line": {"width": 2}}
    hover = f"{key.label}<br>{_coordinates(x, y)}"
    return scatter(key, [place[x]], [place[y]], hover=hover, marker=marker)


def _axis(name: str, spots: Sequence[Spot], unit: str) -> Axis:
    """Returns an axis that covers all spots with their error bars."""
    bars = [(spot.place[name], *reach(spot.errors.get(name))) for spot in spots]
    low = min((value - (below or 0.0) for value, below, _ in bars), default=0.0)
    high = max((value + (above or 0.0) for value, _, above in bars), default=1.0)
    # a single point has no span
    gap = MARGIN * (high - low) or 0.05
    title = name if name == KL else f"{escape(name)} ({unit})"
    return axis(title, range=[low - gap, high + gap])


def _corner_note(reference: PlanePoint, x: str, y: str) -> dict[str, Any]:
    text = f"reference point ({reference[x]:g}, {reference[y]:g}) is outside, at the lower left"
    place = {"xref": "paper", "yref": "paper", "xanchor": "right", "yanchor": "bottom"}
    return annotation(1, 1, text, MUTED, **place)


def _coordinates(x: str, y: str) -> str:
    return f"{'KL' if x == KL else escape(x)} %{{x:.3f}}<br>{escape(y)} %{{y:.3f}}"


def _has(place: PlanePoint, *names: str) -> bool:
    return all(isfinite(place.get(name, float("nan"))) for name in names)
