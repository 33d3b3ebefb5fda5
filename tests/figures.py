"""What figures show, and what holds for all of them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

import firm.report
from firm.report.drawing import Panel

STYLE = Path(firm.report.__file__).with_name("style.css").read_text()


def lines(panel: Panel) -> dict[str, list[tuple[Any, Any]]]:
    """Trace name -> points of the lines of a panel, its bands and rays left out."""
    return {
        trace["name"]: list(zip(trace["x"], trace["y"], strict=True))
        for trace in panel.figure["data"]
        if trace.get("hoverinfo") != "skip"
    }


def assert_plotly_accepts(panels: Sequence[Panel]) -> None:
    """Fails where plotly refuses a figure, or two panels have one name."""
    for panel in panels:
        go.Figure(panel.figure)
    assert len({panel.name for panel in panels}) == len(panels)


def assert_colours_are_defined(panels: Sequence[Panel], *others: str) -> None:
    """Fails where a colour is not one of the style's, or is missing in light or dark."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    drawn = json.dumps([panel.figure for panel in panels], allow_nan=False) + "".join(others)
    used = set(re.findall(r"var\((--[\w-]+)\)", drawn))
    assert "--objective-3" in used
    for name in used:
        assert f"{name}: #" in light
        assert f"{name}: #" in dark
    assert not re.findall(r'"#[0-9a-fA-F]{3,8}"', drawn)
