import math

import pytest

from firm.fronts import collapse_reason

VARIED = {"commonest_share": 0.1, "empty_share": 0.0}


def test_varied_replies_are_no_collapse():
    assert collapse_reason(**VARIED, mean_kl=40.0) is None
    assert collapse_reason(**VARIED, mean_kl=0.0, parse_rate=1.0, base_parse_rate=0.9) is None


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ((0.5, 0.0), None),
        ((0.6, 0.0), "one reply to 60 % of the prompts"),
        ((0.3, 0.5), None),
        ((0.3, 0.6), "no reply to 60 % of the prompts"),
    ],
)
def test_one_reply_or_none_to_more_than_half_of_the_prompts_is_a_collapse(shares, reason):
    commonest, empty = shares
    found = collapse_reason(commonest_share=commonest, empty_share=empty, mean_kl=1.0)
    assert found == reason


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_is_a_collapse(kl):
    assert collapse_reason(**VARIED, mean_kl=kl) == f"the mean KL from the base model is {kl}"


def test_a_language_half_lost_is_a_collapse_beside_the_base_models_own():
    def judged(rate, base):
        return collapse_reason(**VARIED, mean_kl=1.0, parse_rate=rate, base_parse_rate=base)

    assert judged(0.45, 0.9) is None
    assert judged(0.44, 0.9) == "44 % of the replies parse, of the base model's 90 %"
    assert judged(0.0, 0.0) is None
