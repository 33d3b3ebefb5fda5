"""The model of all pages: blocks below a head, and the template that renders them."""

import html
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jinja2
import plotly.offline
import yaml
from markupsafe import Markup

from firm.base.inside import open_inside, remove, replace_text
from firm.base.sanitize import legible, legible_data
from firm.report import formats
from firm.report.drawing import LegendEntry, Panel
from firm.report.record import Record
from firm.report.samples import Sample
from firm.run.comparison import Measure
from firm.run.errors import UserError
from firm.run.guard import drawn
from firm.run.rows import Row

PAGE_NAME = "report.html"
COMPARISON_NAME = "comparison.html"
"""Name of the page of a classic study."""
PLOTLY_NAME = "plotly.min.js"
FOOTER = "One file, no network needed."
UNFINISHED = "Rewritten during the run: reload to see the latest."
SHARED = (
    "No network needed. The figures need {}; to share the page as a single file, embed it with "
    "firm report FOLDER."
)
NUM_OPEN_SAMPLES = 4
"""Number of samples shown unfolded."""
NUM_COLUMNS = 7
"""Facts per row; more are divided among rows of equal length, so that no row holds only one."""
NUM_LEFT_OUT = 5
"""Number of invalid entries that are named; the others are counted."""

T = TypeVar("T")
replace_file = partial(replace_text, errors="backslashreplace")
"""Writes a text atomically; lone surrogates, which UTF-8 cannot encode, become escapes."""


@dataclass(frozen=True)
class Alarm:
    """A warning of a run, and its rounds."""

    text: str
    rounds: tuple[int, ...]
    """0 is the start of the run."""

    @property
    def when(self) -> str:
        """The rounds in words."""
        if self.rounds == (0,):
            return "Before round 1"
        return f"Round{'s' * (len(self.rounds) > 1)} {', '.join(map(str, self.rounds))}"


@dataclass(frozen=True)
class Section:
    """Figures that share a legend, below a heading and a text."""

    kind: ClassVar = "section"
    name: str
    title: str
    text: str
    panels: Sequence[Panel]
    legend: Sequence[LegendEntry] = ()
    note: str = ""
    """Why the figures could not be drawn; empty if they could."""
    is_wide: bool = False
    """True if figures need at least half of the page's width."""
    is_text: bool = False
    """True if the section remains without figures."""


@dataclass(frozen=True)
class Cell:
    """A cell with a change below its value."""

    text: str
    change: str = ""
    is_clear: bool = False
    """True if chance is an unlikely cause of the change."""


@dataclass(frozen=True)
class Table:
    """A table below a heading and a text."""

    kind: ClassVar = "table"
    title: str
    text: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    """The first cell of a row names it."""
    words: frozenset[int] = frozenset()
    """Columns, from 0, that hold words and are aligned left."""
    name: str = "table"
    chips: Mapping[str, str] = field(default_factory=dict)
    """Colours of rows by their first cell."""

    @classmethod
    def of(
        cls, title: str, text: str, columns: Mapping[str, Sequence[str]], **options: Any
    ) -> "Table":
        """Returns a table from columns by heading; the first column names the rows."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        return cls(title, text, list(columns), rows, **options)


@dataclass(frozen=True)
class Bars:
    """Changes with standard errors, by heading and name, with one axis per heading."""

    kind: ClassVar = "bars"
    name: str
    title: str
    text: str
    groups: Mapping[str, Mapping[str, Measure]]


@dataclass(frozen=True)
class Samples:
    """Replies of several models to the same prompts, the base model's first."""

    kind: ClassVar = "samples"
    title: ClassVar = "Samples"
    text: str
    samples: Sequence[Sample]
    models: Sequence[str]
    """Name of the model behind each reply of a sample."""
    has_changes: bool = False
    """True if scores are shown with their change against the first reply's."""
    name: str = "samples"


@dataclass(frozen=True)
class Provenance:
    """Provenance of the page's numbers, with the files needed to repeat it."""

    kind: ClassVar = "origin"
    title: ClassVar = "How it was made"
    text: str
    files: Mapping[str, str]
    """Text by heading."""
    table: Table | None = None
    name: str = "settings"


Block = Section | Table | Bars | Samples | Provenance


