"""Examples and mutations of messages, made from their schemas."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from firm.base.quantities import of_clients
from firm.base.registry import OneOf
from firm.base.schema import MAX_ITEMS, MAX_NAMES, Finite, Gram, PerEach
from firm.federation.objective_training import OwnMetrics
from firm.federation.schema import Metrics, Reading, fields_of, shown

JUNK: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    10**400,
    -1,
    0.5,
    True,
    None,
    "",
    "x",
    "\x1b[2J\nround 9/9  helpful 1.000",
    "y" * 100_000,
    [],
    [None],
    [[1e308, 1e308]],
    {},
    {"a": {"b": "c"}},
    (1, 2),
    torch.zeros(()),
    torch.full((2, 2), math.nan),
)
NAMES = ("", "../../x", "\x1b[2J", "kind", "round", "n" * 10_000)


def example(kind: Any, reading: Reading) -> Any:
    """Returns a value of a type, or {} where a check of it is all that is known."""
    form, notes = _parts(kind)
    if kind == Gram:
        return [[1.0, 0.2], [0.2, 2.0]]
    if kind == Metrics:
        return {name: example(each.type, reading) for name, each in of_clients().items()}
    if kind == OwnMetrics:
        return {}
    each = next((note for note in notes if isinstance(note, PerEach)), None)
    if get_origin(form) is list:
        count = 2 if each is None else len(each.names(reading.objectives))
        return [example(get_args(form)[0], reading)] * count
    if get_origin(form) is dict:
        names = ["name"] if each is None else each.names(reading.objectives)
        return {name: example(get_args(form)[1], reading) for name in names}
    return {float: 0.5, int: 1, str: "text"}.get(form, {})


def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a type without None, and without what is stated about it; and that."""
    if type(None) in get_args(kind):
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if get_origin(kind) is Annotated:
        return kind.__origin__, kind.__metadata__
    return kind, ()


def mutations(kind: Any, value: Any, reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yields values in place of one of a type, and what was done."""
    for junk in JUNK:
        yield f"is {shown(junk)}", junk
    form, notes = _parts(kind)
    choices = [name for note in notes if isinstance(note, OneOf) for name in note.names]
    choices += get_args(form) if get_origin(form) is Literal else []
    yield from ((f"is {choice}", choice) for choice in choices if choice != value)
    if isinstance(value, bool):
        yield f"is {not value}", not value
    elif isinstance(value, int | float):
        yield from ((f"is {other}", other) for other in (value + 1, value * 2, 2**63))
    if isinstance(value, torch.Tensor):
        yield from _tensors(value)
    elif isinstance(value, dict):
        yield from _dictionaries(kind, value, reading)
    elif isinstance(value, list | tuple) and value:
        yield "lacks an item", list(value[:-1])
        yield "has an item twice", [*value, value[-1]]
        yield "is very long", [value[0]] * (MAX_ITEMS + 1)
        for what, item in mutations(_inner(kind), value[-1], reading):
            yield f"'s item {what}", [*value[:-1], item]
        if kind == Gram:
            yield "is asymmetric", [[1.0, 0.5], [-0.5, 1.0]]
            yield "is of no gradients", [[1.0, 9.0], [9.0, 1.0]]
            yield "is negative", [[-1.0, 0.0], [0.0, 1.0]]


def _dictionaries(kind: Any, value: dict[str, Any], reading: Reading) -> Iterator[tuple[str, Any]]:
    for name in NAMES:
        yield f"has the name {shown(name)}", {**value, name: 1.0}
    many = {f"name {index}": 1.0 for index in range(MAX_NAMES + 1)}
    yield "has very many names", {**value, **many}
    known = of_clients() if kind == Metrics else {}
    for name, item in value.items():
        yield f"lacks {name}", {key: value[key] for key in value if key != name}
        inner = known[name].type if name in known else _inner(kind)
        for what, changed in mutations(inner, item, reading):
            yield f".{name} {what}", {**value, name: changed}


def _tensors(value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "is NaN", value * math.nan
    yield "is infinite", value + math.inf
    yield "is huge", torch.full_like(value, 3e38) if value.is_floating_point() else value
    yield "is of doubles", value.double()
    yield "is of integers", value.long()
    yield "is of bools", value.bool()
    yield "is flat", value.flatten()
    yield "is empty", value[:0]
    yield "is longer", torch.cat([value, value])
    yield "has more axes", value[None]
    if value.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        for exponent in [*range(-38, 39), *range(-38, 39)]:
            random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            yield f"is random, of size 1e{exponent}", (random * 10.0**exponent).to(value.dtype)
        for index in range(min(value.numel(), 8)):
            for entry in (math.nan, -math.inf, 1e17, -1e17):
                changed = value.clone()
                changed.view(-1)[index] = entry
                yield f"has {entry} as its entry {index}", changed


def _inner(kind: Any) -> Any:
    """Returns what a container's items are; numbers where it does not say."""
    inner = [part for part in get_args(_parts(kind)[0]) if part not in (Any, ...)]
    return inner[-1] if inner else Finite


def mutated_messages(
    kind: type[Any], fields: Mapping[str, Any], reading: Reading
) -> Iterator[tuple[str, Any]]:
    """Yields a message's fields with one of them mutated, or something else in place of all."""
    yield from ((f"message is {shown(junk)}", junk) for junk in JUNK)
    yield "message has an unknown field", {**fields, "extra": 1}
    for name, own in fields_of(kind)[0].items():
        yield f"{name} is missing", {key: fields[key] for key in fields if key != name}
        if name in fields:
            for what, changed in mutations(own, fields[name], reading):
                yield f"{name} {what}", {**fields, name: changed}
