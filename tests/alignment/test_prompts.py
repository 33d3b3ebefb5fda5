import gzip
import json

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.alignment.prompt_data import PromptsConfig, load_prompts
from firm.alignment.prompt_stream import PromptStream
from firm.alignment.prompts import (
    ASSISTANT,
    HUMAN,
    Prompt,
    PromptFormat,
    as_prompt,
    encode_prompts,
    format_prompt,
    parse_dialogue,
    truncate_by_turns,
)
from firm.federation.randomness import RandomStream
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


# Loading


def load(source, tokenizer=None, **options):
    sources = [str(each) for each in source] if isinstance(source, list) else str(source)
    return load_prompts(PromptsConfig(sources, **options), tokenizer)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, name):
    rows = [
        {"prompt": f"{HUMAN} One{ASSISTANT}", "kind": "helpful"},
        {"prompt": "Two"},
        {"prompt": f"{HUMAN} One{ASSISTANT}", "kind": "helpful"},
    ]
    text = json.dumps(rows) if ".jsonl" not in name else "\n\n".join(map(json.dumps, rows))
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert load(tmp_path / name) == [
        Prompt(f"{HUMAN} One{ASSISTANT}", "helpful"),
        Prompt(f"{HUMAN} Two{ASSISTANT}", ""),
    ]


def test_a_pair_gives_the_dialogue_up_to_the_last_assistant_tag(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"chosen": THREE_TURNS + " Yes.", "rejected": THREE_TURNS + " No."}))
    assert load(file) == [Prompt(THREE_TURNS, "")]


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


def test_further_fields_are_kept_for_the_reward_functions(tmp_path):
    file = tmp_path / "a.jsonl"
    row = {"prompt": "2 + 2?", "kind": "sum", "answer": 4, "completions": "x", "prompts": "y"}
    file.write_text(json.dumps(row))
    (prompt,) = load(file)
    assert prompt.columns == {"kind": "sum", "answer": 4}


def test_a_saved_dataset_and_a_folder_of_files_are_read_by_split(tmp_path):
    table = {
        split: datasets.Dataset.from_dict({"chosen": [f"{HUMAN} {split}?{ASSISTANT} Yes."]})
        for split in ("train", "test")
    }
    datasets.DatasetDict(table).save_to_disk(tmp_path / "saved")
    part = tmp_path / "folder" / "helpful-base"
    part.mkdir(parents=True)
    for split, rows in table.items():
        (part / f"{split}.jsonl").write_text(json.dumps(rows[0]))
    expected = f"{HUMAN} test?{ASSISTANT}"
    assert load(tmp_path / "saved", split="test") == [Prompt(expected, "")]
    assert load(part, split="test") == [Prompt(expected, "")]
    named = load(f"{tmp_path / 'folder'}:helpful-base", split="test")
    assert named == [Prompt(expected, "helpful-base")]
    with pytest.raises(ValueError, match=r"no split 'dev', only train, test"):
        load(tmp_path / "saved", split="dev")


