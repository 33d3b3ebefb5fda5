"""Settings of sampling, and what ends a reply."""

from collections.abc import Sequence
from typing import Any

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
