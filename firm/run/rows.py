"""Validation of the rows of a run's logs, which drops invalid data.

A log may be read long after it was written, by another version of this program. A row that an older
version accepted, such as one with a text or an infinite value in place of a number, must not
prevent showing or resuming the run. Readers of a log therefore get only valid rows, and a list of
the data that was dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import combinations
from reprlib import Repr
from statistics import fmean
from typing import (
    Annotated,
    Any,
    NotRequired,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Interval
from pydantic import Strict, ValidationError

from firm.base.quantities import QUANTITIES, RESERVED
from firm.base.schema import (
    LARGEST,
    Count,
    Finite,
    Items,
    NonNegative,
    PerObjective,
    Separate,
    adapter,
)

Row = dict[str, Any]
Points = dict[int, float]
"""Finite values by round."""

LAST_ROUND = 1_000_000
"""Largest valid round number if a run does not state its number of rounds."""
DEPTH = 4
"""Maximum nesting of unregistered fields."""


class _Failure(TypedDict):
    client: str
    reason: str


class _Training(TypedDict):
    """One of several trainings of a client; has the fields of a client's row."""


class _Message(TypedDict):
    role: str
    content: str


FIELDS: dict[str, dict[str, Any]] = {
    "run": {
        "objectives": Items[str],
        "clients": Items[str],
        "rounds": Count,
        "alarms": Items[str],
        "calibration": dict[str, dict[str, Any]],
        "about": str,
        "num_trainable": Count,
        "adapter_bytes": Count,
    },
    "client": {"client": str, "num_examples": Count, "bytes_down": Count, "bytes_up": Count},
    "round": {
        "clients": Items[str],
        "failures": Items[_Failure],
        "earlier_failures": Items[_Failure],
        "alarms": Items[str],
        "zero_updates": Items[str],
        "bytes_down": Count,
        "bytes_up": Count,
    },
    "evaluation": {
        "split": str,
        "preference": PerObjective[NonNegative],
        "hacking_signs": Items[str],
        "adapter_round": Count,
        "adapter_reason": str,
    },
    "sample": {
        "preference": PerObjective[NonNegative],
        "prompt": str,
        "messages": Items[_Message],
        "completion": str,
        "scores": dict[str, Finite],
    },
}
"""Types of the fields that identify and describe a row, by kind of row. All other fields are
quantities; None marks a number that was not measured."""
KEYS = {
    "client": ("round", "client"),
    "round": ("round",),
    "evaluation": ("round", "split"),
    "sample": ("round",),
}
"""Keys that identify a row, by kind; a row without them is dropped."""


def load_quantities(settings: Any) -> None:
    """Imports the modules that register the quantities of a run's log.

    Programs that only read a log have not imported them; they infer them from the run's settings.
    """
    is_language = isinstance(settings, Mapping) and "policy" in settings
    for name in (*_REGISTERING, "firm.alignment.client" if is_language else "firm.fmoo.client"):
        import_module(name)


_REGISTERING = (
    "firm.federation.server",
    "firm.federation.strategies",
    "firm.federation.objective_training",
)
"""Modules that register quantities of every run, or import all others that do."""


# --- Valid rows ---------------------------------------------------------------------------------


