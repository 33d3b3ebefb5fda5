"""Whether a change is clear: by its standard error, or by the number of equal changes."""

import pytest

from firm.run.comparison import Measure


@pytest.mark.parametrize(
    ("measure", "is_clear"),
    [
        (Measure(0.1, 0.04, 50), True),
        (Measure(-0.1, 0.04, 50), True),
        (Measure(0.1, 0.06, 50), False),
        (Measure(0.5, 0.0, 6), True),  # every pair is ranked rightly, none was
        (Measure(0.5, 0.0, 5), False),
        (Measure(0.0, 0.0, 50), False),
        (Measure(0.1), False),
    ],
)
def test_a_change_is_clear_beyond_the_noise_or_where_all_prompts_agree(measure, is_clear):
    assert measure.is_clear is is_clear
