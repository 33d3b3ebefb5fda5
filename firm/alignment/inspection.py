"""Inspects a policy from its folder, without loading its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from firm.alignment.adapters.target_modules import empty_model, usual_names
from firm.alignment.generation import end_token_ids, stop_strings
from firm.alignment.policy import (
    checkpoint_errors,
    read_architecture,
    read_generation_config,
    read_tokenizer,
)
from firm.alignment.prompts import PromptFormat
from firm.alignment.rollout_config import RolloutConfig


@dataclass(frozen=True)
class Inspection:
    """Properties of a language model that determine the settings of its alignment."""

    model_type: str
    context: int | None
    """Maximum tokens of prompt and reply together; None without a limit."""
    prompt_format: Literal["chat", "hh", "plain"]
    """Format of prompts; see `PromptFormat`."""
    ends: list[str]
    """Tokens that end a reply."""
    stop_strings: list[str]
    """Strings that end a reply and are not part of it."""
    target_modules: list[str]
    """Modules that have an adapter by default."""
    num_parameters: int


def inspect_policy(
    path: str,
    rollout: RolloutConfig | None = None,
    prompt_format: PromptFormat | None = None,
    *,
    on_error: Callable[[ValueError], None],
) -> Inspection | None:
    """Inspects the files beside a model's weights; returns None if they cannot be read.

    Args:
        path: A folder, a name on the Hugging Face hub, or a GGUF file.
        rollout: Settings with further end tokens.
        prompt_format: Format of prompts; by default the chat template, if any.
        on_error: Called with the error if the files cannot be read.

    Raises:
        ValueError: The format requires a chat template and there is none, or an end is not a token.
    """
    rollout, prompt_format = rollout or RolloutConfig(), prompt_format or PromptFormat()
    try:
        tokenizer = read_tokenizer(path)
        with checkpoint_errors("language model", path):
            config = read_architecture(path)
            generation = read_generation_config(path, config)
            model = empty_model(config)
            modules = usual_names(model)
    except ValueError as error:
        on_error(error)
        return None
    ids = end_token_ids(tokenizer, rollout, generation)
    return Inspection(
        config.model_type,
        getattr(config.get_text_config(), "max_position_embeddings", None),
        prompt_format.kind_for(tokenizer),
        [str(tokenizer.convert_ids_to_tokens(each)) for each in ids],
        stop_strings(rollout, prompt_format, tokenizer),
        modules,
        model.num_parameters(),
    )
