"""What the rows of a run's logs may hold, and rows without what they may not.

A log is read long after it was written, by whatever version: a row that an older one let through,
with a text for a number or an infinite one, must not keep a run from being shown or taken up again.
Whoever reads a log therefore sees valid rows alone, and what was left out by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from statistics import fmean
from typing import Any, Literal

Row = dict[str, Any]

LARGEST = 1e30
"""Larger numbers measure nothing, and their sums and squares are not finite."""
SLACK = 0.01
"""How far rounding may take a share or a correlation beyond its range."""
LAST_ROUND = 1_000_000
"""Rounds beyond are no rounds, where a run does not say how many it has."""
DEPTH = 4
"""How deep fields may be nested that no shape is known of."""


# --- Shapes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number in a range; None, where it was not measured."""

    low: float = -LARGEST
    high: float = LARGEST
    is_whole: bool = False
    may_lack: bool = True


@dataclass(frozen=True)
class Text:
    """A text."""


@dataclass(frozen=True)
class Plain:
    """Numbers, texts and what is nested of them, none too deep."""


@dataclass(frozen=True)
class ByName:
    """Entries of one shape by name; an invalid number becomes None, another entry is left out."""

    entry: "Shape"


@dataclass(frozen=True)
class Several:
    """A list of entries of one shape; an invalid one spoils the list, for places have a meaning."""

    entry: "Shape"
    length: Literal["any", "objectives", "pairs"] = "any"
    """How many there are, where the number of objectives is known."""


@dataclass(frozen=True)
class Items:
    """A list of entries that stand for themselves; an invalid one is left out."""

    entry: "Shape"


@dataclass(frozen=True)
class Fields:
    """Entries of a shape each; others are plain. Without a required one nothing is left of it."""

    shapes: Mapping[str, "Shape"] = field(default_factory=dict)
    required: tuple[str, ...] = ()


Shape = Number | Text | Plain | ByName | Several | Items | Fields

NUMBER, AMOUNT = Number(), Number(low=0)
COUNT = Number(low=0, high=1e18, is_whole=True)
SIZE = Number(low=0, high=1e18, is_whole=True, may_lack=False)
SHARE, CORRELATION = Number(-SLACK, 1 + SLACK), Number(-1 - SLACK, 1 + SLACK)
WEIGHT = Number(-SLACK, 1 + SLACK, may_lack=False)
MEASURE = Fields(
    {"mean": Number(may_lack=False), "se": AMOUNT, "num_prompts": COUNT}, required=("mean",)
)

SHAPES: dict[str, dict[str, Shape]] = {
    "run": {
        "objectives": Items(Text()),
        "clients": Items(Text()),
        "rounds": SIZE,
        "alarms": Items(Text()),
        "calibration": ByName(Fields()),
        "num_trainable": SIZE,
        "adapter_bytes": SIZE,
    },
    "client": {
        "num_examples": COUNT,
        "num_steps": COUNT,
        "gradient_norms": Several(Several(AMOUNT, "objectives")),
        "gram": Several(Several(NUMBER, "objectives"), "objectives"),
        "rewards": ByName(NUMBER),
        "logprob_mismatch": AMOUNT,
        "logprob_mismatch_per_reply": AMOUNT,
        "first_log_ratio": AMOUNT,
        "policy_loss": ByName(NUMBER),
        "seconds": ByName(AMOUNT),
        "bytes_down": COUNT,
        "bytes_up": COUNT,
    },
    "round": {
        "clients": Items(Text()),
        "failures": Items(Fields({"client": Text(), "reason": Text()}, ("client", "reason"))),
        "alarms": Items(Text()),
        "dropped_fields": ByName(COUNT),
        "zero_updates": Items(Text()),
        "seconds": AMOUNT,
        "bytes_down": COUNT,
        "bytes_up": COUNT,
        "weights": ByName(NUMBER),
        "norm_ratio": AMOUNT,
        "disagreement_bound": NUMBER,
        "secure": Fields(
            {"num_updates": COUNT, "masked_bytes": COUNT, "seconds": AMOUNT, "rounding": AMOUNT},
            required=("num_updates",),
        ),
        "privacy": Fields(
            {
                "epsilon": AMOUNT,
                "epsilon_if_unknown": AMOUNT,
                "epsilon_server": AMOUNT,
                "delta": Number(0, 1, may_lack=False),
                "clipped": NUMBER,
            },
            required=("epsilon", "delta"),
        ),
    },
    "evaluation": {
        "split": Text(),
        "preference": Several(Number(0, may_lack=False), "objectives"),
        "num_prompts": COUNT,
        "num_rows": COUNT,
        "num_samples": COUNT,
        "scores": ByName(MEASURE),
        "rewards": ByName(MEASURE),
        "change": ByName(MEASURE),
        "kl_se": AMOUNT,
        "commonest_share": SHARE,
        "empty_share": SHARE,
        "users": ByName(SHARE),
        "progress": ByName(ByName(NUMBER)),
    },
    "sample": {
        "prompt": Text(),
        "messages": Items(Fields({"role": Text(), "content": Text()}, ("role", "content"))),
        "completion": Text(),
        "scores": ByName(NUMBER),
    },
}
"""Shapes of the fields by the kind of their row; `firm.run.quantities` adds what pages draw."""
NOISY: dict[str, Shape] = {
    "weights": Several(Several(Number(may_lack=False), "objectives")),
    "cosines": Several(Several(Number(may_lack=False), "pairs")),
}
"""Figures of a client that adds noise to them (``privacy.statistics`` noisy), of any size."""
KEYS = {
    "client": ("round", "client"),
    "round": ("round",),
    "evaluation": ("round", "split"),
    "sample": ("round",),
}
"""The keys that identify a row of a kind; a row without them is left out."""


