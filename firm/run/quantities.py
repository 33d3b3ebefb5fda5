"""The quantities that runs log: what pages, figures, tables and W&B call and draw them.

A number that is added by `register` stands on the page of a run, on that of a study, among the
figures with their data and in W&B, and its values are checked when a log is read. Numbers without
an entry reach W&B all the same. What a client measures leaves its site once it is registered with
`firm.federation.schema.register_metrics`, too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

from firm.run.rows import (
    AMOUNT,
    CORRELATION,
    NUMBER,
    SHAPES,
    SHARE,
    WEIGHT,
    ByName,
    Number,
    Several,
    Shape,
)

Kind = Literal["client", "round", "evaluation"]
Lines = Literal["clients", "clients and mean", "means"]
Points = dict[int, float]
"""Finite values by round."""


@dataclass(frozen=True)
class Quantity:
    """A logged number."""

    name: str
    """Its field in the rows."""
    title: str
    """Above its figure; {} stands for the objective, the pair, or both objectives of two."""
    unit: str
    """Beside the axis."""
    help: str = ""
    """A sentence on what it says, for the text of its section."""
    kind: Kind = "client"
    """The rows that hold it."""
    section: str = "further"
    """The part of a run's page that shows it; none where it is empty."""
    by: Literal["", "objective", "pair"] = ""
    """Whether there is one for all, one by objective, or one by pair of objectives."""
    lines: Lines = "clients"
    """A line for each client, with or without their mean, or the mean by objective alone."""
    evaluated: str = ""
    """The field of evaluations that holds the same for the global model."""
    reference: float | Literal["1/M"] | None = None
    """Where a dashed line lies."""
    axis: Mapping[str, Any] = field(default_factory=lambda: {"rangemode": "tozero"})
    """Further attributes of plotly's y-axis."""
    is_share: bool = False
    """Whether the values of all objectives sum to one, so that of two the first says it all."""
    shape: Shape | None = None
    """What a valid entry of a row is; by default a number, or one by name."""
    of: Callable[[Mapping[str, Any]], float | None] | None = None
    """Derives it from a row that does not hold it."""


QUANTITIES: dict[tuple[Kind, str], Quantity] = {}
"""By kind of row and name, in the order in which pages show them."""


def register(quantity: Quantity) -> Quantity:
    """Adds a quantity, or replaces the one of its name and kind, and returns it."""
    QUANTITIES[quantity.kind, quantity.name] = quantity
    if quantity.of is None:
        shape = quantity.shape or (ByName(NUMBER) if quantity.by else NUMBER)
        SHAPES[quantity.kind][quantity.name] = shape
    return quantity


def shown(section: str) -> list[Quantity]:
    """Returns the quantities of a section in order."""
    return [quantity for quantity in QUANTITIES.values() if quantity.section == section]


