"""Rewards of a few lines of Python: fast, and transparent in their measure.

They need no model, so they suit a first run on any policy. All measure surface features of a text.
Replies may be texts, or messages as in chats.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reward_models.registry import reward_model

POSITIVE_WORDS = (
    "beautiful best brave clever enjoy excited friend friends fun glad good great happy help hope "
    "joy kind kindness laugh laughed love loved lovely nice play please proud safe share shared "
    "smile smiled sweet thank thanks together welcome wonderful"
)

COURTEOUS_PHRASES = (
    "please, thank you, thanks, you're welcome, you are welcome, sorry, i apologize, i apologise, "
    "my apologies, excuse me, pardon, may i, could you, would you, would you mind, "
    "i'd be happy to, i would be happy to, i'm happy to, happy to help, glad to help, my pleasure, "
    "i appreciate, good question, good luck, take care, with respect, if you like, feel free"
)
RUDE_PHRASES = (
    "shut up, stupid, idiot, idiotic, moron, dumb, fool, loser, jerk, pathetic, ridiculous, "
    "nonsense, damn, hell, crap, shit, fuck, fucking, bitch, bastard, asshole, screw you, "
    "go away, get lost, who cares, none of your business, i don't care, what's wrong with you, "
    "your own fault"
)


Given = str | Sequence[Mapping[str, Any]]
"""A prompt or a reply: a text, or a list of messages."""


def as_texts(given: Sequence[Given]) -> list[str]:
    """Returns prompts or replies as texts, whether they are texts already or messages.

    Messages give their contents; pictures and tool calls are left out.

    >>> as_texts(["Yes.", [{"role": "assistant", "content": "No."}]])
    ['Yes.', 'No.']
    """
    return [each if isinstance(each, str) else "\n\n".join(map(_content, each)) for each in given]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


@reward_model("brevity")
def brevity(completions: Sequence[Given], *, half_words: float = 20.0, **_: Any) -> list[float]:
    """Scores the brevity of each reply: 1 for an empty one, 1/2 at `half_words` words.

    >>> brevity(["", "one two"], half_words=2)
    [1.0, 0.5]
    """
    if half_words <= 0:
        raise ValueError(f"brevity's half_words must be positive, got {half_words}.")
    return [half_words / (half_words + len(text.split())) for text in as_texts(completions)]


@reward_model("length")
def length(completions: Sequence[Given], *, num_words: float = 30.0, **_: Any) -> list[float]:
    """Scores how close each reply's length is to `num_words` words: 1 there, 1/2 at half and twice.

    >>> length(["one two", "one", ""], num_words=2)
    [1.0, 0.5, 0.0]
    """
    if num_words <= 0:
        raise ValueError(f"length's num_words must be positive, got {num_words}.")
    counts = [len(text.split()) for text in as_texts(completions)]
    return [min(count, num_words) / max(count, num_words) for count in counts]


SENTENCES = r"[A-Z].*[.!?][\"')]*"
"""Pattern of one or more whole sentences."""


@reward_model("matches")
def matches(completions: Sequence[Given], *, pattern: str = SENTENCES, **_: Any) -> list[float]:
    r"""Checks the format of each reply: 1 if all of it matches a regular expression, 0 otherwise.

    White space around a reply is ignored, and a dot matches line ends. By default a reply must
    begin with a capital letter and end with a sentence.

    >>> matches(["I see.", "I see. And", "- one\n- two"])
    [1.0, 0.0, 0.0]
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"matches' pattern {pattern!r} is invalid ({error}): correct it."
        ) from None
    return [float(bool(compiled.fullmatch(text.strip()))) for text in as_texts(completions)]


@reward_model("positivity")
def positivity(
    completions: Sequence[Given], *, words: str = POSITIVE_WORDS, **_: Any
) -> list[float]:
    """Counts the positive words of each reply; the count conflicts with brevity.

    The share of positive words would not: short replies have a higher one. White space separates
    the words that count.

    >>> positivity(["A happy dog. Happy, I say!", "Rain."])
    [2.0, 0.0]
    """
    positive = set(words.lower().split())
    return [
        float(sum(word in positive for word in re.findall(r"[\w']+", text.lower())))
        for text in as_texts(completions)
    ]


@reward_model("politeness")
def politeness(
    completions: Sequence[Given],
    *,
    courteous: str = COURTEOUS_PHRASES,
    rude: str = RUDE_PHRASES,
    **_: Any,
) -> list[float]:
    """Counts the polite phrases of each reply minus the rude ones.

    A phrase is one or more whole words, in any case and with any punctuation between them; of
    overlapping phrases, only the longest counts. Context is ignored: quoting an insult counts as
    rude, and so does explaining hell. Commas separate phrases.

    >>> politeness(["Thank you! Could you say more, please?", "Shut up.", "Rain."])
    [3.0, -1.0, 0.0]
    """
    for_it, against_it = _any_of(courteous), _any_of(rude)
    texts = [_words(text) for text in as_texts(completions)]
    return [float(len(for_it.findall(text)) - len(against_it.findall(text))) for text in texts]


def _words(text: str) -> str:
    """Returns the words in lower case, one space between them."""
    return " ".join(re.findall(r"\w+(?:'\w+)*", text.lower().replace("\u2019", "'")))


def _any_of(phrases: str) -> re.Pattern[str]:
    """Returns a pattern that matches whole phrases in `_words`, the longest first."""
    spelt = sorted(filter(None, map(_words, phrases.split(","))), key=len, reverse=True)
    return re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, spelt))})(?!\S)" if spelt else r"(?!)")
