"""Comparison of aligned and base model: all scores and side metrics of two evaluations."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from firm.base.quantities import QUANTITIES, SHARES, drawn

CLEAR_Z = 2.0
"""Number of standard errors from which a change counts as clear."""
CLEAR_ALIKE = 6
"""Number of prompts from which equal changes count as clear: 2 · 0.5⁶ < 0.05 (sign test)."""
CHANCE = 0.5
"""Accuracy of the base model on pairs: it is its own reference, so that every margin is 0."""
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
    interval: tuple[float, float] | None = None
    """95 % interval of a share or of its change, counted by prompts; None: of other means."""

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval, or the mean ± one standard error."""
        return self.interval or (self.mean - (self.se or 0.0), self.mean + (self.se or 0.0))

    @property
    def z(self) -> float | None:
        """Mean divided by its standard error."""
        return self.mean / self.se if self.se else None

    @property
    def is_clear(self) -> bool:
        """True if the mean differs clearly from zero, by at least ``CLEAR_Z`` standard errors.

        With few prompts, Student's t asks for more. The interval of a share's change must exclude
        zero. Without a standard error because all prompts changed alike, the sign test decides.
        """
        if self.interval:
            return self.interval[0] > 0 or self.interval[1] < 0
        if self.se == 0 and self.mean != 0:
            return (self.num_prompts or 0) >= CLEAR_ALIKE
        if self.z is None or self.num_prompts == 1:
            return False
        from scipy.special import stdtrit  # late: configurations need no library that takes seconds

        least = stdtrit(self.num_prompts - 1, 0.975) if self.num_prompts else CLEAR_Z
        return abs(self.z) >= max(CLEAR_Z, float(least))


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
    lines, of_pairs = [], "accuracy_change" in aligned
    if of_pairs:
        for name in aligned.get("rewards") or {}:
            after = _with_interval(_measure(aligned, "rewards", name))
            change = _measure(aligned, "accuracy_change", name)
            if after and change and after.interval:
                low, high = (end - CHANCE for end in after.interval)
                change = replace(change, interval=(low, high))
            before = _measure(base, "rewards", name)
            lines.append(
                Line(name, before and Measure(before.mean), after, change, measure="accuracy")
            )
    title = "{}, margin" if of_pairs else "{}"
    for name in aligned.get("scores") or {}:
        before, after = (_measure(row, "scores", name) for row in (base, aligned))
        line = Line(title.format(name), before, after, _measure(aligned, "change", name))
        lines.append(line if of_pairs else with_intervals(line, is_single=_is_single(aligned)))
    for name in (each.name for each in drawn() if each.kind == "evaluation"):
        if isinstance(aligned.get(name), int | float):
            count = aligned.get("num_prompts") if name in SHARES else None
            before, after = (
                None if row.get(name) is None else Measure(row[name], row.get(f"{name}_se"), count)
                for row in (base, aligned)
            )
            change = Measure(after.mean - before.mean) if before and after else None
            lines.append(with_intervals(Line(name, before, after, change, is_score=False)))
    return lines


def with_intervals(line: Line, *, is_single: bool = False) -> Line:
    """Returns a line with exact intervals if it is a share of the replies, else the line.

    With one reply per prompt, scores that are 0 or 1 have the variance p (1 - p), and no others in
    [0, 1] have it.

    Args:
        line: A score or side metric.
        is_single: Whether every prompt has one reply, so that its share changes by -1, 0 or 1.
    """
    known = [(own.mean, own.se, own.num_prompts) for own in (line.base, line.aligned) if own]
    is_binary = all(
        se is not None and num and isclose(se**2 * (num - 1), p * (1 - p), abs_tol=1e-9)
        for p, se, num in known
    )
    is_share = len(known) == 2 and is_binary and any(se for _, se, _ in known)
    if not is_share and line.name not in SHARES:
        return line
    change = line.change
    if is_single and change and change.se is not None and change.num_prompts:
        from firm.fronts.confidence import paired_interval

        interval = paired_interval(change.mean, change.se, change.num_prompts)
        change = replace(change, interval=interval)
    base, aligned = _with_interval(line.base), _with_interval(line.aligned)
    return replace(line, base=base, aligned=aligned, change=change)


def _with_interval(measure: Measure | None) -> Measure | None:
    """Returns a share with its exact interval, counted by prompts: their replies are dependent."""
    # imports scipy.stats, which takes half a second
    from firm.fronts.confidence import share_interval

    if measure is None or not measure.num_prompts or not 0 <= measure.mean <= 1:
        return measure
    return replace(measure, interval=share_interval(measure.mean, measure.num_prompts))


def _is_single(row: Mapping[str, Any]) -> bool:
    """Returns whether every prompt of an evaluation has one reply."""
    return row.get("num_samples") == 1 and row.get("num_rows") in (None, row.get("num_prompts"))


def _measure(row: Mapping[str, Any], figures: str, name: str) -> Measure | None:
    entry = (row.get(figures) or {}).get(name) or {}
    if entry.get("mean") is None:
        return None
    of_all = row.get("num_prompts")
    count = entry.get("num_prompts", of_all)
    return Measure(entry["mean"], entry.get("se"), count, is_partial=count != of_all)
