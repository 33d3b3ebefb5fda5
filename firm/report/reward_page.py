"""Judgements of reward models on held-out pairs: accuracy, calibration, length bias, agreement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import nan

import numpy as np

from firm.fronts.confidence import share_interval
from firm.report import formats
from firm.report.drawing import DASHED, INK, Error, LegendEntry, Panel, axis, curve, figure, scatter
from firm.report.page import Headline, Page, Section, Table, prose
from firm.report.tables import COLORS

EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Limits of the bins of the calibration curve."""


@dataclass(frozen=True)
class Share:
    """A share of n cases, with its exact 95 % interval (Clopper and Pearson, 1934)."""

    value: float
    num: int
    low: float
    high: float

    @classmethod
    def of(cls, holds: np.ndarray) -> "Share":
        """Returns the share of true cases, shape [n]; 0.5 counts as half of one."""
        n = int(holds.size)
        if not n:
            return cls(nan, 0, nan, nan)
        p = float(holds.mean())
        return cls(p, n, *share_interval(p, n))

    def __str__(self) -> str:
        if not self.num:
            return "no pairs"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Bin:
    """Pairs of which a model prefers one reply with a probability within a bin."""

    mean_probability: float
    right: Share


@dataclass(frozen=True)
class Verdicts:
    """Figures of one reward model on held-out pairs."""

    accuracy: Share
    """Share of pairs whose chosen reply has the higher score; a tie is half a success."""
    longer_chosen: Share
    """Accuracy on pairs whose chosen reply is longer."""
    shorter_chosen: Share
    """Accuracy on pairs whose chosen reply is shorter."""
    prefers_longer: Share
    """Share of pairs of unequal lengths whose longer reply has the higher score."""
    log_loss: float
    """Mean of -log σ(difference of the scores), in nats; ln 2 = 0.693 is chance."""
    calibration_error: float
    """Mean distance of probability and share that is right over the bins, weighted by pairs."""
    bins: list[Bin]


@dataclass(frozen=True)
class RewardReport:
    """Report on one or more reward models, the trained one first."""

    verdicts: dict[str, Verdicts]
    agreement: dict[str, Share]
    """Share of pairs on which two models prefer the same reply, by "a, b"."""
    longer_is_better: Share
    """Accuracy of a rule that prefers the longer reply: a model should beat it."""
    num_training: int
    losses: list[float]
    """Training loss of each step."""
    seconds: float
    """Duration of the training."""

    def tables(self) -> list[Table]:
        """Returns the tables that the terminal and the page show."""
        models = self.verdicts.items()
        columns = [
            {
                "": [*self.verdicts, "longer reply"],
                "accuracy": [*(str(v.accuracy) for _, v in models), str(self.longer_is_better)],
                "log loss": [*(formats.number(v.log_loss) for _, v in models), ""],
                "calibration error": [
                    *(formats.number(v.calibration_error) for _, v in models),
                    "",
                ],
            },
            {
                "": list(self.verdicts),
                "chosen is longer": [str(v.longer_chosen) for _, v in models],
                "chosen is shorter": [str(v.shorter_chosen) for _, v in models],
                "prefers the longer": [str(v.prefers_longer) for _, v in models],
            },
            {
                "": list(self.agreement),
                "same preference": [str(share) for share in self.agreement.values()],
            },
        ]
        num_pairs = next(iter(self.verdicts.values())).accuracy.num
        names = ("held-out", "length-bias", "agreement")
        texts = [prose(name, count=num_pairs, chance=f"{np.log(2):.3f}") for name in names]
        tables = [Table.of(*text, own) for text, own in zip(texts, columns, strict=True)]
        return [table for table in tables if table.rows]


def report_of(
    differences: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    *,
    num_training: int,
    losses: Sequence[float],
    seconds: float,
) -> RewardReport:
    """Returns the report on reward models that scored the same pairs.

    Args:
        differences: Score of the chosen minus that of the rejected reply by model, each of
            shape [n]; NaN where a model does not judge.
        lengths: Length of the chosen minus that of the rejected reply, shape [n].
        num_training: Number of pairs that the first model was trained on.
        losses: Training loss of each step of the first model.
        seconds: Duration of its training.
    """
    agreement = {
        f"{a}, {b}": Share.of((np.sign(own) == np.sign(other))[np.isfinite([own, other]).all(0)])
        for (a, own), (b, other) in combinations(differences.items(), 2)
    }
    return RewardReport(
        {name: _verdicts(own, lengths) for name, own in differences.items()},
        agreement,
        Share.of(_right(lengths)),
        num_training,
        list(losses),
        seconds,
    )


