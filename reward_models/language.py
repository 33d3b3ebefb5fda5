"""Rewards of plain English: sentiment, reading ease and vocabulary, by published formulas.

They need packages of the extra `real`, which hold a lexicon or a dictionary, but no model and no
download. Replies may be texts, or messages as in chats.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from reward_models.registry import reward_model
from reward_models.scripted import Given, as_texts

NUM_BASIC = 2_000
"""Most frequent words that count as basic, as in Daller et al. (2003)."""
LONG = 7
"""Letters of a long word: more than six, as in Björnsson's LIX (1968)."""
FEWEST_WORDS = 10
"""Shorter replies are scored in proportion."""


@reward_model("sentiment", needs="vaderSentiment")
def sentiment(completions: Sequence[Given], **_: Any) -> list[float]:
    """Returns the sentiment of each reply, from -1 to 1: the compound score of VADER.

    Hutto and Gilbert (2014), VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
    Social Media Text.
    """
    return [_analyzer().polarity_scores(text)["compound"] for text in as_texts(completions)]


@reward_model("reading_ease", needs="spellchecker")
def reading_ease(completions: Sequence[Given], **_: Any) -> list[float]:
    """Returns how easy each reply is to read, from 0 to 100; plain English has 60 to 70.

    Flesch's formula, 206.835 - 1.015 words per sentence - 84.6 syllables per word (Flesch, 1948, A
    New Readability Yardstick, Journal of Applied Psychology 32), clipped to [0, 100]. Degenerate
    texts would have high scores, so the score is multiplied by the share of words in an English
    dictionary, by the share of distinct pairs of neighbouring words, and, below ten words, by a
    tenth of their number.
    """
    return [_ease(text) for text in as_texts(completions)]


@reward_model("vocabulary", needs="spellchecker")
def vocabulary(completions: Sequence[Given], **_: Any) -> list[float]:
    """Returns how rich each reply's vocabulary is: 0 in plain English, above 1 in dense prose.

    Guiraud's index of advanced words: their number, each counted once, over the square root of the
    number of words (Daller, van Hout and Treffers-Daller, 2003, Lexical Richness in the Spontaneous
    Speech of Bilinguals, Applied Linguistics 24). An advanced word is in an English dictionary, has
    more than six letters and is no form of the 2,000 most frequent words. A list of such words is
    no text, so they count up to a third of all words.
    """
    return [_richness(text) for text in as_texts(completions)]


def num_syllables(word: str) -> int:
    """Returns the number of syllables of an English word, by its spelling.

    Groups of vowels count, except silent ones, and some groups count twice. On the 45,999 words
    that pyspellchecker's list shares with the CMU Pronouncing Dictionary (1.1.3), this equals one
    of the dictionary's pronunciations for 94.0 % of the words and 99.6 % of their occurrences.

    >>> [num_syllables(word) for word in ("make", "table", "wanted", "called", "being", "doesn't")]
    [1, 2, 2, 1, 2, 2]
    """
    word = word.lower().removesuffix("'s")
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    num_groups = len(re.findall(r"[aeiouyéáíóúü]+", word))
    return max(1, num_groups - len(_SILENT.findall(word)) + len(_APART.findall(word)))


