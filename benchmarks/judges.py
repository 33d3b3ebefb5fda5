"""Quantities of texts by which runs are judged, and that none of them is trained on."""

import re
from collections.abc import Sequence
from functools import cache
from math import log10
from typing import Any


def grade(completions: Sequence[str], **_: Any) -> list[float]:
    """Returns the school grade of each text: 0.0588 L - 0.296 S - 15.8, 0 without words.

    L is the number of letters and S of sentences per hundred words (Coleman and Liau, 1975, A
    Computer Readability Formula Designed for Machine Scoring, Journal of Applied Psychology 60). It
    counts letters, where `reading_ease` counts syllables. An unfinished sentence counts as one.
    """
    return [_grade(text) for text in completions]


def rarity(completions: Sequence[str], **_: Any) -> list[float]:
    """Returns the mean of -log10 of the frequency of each text's words in English; 0 without words.

    Words that pyspellchecker's list lacks count once. `vocabulary` uses the same list, but only to
    tell the 2,000 most frequent words from others.
    """
    counts, total = _frequencies()
    return [
        sum(log10(total / counts.get(word, 1)) for word in words) / len(words) if words else 0.0
        for words in map(_words, completions)
    ]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text.lower())


def _grade(text: str) -> float:
    words = _words(text)
    if not words:
        return 0.0
    num_letters = sum(character.isalpha() for word in words for character in word)
    num_sentences = max(
        1, len(re.findall(r"[.!?]+(?=\s|$)", text)) + (text.strip()[-1] not in ".!?")
    )
    return (5.88 * num_letters - 29.6 * num_sentences) / len(words) - 15.8


@cache
def _frequencies() -> tuple[dict[str, int], int]:
    from spellchecker import SpellChecker

    counts = dict(SpellChecker(language="en").word_frequency.dictionary)
    return counts, sum(counts.values())
