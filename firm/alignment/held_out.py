"""Prompts and pairs that are held out of training data without splits of their own."""

import hashlib
import random
from collections.abc import Iterable, Sequence
from itertools import chain

from firm.alignment.pairs import Pair
from firm.alignment.prompt_data import loose_text
from firm.alignment.prompts import Prompt

HELD_OUT = 10
"""One in `HELD_OUT` prompts is held out for validation, and another one for testing, if the data
have no splits for these uses."""
USES = ("validation", "test")
"""Uses of held-out prompts."""


def hold_out(
    prompts: Sequence[Prompt], uses: Sequence[str], share: float, *, seed: int, key: str
) -> dict[str, list[Prompt]]:
    """Divides prompts at random into training prompts and those of other uses.

    Rows with the same prompt, up to white space, stay together.

    Args:
        prompts: All prompts.
        uses: Names of the other uses, each of which gets this share of the distinct prompts.
        share: Share of the distinct prompts, which is rounded down, but to no less than 2.
        seed: Seed of the division.
        key: What the error asks to change.

    Raises:
        ValueError: Nothing is left to train on.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(loose_text(prompt.transcript), []).append(prompt)
    rows = list(groups.values())
    size = max(2, int(share * len(rows)))
    if len(rows) <= size * len(uses):
        raise ValueError(
            f"{key} must have more than {size * len(uses)} distinct prompts, which are held "
            f"out, got {len(rows)}; pass more, or validation and test prompts."
        )
    if uses:
        random.Random(seed).shuffle(rows)
    held_out = {use: list(chain(*(rows.pop() for _ in range(size)))) for use in uses}
    return {"train": list(chain(*rows)), **held_out}


def held_out_pairs(pairs: Sequence[Pair], *, seed: int, limit: int) -> list[Pair]:
    """Returns the pairs of one in `HELD_OUT` prompts, until there are `limit` pairs.

    They are of at least 2 prompts, which an error needs, unless the limit is 0.
    Prompts are ordered by a hash, so that most objectives of a data set hold out the same ones.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(loose_text(pair.prompt.transcript), []).append(pair)

    def position(text: str) -> bytes:
        return hashlib.blake2b(f"{seed} {text}".encode()).digest()

    taken: list[Pair] = []
    for number, text in enumerate(sorted(groups, key=position)):
        is_enough = len(taken) >= limit and number >= min(2, limit)
        if is_enough or number >= max(2, len(groups) // HELD_OUT):
            break
        taken += groups[text]
    return taken


def without(pairs: Iterable[Pair], held_out: Iterable[Pair]) -> list[Pair]:
    """Returns the pairs whose prompts are not held out, up to white space."""
    texts = {loose_text(pair.prompt.transcript) for pair in held_out}
    return [pair for pair in pairs if loose_text(pair.prompt.transcript) not in texts]