def _right(differences: np.ndarray) -> np.ndarray:
    return (np.sign(differences) + 1) / 2


def _verdicts(differences: np.ndarray, lengths: np.ndarray) -> Verdicts:
    judged = np.isfinite(differences)
    differences, lengths = differences[judged], lengths[judged]
    right = _right(differences)
    probabilities = 1 / (1 + np.exp(-np.abs(differences).clip(max=500)))
    bins = []
    for low, high in pairwise(EDGES):
        inside = (probabilities >= low) & ((probabilities < high) | (high == EDGES[-1]))
        if inside.any():
            bins.append(Bin(float(probabilities[inside].mean()), Share.of(right[inside])))
    gaps = [each.right.num * abs(each.right.value - each.mean_probability) for each in bins]
    unequal = lengths != 0
    return Verdicts(
        Share.of(right),
        Share.of(right[lengths > 0]),
        Share.of(right[lengths < 0]),
        Share.of(_right(differences[unequal] * lengths[unequal])),
        float(np.logaddexp(0, -differences).mean()) if len(right) else nan,
        sum(gaps) / len(right) if len(right) else nan,
        bins,
    )


def reward_page(report: RewardReport, *, title: str) -> Page:
    """Returns the page of a report: tables, calibration curve and training loss."""
    keys = [
        LegendEntry(name, COLORS[place % len(COLORS)]) for place, name in enumerate(report.verdicts)
    ]
    own = next(iter(report.verdicts.values()))
    curves = []
    for key, verdicts in zip(keys, report.verdicts.values(), strict=True):
        shares = [each.right for each in verdicts.bins]
        bars: list[Error | None] = [(s.value - s.low, s.high - s.value) for s in shares]
        points = [(each.mean_probability, each.right.value) for each in verdicts.bins]
        line = curve(key, points, size=7, ses=bars)
        curves.append(line | {"hovertemplate": "states %{x:.2f}, right %{y:.2f}<extra></extra>"})
    diagonal = {"type": "line", "x0": 0.5, "x1": 1, "y0": 0.5, "y1": 1, "line": DASHED}
    calibration = figure(
        curves,
        axis("stated probability", range=[0.48, 1.02]),
        axis("share that is right", range=[0, 1.02]),
        shapes=[diagonal | {"layer": "below"}],
    )
    steps = range(1, len(report.losses) + 1)
    line = scatter(keys[0], steps, report.losses, mode="lines", hover="step %{x}: %{y:.3f}")
    loss = Panel("loss", "Loss", figure([line], axis("step"), axis("loss (nats)")))
    facts = {
        "training pairs": f"{report.num_training:,}",
        "held-out pairs": f"{own.accuracy.num:,}",
        "steps": f"{len(report.losses):,}",
        "training": formats.duration(report.seconds),
    }
    headline = Headline(
        "accuracy on held-out pairs",
        keys[0].color,
        f"{own.accuracy.value:.3f}",
        [f"95 % interval {own.accuracy.low:.3f} to {own.accuracy.high:.3f}"],
    )
    share = report.longer_is_better.value
    longer = f"in {share:.0%}"
    if share > own.accuracy.high:
        longer = f"more often, {longer}"
    elif share >= own.accuracy.low:
        longer = f"{longer}, which is within the model's interval"
    accuracy = f"{own.accuracy.value:.0%}"
    summary = prose("summary-reward", count=own.accuracy.num, accuracy=accuracy, longer=longer)[1]
    if own.accuracy.low <= 0.5:
        summary = f"{summary} {prose('reward-chance')[1]}"
    name, rule = "calibration", LegendEntry("calibrated", INK, "dash", is_thin=True)
    panel = Panel(name, "Probability and share that is right", calibration)
    return Page(
        product="reward model",
        title=title,
        blocks=[
            *report.tables(),
            Section(name, *prose(name), [panel], [*keys, rule]),
            Section("training", *prose("reward-training"), [loss] if report.losses else []),
        ],
        summary=[summary],
        facts=facts,
        headlines=[headline],
    )
