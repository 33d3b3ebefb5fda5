import math
import random

import numpy as np
import pytest

from recipes.miniature.baselines import bag_of_words_margins, length_margins, pair_accuracy
from recipes.miniature.preferences import Preference


def pairs_where(chosen_word: str, rejected_word: str, seed: int) -> list[Preference]:
    """Pairs of replies of equal length, told apart by one word in each."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(100):
        reply = rng.choices(["red", "tin", "low", "old"], k=6)
        place = rng.randrange(6)
        chosen, rejected = reply.copy(), reply.copy()
        chosen[place], rejected[place] = chosen_word, rejected_word
        pairs.append(Preference("p", " ".join(chosen), " ".join(rejected), "k"))
    return pairs


def swapped(pairs: list[Preference]) -> list[Preference]:
    return [Preference(p.prompt, p.rejected, p.chosen, p.kind) for p in pairs]


def test_accuracy_counts_ties_as_one_half_with_its_binomial_standard_error():
    result = pair_accuracy(np.array([2.0, -1.0, 0.0, 0.5, 3.0]))
    assert result.accuracy == pytest.approx(0.7)
    assert result.standard_error == pytest.approx(math.sqrt(0.7 * 0.3 / 5))
    assert result.num_pairs == 5


def test_a_telltale_word_is_found_and_length_sees_nothing():
    train, held_out = pairs_where("yes", "not", seed=0), pairs_where("yes", "not", seed=1)
    assert pair_accuracy(bag_of_words_margins(train, held_out)).accuracy == 1.0
    assert pair_accuracy(length_margins(train, held_out)).accuracy == 0.5


@pytest.mark.parametrize(("long", "short"), [("chosen", "rejected"), ("rejected", "chosen")])
def test_whether_longer_or_shorter_wins_is_learned(long, short):
    replies = [{long: "word " * (n + 3), short: "word " * n} for n in range(1, 40)]
    pairs = [Preference("p", r["chosen"], r["rejected"], "k") for r in replies]
    assert pair_accuracy(length_margins(pairs[::2], pairs[1::2])).accuracy == 1.0


@pytest.mark.parametrize("margins", [length_margins, bag_of_words_margins])
def test_swapping_the_replies_of_held_out_pairs_turns_the_margins_round(margins):
    train = pairs_where("yes", "perhaps", seed=0)
    held_out = pairs_where("yes", "perhaps", seed=1)
    assert margins(train, swapped(held_out)) == pytest.approx(-margins(train, held_out))
    assert margins(swapped(train), held_out) == pytest.approx(-margins(train, held_out), abs=1e-6)
