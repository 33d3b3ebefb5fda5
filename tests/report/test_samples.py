import json

from firm.report import read_record
from firm.report.samples import Turn, dialogue, samples_of


def write_samples(run_path, *rows):
    keys = ("round", "prompt", "completion", "scores")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows]
    (run_path / "samples.jsonl").write_text("".join(lines))
    return samples_of(read_record(run_path))


def test_replies_to_the_same_prompt_stand_side_by_side(make_run):
    pairs = write_samples(
        make_run(),
        (0, "p", "base to p", {"a": 0.5}),
        (0, "q", "base to q", {"a": 0.5}),
        (8, "q", "aligned to q", {"a": 0.75}),
        (8, "p", "aligned to p", {"a": 0.25}),
    )
    assert [
        (pair.replies[0].text, pair.replies[1].text) for pair in pairs if len(pair.replies) > 1
    ] == [
        ("base to p", "aligned to p"),
        ("base to q", "aligned to q"),
    ]
    assert [pair.change("a") for pair in pairs] == [-0.25, 0.25]


def test_the_second_reply_to_a_prompt_meets_the_second_one(make_run):
    pairs = write_samples(
        make_run(), (0, "p", "b1", {}), (0, "p", "b2", {}), (8, "p", "a1", {}), (8, "p", "a2", {})
    )
    assert [tuple(reply.text for reply in p.replies) for p in pairs] == [
        ("b1", "a1"),
        ("b2", "a2"),
    ]


def test_before_the_end_the_base_model_stands_alone(make_run):
    (pair,) = write_samples(make_run(), (0, "p", "b", {"a": 1.0}))
    assert len(pair.replies) == 1
    assert pair.change("a") is None


def test_a_score_without_a_value_has_no_change(make_run):
    (pair,) = write_samples(make_run(), (0, "p", "b", {"a": None}), (8, "p", "c", {"a": 1.0}))
    assert pair.change("a") is None


def test_a_dialogue_is_split_into_its_turns():
    prompt = "\n\nHuman: Who says\nHuman: so?\n\nAssistant: I.\n\nHuman: Why?\n\nAssistant:"
    assert dialogue(prompt) == (
        Turn("Human", "Who says\nHuman: so?"),
        Turn("Assistant", "I."),
        Turn("Human", "Why?"),
    )


def test_a_prompt_without_roles_is_one_turn():
    assert dialogue("Once upon a time") == (Turn("", "Once upon a time"),)