def entries(
    row: Mapping[str, Any], objectives: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Yields the numbers of a valid row with their path, such as ("weights", "helpful").

    Lists over solves become their means, columns of lists of lists are named by the objectives, and
    what is no number is left out. Derived quantities follow.
    """
    pairs = ["-".join(pair) for pair in combinations(objectives, 2)]
    columns = {"weights": objectives, "gradient_norms": objectives, "cosines": pairs}
    for key, entry in row.items():
        if key not in ("kind", "round", "client", "split"):
            yield from _numbers((key,), entry, columns.get(key, ()))
    for (kind, name), quantity in QUANTITIES.items():
        if quantity.of and kind == row.get("kind") and (value := quantity.of(row)) is not None:
            yield (name,), value


def _numbers(
    path: tuple[str, ...], entry: Any, columns: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], float | None]]:
    if isinstance(entry, Mapping):
        for key, item in entry.items():
            yield from _numbers((*path, key), item, columns)
    elif isinstance(entry, list) and entry and isinstance(entry[0], list):  # [S][columns]
        if columns:  # other matrices, such as a Gram, are no series
            for column, values in zip(columns, zip(*entry, strict=True), strict=True):
                yield from _numbers((*path, column), list(values), ())
    elif isinstance(entry, list):
        if known := [value for value in entry if _is_number(value)]:
            yield path, fmean(known)
    elif entry is None or _is_number(entry):
        yield path, None if entry is None else float(entry)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mean_over_clients(lines: Mapping[str, Points]) -> Points:
    """Returns the means by round of each client's points; the server's value stands for all."""
    own = [points for client, points in lines.items() if client]
    rounds = sorted({at for points in own for at in points})
    means = {at: fmean(points[at] for points in own if at in points) for at in rounds}
    return dict(sorted((means | lines.get("", {})).items()))


def _norm_ratio(row: Mapping[str, Any]) -> float | None:
    """Returns the geometric mean of norm ratios: first over second, or largest over smallest."""
    ratios = []
    for norms in row.get("gradient_norms") or ():
        if len(norms) < 2 or not all(norms):
            continue  # a zero gradient has no ratio
        ratio = norms[0] / norms[1] if len(norms) == 2 else max(norms) / min(norms)
        ratios.append(math.log(ratio))
    return math.exp(fmean(ratios)) if ratios else None


SIDES = {"autorangeoptions": {"include": [-0.2, 0.2]}}
"""Correlations as far as they go; what is near zero looks so."""
PERCENT = {"rangemode": "tozero", "tickformat": "~%"}

_diagnostic = partial(Quantity, section="diagnostics", lines="means")
_gradient = partial(Quantity, section="gradients", lines="clients and mean")
_training = partial(Quantity, section="training")
_evaluation = partial(Quantity, kind="evaluation", section="")

for _quantity in (
    Quantity(
        "scores",
        "{}",
        "mean raw score",
        section="scores",
        by="objective",
        evaluated="scores",
        axis={},
    ),
    _diagnostic(
        "scores_std",
        "Spread of the scores",
        "SD of raw score",
        "Replies with nearly equal scores teach little.",
        by="objective",
        shape=ByName(AMOUNT),
    ),
    _diagnostic(
        "score_correlation",
        "Score against score",
        "correlation",
        by="pair",
        reference=0.0,
        axis=SIDES,
        shape=ByName(CORRELATION),
    ),
    _diagnostic(
        "score_length_correlation",
        "Score against reply length",
        "correlation",
        "A score that follows the length of the reply invites padding.",
        by="objective",
        reference=0.0,
        axis=SIDES,
        shape=ByName(CORRELATION),
    ),
    _diagnostic(
        "cut_prompt_share",
        "Prompts cut to max_prompt_tokens",
        "share",
        "A prompt that was cut has lost its oldest turns.",
        axis=PERCENT,
        shape=SHARE,
    ),
    _diagnostic(
        "truncated_share",
        "Texts cut short",
        "share",
        "A text that was cut short was not judged whole.",
        by="objective",
        axis=PERCENT,
        shape=ByName(SHARE),
    ),
    Quantity(
        "weights",
        "λ of {}",
        "mean weight λ",
        "λ says how much each objective's gradient counts in a client's step; with FIRM each "
        "client finds its own, and at the dashed line all objectives count alike.",
        section="weights",
        by="objective",
        lines="clients and mean",
        reference="1/M",
        is_share=True,
        shape=Several(Several(WEIGHT, "objectives")),
    ),
    Quantity(
        "weights_spread",
        "Spread of λ over clients",
        "SD of λ over clients",
        "Clients whose lines lie apart weigh the objectives differently.",
        kind="round",
        section="weights",
        by="objective",
        is_share=True,
        shape=ByName(AMOUNT),
    ),
    _gradient(
        "cosines",
        "Cosine, {}",
        "cosine",
        "Below a cosine of zero, what serves one objective hurts the other.",
        by="pair",
        reference=0.0,
        axis=SIDES,
        shape=Several(Several(CORRELATION, "pairs")),
    ),
    _gradient(
        "norm_ratio",
        "Norm, {}",
        "norm ratio",
        reference=1.0,
        axis={"type": "log", "tickformat": "~g", "nticks": 6},
        of=_norm_ratio,
    ),
    _gradient(
        "beta_effect",
        "β-effect",
        "share of the way",
        "The β-effect is the share of the way to uniform weights that regularisation takes λ; "
        "below 5 % (dashed) β does nothing.",
        reference=0.05,
        axis=PERCENT,
        shape=Several(Number(low=0, may_lack=False)),
    ),
    Quantity(
        "drift",
        "Client drift",
        "spread / server step",
        "Drift is the clients' distance from their mean, measured in steps of the server.",
        kind="round",
        section="gradients",
        shape=AMOUNT,
    ),
    Quantity(
        "stationarity",
        "Bound on Pareto stationarity",
        "squared norm",
        "The bound on Pareto stationarity is the most that the squared norm of the shortest common "
        "gradient can be, on the batches that a round draws first, at the global model: near zero, "
        "no step serves all objectives on these batches. For the objectives themselves it is an "
        "estimate, which the batches' noise usually raises.",
        kind="round",
        section="gradients",
    ),
    Quantity(
        "improved",
        "Participants that improved or stayed",
        "share of participants",
        "Share of the clients taking part in a round whose own training losses fell, or stayed as "
        "they were, by the server's step. Below 100\N{NO-BREAK SPACE}% the round cost some of them "
        "something.",
        kind="round",
        section="",
        axis={"tickformat": "~%"},
        shape=SHARE,
    ),
    _training(
        "kl",
        "KL from the base model",
        "nats per reply",
        "A KL that runs away, an entropy that collapses or replies that grow without end are signs "
        "of over-optimisation.",
        evaluated="kl",
    ),
    _training("kl_coefficient", "KL coefficient", "coefficient"),
    _training("entropy", "Entropy of the policy", "nats per token"),
    _training("response_length", "Reply length", "tokens", evaluated="length", shape=AMOUNT),
    _training(
        "end_share", "Replies that end by themselves", "share", evaluated="end_share", shape=SHARE
    ),
    _training("clip_fraction", "Clip fraction", "share of tokens", shape=SHARE),
    _training("value_loss", "Value loss, {}", "loss", by="objective"),
    _training(
        "zero_variance_share",
        "Groups with equal rewards, {}",
        "share of groups",
        "Replies to a prompt with equal rewards teach nothing of this objective.",
        by="objective",
        axis=PERCENT,
        shape=ByName(SHARE),
    ),
    _evaluation("kl", "KL from the base model", "nats per reply"),
    _evaluation("length", "Reply length", "tokens", shape=AMOUNT),
    _evaluation("distinct_1", "Distinct words", "share", shape=SHARE),
    _evaluation("distinct_2", "Distinct word pairs", "share", shape=SHARE),
    _evaluation("end_share", "Replies that end by themselves", "share", shape=SHARE),
    _evaluation("losses", "loss", "loss", by="objective", axis={}),
    _evaluation(
        "accuracies",
        "accuracy",
        "accuracy",
        by="objective",
        axis={"tickformat": "~%"},
        shape=ByName(SHARE),
    ),
):
    register(_quantity)