_IRREGULAR = {"people": 2, "business": 2, "maybe": 2, "evening": 2}
_SILENT = re.compile(
    r"(?<=[^aeiouy])e$(?<![^aeiouylr]le)(?<!cre)"  # make, but not table, acre
    r"|(?<=[^aeiouysxzcgj])es$(?<![^aeiouyl]les)(?<![sc]hes)"  # makes, but not boxes, tables
    r"|(?<=[^aeiouytd])ed$(?<![^aeiouyl]led)(?<![^aeiouyr]red)"  # called, but not wanted, settled
    r"|(?<=[^aeiouy])e(?=(?:ly|ful|fully|less|lessly|ment|ments|ness|some|thing|times?|where|how|"
    r"body|ship)$)(?<![^aeiouyl]le)"  # likely, somebody
    r"|(?<=ev)e(?=ry)|(?<=ical)(?=ly$)"  # every, basically
)
"""Vowels within a word that are not spoken."""
_APART = re.compile(
    r"(?<![tscgxdl])i[aou](?!u?s?$)|(?<=[^aeiouytscgx])i(?=(?:ous|ously|a|as|um|us|o|os)$)"  # radio
    r"|[aeiouy](?=ing)|ea$(?<=..ea)|(?<=cr)ea(?=t)|reali"  # being, idea, create, realize
    r"|(?<=[aeo])y(?=[aeiou])(?!es?$|ed$)|(?<=[^gq])u[ao](?!r|i)"  # beyond, usual
    r"|[cdstpkvz](?:n't|'ve)|(?:s|th)ms?$"  # doesn't, would've, criticism
    r"|ie[tn](?=$|[st])(?<![tscgx]i..)|(?<=sc)ie(?=nce$)"  # quiet, client, science
)
"""Neighbouring vowels in two syllables, and consonants that are one."""


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", text.lower().replace("\u2019", "'"))


def _ease(text: str) -> float:
    words = _words(text)
    if not words:
        return 0.0
    # the end may be cut off, so it counts as a sentence; three words are the shortest that counts
    ends = len(re.findall(r"\w[^\w\s]*[.!?](?=\W*\s|\W*$)", text))
    is_cut = not re.search(r"[.!?]\W*$", text)
    num_sentences = max(1, min(ends + is_cut, len(words) / 3))
    syllables_per_word = sum(map(num_syllables, words)) / len(words)
    ease = 206.835 - 1.015 * len(words) / num_sentences - 84.6 * syllables_per_word
    return min(100.0, max(0.0, ease)) * _soundness(words)


def _soundness(words: Sequence[str]) -> float:
    """Returns how much words are like a text, from 0 to 1: 1 if English, varied and not short."""
    ranks = _ranks()
    # the dictionary has every letter and many abbreviations
    known = sum(_rank(word, ranks) < (NUM_BASIC if len(word) < 3 else len(ranks)) for word in words)
    pairs = list(pairwise(words))
    distinct = len(set(pairs)) / len(pairs) if pairs else 1.0
    return known / len(words) * distinct * min(1.0, len(words) / FEWEST_WORDS)


def _richness(text: str) -> float:
    words, ranks = _words(text), _ranks()
    advanced = {
        word
        for word in words
        if len(word) >= LONG
        and word in ranks
        and not any(_is_basic(f, ranks) for f in _forms(word))
    }
    if not words:
        return 0.0
    return min(len(advanced), len(words) / 3) / len(words) ** 0.5


def _rank(word: str, ranks: dict[str, int]) -> int:
    """Returns the word's rank by frequency, from 0; that of a possessive is its noun's."""
    unknown = len(ranks)
    return min(ranks.get(word, unknown), ranks.get(word.removesuffix("'s"), unknown))


def _is_basic(word: str, ranks: dict[str, int]) -> bool:
    return ranks.get(word, NUM_BASIC) < NUM_BASIC


def _forms(word: str) -> set[str]:
    """Returns the word and what it may be an inflected or derived form of.

    >>> sorted(_forms("stopped"))
    ['stop', 'stopp', 'stoppe', 'stopped']
    """
    forms = {word}
    for suffix in ("'s", "s", "es", "ed", "ing", "ly", "er", "est", "ers", "ings", "ness"):
        stem = word.removesuffix(suffix)
        if stem != word and len(stem) > 2:
            forms |= {stem, f"{stem}e", f"{stem[:-1]}y" if stem[-1] == "i" else stem}
            forms.add(stem[:-1] if stem[-1] == stem[-2] else stem)
    return forms


@cache
def _ranks() -> dict[str, int]:
    """Returns the ranks of English words by frequency, from 0."""
    from spellchecker import SpellChecker

    counts = SpellChecker(language="en").word_frequency.dictionary
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: rank for rank, word in enumerate(ordered)}


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
