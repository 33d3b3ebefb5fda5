"""The trade-off plane: where the rounds took the global model, one pair of objectives at a time."""

from collections.abc import Sequence
from html import escape
from itertools import combinations
from typing import Any

from firm.report.drawing import (
    INK,
    MUTED,
    SURFACE,
    Panel,
    axis_title,
    error_bars,
    nonempty,
    style_layout,
)
from firm.report.formats import number
from firm.report.record import Record, score
from firm.run.directory import Row


def trade_off_planes(record: Record) -> list[Panel]:
    """Returns one plane per pair of objectives; with a single one, its score against the KL."""
    if len(record.objectives) == 1:
        return nonempty([_trade_off(record, None, record.objectives[0])])
    return nonempty(_trade_off(record, x, y) for x, y in combinations(record.objectives, 2))


def final_test(record: Record) -> list[Row]:
    """Returns the evaluations on the test split once the aligned model has one."""
    rows = record.evaluations.get("test", [])
    return rows if rows and rows[-1]["round"] > 0 else []


def _trade_off(record: Record, x: str | None, y: str) -> Panel:
    """The plane of two scores, or of the KL (x is None) and a score."""
    validation = [row for row in record.evaluations.get("validation", []) if _has(row, x, y)]
    test = [row for row in final_test(record) if _has(row, x, y)]
    traces = [
        {
            "x": [_coordinate(row, x) for row in validation],
            "y": [_coordinate(row, y) for row in validation],
            "error_x": _path_error(validation, test, x),
            "error_y": _path_error(validation, test, y),
            "customdata": _hover_data(record, validation),
            "text": [_end_label(row, validation) for row in validation],
            "textposition": "bottom center",
            "cliponaxis": False,
            "textfont": {"color": INK},
            "mode": "lines+markers+text",
            "name": "validation, after each round",
            "line": {"color": MUTED, "width": 1},
            "marker": {
                "color": [row["round"] for row in validation],
                "colorscale": [[0, "var(--round-first)"], [1, "var(--round-last)"]],
                "cmin": 0,
                "cmax": max(record.num_rounds, 1),
                "size": 10,
                "line": {"color": SURFACE, "width": 1},
            },
            "hovertemplate": _plane_hover(record, "validation", x, y),
        },
        {
            "x": [_coordinate(row, x) for row in test],
            "y": [_coordinate(row, y) for row in test],
            "error_x": error_bars([_score_se(row, x) for row in test], INK),
            "error_y": error_bars([_score_se(row, y) for row in test], INK),
            "customdata": _hover_data(record, test),
            "mode": "lines+markers",
            "name": "test, base and aligned",
            "line": {"color": INK, "width": 1, "dash": "dot"},
            "marker": {
                "symbol": "diamond",
                "size": 11,
                "color": [f"var(--round-{'last' if row['round'] else 'first'})" for row in test],
                "line": {"color": INK, "width": 1.5},
            },
            "hovertemplate": _plane_hover(record, "test", x, y),
        },
    ]
    data = [{"type": "scatter", **trace} for trace in traces if trace["x"]]
    layout = style_layout(460, {"title": _score_title(x)}, {"title": _score_title(y)})
    layout["margin"] |= {"t": 28, "r": 28}
    title = f"{y} against {x or 'KL'}"
    return Panel(f"plane-{x}-{y}", title, {"data": data, "layout": layout})


def _score_title(name: str | None) -> dict[str, Any]:
    if name is None:
        return axis_title("KL from the base model (nats per reply)")
    return axis_title(f"{escape(name)} (mean raw reward)")


def _has(row: Row, *names: str | None) -> bool:
    return all(_coordinate(row, name) is not None for name in names)


def _coordinate(row: Row, name: str | None) -> float | None:
    return row.get("kl") if name is None else score(row, "scores", name, "mean")


def _score_se(row: Row, name: str | None) -> float | None:
    return None if name is None else score(row, "scores", name, "se")


def _path_error(path: Sequence[Row], test: Sequence[Row], name: str | None) -> dict[str, Any]:
    """Bars at both ends of the path, none between, where they would hide it.

    Once the test split was scored, its points bear the bars.
    """
    ends = set() if test else {0, len(path) - 1}
    ses = [_score_se(row, name) if index in ends else None for index, row in enumerate(path)]
    return error_bars(ses, MUTED)


def _end_label(row: Row, rows: Sequence[Row]) -> str:
    if row["round"] == 0:
        return "base"
    return f"round {row['round']}" if row is rows[-1] else ""


def _hover_data(record: Record, rows: Sequence[Row]) -> list[list[Any]]:
    """Round, KL and adapter of each point; the adapter is the last round's."""
    places = {0: "none, the base model"}
    if record.is_finished:
        places[record.last_round] = escape(f"{record.name}/adapter")
    return [
        [row["round"], number(row.get("kl")), places.get(row["round"], "of this round not kept")]
        for row in rows
    ]


def _plane_hover(record: Record, split: str, x: str | None, y: str) -> str:
    names = [escape(name or "KL") for name in (x, y)]
    shares = ", ".join(f"{share:g}" for share in record.preference or ())
    return (
        f"{split}, round %{{customdata[0]}}<br>{names[0]} %{{x:.3f}}<br>{names[1]} %{{y:.3f}}"
        f"<br>preference {shares or 'none'}, seed {record.seed}"
        "<br>KL %{customdata[1]}<br>adapter: %{customdata[2]}<extra></extra>"
    )
