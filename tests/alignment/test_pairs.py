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
    pair, note = read(tmp_path, good, equal, other)
    assert pair.chosen == " Yes."
    assert note.startswith("2 of 3 pairs are dropped")
    with pytest.raises(ValueError, match="no pair is left of 2"):
        read(tmp_path, equal, other)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "Hi", "chosen": "Yes."}, {}, "pair 1: `rejected` must be a reply"),
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
