"""Whether a change is clear: by its standard error, or by the number of equal changes."""

import pytest

from firm.run.comparison import Measure, compare


@pytest.mark.parametrize(
    ("measure", "is_clear"),
    [
        (Measure(0.1, 0.04, 50), True),
        (Measure(-0.1, 0.04, 50), True),
        (Measure(0.1, 0.06, 50), False),
        (Measure(18.6, 5.0, 2), False),  # Student's t of one degree of freedom asks for 12.7
        (Measure(18.6, 5.0, 1), False),
        (Measure(0.5, 0.0, 6), True),  # every pair is ranked rightly, none was
        (Measure(0.5, 0.0, 5), False),
        (Measure(0.0, 0.0, 50), False),
        (Measure(0.1), False),
    ],
)
def test_a_change_is_clear_beyond_the_noise_or_where_all_prompts_agree(measure, is_clear):
    assert measure.is_clear is is_clear


def test_shares_have_exact_intervals_and_the_sign_test_decides_on_their_change():
    counts = {"num_prompts": 10, "num_rows": 10, "num_samples": 1}
    margin = {"mean": 0.2, "se": 0.1}
    base = counts | {"rewards": {"a": {"mean": 0.5, "se": 0.0}}, "scores": {"a": margin}}
    own = {"rewards": {"a": {"mean": 1.0, "se": 0.0}}, "scores": {"a": margin}}
    changes = {"change": {"a": margin}, "accuracy_change": {"a": {"mean": 0.5, "se": 0.0}}}
    accuracy, margins = compare(base, counts | own | changes)
    assert accuracy.aligned.interval == pytest.approx((0.69150, 1.0), abs=1e-5)  # R's binom.test
    assert accuracy.change.interval == pytest.approx((0.19150, 0.5), abs=1e-5)
    assert accuracy.change.is_clear
    assert accuracy.base.interval is margins.aligned.interval is None

    parse = {"parse": {"mean": 1.0, "se": 0.0}}
    base = counts | {"scores": parse}
    (line,) = compare(base, base | {"change": {"parse": {"mean": 0.0, "se": 0.0}}})
    assert line.aligned.interval == pytest.approx((0.69150, 1), abs=1e-5)
    assert line.change.interval == pytest.approx((-0.30850, 0.30850), abs=1e-5)  # not ± 0
    several = base | {"num_samples": 4, "change": {"parse": {"mean": 0.0, "se": 0.1}}}
    assert compare(base, several)[0].change.interval is None

    ones = {"praise": {"mean": 0.4, "se": (0.4 * 0.6 / 9) ** 0.5}}  # 4 of 10 scores are 1, 6 are 0
    base = counts | {"scores": ones}
    all_ones = {"scores": {"praise": {"mean": 1.0, "se": 0.0}}}
    change = {"change": {"praise": {"mean": 0.6, "se": (0.6 * 0.4 / 9) ** 0.5}}}
    (line,) = compare(base, base | all_ones | change)
    assert line.base.interval == pytest.approx((0.12155, 0.73762), abs=1e-5)
    # 6 rose, none fell: the low end is the sign test's, the high one Wilson's of 6 of 10
    assert line.change.interval == pytest.approx((0.04889, 0.83182), abs=1e-5)
    other = {"scores": {"praise": {"mean": 0.4, "se": 0.15}}}
    assert compare(base, base | other | change)[0].aligned.interval is None
