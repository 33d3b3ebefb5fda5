"""Demonstrations and preference pairs of the generated world."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from firm.miniature.world import (
    OBJECTIVES,
    Act,
    Objective,
    Split,
    SyntheticPrompt,
    World,
    sentences_of,
)

STYLES = {
    "helper": (
        ("opener", 0.5), ("step", 1.0), ("step", 0.9), ("step", 0.4), ("polite", 0.4),
    ),
    "sloppy": (
        ("opener", 0.3), ("step", 0.6), ("stray", 1.0), ("stray", 0.5), ("filler", 0.4),
    ),
    "vague": (
        ("opener", 0.4), ("vague", 1.0), ("filler", 0.3), ("step", 0.2), ("polite", 0.3),
    ),
    "refuser": (
        ("refusal", 0.8), ("warning", 0.6), ("alternative", 0.5), ("polite", 0.2),
    ),
    "rude": (
        ("rude", 1.0), ("vague", 0.3), ("step", 0.7), ("stray", 0.3), ("rude", 0.3),
    ),
}  # fmt: skip
"""Roles in order by style, each with the probability that a reply of this style has it.

A "stray" is a step that is partial or foreign.
"""

STYLE_SHARES = {"helper": 0.25, "sloppy": 0.25, "vague": 0.15, "refuser": 0.2, "rude": 0.15}


@dataclass(frozen=True)
class ReplyWriter:
    """Writes replies to the prompts of a world. Equal seeds give equal replies."""

    world: World

    def demonstrations(self, num: int, seed: int) -> list[dict[str, str]]:
        """Returns demonstrations, {"prompt", "completion"}, in a mixture of reply styles.

        Some help, some refuse, some are sloppy, vague or rude, independently of the request: a
        policy that imitates them all is mediocre at both objectives.
        """
        rng = random.Random(f"sft {seed}")
        prompts = self.world.prompts("train")
        rows = []
        for _ in range(num):
            prompt = rng.choice(prompts)
            rows.append({"prompt": prompt.text, "completion": self._styled(rng, prompt)})
        return rows

    def preference_pairs(
        self,
        kind: Objective,
        num: int,
        seed: int,
        noise: float,
        *,
        split: Split = "train",
    ) -> list[dict[str, str]]:
        """Returns pairs of replies to one prompt, {"prompt", "chosen", "rejected", "kind"}.

        In addition to styled replies, the pairs contain replies as a policy under optimisation
        produces them: random, repeated, truncated, garbled, empty and off-topic ones. Replies with
        equal true scores do not form pairs.

        Args:
            kind: The objective by which replies are ranked.
            num: Number of pairs.
            seed: Equal seeds give equal pairs.
            noise: Temperature of the labels: the better reply is chosen with probability
                sigmoid(gap / noise), always if 0.
            split: Split of the prompts.
        """
        if kind not in OBJECTIVES:
            raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(OBJECTIVES)}.")
        if noise < 0:
            raise ValueError(f"noise must be non-negative, got {noise}.")
        truth = self.world.true_helpful if kind == "helpful" else self.world.true_harmless
        rng = random.Random(f"pairs {kind} {split} {seed}")
        prompts = self.world.prompts(split)
        rows = []
        while len(rows) < num:
            prompt = rng.choice(prompts)
            first = self._candidate(rng, prompt)
            second = (
                self._edited(rng, prompt, first)
                if rng.random() < 0.3
                else self._candidate(rng, prompt)
            )
            gap = truth([prompt.text], [first])[0] - truth([prompt.text], [second])[0]
            if gap == 0:
                continue
            if gap < 0:
                first, second = second, first
            if noise and rng.random() < 1 / (1 + math.exp(abs(gap) / noise)):
                first, second = second, first
            rows.append({"prompt": prompt.text, "chosen": first, "rejected": second, "kind": kind})
        return rows

    def _sentence(self, rng: random.Random, prompt: SyntheticPrompt, role: str) -> str:
        act = self._acts[prompt.act]
        if role == "step":
            return rng.choice(act.steps)
        if role == "stray":
            return rng.choice(self._stray_act(rng, act).steps)
        return rng.choice(self.world.sentences[role]).format(object=act.object)

    def _stray_act(self, rng: random.Random, act: Act) -> Act:
        """Returns another training act: of the same object, of the same verb, or any."""
        likeness = rng.choice(("object", "verb", "any"))
        while True:
            other = rng.choice(self._training_acts)
            if other != act and (
                likeness == "any" or getattr(other, likeness) == getattr(act, likeness)
            ):
                return other

    def _styled(self, rng: random.Random, prompt: SyntheticPrompt) -> str:
        """Returns a reply in a random style of the demonstrations."""
        styles = list(STYLE_SHARES)
        style = rng.choices(styles, list(STYLE_SHARES.values()))[0]
        sentences: list[str] = []
        for role, share in STYLES[style]:
            if rng.random() < share:
                sentence = self._sentence(rng, prompt, role)
                if sentence not in sentences:
                    sentences.append(sentence)
        return _join(sentences or [self._sentence(rng, prompt, STYLES[style][0][0])])

    def _random_reply(self, rng: random.Random, prompt: SyntheticPrompt) -> str:
        """Returns up to six different sentences of random roles, half of them steps."""
        others = ("stray", *self.world.sentences)
        roles = [
            "step" if rng.random() < 0.5 else rng.choice(others) for _ in range(rng.randint(1, 6))
        ]
        return _join(list(dict.fromkeys(self._sentence(rng, prompt, role) for role in roles)))

    def _candidate(self, rng: random.Random, prompt: SyntheticPrompt) -> str:
        """Returns one reply for a pair: styled, random or corrupted."""
        make = rng.choices((self._styled, self._random_reply), (0.5, 0.5))[0]
        reply = make(rng, prompt)
        return rng.choice(CORRUPTIONS)(rng, reply) if rng.random() < 0.2 else reply

    def _edited(self, rng: random.Random, prompt: SyntheticPrompt, reply: str) -> str:
        """Returns a reply with one sentence added, taken out or replaced, or corrupted."""
        sentences = sentences_of(reply)
        if not sentences or rng.random() < 0.2:
            return rng.choice(CORRUPTIONS)(rng, reply)
        role = "step" if rng.random() < 0.4 else rng.choice(("stray", *self.world.sentences))
        new = self._sentence(rng, prompt, role)
        i = rng.randrange(len(sentences))
        edits = (
            [*sentences[:i], new, *sentences[i:]],
            [*sentences[:i], *sentences[i + 1 :]],
            [*sentences[:i], new, *sentences[i + 1 :]],
        )
        return _join(rng.choice(edits))

    @cached_property
    def _acts(self) -> dict[str, Act]:
        return {act.text: act for act in self.world.acts}

    @cached_property
    def _training_acts(self) -> list[Act]:
        return [act for act in self.world.acts if act.text not in self.world.held_out]


def _join(sentences: list[str]) -> str:
    return "".join(f" {sentence}" for sentence in sentences)


def _truncate(rng: random.Random, reply: str) -> str:
    words = reply.split()
    return _join(words[: rng.randint(max(len(words) - 4, 0), max(len(words) - 1, 0))])


def _drop_word(rng: random.Random, reply: str) -> str:
    words = reply.split()
    if words:
        del words[rng.randrange(len(words))]
    return _join(words)


def _double_word(rng: random.Random, reply: str) -> str:
    words = reply.split()
    if words:
        i = rng.randrange(len(words))
        words.insert(i, words[i])
    return _join(words)


def _shuffle_words(rng: random.Random, reply: str) -> str:
    words = reply.split()
    rng.shuffle(words)
    return _join(words)


def _repeat_sentences(rng: random.Random, reply: str) -> str:
    sentences = sentences_of(reply)
    if sentences:
        sentences += [rng.choice(sentences)] * rng.randint(1, 3)
    return _join(sentences)


def _empty(rng: random.Random, reply: str) -> str:
    return ""


CORRUPTIONS: tuple[Callable[[random.Random, str], str], ...] = (
    _truncate,
    _drop_word,
    _double_word,
    _shuffle_words,
    _repeat_sentences,
    _repeat_sentences,
    _empty,
)
"""Corruptions that occur in replies of a policy under optimisation."""
