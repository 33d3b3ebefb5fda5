"""Strict JSON for files: numbers that JSON does not have become null."""

import json
import math
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Returns plain data as JSON, with null in place of NaN and infinities.

    Python's own encoder writes `NaN` and `Infinity`, which other readers refuse.

    Args:
        value: Data of the types that `json.dumps` supports.
        **options: Options of `json.dumps`, such as `indent`.

    >>> json_text({"a": float("nan"), "b": [1.5, float("-inf")]})
    '{"a": null, "b": [1.5, null]}'
    """
    return json.dumps(_with_null(value), allow_nan=False, **options)


def _with_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
