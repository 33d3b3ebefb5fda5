"""Rewards that are a few lines of Python: quick to run, and plain about what they measure.

They need no model, so they suit a first run on any policy. Both look at the surface of a text.
"""

import re
from typing import Any

from reward_models.registry import reward_model

POSITIVE_WORDS = (
    "beautiful best brave clever enjoy excited friend friends fun glad good great happy help hope "
    "joy kind kindness laugh laughed love loved lovely nice play please proud safe share shared "
    "smile smiled sweet thank thanks together welcome wonderful"
)


@reward_model("brevity")
def brevity(
    completions: list[str], *, prompts: list[str] | None = None, half_words: float = 20.0, **_: Any
) -> list[float]:
    """How short each reply is: 1 for an empty one, 1/2 at `half_words` words, towards 0 beyond.

    >>> brevity(["", "one two"], half_words=2)
    [1.0, 0.5]
    """
    if half_words <= 0:
        raise ValueError(f"brevity's half_words must be positive, got {half_words}.")
    return [half_words / (half_words + len(text.split())) for text in completions]


@reward_model("positivity")
def positivity(
    completions: list[str],
    *,
    prompts: list[str] | None = None,
    words: str = POSITIVE_WORDS,
    **_: Any,
) -> list[float]:
    """How many positive words each reply has: a count, so that it pulls against brevity.

    The share of positive words would not: short replies have a higher one.

    Args:
        completions: The replies.
        prompts: Not looked at.
        words: What counts, separated by white space.

    >>> positivity(["A happy dog. Happy, I say!", "Rain."])
    [2.0, 0.0]
    """
    positive = set(words.lower().split())
    return [
        float(sum(word in positive for word in re.findall(r"[\w']+", text.lower())))
        for text in completions
    ]
