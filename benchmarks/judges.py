"""Quantities of texts by which runs are judged, and that none of them is trained on."""

import re
from collections.abc import Sequence
from functools import cache
from math import log10
from typing import Any

import torch

MODEL = "firm/models/smollm2"
"""Model that judges the style of replies."""
REQUESTS = (
    "Answer in plain, everyday words that a child understands.",
    "Answer in the rich, learned words of an academic.",
)
"""What the questions begin with when plain and rich replies are asked for."""


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


def style(completions: Sequence[str], *, prompts: Sequence[str], **_: Any) -> list[float]:
    """Returns how much more likely each reply is when plain words are asked for than rich ones.

    In nats per token, by SmolLM2 as it is published: it reads the question after a sentence that
    asks for the style (`REQUESTS`). It counts no syllables, letters or rare words. NaN for an empty
    reply.
    """
    pairs = list(zip(prompts, completions, strict=True))
    plain, rich = (
        [_log_likelihood(f"{request}\n\n{prompt}", reply) for prompt, reply in pairs]
        for request in REQUESTS
    )
    return [one - other for one, other in zip(plain, rich, strict=True)]


def _log_likelihood(request: str, reply: str) -> float:
    """Returns the mean log-probability of a reply's tokens, in nats."""
    model, tokenizer = _model()
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    if not ids:
        return float("nan")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], add_generation_prompt=True, return_dict=False
    )
    with torch.inference_mode():
        logits = model(torch.tensor([asked + ids])).logits[0, len(asked) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).mean().item()


@cache
def _model() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from firm.run.shipped import with_shipped_paths

    path = with_shipped_paths(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(path)


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