def valid_rows(rows: Sequence[Any], *, kind: str | None = None) -> tuple[list[Row], list[str]]:
    """Returns the valid data of rows, and a description of each part that was dropped.

    The first row of kind "run" defines the objectives and the number of rounds. A second one with
    the same objectives, from a run resumed with another number of rounds, updates it.

    Args:
        rows: Lines of a log, as parsed from JSON.
        kind: Kind of the rows that have no key "kind".
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
    """Returns the valid data of a row, and a description of each part that was dropped.

    Args:
        row: Line of a log, as parsed from JSON or as about to be written.
        kind: Kind of the row, if it has no key "kind".
        num_objectives: M, if known; per-objective lists of another length are invalid.
        last_round: Last round of the run, if known.

    Returns:
        The row and the descriptions. The row is None if it is not a mapping, its kind is invalid,
        or one of the ``KEYS`` of its kind is missing or invalid.
    """
    kind = row.get("kind", kind) if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not isinstance(kind, str | None):
        return None, []
    limit = LAST_ROUND if last_round is None else last_round
    types = {**_types(kind, row), "round": Annotated[int, Strict(), Interval(ge=0, le=limit)]}
    objectives = None if num_objectives is None else [""] * num_objectives
    check = _Check(objectives)
    try:
        checked = check.fields(row, types, KEYS.get(kind or "", ()), "")
    except _Invalid:
        return None, []
    place = _place(checked)
    return checked, [f"{path} of {place}: {value}" for path, value in check.left_out]


def _types(kind: str | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the types of a row's known fields."""
    own = {q.name: q.type_in(row) for (of, _), q in QUANTITIES.items() if of == kind and not q.of}
    own = {name: each if _is_nested(each) else each | None for name, each in own.items()}
    if kind == "client":
        own["by_objective"] = dict[str, _Training]
    return {"kind": str, **own, **FIELDS.get(kind or "", {})}


def as_one_training(row: Mapping[str, Any]) -> Row:
    """Merges a client's trainings, one per objective, into a row in the layout of one training.

    The values of an objective come from its own training, seconds are summed, and the other values
    are averaged. The weights of these trainings carry no information, being 1 for the objective
    trained, and are omitted. Other rows are returned as a copy.
    """
    trainings = row.get("by_objective")
    if not trainings:
        return dict(row)
    seen = dict.fromkeys(key for each in trainings.values() for key in each)
    keys = [key for key in seen if ("client", key) in QUANTITIES or key in RESERVED]
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


