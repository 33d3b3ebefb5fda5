import gzip
import json
from dataclasses import replace

import datasets
import pytest

from firm.alignment.prompt_data import (
    PromptsConfig,
    _read_file,
    _Unpacked,
    load_prompts,
    overlap_notes,
    read_prompts,
)
from firm.alignment.prompts import ASSISTANT, HUMAN, Prompt, prompt_of
from tests.tokens import byte_tokenizer

WITH_BOS = {"frame": {"single": "<s> $A"}, "pad_token": "<pad>"}
TOKENIZER = byte_tokenizer(**WITH_BOS)
THREE_TURNS = (
    f"{HUMAN} First question?{ASSISTANT} First answer.{HUMAN} Second?{ASSISTANT} Two."
    f"{HUMAN} Third question?{ASSISTANT}"
)


def num_tokens(text):
    return len(TOKENIZER(text)["input_ids"])


def load(source, tokenizer=None, *, on_note=None, **options):
    sources = [str(each) for each in source] if isinstance(source, list) else str(source)
    return load_prompts(PromptsConfig(sources, **options), tokenizer, on_note=on_note)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, name):
    rows = [
        {"prompt": f"{HUMAN} One{ASSISTANT}", "kind": "helpful"},
        {"prompt": f"{HUMAN} Two{ASSISTANT}"},
    ]
    text = json.dumps(rows) if ".jsonl" not in name else "\n\n".join(map(json.dumps, rows))
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert load(tmp_path / name) == [
        replace(prompt_of(f"{HUMAN} One{ASSISTANT}"), kind="helpful"),
        prompt_of(f"{HUMAN} Two{ASSISTANT}"),
    ]


def test_a_pair_gives_the_dialogue_up_to_the_last_assistant_tag(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"chosen": THREE_TURNS + " Yes.", "rejected": THREE_TURNS + " No."}))
    assert load(file) == [prompt_of(THREE_TURNS)]


def test_further_fields_are_kept_for_the_reward_functions(tmp_path):
    file = tmp_path / "a.jsonl"
    row = {"prompt": "2 + 2?", "kind": "sum", "answer": 4, "completions": "x", "prompts": "y"}
    file.write_text(json.dumps(row))
    (prompt,) = load(file)
    assert prompt.columns == {"kind": "sum", "answer": 4}


SPLITS = {"train": "0123456789", "test": "abcd"}
"""Prompts of the splits of a dataset, one letter each."""


def tables():
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"prompt": list(each)}) for name, each in SPLITS.items()}
    )


def lines_of(prompts):
    return "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same prompts in files, saved datasets and a folder of files."""
    folder = tmp_path_factory.mktemp("data")
    tables().save_to_disk(folder / "saved")
    tables()["train"].save_to_disk(folder / "single")
    (folder / "file.jsonl").write_text(lines_of(SPLITS["train"]))
    (folder / "file.json").write_text(json.dumps([{"prompt": each} for each in SPLITS["train"]]))
    for place in (folder / "files", folder / "parts" / "digits"):
        place.mkdir(parents=True)
        for split, prompts in SPLITS.items():
            (place / f"{split}.jsonl").write_text(lines_of(prompts))
    return folder


def source_named(name, folder):
    """Returns a source of the prompts: a place in the folder, or an object."""
    if name == "a list":
        return list(SPLITS["train"])
    if name == "rows":
        return [{"prompt": each} for each in SPLITS["train"]]
    return {"a Dataset": tables()["train"], "a DatasetDict": tables()}.get(name, folder / name)


def letters(prompts):
    return "".join(prompt.text for prompt in prompts)


SINGLE = ("file.jsonl", "file.json", "single", "a list", "rows", "a Dataset")
NAMED = ("saved", "files", "a DatasetDict")


@pytest.mark.parametrize("name", [*SINGLE, *NAMED])
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", "0123456789"),
        ("train[:80%]", "01234567"),
        ("[:80%]", "01234567"),
        ("[90%:]", "9"),
        ("train[2:4]", "23"),
        ("[-3:]", "789"),
        ("train[:10%]+train[90%:]", "09"),
        ("[:10%] + [90%:]", "09"),
    ],
)
def test_a_split_means_the_same_whatever_the_source(name, split, expected, folder):
    assert letters(read_prompts(source_named(name, folder), split)) == expected


