"""Prompts are held out by the prompt and at random, whatever the order of the rows."""

import json

import pytest

from firm.alignment.held_out import hold_out
from firm.alignment.prompts import prompt_of
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_data import data_of
from firm.run.command_line import parse

TOPICS = ("colours", "lakes", "birds", "trees")


def prompts(*texts):
    return [prompt_of(text) for text in texts]


def texts(rows):
    return [row.transcript for row in rows]


def test_each_prompt_has_one_use_with_all_its_rows():
    rows = prompts(*(f"Name {n % 30} birds." for n in range(90)))
    parts = hold_out(rows, ["validation", "test"], 0.1, seed=0, key="prompts")
    assert sorted(text for own in parts.values() for text in texts(own)) == sorted(texts(rows))
    distinct = {use: set(texts(own)) for use, own in parts.items()}
    assert {use: len(own) for use, own in distinct.items()} == {
        "train": 24,
        "validation": 3,
        "test": 3,
    }
    assert len(set.union(*distinct.values())) == 30


def test_the_seed_decides():
    rows = prompts(*(f"Name {n} birds." for n in range(60)))
    first, same, other = (
        hold_out(rows, ["test"], 0.2, seed=seed, key="prompts")["test"] for seed in (1, 1, 2)
    )
    assert texts(first) == texts(same) != texts(other)


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match=r"prompts must have more than 4 .*, got 4"):
        hold_out(
            prompts("a", "b", "c", "d", "d"), ["validation", "test"], 0.1, seed=0, key="prompts"
        )


@pytest.fixture
def load(tmp_path):
    """Loads a file that is sorted by topic: ``load(*arguments)`` to its parts and the notes."""
    file = tmp_path / "sorted.jsonl"
    rows = [{"prompt": f"Name {n} {topic}."} for topic in TOPICS for n in range(75)]
    file.write_text("\n".join(map(json.dumps, rows)))
    own = tmp_path / "own.yaml"
    data = {"data": {"train": {"source": str(file)}, "hold_out": 0.1}}
    own.write_text(json.dumps({**data, "policy": {"path": "unused"}, "rewards": {
        "brief": {"name": "brevity"}, "joy": {"name": "positivity"}}}))  # fmt: skip

    def loaded(*arguments, measures=True, **options):
        cfg = parse(AlignmentConfig, ["--config", str(own), *arguments])
        notes = []
        options |= {"measures": measures, "on_note": notes.append}
        splits = data_of(cfg).load(cfg, None, {}, **options)
        return splits, notes

    return loaded


def test_a_column_that_some_rows_lack_is_in_all_prompts(load, tmp_path):
    """A batch may have none of the rows that have it."""
    rows = [{"prompt": f"{n} + 1?", **({"answer": str(n + 1)} if n % 2 else {})} for n in range(40)]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits, _ = load("--data.train.source", str(tmp_path / "mixed.jsonl"))
    answers = [prompt.columns["answer"] for prompt in splits.train]
    assert None in answers
    assert set(map(type, answers)) == {str, type(None)}


def test_every_topic_of_a_sorted_file_is_trained_on_and_measured(load):
    splits, notes = load()
    for own in (splits.train, splits.validation, splits.test):
        assert {topic for topic in TOPICS if any(topic in text for text in texts(own))} == {*TOPICS}
    assert [len(own) for own in (splits.train, splits.validation, splits.test)] == [240, 30, 30]
    assert notes == []


def test_what_is_held_out_is_trained_on_nowhere_and_measured_by_the_server_only(load):
    whole, _ = load()
    site, _ = load(measures=False)
    assert texts(site.train) == texts(whole.train)
    assert site.validation == site.test == []
    own, _ = load(measures=False, holds_out=False)  # of a site, which nothing measures
    assert len(own.train) == 300


def test_seeds_may_share_what_is_held_out(load):
    first, _ = load()
    for seed, own in ((), True), (("--data.hold_out_seed", "0"), False):
        other, _ = load("--seed", "5", *seed)
        assert (texts(other.test) != texts(first.test)) == own
        assert (texts(other.train) != texts(first.train)) == own


def test_few_held_out_prompts_are_noted(load):
    _, notes = load("--data.hold_out", "0.05")
    assert len(notes) == 2
    assert "15 prompts are held out for validation, too few to measure" in notes[0]
    assert notes[0].endswith("most changes: add prompts, or hold out a larger share.")
    _, (note,) = load("--evaluation.num_test_prompts", "8")
    assert "8 prompts are held out for test, too few to measure" in note
    assert note.endswith("most changes: raise evaluation.num_test_prompts (8).")


def test_other_held_out_prompts_give_way_with_a_note(load):
    splits, notes = load("--data.test.source", "no_such_file.jsonl")
    assert len(splits.test) == 30
    assert notes == ["data.hold_out takes the place of data.validation and data.test."]