def entries(
    row: Mapping[str, Any], objectives: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Yields the path, such as ("weights", "helpful"), and the value of each number in a valid row.

    Lists over solves are averaged, columns of nested lists are named after the objectives or their
    pairs, and values other than numbers are skipped. Derived quantities follow at the end.
    """
    pairs = ["-".join(pair) for pair in combinations(objectives, 2)]
    columns = {"weights": objectives, "gradient_norms": objectives, "cosines": pairs}
    for key, entry in {**row, **_known_cosines(row), **_whole_shares(row)}.items():
        if key not in ("kind", "round", "client", "split"):
            yield from _numbers((key,), entry, columns.get(key, ()))
    for (kind, name), quantity in QUANTITIES.items():
        if quantity.of and kind == row.get("kind") and (value := quantity.of(row)) is not None:
            yield (name,), value


def _known_cosines(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cosines of a row, without those of objectives whose gradients are zero.

    These are logged as 0. So is the gradient of an objective that a client does not serve.
    """
    cosines, norms = row.get("cosines"), row.get("gradient_norms")
    if not cosines or not norms or len(cosines) != len(norms):
        return {}
    known = [[all(pair) for pair in combinations(lengths, 2)] for lengths in norms]
    return {
        "cosines": [
            [own if is_known else None for own, is_known in zip(*solve, strict=False)]
            for solve in zip(cosines, known, strict=True)
        ]
    }


def _whole_shares(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shares of a client's step, 0 for objectives that it does not serve.

    As with weights, means over the clients then sum to 1, too.
    """
    shares = row.get("step_share")
    if not isinstance(shares, Mapping) or not any(_is_number(own) for own in shares.values()):
        return {}
    return {"step_share": {name: 0.0 if own is None else own for name, own in shares.items()}}


def _numbers(
    path: tuple[str, ...], entry: Any, columns: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], float | None]]:
    if isinstance(entry, Mapping):
        for key, item in entry.items():
            yield from _numbers((*path, key), item, columns)
    elif isinstance(entry, list) and entry and isinstance(entry[0], list):  # [S][columns]
        if columns:  # other matrices, such as Gram matrices, are not series
            for column, values in zip(columns, zip(*entry, strict=True), strict=True):
                yield from _numbers((*path, column), list(values), ())
    elif isinstance(entry, list):
        if known := [value for value in entry if _is_number(value)]:
            yield path, fmean(known)
    elif entry is None or _is_number(entry):
        yield path, None if entry is None else float(entry)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_of_earlier(row: Row) -> bool:
    """Returns whether a validation row is of an earlier round's adapter, measured at the end."""
    if row.get("kind") != "evaluation" or row["split"].startswith("test"):
        return False
    return row.get("adapter_round", row["round"]) < row["round"]


def mean_over_clients(lines: Mapping[str, Points]) -> Points:
    """Returns the means over clients by round; a value of the server replaces the mean."""
    own = [points for client, points in lines.items() if client]
    rounds = sorted({at for points in own for at in points})
    means = {at: fmean(points[at] for points in own if at in points) for at in rounds}
    return dict(sorted((means | lines.get("", {})).items()))


class _Invalid(Exception):
    """Raised when a value does not match its type."""


@dataclass(frozen=True)
class _Check:
    """Validates one row, and records the path and value of dropped data in ``left_out``."""

    objectives: Sequence[str] | None
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def valid(self, value: Any, kind: Any, path: str) -> Any:
        """Returns the valid part of a value, or raises ``_Invalid``."""
        form = _form(kind)
        if form is Any:
            if _is_plain(value, DEPTH):
                return value
        elif is_typeddict(form):
            if isinstance(value, Mapping):
                types = _types("client", value) if form is _Training else _fields(form)
                return self.fields(value, types, tuple(form.__required_keys__), f"{path}.")
        elif get_origin(form) is dict:
            if isinstance(value, Mapping):
                return self._by_name(value, get_args(form)[1], path)
        elif get_origin(form) is list and Separate() in getattr(kind, "__metadata__", ()):
            if isinstance(value, list):
                items = [self._or_left_out(item, get_args(form)[0], path) for item in value]
                return [item for item in items if item is not _LEFT_OUT]
        else:
            with suppress(ValidationError):
                adapter(kind).validate_python(value, context=self)
                return value
        raise _Invalid

    def fields(
        self, value: Mapping[str, Any], types: Mapping[str, Any], required: Sequence[str], path: str
    ) -> Row:
        """Returns the valid fields, or raises ``_Invalid`` if a required one is missing."""
        checked = {}
        for key, item in value.items():
            kind = types.get(key, Any)
            if item is None and _is_nested(kind):
                continue  # the same as absent
            item = self._or_left_out(item, kind, f"{path}{key}")
            if item is not _LEFT_OUT:
                checked[key] = item
        if not all(key in checked for key in required):
            raise _Invalid
        return checked

    def _by_name(self, value: Mapping[str, Any], kind: Any, path: str) -> Row:
        """Returns the valid entries; invalid numbers become None, others are dropped."""
        items = {
            name: item if item is None else self._or_left_out(item, kind, f"{path}.{name}")
            for name, item in value.items()
        }
        if _is_nested(kind):
            return {name: item for name, item in items.items() if item not in (_LEFT_OUT, None)}
        return {name: None if item is _LEFT_OUT else item for name, item in items.items()}

    def _or_left_out(self, item: Any, kind: Any, path: str) -> Any:
        before = len(self.left_out)
        try:
            return self.valid(item, kind, path)
        except _Invalid:
            self.left_out[before:] = [(path, _short(item))]
            return _LEFT_OUT


_LEFT_OUT = object()


def _form(kind: Any) -> Any:
    """Returns a type without its annotations."""
    return kind.__origin__ if get_origin(kind) is Annotated else kind


def _is_nested(kind: Any) -> bool:
    """Returns whether values of a type are lists or mappings."""
    return is_typeddict(_form(kind)) or get_origin(_form(kind)) in (dict, list)


@cache
def _fields(form: Any) -> dict[str, Any]:
    """Returns the types of a typed dictionary's fields."""
    hints = get_type_hints(form, include_extras=True).items()
    return {name: get_args(t)[0] if get_origin(t) is NotRequired else t for name, t in hints}


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple | Mapping):
        items = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in items)
    is_number = isinstance(value, int | float) and -LARGEST <= value <= LARGEST  # false for NaN
    return is_number or value is None or isinstance(value, str | bool)


def _place(row: Row) -> str:
    """Describes the subject of a row, such as "client_0 in round 3"."""
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