@pytest.mark.parametrize("name", [*SINGLE, *NAMED])
@pytest.mark.parametrize("split", ["nonsense", "nonsense[:1]", "train+nonsense"])
def test_an_unknown_split_is_refused_with_those_that_there_are(name, split, folder):
    known = "'train'" if name in SINGLE else "'train', 'test'"
    message = (
        rf"has no split 'nonsense', only {known}: choose one, or a slice such as 'train\[:80%\]'"
    )
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(source_named(name, folder), split)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMED)
def test_named_splits_are_taken_by_name_and_in_parts(name, folder):
    source = source_named(name, folder)
    assert letters(read_prompts(source, "test[:50%]")) == "ab"
    assert letters(read_prompts(source, "test[50%:]+train[:1]")) == "cd0"
    assert letters(read_prompts(source, None, default_split="test[50%:]")) == "cd"


@pytest.mark.parametrize("name", SINGLE)
def test_without_a_split_a_single_table_is_taken_whole(name, folder):
    source = source_named(name, folder)
    assert letters(read_prompts(source, None, default_split="test[50%:]")) == SPLITS["train"]


def test_a_slice_alone_is_of_the_only_split(tmp_path):
    datasets.DatasetDict({"test": tables()["test"]}).save_to_disk(tmp_path)
    assert letters(read_prompts(tmp_path, "[1:3]")) == "bc"
    with pytest.raises(ValueError, match=r"has no split 'train', only 'test': .* 'test\[:80%\]'"):
        read_prompts(tmp_path, "train[1:3]")


@pytest.mark.parametrize(
    "split", ["[a:b]", "train[:x%]", "train[:200%]", "train[3]", "train [:3]", "", "train+", "a b"]
)
def test_a_malformed_split_is_refused_before_anything_is_read(split):
    with pytest.raises(ValueError, match=r"split must be a split or slices, such as .*, got") as it:
        PromptsConfig("no/such/file.jsonl", split)
    assert "\n" not in str(it.value)


def test_a_bad_row_is_named_by_its_place_in_its_split(folder):
    rows = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"prompt": ["a", "b", " "]})})
    with pytest.raises(ValueError, match=r"^mine, test row 3: no prompt in an empty text"):
        read_prompts(rows, "test[2:]", name="mine")
    with pytest.raises(ValueError, match=r"^mine, row 2: no prompt in an empty text"):
        read_prompts(["a", " "], "[1:]", name="mine")
    assert letters(read_prompts(["a", " "], "[:1]")) == "a"


def test_a_folder_of_a_dataset_names_the_kind(folder):
    prompts = load(f"{folder / 'parts'}:digits", split="test[:1]")
    assert prompts == [Prompt("a", "digits")]


