"""The generated world: its prompts, and the ground truth of any reply.

Everything is a pure function of the tables in `firm.miniature.grammar` and a seed. Requests come in
the HH dialogue form, replies begin with a space. The ground truth is additive over the sentences of
a reply and computed only from the texts, by parsing them.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from firm.miniature import grammar
from firm.miniature.grammar import Kind

Objective = Literal["helpful", "harmless"]
Split = Literal["train", "validation", "test", "test_acts"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test", "test_acts")
OBJECTIVES: tuple[Objective, ...] = ("helpful", "harmless")

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Act:
    """An act to request: a verb applied to somebody's object."""

    text: str
    kind: Kind
    verb: str
    object: str
    steps: tuple[str, ...]

    @property
    def severity(self) -> float:
        """Harm of the act, in [0, 1]."""
        return grammar.SEVERITY[self.kind]


@dataclass(frozen=True)
class SyntheticPrompt:
    """A request in the HH dialogue form, "\\n\\nHuman: ...\\n\\nAssistant:"."""

    text: str
    kind: Kind
    act: str


@dataclass(frozen=True)
class _Sentence:
    """One sentence of the grammar: its role, its object, and the act that a step belongs to."""

    role: str
    object: str | None = None
    act: Act | None = None


@dataclass(frozen=True)
class World:
    """A grammar of requests and replies with a known ground truth.

    Attributes:
        acts: All acts, including held-out ones.
        held_out: Texts of the acts that no training or validation prompt requests.
        phrasings: Forms of a request by split, with the placeholder `{act}`.
        sentences: Sentences of a reply by role, with the placeholder `{object}`.
    """

    acts: tuple[Act, ...]
    held_out: frozenset[str]
    phrasings: Mapping[str, tuple[str, ...]]
    sentences: Mapping[str, tuple[str, ...]]

    @classmethod
    def conflict(cls) -> "World":
        """Returns the default world, where helping and doing no harm conflict on many requests.

        They conflict on risky and on dual-use requests and agree on harmless ones.
        """
        acts: list[Act] = []
        held_out: set[str] = set()
        for kind, steps_by_verb in grammar.VERBS.items():
            owners = grammar.OWNERS[kind]
            for i, (verb, forms) in enumerate(steps_by_verb.items()):
                for j, item in enumerate(grammar.OBJECTS):
                    text = verb.format(thing=f"{owners[(i + j) % len(owners)]} {item}")
                    steps = tuple(form.format(object=item) for form in forms)
                    acts.append(Act(text, kind, verb, item, steps))
                    if (i + j) % grammar.HELD_OUT_ACT_PERIOD == 0:
                        held_out.add(text)
        return cls(tuple(acts), frozenset(held_out), grammar.PHRASINGS, grammar.SENTENCES)

    # Texts

    def prompts(self, split: Split) -> list[SyntheticPrompt]:
        """Returns the prompts of a split, in a fixed shuffled order.

        "validation" has the training acts in separate phrasings, for tuning; "test" has them in
        phrasings for testing only; "test_acts" has acts that no other split asks for, in the
        phrasings of "test".
        """
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}.")
        acts = [act for act in self.acts if (act.text in self.held_out) == (split == "test_acts")]
        phrasings = self.phrasings["test" if split == "test_acts" else split]
        asked = [(phrasing, act) for act in acts for phrasing in phrasings]
        random.Random(f"prompts {split}").shuffle(asked)
        return [
            SyntheticPrompt(
                f"\n\nHuman: {phrasing.format(act=act.text)}\n\nAssistant:", act.kind, act.text
            )
            for phrasing, act in asked
        ]

    # Truth, in TRL's reward-function signature

    def true_helpful(self, prompts: list[str], completions: list[str], **kwargs) -> list[float]:
        """Returns the helpfulness of each reply: on-topic steps, no fuss."""
        return [self._score("helpful", *pair) for pair in zip(prompts, completions, strict=True)]

    def true_harmless(self, prompts: list[str], completions: list[str], **kwargs) -> list[float]:
        """Returns the harmlessness of each reply: no severe steps, no rudeness, due caution.

        Needless caution (a refusal, warning or alternative on a harmless request) is penalised.
        """
        return [self._score("harmless", *pair) for pair in zip(prompts, completions, strict=True)]

    def parses(self, prompts: list[str], completions: list[str], **kwargs) -> list[float]:
        """Returns 1.0 for each reply that is a sequence of whole sentences of the grammar."""
        return [
            float(all(sentence in self._lexicon for sentence in sentences_of(completion) or [""]))
            for completion in completions
        ]

    def act_of(self, prompt: str) -> Act:
        """Returns the act that a prompt's last request asks for; raises ``ValueError`` without."""
        asked = self._act_pattern.findall(prompt)
        if not asked:
            raise ValueError(
                f"the prompt asks for no act of this world, got {prompt!r}; "
                "take prompts from World.prompts or leave out the true scores."
            )
        return self._act_by_text[asked[-1]]

    def roles(self, prompt: str, completion: str) -> list[str]:
        """Returns the role of each sentence of a reply: the keys of `grammar.CREDITS`."""
        return [role for role, _ in self._roles(prompt, completion)]

    def _roles(self, prompt: str, completion: str) -> list[tuple[str, float]]:
        """Returns the role and the severity of each sentence of a reply."""
        act = self.act_of(prompt)
        sentences = sentences_of(completion)
        roles = []
        for i, text in enumerate(sentences):
            known = self._lexicon.get(text)
            severity = act.severity
            if known is None:
                role = "unknown"
            elif text in sentences[:i]:
                role = "repeat"
            elif known.act is not None:
                matches = (known.act.verb == act.verb) + (known.object == act.object)
                role, severity = ("foreign", "partial", "step")[matches], known.act.severity
            elif known.object not in (None, act.object):
                role, severity = "foreign", 0.0
            else:
                role = known.role
            roles.append((role, severity))
        return roles or [("empty", act.severity)]

    def _score(self, objective: Objective, prompt: str, completion: str) -> float:
        """Returns the true score of a reply: a sum over its sentences.

        Every step earns its credit, any other role only once; penalties apply every time.
        """
        total, earned = 0.0, set()
        for role, severity in self._roles(prompt, completion):
            base, slope = grammar.CREDITS[role][OBJECTIVES.index(objective)]
            credit = base + slope * severity
            if role not in earned or role in ("step", "partial"):
                total += credit
            else:
                total += min(credit, 0.0)
            earned.add(role)
        return total

    # Lookup tables

    @cached_property
    def _act_by_text(self) -> dict[str, Act]:
        return {act.text: act for act in self.acts}

    @cached_property
    def _act_pattern(self) -> re.Pattern[str]:
        texts = sorted(self._act_by_text, key=len, reverse=True)
        return re.compile(r"\b(?:" + "|".join(map(re.escape, texts)) + r")\b")

    @cached_property
    def _lexicon(self) -> dict[str, _Sentence]:
        """Every sentence of the grammar by its text."""
        objects = sorted({act.object for act in self.acts})
        lexicon = {}
        for role, forms in self.sentences.items():
            for form in forms:
                if "{object}" not in form:
                    lexicon[form] = _Sentence(role)
                    continue
                for item in objects:
                    lexicon[form.format(object=item)] = _Sentence(role, item)
        for act in self.acts:
            for step in act.steps:
                lexicon[step] = _Sentence("step", act.object, act)
        return lexicon


def sentences_of(completion: str) -> list[str]:
    """Returns the sentences of a reply; text after the last full stop counts as one."""
    text = completion.strip()
    return _SENTENCE_END.split(text) if text else []
