"""Figures on log-log axes: points with error bars, the fitted slope and the expected one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firm.report.drawing import (
    INK,
    Axis,
    LegendEntry,
    Panel,
    Series,
    Trace,
    annotation,
    axis,
    figure,
    scatter,
    ticks_at,
)

LABEL_GAP = 0.06
"""Minimum distance of two labels, as a share of a figure's height."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Points, their slope and the expected one."""

    points: Series
    """Geometric means over the seeds, positive, with standard errors of their logarithms."""
    slope: float
    exponent: float
    """The expected slope."""
    label: str
    """Text beside the last point."""
    fitted_from: float = 0.0
    """Smallest x of the fit."""


def scaling_panel(name: str, title: str, fits: Sequence[Fit], *, x_title: str) -> Panel:
    """Returns one figure of several quantities over the same variable."""
    xs = fits[0].points.xs
    low, high = np.log10(xs[0]), np.log10(xs[-1])
    x_axis = {
        **log_axis(x_title),
        "range": [low - 0.06 * (high - low), high + 0.42 * (high - low)],  # room for the labels
        **(ticks_at(xs) if len(xs) <= 8 else {}),
    }
    data = [trace for fit in fits for trace in _traces(fit, x_title)]
    return Panel(name, title, figure(data, x_axis, log_axis(""), annotations=_labels(fits)))


def points_trace(points: Series, x_title: str, *, mode: str = "markers") -> Trace:
    """Returns the points with bars of one standard error, of the logarithm, to both sides."""
    color = points.key.color
    return scatter(
        points.key,
        points.xs.tolist(),
        points.means.tolist(),
        mode=mode,
        size=7,
        hover=f"{points.key.label}<br>{x_title} = %{{x:.3~g}}: %{{y:.3~g}}",
        error_y={
            "array": (points.means * (np.exp(points.ses) - 1)).tolist(),
            "arrayminus": (points.means * (1 - np.exp(-points.ses))).tolist(),
            "symmetric": False,
            "color": color,
            "thickness": 1.5,
            "width": 4,
        },
    )


def reference_line(ends: Sequence[float], heights: Sequence[float], dash: str) -> Trace:
    """Returns a thin line between two points, without a tooltip."""
    return scatter(LegendEntry("", INK, dash), ends, heights, mode="lines", width=1.5)


def log_axis(title: str) -> Axis:
    """Returns a log axis with one tick per power of ten."""
    return axis(title, type="log", dtick=1, exponentformat="power")


def _traces(fit: Fit, x_title: str) -> list[Trace]:
    """Returns the expected slope through the fit's first point, the fitted line, and the points."""
    points = fit.points
    kept = points.xs >= fit.fitted_from
    ends = points.xs[kept][[0, -1]]
    center = np.exp(np.log(points.xs[kept]).mean())
    height = np.exp(np.log(points.means[kept]).mean())
    fitted = height * (ends / center) ** fit.slope
    expected = fitted[0] * (ends / ends[0]) ** fit.exponent
    line = reference_line(ends.tolist(), fitted.tolist(), "solid")
    return [
        reference_line(ends.tolist(), expected.tolist(), "dot"),
        line | {"line": {"color": points.key.color, "width": 2}},
        points_trace(points, x_title),
    ]


def _labels(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Returns the slopes as labels beside the last points, without overlaps."""
    lasts = [float(np.log10(fit.points.means[-1])) for fit in fits]
    extremes = np.log10(np.concatenate([fit.points.means for fit in fits]))
    gap, lowest = LABEL_GAP * np.ptp(extremes), -np.inf
    labels = []
    for last, fit in sorted(zip(lasts, fits, strict=True), key=lambda pair: pair[0]):
        lowest = max(last, lowest + gap)
        x = float(np.log10(fit.points.xs[-1]))
        labels.append(annotation(x, float(lowest), fit.label, INK, xanchor="left", xshift=9))
    return labels
