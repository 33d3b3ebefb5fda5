"""Compares aligned models with their base model, on a run's page or one for several adapters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firm.report import formats
from firm.report.page import Bars, Cell, Page, Provenance, Sample, Samples, Table, prose, write_page
from firm.report.record import Record, is_base
from firm.run.comparison import Line, Measure, compare, prompts_text, score_notes


@dataclass(frozen=True)
class RunComparison:
    """Base and aligned model of a run on the same prompts, objectives first."""

    round: int
    """Rounds after which it was measured."""
    adapter_round: int
    """Round of the aligned model's adapter."""
    prompts: str
    """Number of prompts and rows, or of pairs, of the split, in words."""
    lines: tuple[Line, ...]

    def line(self, name: str) -> Line | None:
        """Returns the line of that name, or None if it was not measured."""
        return next((line for line in self.lines if line.name == name), None)


def comparison_of(record: Record, split: str) -> RunComparison | None:
    """Compares base and aligned model on a split; None until both were evaluated."""
    rows = record.evaluations.get(split, [])
    if not rows or rows[0]["round"] != 0 or is_base(rows[-1]):
        return None
    base, aligned = rows[0], rows[-1]
    adapter_round = aligned.get("adapter_round", aligned["round"])
    order = [*record.objectives, *record.extra_scores()]
    lines = sorted(
        compare(base, aligned),
        key=lambda line: order.index(line.name) if line.name in order else len(order),
    )
    counts = aligned.get("num_prompts") or 0, aligned.get("num_rows")
    prompts = prompts_text(*counts, split)
    if record.learns_from_pairs:
        prompts = f"{counts[1]} {split} pairs of replies to {prompts_text(counts[0], None)}"
    return RunComparison(aligned["round"], adapter_round, prompts, tuple(lines))


def best_comparison(record: Record) -> RunComparison | None:
    """Returns the comparison on the test split, or on the validation split until that exists."""
    return comparison_of(record, "test") or comparison_of(record, "validation")


def comparison_table(
    lines: Mapping[str, Sequence[Line]], text: str, *, chips: Mapping[str, str] | None = None
) -> Table:
    """Returns the table that compares models with their base model.

    Args:
        lines: The same scores and figures for each model, by its name.
        text: Text above the table.
        chips: Colours of scores by name.
    """
    rows = [
        [
            own[0].label,
            formats.measure(None if own[0].name == "kl" else own[0].base),
            *map(_cell, own),
        ]
        for own in zip(*lines.values(), strict=True)
    ]
    title, explanation = prose("evaluation", text=text)
    return Table(
        title if len(lines) == 1 else f"{title}s",
        explanation,
        ["Figure", "base", *lines],
        rows,
        name="evaluation",
        chips=chips or {},
    )


def write_comparison(
    path: Path,
    *,
    title: str,
    adapters: Mapping[str, str],
    lines: Mapping[str, Sequence[Line]],
    samples: Sequence[Sample],
    facts: Mapping[str, str],
    config: str,
) -> None:
    """Writes the page of evaluated adapters atomically; it has no script.

    Args:
        path: File of the page.
        title: Heading.
        adapters: Folder of every adapter, by its name.
        lines: Measured scores and figures, by adapter.
        samples: Replies side by side, the base model's first; if empty, the section is omitted.
        facts: Facts on the evaluation, text by label.
        config: Text of the resolved configuration.
    """
    origin = Table("", "", ["Adapter", "Folder"], list(adapters.items()), words=frozenset({1}))
    blocks = [
        _bars(lines),
        comparison_table(lines, score_notes(line.name for line in next(iter(lines.values())))),
        Samples(
            "The first reply of each model to the same prompts, with its raw scores.",
            samples,
            ["base", *adapters],
        ),
        Provenance("Everything needed to repeat the evaluation.", {formats.CONFIG: config}, origin),
    ]
    write_page(path, Page(product="FIRM evaluation", title=title, blocks=blocks, facts=facts))


def _bars(lines: Mapping[str, Sequence[Line]]) -> Bars:
    """Returns the changes of each score, on an axis that covers all error bars."""
    groups: dict[str, dict[str, Measure]] = {}
    for name, own in lines.items():
        for line in own:
            if line.change and line.is_score:
                groups.setdefault(line.label, {})[name] = line.change
    return Bars(
        "changes",
        *prose("changes"),
        groups,
    )


def _cell(line: Line) -> Cell:
    change = None if line.name == "kl" else line.change  # the KL already is a difference
    if change is None:
        return Cell(formats.measure(line.aligned))
    has_z = change.z is not None and not change.interval
    z = f", z{formats.NBSP}{formats.number(change.z, is_signed=True)}" if has_z else ""
    text = f"{formats.measure(change, is_signed=True)}{z}"
    return Cell(formats.measure(line.aligned), text, change.is_clear)
