"""Pairs are read from the forms of TRL, HH-RLHF, PKU-SafeRLHF and UltraFeedback."""

import gzip
import json
import os
from pathlib import Path

import pytest

from firm.alignment.pairs import PairsConfig, load_pairs

HH = "\n\nHuman: Is it cold?\n\nAssistant:"
QUESTION = [{"role": "user", "content": "Is it cold?"}]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(tmp_path: Path, *rows: dict, **options: object) -> list:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes: list[str] = []
    pairs = load_pairs(PairsConfig(source=str(path), **options), on_note=notes.append)  # type: ignore[arg-type]
    return [*pairs, *notes]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "Is it cold?", "chosen": "Yes.", "rejected": "No."}, "Is it cold?"),
        ({"prompt": QUESTION, "chosen": [said("Yes.")], "rejected": [said("No.")]}, None),
        ({"chosen": [*QUESTION, said("Yes.")], "rejected": [*QUESTION, said("No.")]}, None),
        (  # UltraFeedback: a text, and dialogues that repeat it
            {
                "prompt": "Is it cold?",
                "chosen": [*QUESTION, said("Yes.")],
                "rejected": [*QUESTION, said("No.")],
            },
            "Is it cold?",
        ),
        ({"chosen": f"{HH} Yes.", "rejected": f"{HH} No."}, HH),
        ({"prompt": HH, "chosen": " Yes.", "rejected": " No."}, HH),
        ({"prompt": HH, "chosen": f"{HH} Yes.", "rejected": f"{HH} No."}, HH),
        ({"chosen": "Is it cold? Yes.", "rejected": "Is it cold? No."}, "Is it cold?"),
    ],
)
def test_a_pair_has_the_prompt_and_both_replies(tmp_path: Path, row: dict, text: str) -> None:
    (pair,) = read(tmp_path, row)
    assert pair.prompt.text == text
    assert pair.prompt.turns == [{"role": "user", "content": "Is it cold?"}]
    assert (pair.chosen.strip(), pair.rejected.strip()) == ("Yes.", "No.")


@pytest.mark.parametrize(("ranked_by", "chosen"), [("better", "Yes."), ("safer", "No.")])
def test_one_row_ranks_its_replies_by_several_criteria(
    tmp_path: Path, ranked_by: str, chosen: str
) -> None:
    row = {"prompt": "Is it cold?", "response_0": "No.", "response_1": "Yes."}
    row |= {"better": 1, "safer": 0}
    (pair,) = read(tmp_path, row, ranked_by=ranked_by)
    assert pair.chosen == chosen
    assert {pair.chosen, pair.rejected} == {"Yes.", "No."}


def test_a_reply_that_repeats_its_prompt_keeps_it(tmp_path: Path) -> None:
    row = {"prompt": "Say hi.", "chosen": "Say hi. Say hi again.", "rejected": "No."}
    (pair,) = read(tmp_path, row)
    assert pair.chosen == "Say hi. Say hi again."


def test_equal_replies_and_different_prompts_are_dropped_with_a_note(tmp_path: Path) -> None:
    good = {"chosen": f"{HH} Yes.", "rejected": f"{HH} No."}
    equal = {"chosen": f"{HH} Yes.", "rejected": f"{HH} Yes. "}
    other = {"chosen": f"{HH} Yes.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."}
    longer = {"chosen": f"{HH} Yes.", "rejected": f"{HH} No.\n\nHuman: Why?\n\nAssistant: So."}
    shorter = {"chosen": longer["rejected"], "rejected": longer["chosen"]}
    pair, note = read(tmp_path, good, equal, other, longer, shorter)
    assert pair.chosen == " Yes."
    assert note.startswith("4 of 5 pairs are dropped")
    with pytest.raises(ValueError, match="no pair is left of 2"):
        read(tmp_path, equal, other)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"prompt": "Hi", "chosen": "Yes."},
            {},
            r"pairs.jsonl, line 1: `rejected` must be a reply, .* got the fields chosen",
        ),
        ({"prompt": "Hi", "chosen": QUESTION, "rejected": "No."}, {}, "`chosen` must be a reply"),
        (
            {"prompt": "Hi", "response_0": "a", "response_1": "b", "best": 2},
            {"ranked_by": "best"},
            "`best` must be 0 or 1, the index of the preferred reply, got 2",
        ),
    ],
)
def test_a_row_without_two_replies_is_named(
    tmp_path: Path, row: dict, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, row, **options)


