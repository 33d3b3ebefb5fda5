"""Golden scores: examples with known scores, checked before a reward model is used.

A sequence classifier with the wrong input format still returns scores. Comparing with an example
from its model card reveals this, and if the score is off, trying the other formats shows which one
was intended.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from reward_models.config import CallFormat, GoldenScore
from reward_models.sequence_classifier import SequenceClassifierReward


def check_golden_scores(reward: Any, golden: Sequence[GoldenScore]) -> None:
    """Checks that a reward model gives the known scores.

    Messages refer to examples by index and quote no text. The counters of a sequence classifier do
    not change.

    Raises:
        ValueError: A score is off, with the format that would have given all of them if there is
            one; or the reward did not return finite numbers.
    """
    known = {place: example for place, example in enumerate(golden) if example.score is not None}
    if not known:
        return
    is_classifier = isinstance(reward, SequenceClassifierReward)
    asked = reward
    if is_classifier:
        asked = reward.with_format(reward.format, append_eos=reward.append_eos)
    off = _misses(asked, known)
    if not off:
        return
    place, got = next(iter(off.items()))
    remedy = (
        _format_that_fits(reward, known)
        if is_classifier
        else "correct the score, or the function and its options."
    )
    raise ValueError(
        f"golden.{place} must score {known[place].score:g} ± {known[place].tolerance:g}, got "
        f"{got:.6g} ({len(off)} of {len(known)} golden scores are off): {remedy}"
    )


def _misses(reward: Any, golden: Mapping[int, GoldenScore]) -> dict[int, float]:
    """Returns a reward model's scores where they differ from the golden ones, by place."""
    # Imported here, because the package brings TRL along: seconds, and a warning on standard error.
    from firm.alignment.prompts import prompt_of
    from firm.alignment.rewards import score

    prompts = [prompt_of(example.prompt) for example in golden.values()]
    completions = [example.completion for example in golden.values()]
    (row,) = score({reward.name: reward}, prompts, completions).tolist()
    return {
        place: got
        for (place, example), got in zip(golden.items(), row, strict=True)
        if example.score is None or not abs(got - example.score) <= example.tolerance
    }


def _format_that_fits(reward: SequenceClassifierReward, golden: Mapping[int, GoldenScore]) -> str:
    """Returns a remedy: the other formats that give all the scores."""
    fitting = []
    for format in get_args(CallFormat):
        ends = [
            name
            for name, append_eos in (("off", False), ("on", True))
            if _fits(reward, golden, format, append_eos)
        ]
        if ends:
            fitting.append(f"{format!r} with append_eos {' or '.join(ends)}")
    if fitting:
        return f"format {', or '.join(fitting)} would match."
    return (
        "no other format would match, with append_eos on or off: "
        "check path, output, max_length and dtype, and the scores themselves."
    )


def _fits(
    reward: SequenceClassifierReward,
    golden: Mapping[int, GoldenScore],
    format: CallFormat,
    append_eos: bool,
) -> bool:
    try:
        return not _misses(reward.with_format(format, append_eos=append_eos), golden)
    except ValueError:  # a format that this tokenizer cannot spell is not the intended one
        return False