@cache
def _sections() -> dict[str, dict[str, str]]:
    return yaml.safe_load((files("firm.report") / "sections.yaml").read_text(encoding="utf-8"))


def prose(name: str, **values: object) -> tuple[str, str]:
    """Returns title and text of an entry of sections.yaml, with values in place of their names.

    Sentences have no title.
    """
    entry = _sections()[name]
    return entry.get("title", "").format(**values), entry["text"].format(**values)


def is_shown(block: Block) -> bool:
    """Returns whether a block has content."""
    parts = ("panels", "note", "is_text", "rows", "groups", "samples", "files")
    return any(getattr(block, part, None) for part in parts)


@dataclass(frozen=True)
class Choice:
    """Legend groups of traces that the reader can show or hide in all figures."""

    keys: Sequence[LegendEntry]
    shown: frozenset[str]
    """Labels shown at first."""
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Labels shown together, by the name of their button."""


@dataclass(frozen=True)
class Headline:
    """A change in large type."""

    label: str
    color: str
    value: str
    notes: Sequence[str]


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    product: str
    """Part of FIRM that made the page."""
    title: str
    blocks: Sequence[Block]
    """Blocks without content are omitted."""
    summary: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    headlines: Sequence[Headline] = ()
    stats: Sequence[tuple[str, str, str]] = ()
    """Label, value and note of each number in the head."""
    words: str = ""
    """Explanation of names in the head, below the numbers."""
    alarms: Sequence[tuple[str, str]] = ()
    """Warnings of the runs: run and rounds, and the text."""
    notices: Sequence[str] = ()
    """Omissions from the page, with reasons."""
    choice: Choice | None = None

    @property
    def panels(self) -> list[Panel]:
        """All figures in order."""
        return [p for block in self.blocks if isinstance(block, Section) for p in block.panels]

    def block(self, name: str) -> Block:
        """Returns the block of that name, or the table of that title."""
        return next(b for b in self.blocks if name in (b.name, b.title))


def render(page: Page, *, script: str = "", footer: str = FOOTER) -> str:
    """Renders a page as HTML that makes no network request.

    It loads plotly from `script`, a relative address; without one, plotly is embedded.
    """
    panels = page.panels
    template = _environment().get_template("page.html.jinja")
    return template.render(
        page=page,
        blocks=[block for block in page.blocks if is_shown(block)],
        num_open_samples=NUM_OPEN_SAMPLES,
        figures=script_json(panels) if panels else None,
        plotly=None if script else plotly.offline.get_plotlyjs(),
        script=script,
        footer=footer,
        nonce=secrets.token_urlsafe(16),
    )


def write_page(path: Path, page: Page, *, final: bool = True, shared: Path | None = None) -> Path:
    """Writes a page atomically, so that readers never see a partial page, and returns its path.

    The final page embeds plotly. Earlier pages load plotly.min.js from their folder, which keeps
    rewriting them cheap. Pages in a folder of runs always load the copy in that folder.

    Args:
        path: File of the page.
        page: Content.
        final: Whether the page will not be rewritten.
        shared: Folder whose plotly.min.js the page loads.

    Raises:
        OSError: The page cannot be written.
    """
    folder = shared or (None if final else path.parent)
    if folder is None:
        replace_file(path, render(page))
    else:
        # several MB, which would otherwise be written again with every page
        if not (folder / PLOTLY_NAME).exists():
            replace_file(folder / PLOTLY_NAME, plotly.offline.get_plotlyjs())
        script = Path(os.path.relpath(folder / PLOTLY_NAME, path.parent)).as_posix()
        footer = SHARED.format(script) if final else UNFINISHED
        replace_file(path, render(page, script=script, footer=footer))
    # left by earlier pages of this run; in a shared folder, pages of other runs still load it
    if final and folder != path.parent:
        remove(path.with_name(PLOTLY_NAME))
    return path


def stand_alone(path: Path) -> Path:
    """Embeds the plotly that a page loads into the page, atomically, and returns its path.

    Raises:
        UserError: There is no page.
        OSError: The page cannot be written.
    """
    if not path.is_file():
        raise UserError(f"there is no page {path}; `firm resume` writes it.")
    with open(path, encoding="utf-8", opener=open_inside) as file:
        text = file.read()
    loaded = re.search(rf'(<script nonce="[^"]*") src="[^"]*{re.escape(PLOTLY_NAME)}">', text)
    if loaded:
        head, tail = text[: loaded.start()], text[loaded.end() :]
        # the old footer says that the page needs the script beside it
        head = re.sub(r"(?<=<footer>).*(?=</footer>)", FOOTER, head)
        replace_file(path, f"{head}{loaded[1]}>{plotly.offline.get_plotlyjs()}{tail}")
    return path


def draw_blocks(draws: Mapping[str, Callable[[], Block | None]]) -> list[Block]:
    """Returns the blocks that have content, under their names, which are unique on a page.

    Figures must consist of finite numbers, texts and lists. A block that cannot be drawn becomes a
    section with a note.
    """
    blocks = []
    for name, draw in draws.items():
        notes: list[str] = []
        empty = Section(name, name.capitalize(), "", [])
        block = drawn_part(notes, f"The section {empty.title!r}", partial(_checked, draw), empty)
        blocks.append(replace(empty, note=notes[0]) if notes else block)
    return [
        replace(block, name=name)
        for name, block in zip(draws, blocks, strict=True)
        if block and is_shown(block)
    ]


def _checked(draw: Callable[[], Block | None]) -> Block | None:
    block = draw()
    if isinstance(block, Section):
        script_json(block.panels)
    return block


def drawn_part(notes: list[str], what: str, draw: Callable[[], T], default: T) -> T:
    """Returns a part of a page; if it cannot be drawn, adds a note and returns the default."""

    def leave_out(note: str) -> T:
        notes.append(note)
        return default

    return drawn(what, draw, leave_out)


def alarms(rows: Iterable[Row]) -> list[Alarm]:
    """Returns all warnings of a run in the order of its rows, with equal texts merged.

    The run's own row may hold alarms of its start.
    """
    rounds_by_text: dict[str, list[int]] = {}
    for row in rows:
        for text in row.get("alarms") or ():
            rounds_by_text.setdefault(text, []).append(row.get("round", 0))
    return [Alarm(text, tuple(dict.fromkeys(at))) for text, at in rounds_by_text.items()]


def left_out_note(place: str, left_out: Sequence[str]) -> str:
    """Returns a sentence on one or more invalid entries that were left out."""
    count = len(left_out)
    more = f" and {count - NUM_LEFT_OUT} more" if count > NUM_LEFT_OUT else ""
    return (
        f"{formats.count(count, 'entry', 'entries')} in {place} {'is' if count == 1 else 'are'} "
        f"not valid and left out: {'; '.join(left_out[:NUM_LEFT_OUT])}{more}."
    )


def left_out_notes(records: Iterable[Record]) -> list[str]:
    """Returns a sentence for each run with invalid entries in its files."""
    return [left_out_note(f"the log of {r.name}", r.left_out) for r in records if r.left_out]


def untrained_notes(records: Iterable[Record]) -> list[str]:
    """Returns a sentence for each run with rounds that left the adapter it started from."""
    return [
        f"{record.name} left the adapter that it started from, of {record.kept_adapter}."
        for record in records
        if record.kept_no_update
    ]


def script_json(panels: Iterable[Panel]) -> str:
    """Returns all figures by name as JSON that is safe inside a script element."""
    figure_by_name = {
        panel.name: {"title": panel.title, "figure": panel.figure} for panel in panels
    }
    # "<" is escaped, so that text of a prompt cannot open a tag or end the script element
    text = json.dumps(legible_data(figure_by_name), allow_nan=False)
    return text.replace("<", "\\u003c")


@cache
def _environment() -> jinja2.Environment:
    """Returns the templates' environment: output is escaped, and undefined names are errors.

    Texts come from prompts, models and sites, so control characters and bidirectional overrides,
    which browsers obey and readers would copy, are made visible.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("firm.report", "."),
        autoescape=True,
        finalize=lambda v: legible(v) if isinstance(v, str) and not isinstance(v, Markup) else v,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": formats.number,
        "measure": formats.measure,
        "reach": lambda change: max(map(abs, change.ends)),
        "group": lambda name: html.escape(legible(name)),  # as figures write names
        "columns": lambda facts: -(-len(facts) // -(-len(facts) // NUM_COLUMNS)) if facts else 1,
    }
    return environment
