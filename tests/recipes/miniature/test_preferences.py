import gzip
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.miniature.preferences import (
    ASSISTANT,
    HUMAN,
    SPLITS,
    Preference,
    dialogue_texts,
    first_human_turn,
    load_preferences,
    split_of,
    split_preferences,
    truncate_prompt,
    truncate_reply,
)

ROW = {
    "prompt": f"{HUMAN} Why?{ASSISTANT}",
    "chosen": " So.",
    "rejected": " No.",
    "kind": "helpful",
}

words = st.text("abc é", min_size=1, max_size=30)


def num_tokens(text: str) -> int:
    """Counts bytes: an `é` has two tokens, as it may have in a byte-level vocabulary."""
    return len(text.encode())


def dialogue(turns: list[str]) -> str:
    """A dialogue of human and assistant turns in alternation that the assistant is to continue."""
    tags = (HUMAN, ASSISTANT)
    return "".join(f"{tags[i % 2]} {turn}" for i, turn in enumerate(turns)) + ASSISTANT


dialogues = st.lists(words, min_size=1, max_size=7).filter(lambda t: len(t) % 2).map(dialogue)


# Files


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_pairs_are_read_in_order_plain_or_compressed_and_further_fields_are_ignored(tmp_path, name):
    rows = [{**ROW, "chosen": f" {i} é", "id": i} for i in range(3)]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    open_text = gzip.open if name.endswith(".gz") else open
    with open_text(tmp_path / name, "wt", encoding="utf-8") as file:
        file.write(text)
    pairs = load_preferences(tmp_path / name)
    assert [pair.chosen for pair in pairs] == [" 0 é", " 1 é", " 2 é"]
    assert pairs[0] == Preference(**{**ROW, "chosen": " 0 é"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "secret', "line 2: not valid JSON"),
        ('["secret"]', "line 2: got a JSON list"),
        (json.dumps({k: "secret" for k in ROW if k != "rejected"}), "line 2: field 'rejected' is"),
        (json.dumps({**ROW, "chosen": ["secret"]}), "line 2: field 'chosen' .* got list"),
        (json.dumps({**ROW, "prompt": "  "}), "line 2: field 'prompt' .* got an empty string"),
        (json.dumps({**ROW, "kind": "../secret"}), "line 2: field 'kind' must be letters"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number_and_its_text_is_not_repeated(
    tmp_path, line, message
):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"pairs.jsonl, {message}") as error:
        load_preferences(path)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "preference file not found: .*missing.jsonl"),
        ("empty.jsonl", b"\n\n", "empty.jsonl holds no preference pair"),
        ("latin.jsonl", b'{"prompt": "\xe9"}', "latin.jsonl cannot be read as JSON lines"),
        ("fake.jsonl.gz", b"plain text", "fake.jsonl.gz cannot be read as JSON lines"),
        (
            "cut.jsonl.gz",
            gzip.compress(b"{}" * 99, mtime=0)[:-9],
            "cut.jsonl.gz cannot be read as JSON",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_preferences(tmp_path / name)


# Splits


@given(words, words, words)
def test_dialogues_that_open_alike_are_in_one_split_whatever_follows(opening, second, third):
    prompts = [
        dialogue([opening]),
        dialogue([f"{opening.upper()}!? ", second, third]),
        dialogue([f"  {opening}"]),
        f" {opening}.",
    ]
    assert len({split_of(prompt) for prompt in prompts}) == 1


def test_splits_hold_80_5_and_15_percent():
    counts = Counter(split_of(f"{HUMAN} question {i}{ASSISTANT}") for i in range(20_000))
    shares = [counts[split] / 20_000 for split in SPLITS]
    assert shares == pytest.approx([0.80, 0.05, 0.15], abs=0.01)  # over 3.5 standard errors


def test_the_split_of_a_dialogue_is_fixed_for_good():
    letters = [split_of(f"{HUMAN} question {i}{ASSISTANT}")[:2] for i in range(12)]
    assert " ".join(letters) == "tr tr tr tr tr tr tr va tr tr te tr"


def test_every_pair_is_in_one_split_and_keeps_its_place():
    pairs = [Preference(dialogue([str(i % 50)]), f" {i}", " no", "k") for i in range(200)]
    by_split = split_preferences(pairs)
    assert sorted(int(p.chosen) for rows in by_split.values() for p in rows) == list(range(200))
    for rows in by_split.values():
        assert rows == sorted(rows, key=lambda pair: int(pair.chosen))


@pytest.mark.data
def test_no_first_human_turn_of_real_dialogues_is_on_two_sides(firm_data):
    files = [firm_data / "hh_rlhf" / f"{kind}.jsonl.gz" for kind in ("helpful", "harmless")]
    by_split = split_preferences(pair for file in files for pair in load_preferences(file))
    turns = {s: {first_human_turn(p.prompt) for p in rows} for s, rows in by_split.items()}
    assert not turns["train"] & turns["validation"]
    assert not turns["train"] & turns["test"]
    assert not turns["validation"] & turns["test"]
    counts = {s: Counter(pair.kind for pair in rows) for s, rows in by_split.items()}
    assert counts == {
        "train": {"helpful": 1874, "harmless": 1837},
        "validation": {"helpful": 122, "harmless": 115},
        "test": {"helpful": 343, "harmless": 351},
    }


# Texts


def test_a_pair_tells_its_dialogue_once():
    pair = Preference(dialogue(["a", "b", "c"]), " good", " bad", "k")
    assert dialogue_texts(pair) == [
        f"{HUMAN} a{ASSISTANT} b{HUMAN} c{ASSISTANT} good",
        f"{HUMAN} c{ASSISTANT} bad",
    ]
    assert dialogue_texts(Preference("a: ", "b", "c", "k")) == ["a: b", "a: c"]


@given(dialogues, st.integers(25, 120))
def test_a_truncated_prompt_fits_and_is_the_longest_run_of_last_turns(prompt, max_tokens):
    cut = truncate_prompt(prompt, max_tokens=max_tokens, num_tokens=num_tokens)
    assert num_tokens(cut) <= max_tokens
    assert cut.startswith(HUMAN)
    assert cut.endswith(ASSISTANT)
    ends = [prompt[i:] for i in range(len(prompt)) if prompt.startswith(HUMAN, i)]
    fitting = [end for end in ends if num_tokens(end) <= max_tokens]
    if fitting:
        assert cut == fitting[0]
    else:  # the last human turn alone is too long: its own end remains
        said = cut.removeprefix(HUMAN)
        assert ends[-1].endswith(said)
        one_more = ends[-1][len(ends[-1]) - len(said) - 1]
        assert num_tokens(cut) + num_tokens(one_more) > max_tokens


def test_a_prompt_without_turns_is_cut_at_its_beginning():
    assert truncate_prompt("abcdef", max_tokens=4, num_tokens=num_tokens) == "cdef"


def test_a_limit_below_the_markers_of_a_turn_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens must be at least 20 for one turn, got 19\."):
        truncate_prompt(dialogue(["a"]), max_tokens=19, num_tokens=num_tokens)


@given(words, st.integers(0, 40))
def test_a_truncated_reply_is_the_longest_beginning_that_fits(reply, max_tokens):
    cut = truncate_reply(reply, max_tokens=max_tokens, num_tokens=num_tokens)
    assert reply.startswith(cut)
    assert num_tokens(cut) <= max_tokens
    if cut != reply:
        assert num_tokens(reply[: len(cut) + 1]) > max_tokens
