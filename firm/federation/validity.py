"""What the server believes of an update, and why not: nothing that a client sends is trusted."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from firm.federation.client import Adapter, Update

MAX_EXAMPLES = 10**9
"""More examples than any client has."""

_RESERVED = ("kind", "round", "client", "num_examples", "bytes_down", "bytes_up")
"""Keys of a client's row in the log that are the server's to write."""

_NAMED = ("policy_loss", "reward", "reward_raw", "reward_raw_std", "seconds", "value_loss")
"""Metrics that are a number by name."""


def invalidity(
    update: Any, adapter: Adapter, objectives: Sequence[str], max_norm: float | None = None
) -> str | None:
    """Returns why the server must not average an update into this adapter; None if it may.

    Args:
        update: What a client sent; anything.
        adapter: The adapter that it was sent, θ_t.
        objectives: Names of the M objectives.
        max_norm: Longest ‖θ_c - θ_t‖; None allows any.
    """
    if not isinstance(update, Update):
        return f"the reply is no update but {type(update).__name__}"
    if strangers := update.adapter.keys() ^ adapter.keys():
        whose = "lacks" if min(strangers) in adapter else "has an unknown"
        return f"the update {whose} parameter {min(strangers)!r}"
    squares = 0.0
    for name, sent in adapter.items():
        value = update.adapter[name]
        if value.shape != sent.shape:
            return f"the update has shape {list(value.shape)} in {name!r}, not {list(sent.shape)}"
        if value.dtype != sent.dtype:
            return f"the update has dtype {value.dtype} in {name!r}, not {sent.dtype}"
        if not value.isfinite().all():
            return f"the update is not finite in {name!r}"
        squares += (value.double() - sent.double()).square().sum().item()
    if not 1 <= update.num_examples <= MAX_EXAMPLES:
        return f"the update counts {update.num_examples} examples"
    if max_norm is not None and squares**0.5 > max_norm:
        return f"the update has norm {squares**0.5:.4g}, above max_update_norm {max_norm:g}"
    return _metrics_invalidity(update.metrics, len(objectives))


def _metrics_invalidity(metrics: Mapping[str, Any], num_objectives: int) -> str | None:
    """Why metrics cannot be those of a client with so many objectives; None if they can."""
    if taken := [key for key in metrics if key in _RESERVED or not isinstance(key, str)]:
        return f"the update's metrics have the key {taken[0]!r}, which is not a client's to set"
    num_pairs = num_objectives * (num_objectives - 1) // 2
    layouts: dict[str, Callable[[Any], bool]] = {
        "weights": lambda value: _has_rows(value, num_objectives),
        "gradient_norms": lambda value: _has_rows(value, num_objectives),
        "cosines": lambda value: _has_rows(value, num_pairs),
        "gram": lambda value: _has_rows(value, num_objectives) and len(value) == num_objectives,
        "clipped": _is_number,
        **dict.fromkeys(_NAMED, _names_numbers),
    }
    for key, has_layout in layouts.items():
        if key in metrics and not has_layout(metrics[key]):
            return f"the update's metrics have no usable {key!r}"
    if "gram" in metrics and "weights" not in metrics:
        return "the update's metrics have a 'gram' without 'weights'"
    if not _is_plain(dict(metrics)):
        return "the update's metrics hold something other than numbers and texts"
    return None


def _has_rows(value: Any, width: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(row, list) and len(row) == width for row in value)
        and all(_is_number(item) for row in value for item in row)
    )


def _names_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and (item is None or _is_number(item)) for name, item in value.items()
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)
