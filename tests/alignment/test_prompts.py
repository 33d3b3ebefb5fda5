import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.alignment.prompt_data import PromptsConfig, load_prompts
from firm.alignment.prompts import (
    ASSISTANT,
    HUMAN,
    PromptFormat,
    as_prompt,
    encode_prompts,
    format_prompt,
    parse_dialogue,
    truncate_by_turns,
)
from tests.tokens import byte_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}[{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}]"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


WITH_BOS = {"frame": {"single": "<s> $A"}, "pad_token": "<pad>"}
TOKENIZER = byte_tokenizer(**WITH_BOS)
THREE_TURNS = (
    f"{HUMAN} First question?{ASSISTANT} First answer.{HUMAN} Second?{ASSISTANT} Two."
    f"{HUMAN} Third question?{ASSISTANT}"
)


def num_tokens(text):
    return len(TOKENIZER(text)["input_ids"])


# Reading


USER = {"role": "user", "content": "First question?"}
REPLY = {"role": "assistant", "content": " First answer."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Second?"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER, REPLY, PARTS]},
        {"messages": [USER, REPLY, PARTS, {"role": "assistant", "content": "secret"}]},
        {"chosen": [USER, REPLY, PARTS, REPLY], "rejected": [USER, REPLY, PARTS, REPLY]},
    ],
)
def test_chat_turns_become_a_dialogue(row):
    expected = f"{HUMAN} First question?{ASSISTANT} First answer.{HUMAN} Second?{ASSISTANT}"
    assert as_prompt(row, place="here").text == expected


def test_a_system_turn_opens_the_first_human_turn():
    turns = [{"role": "system", "content": "Be kind."}, USER]
    assert as_prompt({"prompt": turns}, place="here").text == (
        f"{HUMAN} Be kind.\n\nFirst question?{ASSISTANT}"
    )
    with pytest.raises(ValueError, match="the system's first, got user, system, user"):
        as_prompt({"prompt": [USER, turns[0], USER]}, place="here")
    with pytest.raises(ValueError, match="here: a dialogue must begin with"):
        as_prompt({"prompt": [turns[0], REPLY, USER]}, place="here")


# Formats


def test_hh_leaves_the_dialogue_as_it_is():
    assert format_prompt(THREE_TURNS, TOKENIZER) == THREE_TURNS


def test_plain_puts_the_last_human_turn_into_the_users_text():
    bare = format_prompt(THREE_TURNS, TOKENIZER, PromptFormat("plain"))
    story = PromptFormat("plain", template='A girl asked, "{prompt}" {Her} mom said, "')
    assert bare == "Third question?"
    assert format_prompt(THREE_TURNS, TOKENIZER, story) == (
        'A girl asked, "Third question?" {Her} mom said, "'
    )
    with pytest.raises(ValueError, match=r"put \{prompt\} into it"):
        PromptFormat("plain", template="no place")


def test_chat_gives_the_template_messages_and_a_pinned_date():
    tokenizer = byte_tokenizer(**WITH_BOS)
    with pytest.raises(ValueError, match="needs a chat template"):
        format_prompt(THREE_TURNS, tokenizer, PromptFormat("chat"))
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = PromptFormat("chat", system_prompt="Be kind.", date_string="1 Jan 2000")
    assert format_prompt(THREE_TURNS, tokenizer, chat) == (
        "<s>[1 Jan 2000]<system>Be kind.<user>First question?<assistant>First answer."
        "<user>Second?<assistant>Two.<user>Third question?<assistant>"
    )


def test_neighbouring_turns_of_one_speaker_become_one_message():
    text = f"{HUMAN} One{HUMAN} Two{ASSISTANT} \n{HUMAN} Three{ASSISTANT}"
    assert parse_dialogue(text) == [{"role": "user", "content": "One\n\nTwo\n\nThree"}]


# Truncation


def test_the_oldest_turns_go_first():
    second = THREE_TURNS.index(f"{HUMAN} Second")
    third = THREE_TURNS.index(f"{HUMAN} Third")
    whole = num_tokens(THREE_TURNS)
    assert truncate_by_turns(THREE_TURNS, TOKENIZER, whole) == THREE_TURNS
    assert truncate_by_turns(THREE_TURNS, TOKENIZER, whole - 1) == THREE_TURNS[second:]
    room = num_tokens(THREE_TURNS[second:]) - 1
    assert truncate_by_turns(THREE_TURNS, TOKENIZER, room) == THREE_TURNS[third:]


