import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForSequenceClassification,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from reward_models import SequenceClassifierReward, load_sequence_classifier
from tests import tokens

PROMPT = "\n\nHuman: Hello there{}\n\nAssistant:"
REPLIES = [" Yes.", " Certainly, that is a much longer reply.", "", " No, not at all.", " Why?"]
PROMPTS = [PROMPT.format(str(index)) for index in range(len(REPLIES))]


def alone(model, token_ids: list[int], **inputs) -> float:
    """What the model itself says about one unpadded text."""
    with torch.no_grad():
        return model(torch.tensor([token_ids]), **inputs).logits.item()


# A score is a function of prompt and reply alone


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_scores_do_not_depend_on_the_batch(kind, pad, append_eos, byte_tokenizer, classifier):
    tokenizer = byte_tokenizer(pad=pad)
    tokenizer.padding_side = "left"  # whatever the checkpoint says
    model = classifier(kind, pad_token_id=tokenizer.pad_token_id)
    reward = SequenceClassifierReward(
        model, tokenizer, name="r", format="plain", append_eos=append_eos
    )
    together = reward(PROMPTS, REPLIES)
    one_by_one = [reward([p], [c])[0] for p, c in zip(PROMPTS, REPLIES, strict=True)]
    assert together == pytest.approx(one_by_one, abs=1e-5)
    assert max(one_by_one) - min(one_by_one) > 0.01

    reward.batch_size = 2
    assert reward(PROMPTS[::-1], REPLIES[::-1])[::-1] == pytest.approx(one_by_one, abs=1e-5)

    model.config.pad_token_id = None  # unpadded, so that Transformers takes the last token
    eos = [tokenizer.eos_token_id] * append_eos
    expected = [
        alone(model, tokenizer(p + c)["input_ids"] + eos)
        for p, c in zip(PROMPTS, REPLIES, strict=True)
    ]
    assert one_by_one == pytest.approx(expected, abs=1e-5)


def test_encoders_get_their_own_pooling_padding_and_segments(byte_tokenizer, classifier):
    tokenizer = byte_tokenizer(pad="<pad>", opening=True)
    model = classifier("bert", pad_token_id=0)
    reward = SequenceClassifierReward(model, tokenizer, name="r", format="hh_pair")
    together = reward(PROMPTS, REPLIES)
    expected = []
    for prompt, reply in zip(PROMPTS, REPLIES, strict=True):
        question = prompt.replace("\n\nAssistant:", " \n\nAssistant:")
        encoded = tokenizer([question], [reply.lstrip(" ")], return_tensors="pt")
        assert 1 in encoded["token_type_ids"]
        with torch.no_grad():
            expected.append(model(**encoded).logits.item())
    assert together == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
@pytest.mark.parametrize("kind", ["bert", "bart"])
def test_encoders_need_no_pad_token_and_may_pad_with_eos(kind, pad, byte_tokenizer, classifier):
    tokenizer = byte_tokenizer(pad=pad, opening=True)
    has_none = kind == "bert" and pad is None  # BART itself runs on no text without
    model = classifier(kind, pad_token_id=None if has_none else tokenizer.pad_token_id or 0)
    reward = SequenceClassifierReward(model, tokenizer, name="r", format="plain")
    expected = []
    for prompt, reply in zip(PROMPTS, REPLIES, strict=True):
        ids = tokenizer(prompt + reply)["input_ids"]
        expected.append(alone(model, ids, attention_mask=torch.ones(1, len(ids))))
    assert reward(PROMPTS, REPLIES) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01


