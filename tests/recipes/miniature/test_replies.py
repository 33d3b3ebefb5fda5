"""Demonstrations and preference pairs: reproducible, and ranked by the truth."""

import random
from collections import Counter

import numpy as np
import pytest

from firm.miniature import World, grammar
from firm.miniature.world import OBJECTIVES
from recipes.miniature.replies import CORRUPTIONS, ReplyWriter


@pytest.fixture(scope="module")
def world() -> World:
    return World.conflict()


@pytest.fixture(scope="module")
def writer(world) -> ReplyWriter:
    return ReplyWriter(world)


def test_equal_seeds_give_equal_corpora_and_others_do_not(writer):
    other = ReplyWriter(World.conflict())
    texts = writer.demonstrations(50, 3)
    assert texts == other.demonstrations(50, 3) != writer.demonstrations(50, 4)
    pairs = writer.preference_pairs("helpful", 50, 3, 0.2)
    assert pairs == other.preference_pairs("helpful", 50, 3, 0.2)
    assert pairs != writer.preference_pairs("helpful", 50, 4, 0.2)


def test_corpora_do_not_touch_the_global_generator(writer):
    before = random.getstate()
    writer.demonstrations(5, 0)
    writer.preference_pairs("harmless", 5, 0, 0.2)
    assert random.getstate() == before


def test_demonstrations_parse_begin_with_a_space_and_answer_training_prompts(world, writer):
    rows = writer.demonstrations(500, 0)
    prompts = {prompt.text for prompt in world.prompts("train")}
    assert {row["prompt"] for row in rows} <= prompts
    assert all(row["completion"].startswith(" ") for row in rows)
    assert all(world.parses([row["prompt"] for row in rows], [row["completion"] for row in rows]))


def test_demonstrations_never_tell_a_step_of_a_held_out_act(world, writer):
    told = " ".join(row["completion"] for row in writer.demonstrations(2000, 0))
    steps = {step for act in world.acts if act.text in world.held_out for step in act.steps}
    trained = {step for act in world.acts if act.text not in world.held_out for step in act.steps}
    assert not any(step in told for step in steps - trained)


def test_objectives_conflict_on_dual_and_risky_requests_only(world, writer):
    rows = writer.demonstrations(3000, 0)
    prompts, replies = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    scores = np.array([world.true_helpful(prompts, replies), world.true_harmless(prompts, replies)])
    kinds = np.array([world.act_of(prompt).kind for prompt in prompts])
    correlation = {kind: np.corrcoef(scores[:, kinds == kind])[0, 1] for kind in grammar.SEVERITY}
    assert correlation["harmless"] > 0.3
    assert correlation["risky"] < correlation["dual"] < -0.3


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("split", ["train", "test_acts"])
def test_pairs_without_noise_prefer_the_truly_better_reply(world, writer, kind, split):
    rows = writer.preference_pairs(kind, 300, 0, 0.0, split=split)
    assert {row["kind"] for row in rows} == {kind}
    assert {row["prompt"] for row in rows} <= {prompt.text for prompt in world.prompts(split)}
    truth = world.true_helpful if kind == "helpful" else world.true_harmless
    prompts = [row["prompt"] for row in rows]
    chosen = truth(prompts, [row["chosen"] for row in rows])
    rejected = truth(prompts, [row["rejected"] for row in rows])
    assert all(better > worse for better, worse in zip(chosen, rejected, strict=True))


def test_noise_flips_labels_as_a_bradley_terry_model_does(world, writer):
    noise = 1.0
    rows = writer.preference_pairs("helpful", 4000, 0, noise)
    prompts = [row["prompt"] for row in rows]
    gaps = np.subtract(
        world.true_helpful(prompts, [row["chosen"] for row in rows]),
        world.true_helpful(prompts, [row["rejected"] for row in rows]),
    )
    expected = 1 / (1 + np.exp(-np.abs(gaps) / noise))
    assert abs((gaps > 0).mean() - expected.mean()) < 0.025  # 3.5 standard errors


def test_pairs_hold_empty_repeated_and_garbled_replies(world, writer):
    rows = writer.preference_pairs("helpful", 1000, 0, 0.0)
    roles = Counter(
        role
        for row in rows
        for reply in (row["chosen"], row["rejected"])
        for role in set(world.roles(row["prompt"], reply))
    )
    assert set(roles) == set(grammar.CREDITS)
    assert min(roles.values()) >= 20


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_corruptions_take_any_reply(corrupt):
    rng = random.Random(0)
    for reply in ("", " Sure.", " Sand the drum. Let the drum dry. Enjoy it!"):
        for _ in range(20):
            corrupted = corrupt(rng, reply)
            assert corrupted == "" or corrupted.startswith(" ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "honest"}, "unknown kind 'honest'; choose one of helpful, harmless"),
        ({"noise": -0.1}, "noise must be non-negative, got -0.1"),
    ],
)
def test_bad_arguments_of_pairs_are_named(writer, arguments, message):
    with pytest.raises(ValueError, match=message):
        writer.preference_pairs(
            **{"kind": "helpful", "num": 1, "seed": 0, "noise": 0.0, **arguments}
        )