# --- Rows -----------------------------------------------------------------------------------------


def valid_rows(rows: Sequence[Any], *, kind: str | None = None) -> tuple[list[Row], list[str]]:
    """Returns rows without what is not valid in them, and what was left out, a text for each.

    The first row of kind "run" has the objectives and the rounds. A second of the same objectives,
    of a run that was given other rounds, takes its place.

    Args:
        rows: A log's lines as JSON reads them.
        kind: The kind of rows that do not name theirs.
    """
    valid: list[Row] = []
    left_out: list[str] = []
    header: Row = {}
    for number, row in enumerate(rows, start=1):
        objectives = header.get("objectives")
        checked, problems = valid_row(
            row,
            kind=kind,
            num_objectives=None if objectives is None else len(objectives),
            last_round=header.get("rounds"),
        )
        is_header = isinstance(row, Mapping) and row.get("kind") == "run"
        is_second = is_header and bool(header)
        if checked is None or (is_second and checked.get("objectives") != objectives):
            left_out.append(f"row {number}: {_short(row)}")
            continue
        left_out += problems
        if is_second:
            header.update(checked)
        else:
            valid.append(checked)
            header = checked if is_header else header
    return valid, left_out


def valid_row(
    row: Any,
    *,
    kind: str | None = None,
    num_objectives: int | None = None,
    last_round: int | None = None,
) -> tuple[Row | None, list[str]]:
    """Returns a row without what is not valid in it, and what was left out, a text for each.

    Args:
        row: A log's line as JSON reads it, or as it is about to be written.
        kind: The row's kind where it does not name it.
        num_objectives: M, where it is known: lists of another length are not valid.
        last_round: Of the run, where it is known.

    Returns:
        None in place of a row that does not say what it is about.
    """
    kind = row.get("kind", kind) if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not isinstance(kind, str | None):
        return None, []
    shapes = SHAPES.get(kind or "", {})
    if kind == "client":
        shapes = {"client": Text(), **shapes, "by_objective": ByName(Fields(shapes))}
    if kind == "client" and "clipped" in row and "update_norm" not in row:
        shapes = {**shapes, **NOISY}
    rounds = Number(0, LAST_ROUND if last_round is None else last_round, True, may_lack=False)
    check = _Check(num_objectives)
    keys = KEYS.get(kind or "", ())
    try:
        checked = check.fields(row, Fields({"kind": Text(), "round": rounds, **shapes}, keys), "")
    except _Invalid:
        return None, []
    place = _place(checked)
    return checked, [f"{path} of {place}: {value}" for path, value in check.left_out]


