from dataclasses import replace

import pytest

from firm.miniature.world import World
from recipes.miniature.corpus import generated_corpus, preference_corpus
from recipes.miniature.preferences import Preference, first_human_turn


def generated(seed: int):
    return generated_corpus(
        World.conflict(), num_texts=300, num_pairs=50, num_held_out=60, noise=0.25, seed=seed
    )


def test_equal_seeds_generate_equal_corpora_and_others_do_not():
    assert generated(0) == generated(0)
    assert generated(0).texts != generated(1).texts
    assert generated(0).pairs["helpful"]["train"] != generated(1).pairs["helpful"]["train"]


def test_no_generated_held_out_text_or_prompt_is_learned_from():
    corpus = generated(0)
    assert len(corpus.texts["train"]) == 300
    assert corpus.texts["test"]
    learned = {pair.prompt for by_split in corpus.pairs.values() for pair in by_split["train"]}
    for split in ("validation", "test", "test_acts"):
        prompts = {row["prompt"] for row in corpus.prompts[split]}
        assert not prompts & learned
        for by_split in corpus.pairs.values():
            assert {pair.prompt for pair in by_split[split]} <= prompts


def test_no_held_out_text_was_told_in_training_even_where_chance_repeats_many():
    world = World.conflict()
    phrasings = {**world.phrasings, "train": world.phrasings["train"][:1]}
    corpus = generated_corpus(
        replace(world, phrasings=phrasings),
        num_texts=4000,
        num_pairs=1,
        num_held_out=300,
        noise=0.0,
        seed=0,
    )
    assert 0 < len(corpus.texts["test"]) < 300
    assert not set(corpus.texts["test"]) & set(corpus.texts["train"])


def test_generated_held_out_pairs_are_ranked_by_the_truth():
    world, corpus = World.conflict(), generated(0)
    for kind, truth in (("helpful", world.true_helpful), ("harmless", world.true_harmless)):
        pairs = corpus.pairs[kind]["test"]
        prompts = [pair.prompt for pair in pairs]
        chosen = truth(prompts, [pair.chosen for pair in pairs])
        rejected = truth(prompts, [pair.rejected for pair in pairs])
        assert all(a > b for a, b in zip(chosen, rejected, strict=True))


def pair(question: int, kind: str) -> Preference:
    return Preference(f"\n\nHuman: {question}?\n\nAssistant:", f" {question}", " no", kind)


def test_a_preference_corpus_keeps_kinds_and_splits_apart():
    pairs = [pair(i, kind) for i in range(200) for kind in ("helpful", "harmless", "brief")]
    corpus = preference_corpus(pairs)
    assert set(corpus.pairs) == {"helpful", "harmless", "brief"}
    for kind, by_split in corpus.pairs.items():
        assert all(p.kind == kind for rows in by_split.values() for p in rows)
        turns = {s: {first_human_turn(p.prompt) for p in rows} for s, rows in by_split.items()}
        assert sum(map(len, turns.values())) == 200
        assert not turns["train"] & (turns["validation"] | turns["test"])
        assert {row["prompt"] for row in corpus.prompts["test"]} == {
            p.prompt for p in by_split["test"]
        }
    told = "".join(corpus.texts["train"])
    assert not any(p.prompt in told for rows in corpus.pairs.values() for p in rows["test"])


def test_prompts_are_listed_once_per_kind():
    corpus = preference_corpus([pair(i % 200, "helpful") for i in range(400)])
    assert sum(map(len, corpus.prompts.values())) == 200


def test_a_kind_without_held_out_pairs_is_refused():
    pairs = [pair(i, "helpful") for i in range(200)] + [pair(0, "rare")]
    with pytest.raises(ValueError, match="kind 'rare' has no pair in the test split"):
        preference_corpus(pairs)
