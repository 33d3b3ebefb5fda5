"""The aligned model beside the base model, in figures."""

from dataclasses import dataclass

from firm.report.record import Record, score
from firm.run.directory import Row

SIDE_FIGURES = {
    "kl": "KL from the base model (nats per reply)",
    "length": "Reply length (tokens)",
    "distinct_1": "Distinct words (share)",
    "distinct_2": "Distinct word pairs (share)",
    "end_share": "Replies that end by themselves (share)",
}
"""What an evaluation holds beside the scores: key -> how the page calls it."""


@dataclass(frozen=True)
class Measure:
    """A mean with its standard error, where there is one."""

    mean: float
    se: float | None = None

    @property
    def z(self) -> float | None:
        """The mean in standard errors."""
        return self.mean / self.se if self.se else None


@dataclass(frozen=True)
class Line:
    """One score or side figure: base model, aligned model, and their difference per prompt."""

    name: str
    label: str
    base: Measure | None
    aligned: Measure | None
    change: Measure | None
    is_objective: bool = False


@dataclass(frozen=True)
class Comparison:
    """Base and aligned model on the same prompts."""

    split: str
    round: int
    num_prompts: int
    lines: tuple[Line, ...]

    def line(self, name: str) -> Line | None:
        """The line of that name, None if it was not measured."""
        return next((line for line in self.lines if line.name == name), None)


def compare(record: Record, split: str) -> Comparison | None:
    """Returns base against aligned model on a split, None until both were evaluated.

    The change is the one that the evaluation paired by prompt; its standard error is smaller than
    that of two independent means.
    """
    rows = record.evaluations.get(split, [])
    if not rows or rows[0]["round"] != 0 or rows[-1]["round"] == 0:
        return None
    base, aligned = rows[0], rows[-1]
    scores = [*record.objectives, *record.extra_scores()]
    lines = [
        Line(
            name,
            _label(name),
            _measure(base, "scores", name),
            _measure(aligned, "scores", name),
            _measure(aligned, "change", name),
            is_objective=name in record.objectives,
        )
        for name in scores
        if name in aligned.get("scores", {})
    ]
    lines += [
        Line(key, label, _value(base, key), _value(aligned, key), _difference(base, aligned, key))
        for key, label in SIDE_FIGURES.items()
        if aligned.get(key) is not None
    ]
    return Comparison(split, aligned["round"], aligned.get("num_prompts") or 0, tuple(lines))


def best_comparison(record: Record) -> Comparison | None:
    """Returns the comparison on the test split, and until there is one, on the validation split."""
    return compare(record, "test") or compare(record, "validation")


def _measure(row: Row, field: str, name: str) -> Measure | None:
    mean = score(row, field, name, "mean")
    return None if mean is None else Measure(mean, score(row, field, name, "se"))


def _value(row: Row, key: str) -> Measure | None:
    return None if row.get(key) is None else Measure(row[key], row.get(f"{key}_se"))


def _difference(base: Row, aligned: Row, key: str) -> Measure | None:
    both = base.get(key) is not None and aligned.get(key) is not None
    return Measure(aligned[key] - base[key]) if both else None


def _label(score: str) -> str:
    return "parse rate" if score == "parse" else score.replace("true_", "true ", 1)
