"""Accuracy and margin of held-out pairs."""

import math

import pytest
import torch

from firm.alignment.pair_evaluation import evaluate_pairs
from firm.alignment.pair_tokens import EncodedPair
from firm.alignment.pairs import Pair
from firm.alignment.prompts import Prompt


def pair(prompt: str, objective: int, reference=(0.0, 0.0)) -> EncodedPair:
    own = Pair(Prompt(prompt), "a", "b")
    return EncodedPair(own, objective, [1], ([2], [3]), (False, False, False), reference)


PAIRS = [
    pair("one", 0, (1.0, 2.0)),
    pair("two", 0),
    pair("two", 0),
    pair("three", 1),
    pair("one", 1),
]
LOGPROBS = torch.tensor([[1.5, 2.0], [0.0, 0.4], [0.0, 0.0], [3.0, 0.0], [0.0, 1.0]])


def evaluated(logprobs=LOGPROBS):
    return evaluate_pairs(lambda pairs: logprobs, PAIRS, ("a", "b"), beta=2.0)


def test_margins_are_those_of_implicit_rewards_and_ties_count_half():
    evaluation = evaluated()
    row = evaluation.row(round=1, split="test")
    assert row["num_rows"] == 5
    assert row["num_prompts"] == 3
    assert row["scores"]["a"]["mean"] == pytest.approx(2 * (0.5 - 0.4 + 0.0) / 3)
    assert row["rewards"]["a"]["mean"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert row["rewards"]["b"]["mean"] == pytest.approx(0.5)
    assert evaluation.rewards["a"].isnan().tolist() == [False, False, False, True, True]


def test_errors_are_clustered_by_prompt():
    row = evaluated().row(round=1, split="test")
    residuals = torch.tensor([1.0, 0.0, 0.5]) - 0.5
    squares = residuals[0] ** 2 + (residuals[1] + residuals[2]) ** 2
    assert row["rewards"]["a"]["se"] == pytest.approx(math.sqrt(2 * squares) / 3)


def test_changes_are_paired_with_the_base_model():
    reference = torch.tensor([pair.reference for pair in PAIRS])
    base, final = evaluated(reference), evaluated()
    rows = {row.name: row for row in final.comparison(base)}
    assert rows["a, accuracy"].base == 0.5
    assert rows["a, accuracy"].change == pytest.approx(0.0)
    assert rows["b, margin"].change == pytest.approx(2.0)
    assert rows["b, margin"].num_prompts == 2


def test_an_objective_with_one_prompt_is_refused():
    with pytest.raises(ValueError, match="pairs of b with at least 2 different prompts"):
        evaluate_pairs(lambda pairs: LOGPROBS[:4], PAIRS[:4], ("a", "b"), beta=1.0)
