"""What a policy's folder says of it, without its weights."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from firm.alignment import RolloutConfig, default_target_modules
from firm.alignment.generation import end_token_ids
from firm.alignment.prompts import PromptFormat


@dataclass(frozen=True)
class Inspection:
    """Properties of a language model that decide how it is aligned."""

    model_type: str
    context: int | None
    """Positions for prompt and reply together; None without a limit."""
    prompt_format: Literal["chat", "hh", "plain"]
    """How prompts reach the model; see `PromptFormat`."""
    ends: list[str]
    """Tokens that end a reply."""
    target_modules: list[str]
    """Layers that get an adapter by default."""


def inspect_policy(
    path: str, rollout: RolloutConfig | None = None, prompt_format: PromptFormat | None = None
) -> Inspection | None:
    """Returns what the files beside a model's weights say; None where they cannot be read.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        rollout: Names further ends.
        prompt_format: How prompts are to be formatted; by default by the chat template, if any.

    Raises:
        ValueError: The format needs a chat template and there is none, or an end is no token.
    """
    try:
        config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except Exception:  # of files in any state, which loading names in a line
        return None
    try:
        generation = GenerationConfig.from_pretrained(path)
    except Exception:  # many folders have none, and the model's configuration has the end then
        generation = GenerationConfig.from_model_config(config)
    try:
        modules = default_target_modules(config)
    except Exception:  # of architectures that are no language models
        modules = []
    ids = end_token_ids(tokenizer, rollout or RolloutConfig(), generation)
    return Inspection(
        config.model_type,
        getattr(config.get_text_config(), "max_position_embeddings", None),
        (prompt_format or PromptFormat()).kind_for(tokenizer),
        [str(tokenizer.convert_ids_to_tokens(each)) for each in ids],
        modules,
    )


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """Returns the type whose matrix products are faster on this machine, by a measurement."""
    if torch.accelerator.is_available():
        return "bfloat16"
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(768, 768, dtype=dtype)
        torch.mm(matrix, matrix)  # the first product sets kernels up
        start = time.perf_counter()
        for _ in range(3):
            torch.mm(matrix, matrix)
        seconds[dtype] = time.perf_counter() - start
    return "bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"
