"""Stage 2 of a round: prompts become responses with log-probabilities, by policy and reference.

Prompts are left-padded so that every response starts in the same column. A response ends at the
first end token (EOS or a configured one) or where a stop string is complete; what the model wrote
after that is masked out everywhere, and the text is cut before the stop string.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.generation import RolloutConfig, end_token_ids, find_ends, generate, pad_right
from firm.alignment.prompts import PromptFormat, encode_prompts, format_prompt, truncate_by_turns
from firm.alignment.rows import ALONE, by_chunks
from firm.alignment.sequences import (
    INVALID_LOGPROB,
    Queries,
    Rollouts,
    Sequences,
    response_logprobs,
)
from firm.federation import Team


def encode_dialogues(
    dialogues: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
) -> Queries:
    """Returns dialogues as the policy reads them, left-padded to Q tokens.

    One that is longer than `max_prompt_tokens` loses its oldest turns.
    """
    texts = [
        format_prompt(
            truncate_by_turns(dialogue, tokenizer, max_prompt_tokens, prompt_format=prompt_format),
            tokenizer,
            prompt_format,
        )
        for dialogue in dialogues
    ]
    token_ids = encode_prompts(texts, tokenizer, max_prompt_tokens=max_prompt_tokens)
    return Queries(list(dialogues), token_ids)


@torch.no_grad()
def rollout(
    model: Any,
    queries: Queries,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    reference: Callable[[], AbstractContextManager[Any]],
    team: Team = ALONE,
    measures_mismatch: bool = False,
) -> Rollouts:
    """Returns sampled responses to left-padded prompts, with both policies' log-probabilities.

    Args:
        model: The policy, a causal language model with an adapter.
        queries: B prompts, left-padded to Q tokens.
        tokenizer: The policy's, as `load_tokenizer` returns it.
        config: How to sample, where responses end, and where log-probabilities come from.
        reference: A context inside which `model` is the reference policy (adapter off).
        team: Divides the rows among its processes; all get the whole result.
        measures_mismatch: Measures the `mismatch` also where generation's log-probabilities are
            taken, by another forward pass.
    """
    end_ids = end_token_ids(tokenizer, config)
    sequences, at_generation = _sampled(model, queries, tokenizer, config, end_ids, team)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    last_index, ended, completions = find_ends(
        sequences.responses, tokenizer=tokenizer, config=config, end_ids=end_ids
    )
    positions = torch.arange(at_generation.size(1), device=at_generation.device)
    padding = positions > last_index.unsqueeze(1)  # [B, T]

    def in_forward_passes() -> torch.Tensor:
        def logprobs_of(rows: Sequences) -> torch.Tensor:
            return response_logprobs(model, rows, pad_id, config.temperature)

        size = config.forward_batch_size
        logprobs = by_chunks(logprobs_of, sequences, size=size, team=team)
        return logprobs.masked_fill(padding, INVALID_LOGPROB)

    logprobs, mismatch = at_generation.masked_fill(padding, INVALID_LOGPROB), None
    precision = model.get_input_embeddings().weight.dtype
    is_forward = logprobs_from(str(precision).removeprefix("torch."), config) == "forward"
    if is_forward or measures_mismatch:
        passed = in_forward_passes()
        mismatch = logprobs - passed
        logprobs = passed if is_forward else logprobs
    with reference():
        reference_logprobs = in_forward_passes()
    return Rollouts(
        sequences.queries,
        sequences.query_responses,
        completions=completions,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs,
        last_index=last_index,
        ended=ended,
        mismatch=mismatch,
    )


def _sampled(
    model: Any,
    queries: Queries,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    end_ids: Sequence[int],
    team: Team,
) -> tuple[Sequences, torch.Tensor]:
    """Returns responses of one length, and their log-probabilities at generation, [B, T]."""
    chunks = [
        generate(model, chunk, tokenizer=tokenizer, config=config, end_ids=end_ids, team=team)
        for chunk in queries.split(config.forward_batch_size)
    ]
    length = max(ids.size(1) for ids, _ in chunks)
    num_tokens = length - queries.token_ids.size(1)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    query_responses = torch.cat([pad_right(ids, length, pad_id) for ids, _ in chunks])
    logprobs = torch.cat([pad_right(part, num_tokens, INVALID_LOGPROB) for _, part in chunks])
    return Sequences(queries, query_responses), logprobs


def logprobs_from(dtype: str, config: RolloutConfig) -> Literal["generation", "forward"]:
    """Returns where a policy's log-probabilities come from, by the type of its parameters."""
    return config.logprobs or ("generation" if dtype in ("float32", "float64") else "forward")
