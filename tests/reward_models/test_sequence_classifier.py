import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from reward_models import SequenceClassifierReward, load_sequence_classifier

PROMPT = "\n\nHuman: Hello there{}\n\nAssistant:"
REPLIES = [" Yes.", " Certainly, that is a much longer reply.", "", " No, not at all.", " Why?"]
PROMPTS = [PROMPT.format(str(index)) for index in range(len(REPLIES))]

CLASSES = {
    "llama": (LlamaForSequenceClassification, LlamaConfig),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config),
    "bert": (BertForSequenceClassification, BertConfig),
}


def byte_tokenizer(*, pad: str | None = None, opening: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; with `opening` in the manner of BERT: <s> a </s> b </s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if opening:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token="<s>",
        eos_token="</s>",
        model_input_names=["input_ids", "attention_mask"] + ["token_type_ids"] * opening,
    )


def classifier(kind: str, *, positions: int = 128, num_labels: int = 1, **extra):
    model_class, config_class = CLASSES[kind]
    config = config_class(  # GPT-2 knows these names too, but for the width of its MLP
        vocab_size=259, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=positions, num_labels=num_labels,
        **({} if kind == "gpt2" else {"intermediate_size": 32}),
        **({"pad_token_id": None} | extra),
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual tiny start would hide every difference
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def alone(model, token_ids: list[int], **inputs) -> float:
    """What the model itself says about one unpadded text."""
    with torch.no_grad():
        return model(torch.tensor([token_ids]), **inputs).logits.item()


# A score is a function of prompt and reply alone


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("pad", [None, "</s>", "<pad>"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_scores_do_not_depend_on_the_batch(kind, pad, append_eos):
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


def test_encoders_get_their_own_pooling_padding_and_segments():
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


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_eos_in_the_text_is_read_where_transformers_takes_it_for_padding(kind):
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


def texts_read_by(format, prompt, reply, **options):
    """The text of what the model is given, by a model that only remembers."""
    tokenizer = byte_tokenizer(opening=True)
    reward = SequenceClassifierReward(
        classifier("llama"), tokenizer, name="r", format=format, **options
    )
    (row,) = reward._encode([prompt], [reply])
    return tokenizer.decode(row["input_ids"])


def test_formats_spell_dialogue_and_reply_as_their_models_expect():
    prompt = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nAssistant:"
    pair = prompt.removesuffix("\n\nAssistant:") + " \n\nAssistant:"
    assert texts_read_by("hh_pair", prompt, " Sure.") == f"<s>{pair}</s>Sure.</s>"
    assert texts_read_by("hh_pair", pair, "Sure.") == f"<s>{pair}</s>Sure.</s>"
    assert texts_read_by("plain", prompt, " Sure.") == f"<s>{prompt} Sure.</s>"
    assert texts_read_by("plain", prompt, "Sure.") == f"<s>{prompt} Sure.</s>"
    assert texts_read_by("response", prompt, " Sure.") == "<s> Sure.</s>"


def test_eos_is_appended_once_and_an_empty_reply_is_a_text_too():
    tokenizer = byte_tokenizer()
    reward = SequenceClassifierReward(
        classifier("llama"), tokenizer, name="r", format="response", append_eos=True
    )
    rows = reward._encode([""] * 3, ["a", "a</s>", ""])
    assert [row["input_ids"][-2:] for row in rows] == [[rows[0]["input_ids"][0], 2]] * 2 + [[2]]
    reward.append_eos = False
    assert len(reward([""], [""])) == 1
    assert reward([], []) == []


# Truncation


@pytest.mark.parametrize("opening", [False, True])
def test_long_texts_lose_their_beginning_but_not_what_opens_them(opening):
    tokenizer = byte_tokenizer(opening=opening)
    reward = SequenceClassifierReward(
        classifier("llama", positions=16), tokenizer, name="r", format="hh_pair"
    )
    long, short = reward._encode(["x" * 50 + "question", "q"], ["an answer", "a"])
    expected = "<s>tion</s>an answer</s>" if opening else "uestionan answer"
    assert tokenizer.decode(long["input_ids"]) == expected
    assert len(long["input_ids"]) == reward.max_length == 16
    assert reward.num_truncated == 1
    assert len(short["input_ids"]) < 16
    reward(["x" * 50] * 3, ["answer"] * 3)
    assert reward.num_truncated == 4


def test_segments_are_cut_with_their_tokens():
    reward = SequenceClassifierReward(
        classifier("bert", positions=12, pad_token_id=0),
        byte_tokenizer(pad="<pad>", opening=True),
        name="r",
    )
    (row,) = reward._encode(["a long question"], ["reply"])
    assert row["token_type_ids"] == [0] * 6 + [1] * 6


def test_max_length_must_be_known_and_within_the_model():
    model, tokenizer = classifier("gpt2", positions=32), byte_tokenizer()
    assert SequenceClassifierReward(model, tokenizer, name="r").max_length == 32
    tokenizer.model_max_length = 20
    assert SequenceClassifierReward(model, tokenizer, name="r").max_length == 20
    assert SequenceClassifierReward(model, tokenizer, name="r", max_length=30).max_length == 30
    with pytest.raises(ValueError, match="max_length 33 exceeds the classifier's 32 positions"):
        SequenceClassifierReward(model, tokenizer, name="r", max_length=33)


# Loading


def test_a_checkpoint_scores_like_the_model_that_was_saved(tmp_path):
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


def test_missing_checkpoints_and_unreachable_names_are_one_clear_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in {
        str(tmp_path / "missing"): "there is no folder",
        "nobody/no-such-model": "no such model could be had from the Hugging Face hub",
        str(tmp_path / "empty"): "no sequence classifier could be loaded from the folder",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_sequence_classifier(path)
        assert "\n" not in str(caught.value)


def test_checkpoints_that_give_no_single_score_are_refused(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    classifier("llama", num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"score\.weight has shape \[2, 16\]"):
        load_sequence_classifier(tmp_path)
    LlamaForCausalLM(classifier("llama").config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no trained classifier \(score\.weight is missing\)"):
        load_sequence_classifier(tmp_path)
    with pytest.raises(ValueError, match="has 2 labels, expected 1"):
        SequenceClassifierReward(classifier("llama", num_labels=2), byte_tokenizer(), name="r")


def test_eos_cannot_be_appended_where_there_is_none():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="append_eos is for causal classifiers with an EOS"):
        SequenceClassifierReward(classifier("llama"), tokenizer, name="r", append_eos=True)
    bert = classifier("bert", pad_token_id=0)
    with pytest.raises(ValueError, match="got BertForSequenceClassification"):
        SequenceClassifierReward(bert, byte_tokenizer(), name="r", append_eos=True)