def test_real_pairs_are_read_alike_with_and_without_their_prompt(tmp_path: Path) -> None:
    folder = os.environ.get("FIRM_DATA")
    if not folder:
        pytest.skip("needs FIRM_DATA with HH-RLHF's pairs")
    with gzip.open(Path(folder) / "hh_rlhf" / "helpful.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:300]
    whole = [{k: row["prompt"] + row[k] for k in ("chosen", "rejected")} for row in rows]
    both = [
        [(pair.prompt.text, pair.chosen, pair.rejected) for pair in read(tmp_path, *form)]
        for form in (whole, rows)
    ]
    assert len(both[0]) == 300
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("Hi", "Hi there! How are you?", "Highly inappropriate."),
        ("Yes", "Yesterday it was.", "Yes"),
        ("2", "25", "2"),
        ("Say hi.", "Say hi. Then leave.", "Say hi. Stay."),
    ],
)
def test_a_prompt_of_its_own_is_never_cut_off_a_reply(
    tmp_path: Path, prompt: str, chosen: str, rejected: str
) -> None:
    (pair,) = read(tmp_path, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert pair.prompt.text == prompt
    assert pair.replies == (chosen, rejected)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Is it cold? Yes.", "Is it cold? Yesterday.", "Is it cold?"),
        ("What is 5 times 5? 25", "What is 5 times 5? 2", "What is 5 times 5?"),
        ("Was it cold? unlikely", "Was it cold? undecided", "Was it cold?"),
        ("Is it cold? Yes.", "Is it cold? (Yes.)", "Is it cold?"),
    ],
)
def test_an_implicit_prompt_does_not_end_inside_a_word(
    tmp_path: Path, chosen: str, rejected: str, prompt: str
) -> None:
    (pair,) = read(tmp_path, {"chosen": chosen, "rejected": rejected})
    assert pair.prompt.text == prompt
    assert [prompt + reply for reply in pair.replies] == [chosen, rejected]


def test_a_dialogue_that_ends_without_a_reply_is_no_pair(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pair is left of 1"):
        read(tmp_path, {"chosen": "Tell me more now", "rejected": "Tell me"})


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
OTHER = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def calls(*own: dict, text: str = "") -> list[dict]:
    return [{"role": "assistant", "content": text, "tool_calls": list(own)}]


def test_replies_that_differ_in_tool_calls_alone_are_a_pair(tmp_path: Path) -> None:
    row = {"prompt": QUESTION, "chosen": calls(CALL), "rejected": calls(OTHER)}
    (pair,) = read(tmp_path, row)
    assert [fields["tool_calls"] for fields in pair.fields] == [[CALL], [OTHER]]
    assert pair.messages[0] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert pair.swapped().fields == pair.fields[::-1]
    thoughts = [[{**said("Yes."), "reasoning_content": each}] for each in ("So.", "Thus.")]
    row = {"prompt": QUESTION, "chosen": thoughts[0], "rejected": thoughts[1]}
    (pair,) = read(tmp_path, row)
    assert pair.replies == ("Yes.", "Yes.")
    with pytest.raises(ValueError, match="no pair is left of 1"):
        read(tmp_path, {"prompt": QUESTION, "chosen": calls(CALL), "rejected": calls(CALL)})


IMAGE = {"type": "image_url", "image_url": {"url": "cold.png"}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["cold.png"]}, "line 1: the row has `images`, which a language model does not"),
        (
            {"chosen": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "line 1: `chosen`: chat message 1 has a part of type 'image_url'",
        ),
        (
            {"chosen": [*calls(CALL), {"role": "tool", "content": "5"}, said("Yes.")]},
            "line 1: `chosen`: a reply must be messages of the assistant alone, got assistant, "
            "tool, assistant",
        ),
        (
            {"chosen": [*QUESTION, *calls(CALL), {"role": "tool", "content": "5"}, said("Yes.")]},
            "line 1: `chosen`: a reply must be messages of the assistant alone, got assistant, "
            "tool, assistant",
        ),
        (
            {"chosen": [*calls(CALL), said("Yes.")]},
            "line 1: `chosen`: a reply with `tool_calls` must be one message, got 2",
        ),
        ({"chosen": ""}, "line 1: `chosen` must be a reply, .* got an empty reply"),
        ({"chosen": "  "}, "line 1: `chosen` must be a reply, .* got an empty reply"),
        ({"chosen": None}, "line 1: `chosen` must be a reply, .* got an empty reply"),
    ],
)
def test_what_cannot_be_learned_is_refused_by_name(tmp_path: Path, row: dict, message: str) -> None:
    good = {"prompt": QUESTION, "chosen": [said("Yes.")], "rejected": [said("No.")]}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**good, **row})


def test_an_empty_list_of_calls_is_no_part_of_a_reply(tmp_path: Path) -> None:
    row = {"prompt": QUESTION, "chosen": calls(text="Yes."), "rejected": [said("No.")]}
    (pair,) = read(tmp_path, row)
    assert not pair.extra_fields
    with pytest.raises(ValueError, match=r"`chosen` must be a reply, .* got an empty reply"):
        read(tmp_path, {**row, "chosen": calls()})
    asked = [*QUESTION, {**said("Rome?"), "tool_calls": []}, *QUESTION]
    whole = {"chosen": [*asked, said("Yes.")], "rejected": [*QUESTION, said("Rome?"), *QUESTION]}
    whole["rejected"] += [said("No.")]
    (pair,) = read(tmp_path, {"prompt": asked, **whole})
    assert pair.replies == ("Yes.", "No.")


def test_a_ranking_that_is_true_or_false_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "response_0": "a", "response_1": "b", "best": True}
    with pytest.raises(ValueError, match=r"`best` must be 0 or 1, .* got True"):
        read(tmp_path, row, ranked_by="best")
    (pair,) = read(tmp_path, {**row, "best": 1.0}, ranked_by="best")
    assert pair.replies == ("b", "a")
