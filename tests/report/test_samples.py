import json

from firm.report import read_record
from firm.report.run_page import run_page
from firm.report.samples import Turn, dialogue, sample_preferences, samples_of


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


def test_a_conditioned_model_has_a_reply_at_each_preference(make_run):
    rows = [
        {"round": 0, "prompt": "p", "completion": "base", "scores": {}},
        {"round": 8, "prompt": "p", "completion": "equal", "scores": {}},
        {"round": 4, "prompt": "p", "completion": "old", "scores": {}, "preference": [0.5, 0.5]},
        {"round": 8, "prompt": "p", "completion": "low", "scores": {}, "preference": [0.1, 0.9]},
        {"round": 8, "prompt": "p", "completion": "high", "scores": {}, "preference": [0.9, 0.1]},
    ]
    run_path = make_run()
    (run_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = read_record(run_path)
    (pair,) = samples_of(record)
    assert [reply.text for reply in pair.replies] == ["base", "high", "low"]
    (equal,) = samples_of(record, by_preference=False)  # beside other settings
    assert [reply.text for reply in equal.replies] == ["base", "equal"]
    assert sample_preferences(record) == [(0.9, 0.1), (0.1, 0.9)]
    block = next(block for block in run_page(record).blocks if block.name == "samples")
    assert list(block.models) == ["Base", "0.9, 0.1", "0.1, 0.9"]


def test_signs_of_reward_hacking_stand_in_the_headline(make_run):
    run_path = make_run()
    rows = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "evaluation" and row["split"] == "test"][-1]
    last["hacking_signs"] = ["9 of 9 replies repeat themselves (base: 0)"]
    at = {**last, "split": "test at 0.9, 0.1", "preference": [0.9, 0.1]}
    (run_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, at]))
    (_, sentence) = run_page(read_record(run_path)).summary
    assert sentence == (
        "Signs of reward hacking, so read the samples: 9 of 9 replies repeat themselves (base: 0); "
        "at preference 0.9, 0.1, 9 of 9 replies repeat themselves (base: 0)."
    )


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
