"""Settings of sampling, and the ends of replies: finds them and decodes the texts."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from firm.alignment.prompts import PromptFormat
from firm.alignment.rollout_config import RolloutConfig


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, generation_config: Any = None
) -> list[int]:
    """Returns the ids of the tokens that end a response, the tokenizer's EOS first.

    Args:
        tokenizer: The policy's tokenizer.
        config: Configuration with additional end tokens.
        generation_config: The model's generation config, whose `eos_token_id` may be a list: chat
            models end turns and documents with different tokens.

    Raises:
        ValueError: When an end token is not in the vocabulary.
    """
    own = getattr(generation_config, "eos_token_id", None)  # an id, a list of ids, or None
    of_model = own if isinstance(own, list | tuple) else [own]
    ids: list[Any] = [tokenizer.eos_token_id, *of_model]
    vocabulary = tokenizer.get_vocab()
    for token in config.end_tokens:
        if token not in vocabulary:
            raise ValueError(
                f"rollout.end_tokens: {token!r} is not a token of the policy's tokenizer: "
                "spell it as the tokenizer does (a newline may be '<0x0A>' or 'Ċ')."
            )
        ids.append(vocabulary[token])
    return list(dict.fromkeys(int(each) for each in ids if each is not None))


def generation_settings(end_ids: Sequence[int], config: RolloutConfig) -> GenerationConfig:
    """Returns settings of transformers' `generate` for replies as in training.

    They lack the stop strings, with which `generate` also needs the tokenizer.

    Args:
        end_ids: Tokens that end a reply; see `end_token_ids`.
        config: Sampling of replies.
    """
    return GenerationConfig(
        do_sample=True,
        temperature=config.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=list(end_ids) or None,
        pad_token_id=end_ids[0] if end_ids else None,
    )


def stop_strings(
    config: RolloutConfig, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Returns the strings before which a response ends: the configured ones, or the format's.

    Raises:
        ValueError: When a configured string contains a special token, which no text does.
    """
    if config.stop_strings is None:
        return prompt_format.stop_strings(tokenizer)
    decoder = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(each) for each in decoder if each.special)}
    for stop in config.stop_strings:
        if found := [token for token in special if token in stop]:
            raise ValueError(
                f"rollout.stop_strings: {stop!r} contains the special token {found[0]!r}, which is "
                f"not part of a reply's text: set rollout.end_tokens to [{found[0]!r}] instead."
            )
    return config.stop_strings


def find_ends(
    responses: torch.Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Finds the end of each raw response [B, T], and decodes its text.

    Negative ids at the end of a row are ignored.

    Returns:
        Numbers of tokens [B], including the end token or the token that completes a stop string;
        whether the response ended, bool [B]; and the texts without special tokens and stop strings.
    """
    lengths, ended, texts = [], [], []
    for row in responses.tolist():
        row = [token for token in row if token >= 0]  # negative ids are after the end
        end = next((i for i, token in enumerate(row) if token in end_ids), None)
        kept = row if end is None else row[: end + 1]
        text: Any = tokenizer.decode(kept, skip_special_tokens=True)
        has_stop = any(stop in text for stop in stop_strings)
        if has_stop:
            kept = _until_stop(kept, tokenizer, stop_strings)
            text = tokenizer.decode(kept, skip_special_tokens=True)
            text = text[: min(i for stop in stop_strings if (i := text.find(stop)) >= 0)]
        lengths.append(len(kept))
        ended.append(end is not None or has_stop)
        texts.append(text)
    device = responses.device
    return torch.tensor(lengths, device=device), torch.tensor(ended, device=device), texts


def _until_stop(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]
) -> list[int]:
    """Returns the shortest prefix of `token_ids` that contains a stop string as text."""

    def has_stop(length: int) -> bool:
        text: Any = tokenizer.decode(token_ids[:length], skip_special_tokens=True)
        return any(stop in text for stop in stop_strings)

    lengths = range(1, len(token_ids))  # the whole row has one
    return token_ids[: 1 + bisect_left(lengths, True, key=has_stop)]  # longer prefixes have it too
