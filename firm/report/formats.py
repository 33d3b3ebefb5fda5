"""Formats numbers for pages."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from firm.fronts.correlation import correlation_interval
from firm.run.comparison import Measure

MISSING = "–"
CONFIG = "Configuration (config.yaml)"
NBSP = "\N{NO-BREAK SPACE}"


def number(value: float | None, *, is_signed: bool = False) -> str:
    """Returns a number with about three digits.

    >>> number(0.12345), number(-12.345), number(12345.6), number(0.5, is_signed=True)
    ('0.123', '−12.3', '12,346', '+0.500')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size < 1e-6:  # zero up to rounding
        return "0.000"
    if size < 1e-3:
        return _with_sign(value, f"{size:.2g}", is_signed)
    decimals = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return _with_sign(value, f"{size:,.{decimals}f}", is_signed)


def measure(value: Measure | None, *, is_signed: bool = False) -> str:
    r"""Returns a mean with its standard error, to the digits that the error leaves significant.

    Shares have their interval instead.

    >>> measure(Measure(0.81234, 0.0213), is_signed=True).replace("\N{NO-BREAK SPACE}", " ")
    '+0.812 ± 0.021'
    >>> measure(Measure(1.0, 0.0, 6, interval=(0.54074, 1.0))).replace("\N{NO-BREAK SPACE}", " ")
    '1.000 [0.541, 1.000]'
    """
    if value is None:
        return MISSING
    if value.interval:
        numbers = value.mean, *value.interval
        mean, low, high = (_with_sign(own, f"{abs(own):.3f}", is_signed) for own in numbers)
        return f"{mean} [{low},{NBSP}{high}]"
    if not value.se or not math.isfinite(value.se):
        return number(value.mean, is_signed=is_signed)
    decimals = min(max(1 - math.floor(math.log10(value.se)), 0), 6)
    if value.se < 1e-6 and abs(value.mean) < 1e-6:
        return number(0.0, is_signed=is_signed)
    mean = _with_sign(value.mean, f"{abs(value.mean):,.{decimals}f}", is_signed)
    return f"{mean}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{value.se:,.{decimals}f}"


def correlation(value: float | None, num_points: int) -> str:
    """Returns a rank correlation of `num_points` points with its 95 % interval.

    >>> correlation(0.95, 9).replace(NBSP, " "), correlation(None, 2)
    ('+0.950 (0.70 to 0.99)', '–')
    """
    if value is None:
        return MISSING
    ends = correlation_interval(value, num_points)
    low, high = (_with_sign(end, f"{abs(end):.2f}", is_signed=False) for end in ends)
    return f"{number(value, is_signed=True)} ({low} to {high})".replace(" ", NBSP)


def size(num_bytes: float) -> str:
    """Returns a number of bytes in decimal units.

    >>> size(1_234_567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Returns a duration in its two largest units.

    >>> duration(12.34), duration(754), duration(7390)
    ('12.3 s', '12 min 34 s', '2 h 3 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """Returns an ISO 8601 time to the minute.

    >>> moment("2026-01-05T09:30:12+00:00")
    '2026-01-05 09:30 UTC'
    """
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def count(number: int, noun: str, nouns: str | None = None) -> str:
    """Returns a count with its noun.

    >>> count(1, "round"), count(2, "round"), count(2, "entry", "entries")
    ('1 round', '2 rounds', '2 entries')
    """
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def shares(preference: Sequence[float] | None) -> str:
    """Returns a preference as text."""
    return "none" if preference is None else ", ".join(f"{share:.3g}" for share in preference)


def _with_sign(value: float, digits: str, is_signed: bool) -> str:
    if value < 0:
        return f"−{digits}"
    return f"+{digits}" if is_signed and value > 0 else digits
