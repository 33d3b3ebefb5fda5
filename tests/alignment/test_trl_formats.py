"""Rows in the formats of TRL's users give the prompts that TRL's own functions see in them."""

import json

import datasets
import pytest
from trl import apply_chat_template, extract_prompt

from firm.alignment.prompt_data import read_prompts
from firm.alignment.prompts import format_prompt
from tests.tokens import byte_tokenizer

SKY = "What color is the sky?"
USER = {"role": "user", "content": SKY}
SYSTEM = {"role": "system", "content": "Answer in a word."}
BLUE, GREEN = ({"role": "assistant", "content": color} for color in ("Blue.", "Green."))
TURNS = [SYSTEM, USER, BLUE, {"role": "user", "content": "And\n\nHuman: at night?"}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"up": True}}}],
}
TOOL = {"role": "tool", "name": "look", "content": "blue"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]

PROMPTS = {
    "prompt-only": ({"prompt": SKY}, SKY),
    "prompt-completion": ({"prompt": SKY, "completion": " Blue."}, SKY),
    "preference": ({"prompt": SKY, "chosen": " Blue.", "rejected": " Green."}, SKY),
    "preference, implicit": ({"chosen": f"{SKY} Blue.", "rejected": f"{SKY} Green."}, SKY),
    "unpaired": ({"prompt": SKY, "completion": " Blue.", "label": True}, SKY),
    "stepwise": ({"prompt": SKY, "completions": ["It", " is"], "labels": [True, False]}, SKY),
    "chat, language modeling": ({"messages": [*TURNS, GREEN]}, TURNS),
    "chat, prompt-only": ({"prompt": TURNS}, TURNS),
    "chat, prompt-completion": ({"prompt": [USER], "completion": [BLUE]}, [USER]),
    "chat, preference": ({"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}, [USER]),
    "chat, preference, implicit": ({"chosen": [*TURNS, BLUE], "rejected": [*TURNS, GREEN]}, TURNS),
    "chat, preference, implicit, apart early": (
        {"chosen": [USER, BLUE, USER, BLUE], "rejected": [USER, GREEN, USER, BLUE]},
        [USER],
    ),
    "chat, unpaired": ({"prompt": [USER], "completion": [BLUE], "label": False}, [USER]),
    "chat, tools": ({"prompt": [USER, CALL, TOOL], "tools": TOOLS}, [USER, CALL, TOOL]),
    "chat, tools as JSON": ({"prompt": [USER, CALL, TOOL], "tools": json.dumps(TOOLS)}, None),
    "chat, template options": (
        {"prompt": [USER], "chat_template_kwargs": {"effort": "low"}},
        [USER],
    ),
}
"""Rows by their format in TRL's documentation, and the prompts in them."""


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if effort is defined %}<effort {{ effort }}>{% endif %}"
        "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("source", ["list", "Dataset", "file"])
def test_a_row_gives_the_prompt_that_trl_sees(name, source, tokenizer, tmp_path):
    row, expected = PROMPTS[name]
    given = {"list": [row], "Dataset": datasets.Dataset.from_list([row])}.get(source)
    if given is None:
        given = tmp_path / "rows.jsonl"
        given.write_text(json.dumps(row))
    (prompt,) = read_prompts(given)
    if expected is not None:
        assert prompt.given == expected
    is_chat = not isinstance(prompt.given, str)
    if not is_chat:
        trl = extract_prompt(row)["prompt"] if "prompt" not in row else row["prompt"]
        assert prompt.given == trl
        return
    if "chosen" in row and "prompt" not in row:
        row = extract_prompt(row)
    if "messages" in row:
        row = {"prompt": row["messages"][:-1], **row}
        del row["messages"]
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
    options = row.get("chat_template_kwargs", {})
    asked = {"prompt": row["prompt"], **({"chat_template_kwargs": options} if options else {})}
    trl = apply_chat_template(asked, tokenizer, tools=tools)["prompt"]
    assert format_prompt(prompt, tokenizer) == trl


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "The sky is blue."}, "no prompt in fields text"),
        ({"question": "?", "chosen": "b", "rejected": "c"}, "no prompt in fields question, chosen"),
        ({"prompt": None, "answer": "4"}, r"no prompt in fields prompt \(null\), answer"),
        ({"completion": " Blue.", "label": True}, "no prompt in fields completion, label"),
        ({"messages": [BLUE]}, "must end with a message of the user or a tool"),
    ],
)
def test_a_row_without_a_prompt_is_refused_by_its_place(row, message):
    with pytest.raises(ValueError, match=f"^the prompts, row 2: .*{message}") as caught:
        read_prompts([SKY, row])
    assert "\n" not in str(caught.value)


def test_completions_labels_and_answers_reach_rewards_as_columns():
    row = {"prompt": SKY, "completion": " Blue.", "label": True, "solution": "blue"}
    (prompt,) = read_prompts([row])
    assert prompt.columns == {"completion": " Blue.", "label": True, "solution": "blue"}
