"""The page of a study: all that it was given, escaped, and nothing of the network."""

import json
import re

import pytest

from firm.report.drawing import LegendEntry, Panel
from firm.report.page import Page, Provenance, Section, Table, prose, render

FIGURE = {"data": [{"type": "scatter", "x": [1], "y": [2]}], "layout": {"height": 340}}


@pytest.fixture
def page() -> str:
    section = Section(
        "drift",
        "The drift",
        "It <falls>.",
        [Panel("a", "Against B", FIGURE)],
        [LegendEntry("fit", "red")],
    )
    table = Table("Slopes", "By least squares.", ["what", "slope"], [["drift", "<b>−2</b>"]])
    return render(
        Page(
            product="laboratory",
            title="A study",
            summary=["It holds.", "Always."],
            facts={"Clients": "C = 4"},
            blocks=[section, table, Provenance("By measuring.", {"Configuration": "seed: 0"})],
        )
    )


def test_everything_stands_on_the_page_escaped(page):
    body = page[: page.index('<script type="application/json"')]
    for text in (
        "<title>A study · FIRM</title>",
        "It holds.",
        "Always.",
        "C = 4",
        "It &lt;falls&gt;.",
        "&lt;b&gt;−2&lt;/b&gt;",
        "By least squares.",
        "By measuring.",
        "seed: 0",
        "Against B",
    ):
        assert text in body
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    assert figures == {"a": {"title": "Against B", "figure": FIGURE}}


def test_values_replace_their_names_in_title_and_text_and_stay_as_they_are():
    title, text = prose("differences", first="{beta}")
    assert title == "Differences from {beta}"
    assert text.startswith("Final models, mean difference over the seeds")
    with pytest.raises(KeyError, match="first"):
        prose("differences")


def test_the_page_asks_nothing_of_the_network(page):
    body = page[: page.index('<script type="application/json"')]
    assert not re.findall(r'(?:src|href)="(?!#|data:)', body)
    assert "default-src 'none'" in body