@pytest.mark.parametrize(
    ("split", "expected"), [("[:80%]", "01234567"), ("[80%:]", "89"), ("[2:4]", "23"), ("x", None)]
)
def test_a_slice_is_a_part_of_a_file(split, expected, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": digit}) for digit in "0123456789"))
    taken = "".join(prompt.text.split()[1] for prompt in load(file, split=split))
    assert taken == (expected or "0123456789")
    with pytest.raises(ValueError, match=r"split must be a slice such as .*, got '\[a:b\]'"):
        load(file, split="[a:b]")


def test_sources_are_joined_in_order_without_repetition(tmp_path):
    for name, questions in {"a": ["One", "Two"], "b": ["Two", "Three"]}.items():
        rows = [json.dumps({"prompt": question, "kind": name}) for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    prompts = load([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [prompt.text.split()[1] for prompt in prompts] == ["One", "Two", "Three"]


def test_limits_leave_out_what_is_too_short_or_too_long(tmp_path):
    file = tmp_path / "a.jsonl"
    questions = ["x" * length for length in (1, 5, 9)]
    file.write_text("\n".join(json.dumps({"prompt": q}) for q in questions))
    around = num_tokens(f"{HUMAN} {ASSISTANT}")
    kept = load(file, min_tokens=around + 2, max_tokens=around + 5, tokenizer=TOKENIZER)
    assert [prompt.text for prompt in kept] == [f"{HUMAN} xxxxx{ASSISTANT}"]
    with pytest.raises(ValueError, match="no prompt is left of 3"):
        load(file, min_tokens=10_000, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="need a tokenizer"):
        load(file, min_tokens=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "secret"', r"line 2: not valid JSON"),
        ('["secret"]', r"line 2: got a JSON list"),
        ('{"text": "secret"}', r"line 2: no prompt in fields text"),
        ('{"prompt": " "}', r"line 2: no prompt in an empty text"),
        ('{"prompt": 3}', r"line 2: no prompt in fields prompt"),
        ('{"prompt": ["secret"]}', r"line 2: chat turn 1 must have a `role`"),
        ('{"prompt": []}', r"line 2: chat turns must end with the user's, .* got none"),
        ('{"prompt": [{"role": "secret", "content": "x"}]}', r"line 2: chat turn 1 must have a"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2: chat turn 1 must have a"),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}',
            r"line 2: chat turns must end with the user's, .* got user, assistant: add or remove",
        ),
        ('{"chosen": "secret"}', r"line 2: no prompt in an empty text"),
        ('{"prompt": "secret", "kind": 3}', r"line 2: `kind` must be a text, got int"),
        (r'{"prompt": "secret \ud83d"}', r"line 2: the prompt has half a surrogate .* character 8"),
        (r'{"prompt": "secret", "kind": "\udc00"}', r"line 2: `kind` has half a surrogate pair"),
        ("[" * 100_000, r"line 2: JSON that is nested too deeply"),
        (json.dumps({"prompt": f"{HUMAN} secret"}), r"line 2: a dialogue must begin"),
        (json.dumps({"prompt": f"secret{HUMAN} Hi{ASSISTANT}"}), r"line 2: a dialogue must begin"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_never_quoted(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        load(file)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sources_that_cannot_be_read_are_one_clear_line(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\nHi")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "fine"}\n' * 9)[:-9])
    damaged = bytearray(gzip.compress(b'{"prompt": "fine"}\n' * 9))
    damaged[10] ^= 0xFF
    (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "object.json").write_text('{"prompt": "Hi"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    for source, message in {
        str(tmp_path / "a.csv"): "not a .json or .jsonl file",
        str(tmp_path / "cut.jsonl.gz"): "cannot be read",
        str(tmp_path / "damaged.jsonl.gz"): "cannot be read",
        str(tmp_path / "deep.json"): r"deep\.json: JSON that is nested too deeply",
        str(tmp_path / "object.json"): "holds a JSON dict",
        str(tmp_path / "empty.jsonl"): "there is no prompt in",
        str(tmp_path / "missing.jsonl"): "no prompts at",
        "nobody/such-a-dataset": "no prompts at nobody/such-a-dataset",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            load(source)
        assert "\n" not in str(caught.value)


def test_limits_that_exclude_each_other_are_refused():
    assert PromptsConfig(max_tokens=8).max_tokens == 8
    with pytest.raises(ValueError, match=r"max_tokens must be at least min_tokens \(9\), got 8"):
        PromptsConfig(min_tokens=9, max_tokens=8)


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


# Streams


def shard(size):
    return [Prompt(str(index), "") for index in range(size)]


@given(size=st.integers(1, 12), data=st.data())
def test_passes_use_every_prompt_once_and_no_batch_repeats_one(size, data):
    batch_size = data.draw(st.integers(1, size))
    stream = PromptStream(shard(size), RandomStream(0, "prompts"))
    batches = [stream.draw(batch_size) for _ in range(3 * size)]
    assert all(len(set(batch)) == batch_size for batch in batches)
    counts = [sum(prompt in batch for batch in batches) for prompt in shard(size)]
    assert counts == [3 * batch_size] * size


def test_drawing_ahead_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    PromptStream(shard(5), RandomStream(0, "prompts")).draw(3)
    assert torch.equal(torch.rand(1), expected)


def test_passes_differ_and_seeds_decide():
    def orders(seed):
        stream = PromptStream(shard(9), RandomStream(seed, "prompts"))
        return [stream.draw(9) for _ in range(2)]

    assert orders(0) == orders(0)
    assert orders(0) != orders(1)
    assert orders(0)[0] != orders(0)[1]


def test_a_restored_stream_goes_on_as_if_nothing_had_happened():
    stream = PromptStream(shard(7), RandomStream(0, "prompts"))
    stream.draw(3)
    state = stream.state()
    expected = [stream.draw(3) for _ in range(5)]
    other = PromptStream(shard(7), RandomStream(1, "prompts"))
    for target in (stream, other):
        target.restore(state)
        assert [target.draw(3) for _ in range(5)] == expected


@pytest.mark.parametrize("batch_size", [0, 4])
def test_a_shard_smaller_than_the_batch_is_refused(batch_size):
    stream = PromptStream(shard(3), RandomStream(0, "prompts"))
    with pytest.raises(ValueError, match=f"a batch of {batch_size} .* shard of 3"):
        stream.draw(batch_size)


# Real data


@pytest.mark.data
def test_every_prompt_of_hh_rlhf_is_read_as_it_stands(firm_data):
    for name, num_distinct in {"helpful": 2339, "harmless": 2301}.items():
        file = firm_data / "hh_rlhf" / f"{name}.jsonl.gz"
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            texts = {json.loads(line)["prompt"] for line in lines}
        prompts = load(file)
        assert len(prompts) == num_distinct
        assert {prompt.text for prompt in prompts} == texts
        assert {prompt.kind for prompt in prompts} == {name}


@pytest.mark.data
def test_real_prompts_fit_a_real_policy(firm_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(firm_data / "models" / "stories260K")
    prompts = load(firm_data / "hh_rlhf" / "helpful.jsonl.gz")[:200]
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