def as_one_training(row: Mapping[str, Any]) -> Row:
    """Returns a client's row in the layout of one training, where it had one per objective.

    What belongs to an objective is that of its own training, seconds are summed, and the rest is
    averaged. The weights of such a training, 1 for its objective, say nothing and are left out.
    """
    trainings = row.get("by_objective")
    if not trainings:
        return dict(row)
    seen = dict.fromkeys(key for each in trainings.values() for key in each)
    keys = [key for key in seen if key in SHAPES["client"]]
    merged = {}
    for key in keys:
        values = {name: each[key] for name, each in trainings.items() if key in each}
        entry = next(iter(values.values()))
        if key == "seconds":
            merged[key] = {
                stage: sum(each.get(stage) or 0 for each in values.values())
                for stage in dict.fromkeys(stage for each in values.values() for stage in each)
            }
        elif isinstance(entry, dict) and set(entry) & set(trainings):
            merged[key] = {name: each.get(name) for name, each in values.items()}
        elif isinstance(entry, dict):
            merged[key] = {
                name: _mean([each.get(name) for each in values.values()]) for name in entry
            }
        elif isinstance(entry, int | float):
            merged[key] = _mean(list(values.values()))
    return {**merged, **{key: value for key, value in row.items() if key != "by_objective"}}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class _Invalid(Exception):
    """A value is not of its shape."""


class _Check:
    """Sorts out one row; what it left out is in ``left_out``, path and value."""

    def __init__(self, num_objectives: int | None) -> None:
        m = num_objectives
        self._lengths = {} if m is None else {"objectives": m, "pairs": m * (m - 1) // 2}
        self.left_out: list[tuple[str, str]] = []

    def valid(self, value: Any, shape: Shape, path: str) -> Any:
        """Returns the value without what is not valid in it, or raises ``_Invalid``."""
        match shape:
            case Number() if _is_number(value, shape):
                return value
            case Text() if isinstance(value, str):
                return value
            case Plain() if _is_plain(value, DEPTH):
                return value
            case Several(entry, length) if isinstance(value, list):
                if len(value) == self._lengths.get(length, len(value)):
                    return [self.valid(item, entry, path) for item in value]
            case Items(entry) if isinstance(value, list):
                items = [self._or_left_out(item, entry, path) for item in value]
                return [item for item in items if item is not _LEFT_OUT]
            case ByName(entry) if isinstance(value, Mapping):
                items = {
                    name: self._or_left_out(item, entry, f"{path}.{name}")
                    for name, item in value.items()
                }
                if isinstance(entry, Number):
                    return {n: None if item is _LEFT_OUT else item for n, item in items.items()}
                return {name: item for name, item in items.items() if item is not _LEFT_OUT}
            case Fields() if isinstance(value, Mapping):
                return self.fields(value, shape, path)
        raise _Invalid

    def fields(self, value: Mapping[str, Any], shape: Fields, path: str) -> Row:
        """Returns the valid fields, or raises ``_Invalid`` where a required one is missing."""
        checked = {}
        for key, item in value.items():
            own = shape.shapes.get(key, Plain())
            if item is None and not isinstance(own, Number | Plain):
                continue  # as good as absent
            item = self._or_left_out(item, own, f"{path}{key}")
            if item is not _LEFT_OUT:
                checked[key] = item
        if not all(key in checked for key in shape.required):
            raise _Invalid
        return checked

    def _or_left_out(self, item: Any, shape: Shape, path: str) -> Any:
        before = len(self.left_out)
        try:
            return self.valid(item, shape, f"{path}." if isinstance(shape, Fields) else path)
        except _Invalid:
            self.left_out[before:] = [(path, _short(item))]
            return _LEFT_OUT


_LEFT_OUT = object()


def _is_number(value: Any, shape: Number) -> bool:
    if value is None:
        return shape.may_lack
    kinds = int if shape.is_whole else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    return is_number and shape.low <= value <= shape.high  # false of NaN


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple | Mapping):
        items = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in items)
    return isinstance(value, str | bool) or _is_number(value, NUMBER)


def _place(row: Row) -> str:
    """Returns what a row is about, in words."""
    at = f"round {row['round']}" if "round" in row else "no round"
    match row.get("kind"):
        case "client":
            return f"{row['client']} in {at}"
        case "evaluation":
            return f"the {row['split']} evaluation of {at}"
        case "run":
            return "the run's own row"
        case _:
            return at


def _short(value: Any) -> str:
    shown = Repr()
    shown.maxlevel, shown.maxdict, shown.maxlist, shown.maxstring = 3, 4, 4, 40
    return shown.repr(value)
