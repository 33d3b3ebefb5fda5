import pytest

from firm.report import formats
from firm.run.comparison import Measure

NBSP = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (-1.234, "−1.23"),
        (12.345, "12.3"),
        (123.45, "123"),
        (12345.6, "12,346"),
        (0.00012345, "0.00012"),
        (0, "0.000"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_a_number_has_about_three_digits(value, text):
    assert formats.number(value) == text


def test_a_signed_zero_has_no_sign():
    assert formats.number(0.0, is_signed=True) == "0.000"
    assert formats.number(0.5, is_signed=True) == "+0.500"


@pytest.mark.parametrize(
    ("mean", "se", "text"),
    [
        (0.81234, 0.0213, f"+0.812{NBSP}±{NBSP}0.021"),
        (-0.81234, 0.213, f"−0.81{NBSP}±{NBSP}0.21"),
        (812.34, 21.3, f"+812{NBSP}±{NBSP}21"),
        (0.5, None, "+0.500"),
        (0.5, 0.0, "+0.500"),
    ],
)
def test_a_mean_ends_where_its_standard_error_has_two_digits(mean, se, text):
    assert formats.measure(Measure(mean, se), is_signed=True) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1_234_567, "1.23 MB"), (999_900, "1 MB"), (5e12, "5 TB")],
)
def test_bytes_are_written_in_decimal_units(num_bytes, text):
    assert formats.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (59.96, "1 min 0 s"), (754, "12 min 34 s"), (7390, "2 h 3 min")],
)
def test_a_duration_has_two_units(seconds, text):
    assert formats.duration(seconds) == text
