"""Detects collapsed models: the same reply to every prompt, or no language any more.

Reward models may still score such a policy highly, so rewards alone do not reveal it. Not in the
paper; the thresholds are loose enough that no usable policy reaches them by chance.
"""

import math

MAX_EMPTY_SHARE = 0.5
"""A policy with blank replies to more than this share of the prompts counts as collapsed."""

MAX_COMMON_SHARE = 0.5
"""A policy has also collapsed if it gives the same reply to more than this share of the prompts."""

MIN_PARSE_RATIO = 0.5
"""Smallest parse rate, relative to the base model's, of a policy that has not collapsed."""


def collapse_reason(
    *,
    commonest_share: float,
    empty_share: float,
    mean_kl: float,
    parse_rate: float | None = None,
    base_parse_rate: float | None = None,
) -> str | None:
    """Returns why a policy counts as collapsed, or None if it does not.

    Args:
        commonest_share: Share of the prompts with the most frequent reply, in [0, 1]; blank replies
            do not count.
        empty_share: Share of the prompts with a blank reply, in [0, 1].
        mean_kl: Mean KL from the base model; NaN and infinities count as a collapse.
        parse_rate: Share of the replies that parse in the language's grammar, in [0, 1]; None
            without a grammar.
        base_parse_rate: Parse rate of the base model, the baseline of `parse_rate`.

    >>> collapse_reason(commonest_share=0.75, empty_share=0.0, mean_kl=2.5)
    'one reply to 75 % of the prompts'
    """
    if not math.isfinite(mean_kl):
        return f"the mean KL from the base model is {mean_kl}"
    if empty_share > MAX_EMPTY_SHARE:
        return f"no reply to {_percent(empty_share)} of the prompts"
    if commonest_share > MAX_COMMON_SHARE:
        return f"one reply to {_percent(commonest_share)} of the prompts"
    if parse_rate is None or base_parse_rate is None:
        return None
    if parse_rate < MIN_PARSE_RATIO * base_parse_rate:
        return (
            f"{_percent(parse_rate)} of the replies parse, of the base model's "
            f"{_percent(base_parse_rate)}"
        )
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
