"""Golden scores: examples with known scores, checked before a reward model is used.

A sequence classifier with the wrong input format still returns scores. Comparing with an example
from its model card reveals this, and if the score is off, trying the other formats shows which one
was intended.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from reward_models.config import CallFormat, GoldenScore

if TYPE_CHECKING:
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
    is_classifier = hasattr(reward, "append_eos")  # importing the class takes seconds
    # a copy counts for itself which inputs it truncates
    off = _misses(reward.replace() if is_classifier else reward, known)
    if not off:
        return
    place, got = next(iter(off.items()))
    remedy = "correct the score, or the function and its options."
    if is_classifier:
        remedy = _format_that_fits(reward, known)
    raise ValueError(
        f"golden.{place} must score {known[place].score:g} ± {known[place].tolerance:g}, got "
        f"{got:.6g} ({len(off)} of {len(known)} golden scores are off): {remedy}"
    )


def _misses(reward: Any, golden: Mapping[int, GoldenScore]) -> dict[int, float]:
    """Returns a reward model's scores where they differ from the golden ones, by place."""
    from firm.alignment.rewards import score  # here, since the registry is read without torch

    prompts = [example.prompt for example in golden.values()]
    completions = [example.completion for example in golden.values()]
    (row,) = score({reward.name: reward}, prompts, completions).tolist()
    return {
        place: got
        for (place, example), got in zip(golden.items(), row, strict=True)
        if example.score is None or not abs(got - example.score) <= example.tolerance
    }


def _format_that_fits(reward: "SequenceClassifierReward", golden: Mapping[int, GoldenScore]) -> str:
    """Returns a remedy: the other formats that give all the scores."""
    fitting = []
    for format in get_args(CallFormat):
        ends = []
        for name, append_eos in (("off", False), ("on", True)):
            try:
                if not _misses(reward.replace(format=format, append_eos=append_eos), golden):
                    ends.append(name)
            except ValueError:  # a format that this tokenizer cannot spell is not the intended one
                pass
        if ends:
            fitting.append(f"{format!r} with append_eos {' or '.join(ends)}")
    if fitting:
        return f"format {', or '.join(fitting)} would match."
    return (
        "no other format would match, with append_eos on or off: "
        "check path, output, max_length and dtype, and the scores themselves."
    )
