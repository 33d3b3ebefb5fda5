"""Tiny classifiers of several kinds, and a tokenizer of bytes to go with each."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests import tokens

CLASSES = {
    "llama": (LlamaForSequenceClassification, LlamaConfig),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config),
    "bert": (BertForSequenceClassification, BertConfig),
    "bart": (BartForSequenceClassification, BartConfig),
}


SIZES = {
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "bart": {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
}  # fmt: skip
SIZES["bert"] = SIZES["llama"]


@pytest.fixture
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Makes tokenizers of one token per byte."""
    return make_tokenizer


@pytest.fixture
def classifier() -> Callable[..., torch.nn.Module]:
    """Makes classifiers whose scores differ from text to text."""
    return make_classifier


def make_tokenizer(
    *, pad: str | None = None, opening: bool = False, template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte; with `opening` in the manner of BERT: <s> a </s> b </s>."""
    bert = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B:1 </s>:1"}
    return tokens.byte_tokenizer(
        frame=bert if opening else None,
        pad_token=pad,
        chat_template=template,
        model_input_names=["input_ids", "attention_mask"] + ["token_type_ids"] * opening,
    )


def make_classifier(kind: str, *, positions: int = 128, num_labels: int = 1, **extra):
    model_class, config_class = CLASSES[kind]
    config = config_class(
        vocab_size=259, max_position_embeddings=positions, num_labels=num_labels, **SIZES[kind],
        **({"pad_token_id": None} | extra),
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual tiny start would hide every difference
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model