@pytest.mark.parametrize(("kind", "opening"), [("llama", False), ("gpt2", False), ("bert", True)])
def test_one_of_several_labels_is_the_reward(kind, opening, tmp_path, byte_tokenizer, classifier):
    tokenizer, model = byte_tokenizer(opening=opening), classifier(kind, num_labels=3)
    model.config.id2label = {0: "rude", 1: "dull", 2: "kind"}
    model.config.problem_type = "single_label_classification"  # refuses a single label
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("Yes.")["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].tolist()
    for column in range(3):
        loaded = load_sequence_classifier(tmp_path, output=column, device="cpu")
        reward = SequenceClassifierReward(*loaded, name="r", format="response", output=column)
        assert reward(["p", "p"], ["Yes.", "A longer one."])[0] == pytest.approx(
            expected[column], abs=1e-5
        )
    with pytest.raises(ValueError, match=r"has 3 labels, and a reward is one number .*0 to 2"):
        load_sequence_classifier(tmp_path)
    for column in (3, -1):
        with pytest.raises(ValueError, match=f"has 3 labels, got output {column}: choose from 0 t"):
            SequenceClassifierReward(*loaded, name="r", output=column)
    with pytest.raises(ValueError, match="has one label, got output 1: leave it out"):
        SequenceClassifierReward(classifier(kind), tokenizer, name="r", output=1)


def test_the_number_of_labels_may_be_missing_in_a_config(tmp_path, byte_tokenizer, classifier):
    byte_tokenizer().save_pretrained(tmp_path)
    classifier("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["id2label"], config["label2id"]
    file.write_text(json.dumps(config))
    model, _ = load_sequence_classifier(tmp_path)
    assert model.config.num_labels == 1
    with pytest.raises(ValueError, match=r"contradicts itself \(score.weight has shape \[1, 16\]"):
        load_sequence_classifier(tmp_path, output=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_eos_in_the_text_is_read_where_transformers_takes_it_for_padding(
    kind, byte_tokenizer, classifier
):
    tokenizer = byte_tokenizer(pad="</s>")
    model = classifier(kind, pad_token_id=2)
    reward = SequenceClassifierReward(model, tokenizer, name="r", format="response")
    ids = tokenizer("Yes</s>")["input_ids"]
    assert ids[-1] == 2
    misread = alone(model, ids)
    model.config.pad_token_id = None
    expected = alone(model, ids)
    assert abs(misread - expected) > 1e-3
    assert reward(["", ""], ["Yes</s>", "A longer one."])[0] == pytest.approx(expected, abs=1e-5)


# Formats


@pytest.fixture
def texts_read_by(byte_tokenizer, classifier):
    """The text of what a classifier is given, special tokens included."""

    def read(format, prompt, reply, *, template=None, **options):
        tokenizer = byte_tokenizer(opening=True, template=template)
        reward = SequenceClassifierReward(
            classifier("llama"), tokenizer, name="r", format=format, **options
        )
        (row,) = reward.encode([prompt], [reply])
        return tokenizer.decode(row["input_ids"])

    return read


def test_formats_spell_dialogue_and_reply_as_their_models_expect(texts_read_by):
    prompt = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nAssistant:"
    pair = prompt.removesuffix("\n\nAssistant:") + " \n\nAssistant:"
    assert texts_read_by("hh_pair", prompt, " Sure.") == f"<s>{pair}</s>Sure.</s>"
    assert texts_read_by("hh_pair", pair, "Sure.") == f"<s>{pair}</s>Sure.</s>"
    assert texts_read_by("plain", prompt, " Sure.") == f"<s>{prompt} Sure.</s>"
    assert texts_read_by("plain", prompt, "Sure.") == f"<s>{prompt} Sure.</s>"
    assert texts_read_by("response", prompt, " Sure.") == "<s> Sure.</s>"


CHATML = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_chat_template_writes_all_special_tokens_itself(texts_read_by):
    prompt = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nAssistant:"
    written = "<|user|>Hi\n<|assistant|>Yes?\n<|user|>Go\n<|assistant|>Sure.\n"
    read = texts_read_by("chat_template", prompt, " Sure.", template=CHATML)
    assert read == f"<s>{written}"
    template = CHATML.removeprefix("{{ bos_token }}")
    read = texts_read_by("chat_template", prompt, " Sure.", template=template, append_eos=True)
    assert read == f"{written}</s>"


@pytest.mark.parametrize("bos", ["{{ bos_token }}", ""])
def test_a_long_chat_keeps_its_bos_and_its_end(bos, texts_read_by):
    template = bos + CHATML.removeprefix("{{ bos_token }}")
    read = texts_read_by("chat_template", "x" * 90, "An answer", template=template, max_length=24)
    written = "x" * 90 + "\n<|assistant|>An answer\n"
    assert read == ("<s>" + written[-23:] if bos else written[-24:])


def test_a_question_and_its_answer_are_told_apart(texts_read_by):
    prompt = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nAssistant:"
    assert texts_read_by("question_answer", prompt, " Sure. ") == "<s>Go</s>Sure.</s>"


def test_eos_is_appended_once_and_an_empty_reply_is_a_text_too(byte_tokenizer, classifier):
    tokenizer = byte_tokenizer()
    reward = SequenceClassifierReward(
        classifier("llama"), tokenizer, name="r", format="response", append_eos=True
    )
    rows = reward.encode([""] * 3, ["a", "a</s>", ""])
    assert [row["input_ids"][-2:] for row in rows] == [[rows[0]["input_ids"][0], 2]] * 2 + [[2]]
    reward.append_eos = False
    assert len(reward([""], [""])) == 1
    assert reward([], []) == []


# Truncation


@pytest.mark.parametrize("opening", [False, True])
def test_long_texts_lose_their_beginning_but_not_what_opens_them(
    opening, byte_tokenizer, classifier
):
    tokenizer = byte_tokenizer(opening=opening)
    reward = SequenceClassifierReward(
        classifier("llama", positions=48), tokenizer, name="r", format="hh_pair"
    )
    long, short = reward.encode(["x" * 50 + "question", "q"], ["an answer", "a"])
    question = "x" * (15 if opening else 18) + "question \n\nAssistant:"
    expected = f"<s>{question}</s>an answer</s>" if opening else f"{question}an answer"
    assert tokenizer.decode(long["input_ids"]) == expected
    assert len(long["input_ids"]) == reward.max_length == 48
    assert reward.truncated == [True, False]
    assert len(short["input_ids"]) < 48
    reward(["x", "x" * 50], ["short", "answer"])
    assert reward.truncated == [False, True]


def test_segments_are_cut_with_their_tokens(byte_tokenizer, classifier):
    reward = SequenceClassifierReward(
        classifier("bert", positions=12, pad_token_id=0),
        byte_tokenizer(pad="<pad>", opening=True),
        name="r",
    )
    (row,) = reward.encode(["a long question"], ["reply"])
    assert row["token_type_ids"] == [0] * 6 + [1] * 6


def test_positions_that_are_counted_from_the_pad_token_are_fewer(byte_tokenizer):
    sizes = RobertaConfig(
        vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=66, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    model, tokenizer = RobertaForSequenceClassification(sizes), byte_tokenizer(opening=True)
    reward = SequenceClassifierReward(model, tokenizer, name="r", format="response")
    assert reward.max_length == 64
    assert len(reward(["p"], ["a" * 100])) == 1
    with pytest.raises(ValueError, match="max_length 66 exceeds the classifier's 64 positions"):
        SequenceClassifierReward(model, tokenizer, name="r", max_length=66)


def test_a_classifier_within_a_multimodal_model_reads_its_text_part(byte_tokenizer):
    text = {
        "vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
        "max_position_embeddings": 64, "sliding_window": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForSequenceClassification(
        Gemma3Config(
            text_config=text, vision_config=vision, num_labels=1, mm_tokens_per_image=4,
            image_token_index=258, boi_token_index=257, eoi_token_index=256,
        )
    ).eval()  # fmt: skip
    tokenizer = byte_tokenizer(pad="</s>")
    reward = SequenceClassifierReward(model, tokenizer, name="r", format="plain")
    assert reward.max_length == 64
    texts = ["Yes.", "No, not at all."]
    prompt = "\n\nHuman: p\n\nAssistant:"
    expected = [alone(model, tokenizer(f"{prompt} {text}")["input_ids"]) for text in texts]
    assert reward([prompt, "p"], texts) == pytest.approx(expected, abs=1e-4)
    assert len(reward(["p"], ["a" * 100])) == 1


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
def test_an_eos_that_the_tokenizer_appends_is_read_once(pad, append_eos, classifier):
    tokenizer = tokens.byte_tokenizer(
        frame={"single": "$A </s>", "pair": "$A </s> $B </s>"}, pad_token=pad
    )
    model = classifier("llama")
    reward = SequenceClassifierReward(
        model, tokenizer, name="r", format="response", append_eos=append_eos
    )
    ids = [tokenizer(reply)["input_ids"] for reply in REPLIES]
    assert all(row[-1] == tokenizer.eos_token_id for row in ids)
    expected = [alone(model, row) for row in ids]
    assert reward(PROMPTS, REPLIES) == pytest.approx(expected, abs=1e-5)


def test_max_length_must_be_known_and_within_the_model(byte_tokenizer, classifier):
    model, tokenizer = classifier("gpt2", positions=32), byte_tokenizer()
    assert SequenceClassifierReward(model, tokenizer, name="r").max_length == 32
    tokenizer.model_max_length = 20
    assert SequenceClassifierReward(model, tokenizer, name="r").max_length == 20
    assert SequenceClassifierReward(model, tokenizer, name="r", max_length=30).max_length == 30
    with pytest.raises(ValueError, match="max_length 33 exceeds the classifier's 32 positions"):
        SequenceClassifierReward(model, tokenizer, name="r", max_length=33)


# Loading


def test_a_checkpoint_scores_like_the_model_that_was_saved(tmp_path, byte_tokenizer, classifier):
    model, tokenizer = classifier("llama"), byte_tokenizer(pad="<pad>")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    copy.deepcopy(model).half().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_sequence_classifier(tmp_path, dtype="float32", device="cpu")
    reward = SequenceClassifierReward(*loaded, name="r")
    assert {p.dtype for p in reward.model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in reward.model.parameters())
    expected = SequenceClassifierReward(model, tokenizer, name="r")(PROMPTS, REPLIES)
    assert reward(PROMPTS, REPLIES) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b""), ("config.json", b"[" * 100_000), ("tokenizer.json", b"[]")],
)
def test_a_checkpoint_of_another_making_is_one_clear_line(tmp_path, file, content):
    shipped = Path(__file__).parents[2] / "firm/miniature/checkpoints/helpful"
    folder = shutil.copytree(shipped, tmp_path / "helpful")
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match="no sequence classifier could be loaded") as caught:
        load_sequence_classifier(str(folder))
    assert "\n" not in str(caught.value)


def test_missing_checkpoints_and_unreachable_names_are_one_clear_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in {
        str(tmp_path / "missing"): "there is no folder",
        "nobody/no-such-model": "no such sequence classifier could be loaded",
        str(tmp_path / "empty"): "no sequence classifier could be loaded from the folder",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_sequence_classifier(path)
        assert "\n" not in str(caught.value)


def test_checkpoints_that_give_no_single_score_are_refused(tmp_path, byte_tokenizer, classifier):
    byte_tokenizer().save_pretrained(tmp_path)
    classifier("llama", num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has 2 labels, .*score\.weight .*\[2, 16\].*0 to 1"):
        load_sequence_classifier(tmp_path)
    LlamaForCausalLM(classifier("llama").config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no trained classifier \(score\.weight is missing\)"):
        load_sequence_classifier(tmp_path)
    with pytest.raises(ValueError, match="has 2 labels, and a reward is one number"):
        SequenceClassifierReward(classifier("llama", num_labels=2), byte_tokenizer(), name="r")


def test_pickled_weights_are_refused_in_one_line(tmp_path, byte_tokenizer, classifier):
    model = classifier("llama")
    byte_tokenizer().save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"could be loaded .*model\.safetensors") as caught:
        load_sequence_classifier(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(
    tmp_path, byte_tokenizer, classifier
):
    classifier("bert", pad_token_id=0).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    line = f"the tokenizer of {tmp_path} has ids up to 259, but the model's embedding has 259 rows"
    with pytest.raises(ValueError, match=line):
        load_sequence_classifier(tmp_path)


def test_eos_cannot_be_appended_where_there_is_none(byte_tokenizer, classifier):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="append_eos is for causal classifiers with an EOS"):
        SequenceClassifierReward(classifier("llama"), tokenizer, name="r", append_eos=True)
    bert = classifier("bert", pad_token_id=0)
    with pytest.raises(ValueError, match="got BertForSequenceClassification"):
        SequenceClassifierReward(bert, byte_tokenizer(), name="r", append_eos=True)


def test_a_device_that_is_not_here_is_answered_with_those_that_are(
    tmp_path, byte_tokenizer, classifier
):
    byte_tokenizer().save_pretrained(tmp_path)
    classifier("llama").save_pretrained(tmp_path)
    for device in ("gpu", "cuda:99", "meta", "cpu:x", ""):
        with pytest.raises(ValueError, match=f"no device '{device}' here: .*'auto' or one of cpu"):
            load_sequence_classifier(tmp_path, device=device)
    for device in ("cpu", "cpu:0"):
        assert load_sequence_classifier(tmp_path, device=device)[0].device.type == "cpu"
