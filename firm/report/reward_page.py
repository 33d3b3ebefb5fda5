"""Judgements of reward models on held-out pairs: accuracy, calibration, length bias, agreement."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from math import nan
from typing import Any

import numpy as np

from firm.fronts.confidence import share_interval
from firm.report import formats
from firm.report.drawing import DASHED, INK, LegendEntry, Panel, axis, figure, scatter
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

    def as_data(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """Returns the tables that the terminal and the page show."""
        num_pairs = next(iter(self.verdicts.values())).accuracy.num
        tables = [
            Table(
                f"{num_pairs} held-out pairs, with 95 % intervals",
                "Accuracy: share of pairs whose chosen reply has the higher score. Log loss: "
                f"{np.log(2):.3f} is chance. Calibration error: mean distance between the "
                "probability that the scores state and the share that is right.",
                ["", "accuracy", "log loss", "calibration error"],
                [
                    *(
                        [name, str(v.accuracy), f"{v.log_loss:.3f}", f"{v.calibration_error:.3f}"]
                        for name, v in self.verdicts.items()
                    ),
                    ["longer reply", str(self.longer_is_better), "", ""],
                ],
            ),
            Table(
                *prose("length-bias"),
                ["", "chosen is longer", "chosen is shorter", "prefers the longer"],
                [
                    [name, str(v.longer_chosen), str(v.shorter_chosen), str(v.prefers_longer)]
                    for name, v in self.verdicts.items()
                ],
            ),
            Table(
                *prose("agreement"),
                ["", "same preference"],
                [[pair, str(share)] for pair, share in self.agreement.items()],
            ),
        ]
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
        f"{a}, {b}": Share.of(np.sign(own) == np.sign(other))
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
        float(np.logaddexp(0, -differences).mean()),
        sum(gaps) / len(right),
        bins,
    )


def reward_page(report: RewardReport, *, title: str) -> Page:
    """Returns the page of a report: tables, calibration curve and training loss."""
    keys = {
        name: LegendEntry(name, COLORS[place % len(COLORS)])
        for place, name in enumerate(report.verdicts)
    }
    name, own = next(iter(report.verdicts.items()))
    calibration = Section(
        "calibration",
        *prose("calibration"),
        [Panel("calibration", "Probability and share that is right", _calibration(report, keys))],
        [*keys.values(), LegendEntry("calibrated", INK, "dash", is_thin=True)],
    )
    steps = range(1, len(report.losses) + 1)
    loss = figure(
        [scatter(keys[name], steps, report.losses, mode="lines", hover="step %{x}: %{y:.3f}")],
        axis("step"),
        axis("loss (nats)"),
    )
    training = Section(
        "training",
        *prose("reward-training"),
        [Panel("loss", "Loss", loss)] if report.losses else [],
    )
    facts = {
        "training pairs": f"{report.num_training:,}",
        "held-out pairs": f"{own.accuracy.num:,}",
        "steps": f"{len(report.losses):,}",
        "training": formats.duration(report.seconds),
    }
    beats = own.accuracy.low > report.longer_is_better.value
    summary = (
        f"On {own.accuracy.num} pairs that were held out, the model prefers the reply that people "
        f"chose in {own.accuracy.value:.0%} of the pairs; always taking the longer reply would be "
        f"right in {report.longer_is_better.value:.0%}"
        + ("." if beats else ", which is within the model's interval.")
    )
    headline = Headline(
        "accuracy on held-out pairs",
        keys[name].color,
        f"{own.accuracy.value:.3f}",
        [f"95 % interval {own.accuracy.low:.3f} to {own.accuracy.high:.3f}"],
    )
    return Page(
        product="reward model",
        title=title,
        blocks=[*report.tables(), calibration, training],
        summary=[summary],
        facts=facts,
        headlines=[headline],
    )


def _calibration(report: RewardReport, keys: Mapping[str, LegendEntry]) -> dict[str, Any]:
    traces = []
    for name, verdicts in report.verdicts.items():
        up = [each.right.high - each.right.value for each in verdicts.bins]
        color = keys[name].color
        down = [each.right.value - each.right.low for each in verdicts.bins]
        traces.append(
            scatter(
                keys[name],
                [each.mean_probability for each in verdicts.bins],
                [each.right.value for each in verdicts.bins],
                mode="lines+markers",
                size=7,
                hover="states %{x:.2f}, right %{y:.2f}",
                error_y={
                    "array": up,
                    "arrayminus": down,
                    "color": color,
                    "thickness": 1,
                    "width": 3,
                },
            )
        )
    line = {"type": "line", "x0": 0.5, "x1": 1, "y0": 0.5, "y1": 1, "line": DASHED}
    return figure(
        traces,
        axis("stated probability", range=[0.48, 1.02]),
        axis("share that is right", range=[0, 1.02]),
        shapes=[line | {"layer": "below"}],
    )
