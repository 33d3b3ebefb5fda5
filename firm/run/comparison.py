"""Comparison of aligned and base model: all scores and side metrics of two evaluations."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from firm.base.quantities import QUANTITIES, drawn

CLEAR_Z = 2.0
"""Number of standard errors from which a change counts as clear."""
CLEAR_ALIKE = 6
"""Number of prompts from which equal changes count as clear: 2 · 0.5⁶ < 0.05 (sign test)."""

FEW_PROMPTS = 20
"""Fewer held-out prompts are too few to tell most changes from chance."""


@dataclass(frozen=True)
class Measure:
    """A mean and, if available, its standard error."""

    mean: float
    se: float | None = None
    num_prompts: int | None = None
    """Number of prompts in the mean; None if a log lacks it."""
    is_partial: bool = False
    """True if other prompts of the evaluation have no score."""

    @property
    def z(self) -> float | None:
        """Mean divided by its standard error."""
        return self.mean / self.se if self.se else None

    @property
    def is_clear(self) -> bool:
        """True if the mean differs clearly from zero, by at least ``CLEAR_Z`` standard errors.

        Without a standard error because all prompts changed alike, the sign test decides.
        """
        if self.se == 0 and self.mean != 0:
            return (self.num_prompts or 0) >= CLEAR_ALIKE
        return self.z is not None and abs(self.z) >= CLEAR_Z


@dataclass(frozen=True)
class Line:
    """A score or side metric of the base and the aligned model, and its change per prompt."""

    name: str
    base: Measure | None
    aligned: Measure | None
    change: Measure | None
    is_score: bool = True
    """True if it is a score of the replies, or a measure of held-out pairs."""
    measure: str = ""
    """Measure of the name's objective, if it is not a score of replies."""

    @property
    def label(self) -> str:
        """Display name on pages."""
        side = QUANTITIES.get(("evaluation", self.name))
        if side and not self.is_score:
            return f"{side.title} ({side.unit})"
        label = ", ".join(filter(None, [score_label(self.name), self.measure]))
        measure = self.change or self.aligned
        if measure is None or not measure.is_partial:
            return label
        return f"{label}, {measure.num_prompts} prompts"


def prompts_text(num_prompts: int, num_rows: int | None, adjective: str = "") -> str:
    """Describes the number of prompts, and the number of rows if rows share prompts.

    >>> prompts_text(8, 8, "test"), prompts_text(8, 12), prompts_text(1, None)
    ('8 test prompts', '8 prompts in 12 rows', '1 prompt')
    """
    noun = "prompt" if num_prompts == 1 else "prompts"
    text = f"{num_prompts} {adjective} {noun}" if adjective else f"{num_prompts} {noun}"
    return text if num_rows in (None, num_prompts) else f"{text} in {num_rows} rows"


def score_label(name: str) -> str:
    """Returns the display name of a score.

    >>> score_label("parse"), score_label("true_helpful")
    ('parse rate', 'true helpful')
    """
    return "parse rate" if name == "parse" else name.replace("true_", "true ", 1)


def score_notes(names: Iterable[str]) -> str:
    """Returns an explanation of the scores that are measured but not trained on."""
    names = list(names)
    true = next((name for name in names if name.startswith("true_")), None)
    sentences = []
    if true:
        sentences.append(
            f"A true score, here evaluation.metrics.{true}, is the quantity that the learned "
            "reward approximates; it is measured and never trained on. In the miniature world it "
            "is the rule that generated the preference data."
        )
    if "parse" in names:
        sentences.append(
            "The parse rate is the share of replies that evaluation.metrics.parse accepts; in the "
            "miniature world, these are complete sentences of its grammar. If it falls, the policy "
            "unlearns its language."
        )
    return " ".join(sentences)


def compare(base: Mapping[str, Any], aligned: Mapping[str, Any]) -> list[Line]:
    """Compares base and aligned model on one split, with all scores first.

    The change of a score is paired by row, so its standard error is smaller than that of two
    independent means.
    """
    parts = [("{}", "scores", "change", "")]
    if "accuracy_change" in aligned:  # held-out pairs
        parts = [
            ("{}", "rewards", "accuracy_change", "accuracy"),
            ("{}, margin", "scores", "change", ""),
        ]
    lines = [
        Line(
            title.format(name),
            _measure(base, figures, name),
            _measure(aligned, figures, name),
            _measure(aligned, change, name),
            measure=measure,
        )
        for title, figures, change, measure in parts
        for name in aligned.get(figures) or {}
    ]
    for name in (each.name for each in drawn() if each.kind == "evaluation"):
        if isinstance(aligned.get(name), int | float):
            before, after = (
                None if row.get(name) is None else Measure(row[name], row.get(f"{name}_se"))
                for row in (base, aligned)
            )
            change = Measure(after.mean - before.mean) if before and after else None
            lines.append(Line(name, before, after, change, is_score=False))
    return lines


def _measure(row: Mapping[str, Any], figures: str, name: str) -> Measure | None:
    entry = (row.get(figures) or {}).get(name) or {}
    if entry.get("mean") is None:
        return None
    of_all = row.get("num_prompts")
    count = entry.get("num_prompts", of_all)
    return Measure(entry["mean"], entry.get("se"), count, is_partial=count != of_all)
