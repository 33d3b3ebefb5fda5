"""Writes the page that sets any number of adapters beside their base model: figures and replies.

One file with its style inside: no script, nothing of the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firm.report.comparison import SIDE_FIGURES, Measure
from firm.report.page import CLEAR_Z, NUM_OPEN_SAMPLES, environment, replace_file
from firm.report.samples import Reply, Turn


@dataclass(frozen=True)
class Figure:
    """One figure of one adapter's model."""

    value: Measure
    change: Measure
    """Against the base model; its error is paired by prompt."""

    @property
    def is_clear(self) -> bool:
        """Whether chance is an unlikely cause of the change."""
        return self.change.z is not None and abs(self.change.z) >= CLEAR_Z


@dataclass(frozen=True)
class Row:
    """One figure of all models."""

    name: str
    base: Measure
    figures: Sequence[Figure]
    """One by adapter."""
    is_score: bool = False
    """Whether it is a reward or another score of the replies; these are drawn, too."""

    @property
    def label(self) -> str:
        """How the page calls it."""
        return SIDE_FIGURES.get(self.name, self.name)

    @property
    def reach(self) -> float:
        """The largest change that an error bar touches; the drawing ends there."""
        changes = [figure.change for figure in self.figures]
        return max((abs(c.mean) + (c.se or 0.0) for c in changes), default=0.0)


@dataclass(frozen=True)
class Bar:
    """A change and its standard error on an axis from 0 to 100 whose middle is no change."""

    center: float
    low: float
    high: float


@dataclass(frozen=True)
class Sample:
    """One prompt and what every model replied to it, the base model first."""

    turns: Sequence[Turn]
    replies: Sequence[Reply]


def write_comparison(
    path: Path,
    *,
    title: str,
    adapters: Mapping[str, str],
    rows: Sequence[Row],
    samples: Sequence[Sample],
    facts: Mapping[str, str],
    config: str,
) -> None:
    """Writes the page, in one step.

    Args:
        path: The page to be.
        title: Heading.
        adapters: Name to place of every adapter, in the order of the rows' figures.
        rows: The table.
        samples: Replies side by side; none leaves the section out.
        facts: What was evaluated, label to text.
        config: Text of the resolved configuration.
    """
    template = environment().get_template("comparison_page.html.jinja")
    replace_file(
        path,
        template.render(
            title=title,
            adapters=adapters,
            rows=rows,
            bar=bar,
            samples=samples,
            num_open_samples=NUM_OPEN_SAMPLES,
            facts=facts,
            config=config,
        ),
    )


def bar(row: Row, change: Measure) -> Bar:
    """Where a change of this row is drawn.

    >>> row = Row("reward", Measure(0.5), [Figure(Measure(0.7), Measure(0.2, 0.2))])
    >>> bar(row, row.figures[0].change)
    Bar(center=75.0, low=50.0, high=100.0)
    """
    se = change.se or 0.0
    ends = change.mean, change.mean - se, change.mean + se
    return Bar(*(50 + 50 * end / (row.reach or 1.0) for end in ends))
