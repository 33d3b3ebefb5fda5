"""Writes the page of a study: figures in sections, one table, and how it was made.

One file with its style, script, figures and plotly inside.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import plotly.offline

from firm.report.comparison_page import Sample
from firm.report.drawing import Key
from firm.report.page import NUM_OPEN_SAMPLES, Section, environment, script_json
from firm.run.guard import drawn


@dataclass(frozen=True)
class Table:
    """A table and what stands above it."""

    title: str
    text: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Cells; the first of a row names it."""
    words: frozenset[int] = frozenset()
    """Columns, from 0, that hold words and are set to the left."""
    note: str = ""
    """Why there are no rows, where it could not be drawn."""


@dataclass(frozen=True)
class Choice:
    """What the reader may show or put away in all figures: traces by their legend group."""

    keys: Sequence[Key]
    """The groups, and how they are drawn."""
    shown: frozenset[str]
    """Labels of those that are shown at first."""
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Labels to be shown together, by the name of their button."""


@dataclass(frozen=True)
class Study:
    """All that the page says."""

    product: str
    """What part of FIRM made it."""
    title: str
    summary: Sequence[str]
    """Sentences."""
    facts: Mapping[str, str]
    sections: Sequence[Section]
    table: Table
    method: str
    """How it was made."""
    config: str
    """As YAML."""
    tables: Sequence[Table] = ()
    """Further tables, below the first."""
    choice: Choice | None = None
    samples: Sequence[Sample] = ()
    """Replies to the same prompts."""
    sample_names: Sequence[str] = ()
    """Who replied, one for each reply of a sample."""
    details: Sequence[Section] = ()
    """Further figures, below tables and samples."""
    alarms: Sequence[tuple[str, str]] = ()
    """What the runs warned of: which of them and when, and the text."""
    notices: Sequence[str] = ()
    """What was left out of the page, and why."""


def drawn_table(title: str, draw: Callable[[], Table]) -> Table:
    """Returns a table or, where it cannot be drawn, one that says so in its place.

    Args:
        title: Heading in that case.
        draw: Returns the table.
    """
    return drawn(
        f"The table {title!r}", draw, instead=lambda note: Table(title, "", [], [], note=note)
    )


def render_study(study: Study) -> str:
    """Returns the page as HTML that asks nothing of the network."""
    panels = [p for section in [*study.sections, *study.details] for p in section.panels]
    return (
        environment()
        .get_template("study_page.html.jinja")
        .render(
            study=study,
            num_open_samples=NUM_OPEN_SAMPLES,
            figures=script_json(panels),
            plotly=plotly.offline.get_plotlyjs(),
            nonce=secrets.token_urlsafe(16),
        )
    )