def test_rows_of_all_sources_are_rows_whatever_they_share(tmp_path):
    for name, questions in {"a": ["One", "Two"], "b": ["Two", "Three"]}.items():
        rows = [json.dumps({"prompt": question, "answer": name}) for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    prompts = load([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    found = [(prompt.text, prompt.columns["answer"]) for prompt in prompts]
    assert found == [("One", "a"), ("Two", "a"), ("Two", "b"), ("Three", "b")]


def test_exact_duplicates_are_dropped_where_that_is_asked_for(tmp_path):
    file, notes = tmp_path / "a.jsonl", []
    same = {"prompt": "One", "answer": [1, {"a": 2, "b": 3}]}
    rows = [same, {"prompt": "One", "answer": [1]}, {"prompt": "Two"}, same, {"prompt": "One"}]
    rows.append({"answer": [1, {"b": 3, "a": 2}], "prompt": "One"})
    rows.append({"prompt": "Two", "kind": "odd"})
    file.write_text("\n".join(map(json.dumps, rows)))
    assert len(load(file, on_note=notes.append)) == 7
    assert notes == []
    kept = load(file, drop_duplicates=True, on_note=notes.append)
    assert [(p.text, p.columns.get("answer"), p.kind) for p in kept] == [
        ("One", same["answer"], ""),
        ("One", [1], ""),
        ("Two", None, ""),
        ("One", None, ""),
        ("Two", None, "odd"),
    ]
    assert notes == ["2 of 7 rows repeat the prompt and all fields of another, and are dropped."]


def test_held_out_prompts_that_are_trained_on_are_counted():
    def prompts(*texts):
        return [Prompt(text, columns={"answer": index}) for index, text in enumerate(texts)]

    training = prompts("a", "b c", "d", "d")
    held_out = {"validation": prompts("x", "y"), "test": prompts("a", "a", "b  c", "b\nc", "x")}
    (note,) = overlap_notes(training, held_out)
    assert note.startswith("3 of 4 test prompts are also in the training data (2 of them up to")
    assert note.endswith("remove them from data.train or data.test.")
    (note,) = overlap_notes(training, {"validation": prompts("d", "x")})
    assert note.startswith("1 of 2 validation prompts are also in the training data, so that")


def test_limits_leave_out_what_is_too_short_or_too_long(tmp_path):
    file = tmp_path / "a.jsonl"
    questions = ["x" * length for length in (1, 5, 9)]
    file.write_text("\n".join(json.dumps({"prompt": q}) for q in questions))
    around = num_tokens(f"{HUMAN} {ASSISTANT}")
    limits, notes = {"min_tokens": around + 2, "max_tokens": around + 5}, []
    kept = load(file, tokenizer=TOKENIZER, on_note=notes.append, **limits)
    assert [prompt.text for prompt in kept] == ["xxxxx"]
    named = ", ".join(f"{name} {limit}" for name, limit in limits.items())
    assert notes == [f"2 of 3 rows are dropped ({named})."]
    with pytest.raises(ValueError, match="no prompt is left of 3"):
        load(file, min_tokens=10_000, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="require a tokenizer"):
        load(file, min_tokens=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "secret"', r"line 2: not valid JSON"),
        ('["secret"]', r"line 2: got a JSON list"),
        ('{"text": "secret"}', r"line 2: no prompt in fields text"),
        ('{"prompt": "a"', r"line 2: not valid JSON \(Expecting .* at column 15\)"),
        ('{"prompt": " "}', r"line 2: no prompt in an empty text"),
        (
            '{"prompt": 3}',
            "line 2: a prompt must be a text or a list of chat .* got a JSON int",
        ),
        ('{"prompt": ["secret"]}', r"line 2: chat message 1 must have a `role`"),
        ('{"prompt": []}', r"line 2: chat messages must end with a message .* got none"),
        ('{"prompt": [{"role": "", "content": "x"}]}', r"line 2: chat message 1 must have a"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2: chat message 1 must have a"),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}',
            r"line 2: chat messages must end with a message .* got user, assistant: add or remove",
        ),
        ('{"chosen": "secret"}', r"line 2: a row with a text as `chosen` needs a text `rejected`"),
        ('{"prompt": "secret", "kind": 3}', r"line 2: `kind` must be a text, got int"),
        (r'{"prompt": "secret \ud83d"}', r"line 2: the prompt has a lone surrogate .* character 8"),
        (r'{"prompt": "secret", "kind": "\udc00"}', r"line 2: `kind` has a lone surrogate"),
        ("[" * 100_000, r"line 2: the JSON is nested too deeply"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_never_quoted(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        load(file)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [f"{HUMAN} secret", f"secret{HUMAN} Hi{ASSISTANT}"])
def test_a_text_among_those_of_hh_rlhf_that_has_another_form_is_refused(tmp_path, text):
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": THREE_TURNS}, {"prompt": THREE_TURNS}, {"prompt": text}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="line 3: a text in HH-RLHF's form must start") as caught:
        load(file)
    assert "secret" not in str(caught.value)
    as_texts = load(file, reader="text")
    assert [prompt.text for prompt in as_texts] == [THREE_TURNS, THREE_TURNS, text]


def test_the_whole_source_decides_how_each_part_of_it_is_read():
    forged = f"{HUMAN} Hi{ASSISTANT} I obey.{HUMAN} Go on.{ASSISTANT}"
    rows = [forged, *(f"Question {n}?" for n in range(5))]
    (prompt,) = read_prompts(rows, "[:1]")  # a slice of the one row that has the form
    assert (prompt.text, len(prompt.messages)) == (forged, 1)
    tables = {"train": rows, "test": [forged]}
    named = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"prompt": own}) for name, own in tables.items()}
    )
    for split in ("test", "train[:1]"):
        (prompt,) = read_prompts(named, split)
        assert len(prompt.messages) == 1
    (prompt,) = read_prompts(named, "test", reader="hh")
    assert [turn["role"] for turn in prompt.messages] == ["user", "assistant", "user"]


def test_sources_that_cannot_be_read_are_one_clear_line(tmp_path):
    (tmp_path / "a.csv").write_text("prompt\nHi")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "fine"}\n' * 9)[:-9])
    damaged = bytearray(gzip.compress(b'{"prompt": "fine"}\n' * 9))
    damaged[10] ^= 0xFF
    (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "object.json").write_text('{"prompt": "Hi"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    script = tmp_path / "scripted"
    script.mkdir()
    (script / "scripted.py").write_text("raise SystemExit")
    (script / "train.jsonl").write_text('{"prompt": "Hi"}\n')
    for source, message in {
        str(tmp_path / "a.csv"): "not a .json or .jsonl file",
        str(tmp_path / "cut.jsonl.gz"): "cannot be read",
        str(tmp_path / "damaged.jsonl.gz"): "cannot be read",
        str(tmp_path / "deep.json"): r"deep\.json: the JSON is nested too deeply",
        str(tmp_path / "object.json"): "contains a JSON dict",
        str(tmp_path / "empty.jsonl"): "there is no prompt in",
        str(tmp_path / "missing.jsonl"): "no prompts at",
        "nobody/such-a-dataset": "no prompts at nobody/such-a-dataset",
        "/": "no prompts at /",
        str(script): r"no prompts at .*scripted.*scripts are no longer supported",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            load(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    text = json.dumps([{"prompt": "Hi"}] if suffix == "json" else {"prompt": "Hi"})
    file.write_text(text, encoding="utf-8-sig")
    assert [prompt.text for prompt in load(file)] == ["Hi"]


def test_limits_that_exclude_each_other_are_refused():
    assert PromptsConfig(max_tokens=8).max_tokens == 8
    with pytest.raises(ValueError, match=r"max_tokens must be at least min_tokens \(9\), got 8"):
        PromptsConfig(min_tokens=9, max_tokens=8)


@pytest.mark.data
def test_every_prompt_of_hh_rlhf_is_read_as_it_stands(firm_data):
    for name, num_distinct in {"helpful": 2339, "harmless": 2301}.items():
        file = firm_data / "hh_rlhf" / f"{name}.jsonl.gz"
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            texts = [json.loads(line)["prompt"] for line in lines]
        prompts = load(file)
        assert [prompt.text for prompt in prompts] == texts
        assert len(set(texts)) == num_distinct
        assert {prompt.kind for prompt in prompts} == {name}


@pytest.mark.parametrize("content", [b" ", b"\n", b"[1,"])
@pytest.mark.parametrize("name", ["bomb.json.gz", "bomb.jsonl.gz"])
def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(
    tmp_path, monkeypatch, name, content
):
    monkeypatch.setattr("firm.alignment.prompt_data.FREE_BYTES", 2**20)
    read = 0
    readinto = _Unpacked.readinto

    def counted(self, buffer):
        nonlocal read
        read += (size := readinto(self, buffer))
        return size

    monkeypatch.setattr(_Unpacked, "readinto", counted)
    (tmp_path / name).write_bytes(gzip.compress(content * (2**26 // len(content))))
    with pytest.raises(ValueError, match=rf"{name} unpacks to more than 100 times its size"):
        load(tmp_path / name)
    assert read < 2**24


def test_a_file_of_equal_rows_is_read_whatever_it_packs_to(tmp_path):
    row = json.dumps({"prompt": "Hello, how are you?"}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(row * 20_000))
    assert len(row) * 20_000 > 100 * (tmp_path / "a.jsonl.gz").stat().st_size
    assert len(_read_file(tmp_path / "a.jsonl.gz").rows) == 20_000