def test_a_long_last_turn_keeps_its_end_and_its_tags():
    room = num_tokens(f"{HUMAN} {ASSISTANT}") + len("question?")
    cut = truncate_by_turns(THREE_TURNS, TOKENIZER, room)
    assert cut == f"{HUMAN} question?{ASSISTANT}"


def test_truncation_measures_what_the_policy_will_read():
    frame = PromptFormat("plain", template="x" * 50 + "{prompt}")
    cut = truncate_by_turns(THREE_TURNS, TOKENIZER, 1 + 50 + 9, prompt_format=frame)
    assert format_prompt(cut, TOKENIZER, frame) == "x" * 50 + "question?"
    with pytest.raises(ValueError, match="no prompt fits into 50 tokens"):
        truncate_by_turns(THREE_TURNS, TOKENIZER, 50, prompt_format=frame)


turns = st.lists(st.text("ab é😀\n", min_size=1, max_size=30).filter(str.strip), min_size=1)


@given(turns=turns, room=st.integers(40, 120))
def test_a_truncated_dialogue_fits_and_is_an_end_of_the_whole(turns, room):
    text = "".join(f"{(HUMAN, ASSISTANT)[i % 2]} {turn}" for i, turn in enumerate(turns))
    text += ASSISTANT if len(turns) % 2 else f"{HUMAN} end?{ASSISTANT}"
    cut = truncate_by_turns(text, TOKENIZER, room)
    assert num_tokens(cut) <= room
    assert cut.startswith(HUMAN)
    assert text.endswith(cut.removeprefix(f"{HUMAN} "))


# Encoding


def test_prompts_are_padded_on_the_left():
    input_ids = encode_prompts(["abc", "a"], TOKENIZER, max_prompt_tokens=9)
    a, b, c = TOKENIZER("abc")["input_ids"][1:]
    assert input_ids.tolist() == [[1, a, b, c], [0, 0, 1, a]]
    assert input_ids.dtype == torch.long


def test_a_long_prompt_keeps_its_bos_and_its_end(caplog):
    caplog.set_level("INFO", logger="firm.alignment.prompts")
    input_ids = encode_prompts(["abcdef", "a"], TOKENIZER, max_prompt_tokens=4)
    assert TOKENIZER.decode(input_ids[0]) == "<s>def"
    assert "1 of 2 prompts cut to 4 tokens" in caplog.text
    without_bos = encode_prompts(["abcdef"], byte_tokenizer(pad_token="<pad>"), max_prompt_tokens=4)
    assert TOKENIZER.decode(without_bos[0]) == "cdef"


def test_a_bos_that_the_template_spells_out_stands_once():
    input_ids = encode_prompts(["<s>ab"], TOKENIZER, max_prompt_tokens=9)
    assert input_ids.tolist() == encode_prompts(["ab"], TOKENIZER, max_prompt_tokens=9).tolist()


def test_prompts_that_cannot_be_encoded_are_refused():
    with pytest.raises(ValueError, match="prompt 1 of 2 has no token"):
        encode_prompts(["a", ""], byte_tokenizer(pad_token="<pad>"), max_prompt_tokens=4)
    with pytest.raises(ValueError, match="must be at least 2, got 1"):
        encode_prompts(["a"], TOKENIZER, max_prompt_tokens=1)
    unpadded = byte_tokenizer(**WITH_BOS)
    unpadded.pad_token = None
    with pytest.raises(ValueError, match="need a pad token"):
        encode_prompts(["a"], unpadded, max_prompt_tokens=4)


# Real data


@pytest.mark.data
def test_real_prompts_fit_a_real_policy(firm_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(firm_data / "models" / "stories260K")
    file = firm_data / "hh_rlhf" / "helpful.jsonl.gz"
    prompts = load_prompts(PromptsConfig(str(file)))[:200]
    frame = PromptFormat("plain", template='One day, a girl asked, "{prompt}" Her mom said, "')
    for prompt_format in (PromptFormat(), frame):
        texts = [
            format_prompt(
                truncate_by_turns(prompt.text, tokenizer, 96, prompt_format=prompt_format),
                tokenizer,
                prompt_format,
            )
            for prompt in prompts
        ]
        input_ids = encode_prompts(texts, tokenizer, max_prompt_tokens=96)
        attention_mask = (input_ids != tokenizer.pad_token_id).long()
        first = attention_mask.argmax(1)
        assert input_ids.shape == (200, 96)
        assert (input_ids[torch.arange(200), first] == tokenizer.bos_token_id).all()
        assert int(attention_mask.sum(1).max()) <= 96
