"""A tokenizer of one token per byte, so that a test can count, and prompts given as tokens."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from firm.alignment.prompts import Prompt
from firm.alignment.sequences import Queries


def byte_tokenizer(*, frame: dict[str, str] | None = None, **options: Any):
    """Returns a tokenizer of <pad>, <s>, </s> and the 256 bytes.

    Args:
        frame: What texts are put into: `single` and `pair` of a template.
        options: Further ones of `PreTrainedTokenizerFast`.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if frame:
        special = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(**frame, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options
    )


def queries(token_ids: torch.Tensor, texts: list[str] | None = None, **fields: Any) -> Queries:
    """Returns prompts of token ids [B, Q], which 0 pads on the left, and their texts."""
    prompts = [Prompt(text) for text in texts or [""] * len(token_ids)]
    return Queries(prompts, token_ids, (token_ids != 0).sum(1), **fields)
