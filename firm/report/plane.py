"""The trade-off plane, for the rounds of a run, settings over seeds, or fronts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import combinations
from math import isfinite
from statistics import fmean, stdev

from firm.fronts.dominance import non_dominated
from firm.report import formats
from firm.report.drawing import (
    INK,
    SURFACE,
    Axis,
    Error,
    LegendEntry,
    Panel,
    Trace,
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
NARROW = (250.0, 380.0)
"""Width and height of the axes on a telephone, where labels are nearest, in CSS pixels."""
LETTER, LINE = 6.8, 16.0
"""Width and height of a letter of a label, in CSS pixels."""
MANY = 9
"""Number of models above which dominated ones have no error bars."""
MARK = 5.0
"""Distance from a marker's centre to its edge, in CSS pixels."""

PlanePoint = Mapping[str, float]
"""Rewards by objective, and the KL under `KL`."""
Spans = tuple[Sequence[float], Sequence[float]]
"""Ranges of the x- and the y-axis."""


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
) -> list[Panel]:
    """Returns one plane per pair of objectives; for a single objective, its value against the KL.

    The axes cover all models, the base model and the error bars.
    """
    panels = []
    for x, y in combinations(objectives, 2) if len(objectives) > 1 else [(KL, objectives[0])]:
        # single models have no error bars, which must not widen the axes
        means = [spot for cloud in clouds for spot in cloud.means]
        bare = [replace(spot, errors={}) for cloud in clouds for spot in cloud.models]
        spots = [*means, *bare, Spot(base or {}, {}, {})]
        spots = [spot for spot in spots if _has(spot.place, x, y)]
        axes = _axis(x, spots, unit), _axis(y, spots, unit)
        spans = axes[0]["range"], axes[1]["range"]
        traces = [t for cloud in clouds for t in _traces(cloud, (x, y), spans) if t["x"]]
        if base and _has(base, x, y):
            traces.append(_mark(base, x, y, LegendEntry(base_name, INK), "asterisk-open"))
        margin = {"l": 52, "r": 28, "t": 28, "b": 40}
        made = figure(traces, *axes, height=460, margin=margin)
        short = "KL" if x == KL else x
        panels.append(Panel(f"{name}-{short}-{y}", f"{y} against {short}", made))
    return panels


def _traces(cloud: Cloud, names: tuple[str, str], spans: Spans) -> list[Trace]:
    """Returns the traces of a cloud: path, models behind means, and means."""
    x, y = names
    width = 1 if any(spot.shade is not None for spot in cloud.means) else 1.5
    models, means = (_markers(cloud, own, names, spans) for own in (cloud.models, cloud.means))
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


def _markers(cloud: Cloud, spots: Sequence[Spot], names: tuple[str, str], spans: Spans) -> Trace:
    x, y = names
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
        sides = _label_sides(shown, names, spans)
        attributes = {
            "mode": "markers+text",
            "text": [escape(s.label) if side else "" for s, side in zip(shown, sides, strict=True)],
            "textposition": [side or "top right" for side in sides],
            "textfont": {"color": INK},
        }
    if is_mean:
        is_crowded = len(shown) > MANY  # bars of dominated models would hide the others
        attributes |= {
            f"error_{name}": error_bars(
                [None if is_crowded and s.is_dominated else s.errors.get(at) for s in shown],
                key.color,
            )
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


def _label_sides(spots: Sequence[Spot], names: tuple[str, str], spans: Spans) -> list[str]:
    """Returns the side of each marker on which its label stands, "" if there is no room for it.

    A label covers neither others nor markers, except that the first and the last one, the ends of a
    path, always stand. The side that has more room comes first.
    """
    sides, last = [""] * len(spots), len(spots) - 1
    places = [
        tuple(
            size * (spot.place[name] - low) / (high - low)
            for name, size, (low, high) in zip(names, NARROW, spans, strict=True)
        )
        for spot in spots
    ]
    taken = [(x - MARK, x + MARK, y - MARK, y + MARK) for x, y in places]
    for index in sorted(range(len(spots)), key=lambda i: i not in (0, last)):
        x, y = places[index]
        length = LETTER * len(spots[index].label)
        boxes = {
            f"{above} {beside}": (start, start + length, base, base + LINE)
            for beside, start in (("right", x), ("left", x - length))
            for above, base in (("top", y + MARK), ("bottom", y - MARK - LINE))
        }
        preferred = "right" if x < NARROW[0] / 2 else "left"
        order = sorted(boxes, key=lambda side: preferred not in side)
        inside = [side for side in order if boxes[side][0] >= 0 and boxes[side][1] <= NARROW[0]]
        free = [side for side in inside if not any(_overlap(boxes[side], own) for own in taken)]
        if length and (free or index in (0, last)):
            sides[index] = (free or order)[0]
            taken.append(boxes[sides[index]])
    return sides


def _overlap(first: Sequence[float], second: Sequence[float]) -> bool:
    """Returns whether two boxes, each left, right, bottom and top, have an area in common."""
    return all(first[i] < second[i + 1] and second[i] < first[i + 1] for i in (0, 2))


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


def _coordinates(x: str, y: str) -> str:
    return f"{'KL' if x == KL else escape(x)} %{{x:.3f}}<br>{escape(y)} %{{y:.3f}}"


def _has(place: PlanePoint, *names: str) -> bool:
    return all(isfinite(place.get(name, float("nan"))) for name in names)
