"""Stage 2 of a local step: samples responses, with log-probabilities of policy and reference.

Prompts are left-padded, so that all responses start in the same column. A response ends at the
first end token (see `end_token_ids`) or when a stop string is complete; later tokens are masked
everywhere, and the text is cut before the stop string.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.generation import (
    RolloutConfig,
    end_token_ids,
    find_ends,
    generate,
    pad_right,
    stop_strings,
)
from firm.alignment.prompts import AUTO, Prompt, PromptFormat, fitting_token_ids
from firm.alignment.sequences import (
    ALONE,
    INVALID_LOGPROB,
    Alone,
    Queries,
    Rollouts,
    Sequences,
    by_chunks,
    left_padded,
    response_logprobs,
)
from firm.federation.engines.processes import Team


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
) -> Queries:
    """Encodes prompts for the policy, left-padded to Q tokens.

    Prompts of more than `max_prompt_tokens` tokens are truncated; see `fitting_token_ids`.
    """
    rows, is_cut = fitting_token_ids(
        prompts, tokenizer, prompt_format=prompt_format, max_tokens=max_prompt_tokens
    )
    token_ids, lengths = left_padded(rows, fill=int(tokenizer.pad_token_id))  # type: ignore[arg-type]
    return Queries(list(prompts), token_ids, lengths, is_cut=is_cut)


@dataclass(frozen=True)
class Sampler:
    """The policy as used by rollouts: generation and forward passes."""

    model: Any
    """The policy, a causal language model with an adapter."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy, as returned by `load_tokenizer`."""
    config: RolloutConfig
    """Sampling, end of responses, and source of log-probabilities."""
    reference: Callable[[], AbstractContextManager[Any]]
    """Context manager inside which `model` is the reference policy (adapter disabled)."""
    prompt_format: PromptFormat = AUTO
    """Prompt format, which sets the stop strings if `config` does not."""
    team: Team | Alone = ALONE
    """Processes that share the rows; all get the whole result."""

    @property
    def pad_token_id(self) -> int:
        """Padding token of the rows; masks are computed from lengths, so any token works."""
        return int(self.tokenizer.pad_token_id)  # type: ignore[arg-type]

    @cached_property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a response."""
        return end_token_ids(self.tokenizer, self.config, self.model.generation_config)

    @cached_property
    def stop_strings(self) -> list[str]:
        """Strings before which a response ends."""
        return stop_strings(self.config, self.prompt_format, self.tokenizer)

    def generate(
        self, queries: Queries, *, on_token: Callable[[int], None] = lambda _: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns samples [B, Q + T] and their log-probabilities [B, T]; see `generate`."""
        return generate(
            self.model,
            queries,
            tokenizer=self.tokenizer,
            config=self.config,
            end_ids=self.end_ids,
            team=self.team,
            on_token=on_token,
        )

    def logprobs(self, sequences: Sequences, *, of_reference: bool) -> torch.Tensor:
        """Returns the responses' log-probabilities from forward passes, [B, T]."""

        def logprobs_of(rows: Sequences) -> torch.Tensor:
            return response_logprobs(self.model, rows, self.config.temperature)

        with self.reference() if of_reference else nullcontext():
            size = self.config.forward_batch_size
            return by_chunks(logprobs_of, sequences, size=size, team=self.team)


@torch.no_grad()
def rollout(
    sampler: Sampler,
    queries: Queries,
    *,
    measures_mismatch: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Rollouts:
    """Samples responses to left-padded prompts, with log-probabilities of policy and reference.

    Args:
        sampler: The policy's sampler.
        queries: B prompts, left-padded to Q tokens.
        measures_mismatch: Whether to measure the `mismatch` even if log-probabilities come from
            generation, at the cost of a forward pass.
        on_progress: Called at each token with the number of replies so far, including fractions of
            unfinished ones.
    """
    config = sampler.config
    query_responses, at_generation = _sampled(sampler, queries, on_progress)
    num_tokens, ended, completions = find_ends(
        query_responses[:, queries.token_ids.size(1) :],
        tokenizer=sampler.tokenizer,
        end_ids=sampler.end_ids,
        stop_strings=sampler.stop_strings,
    )
    sequences = Sequences(queries, query_responses, num_tokens)
    padding = ~sequences.mask  # [B, T]

    logprobs, mismatch = at_generation.masked_fill(padding, INVALID_LOGPROB), None
    precision = sampler.model.get_input_embeddings().weight.dtype
    is_forward = logprobs_from(str(precision).removeprefix("torch."), config) == "forward"
    if is_forward or measures_mismatch:
        passed = sampler.logprobs(sequences, of_reference=False)
        passed = passed.masked_fill(padding, INVALID_LOGPROB)
        mismatch = logprobs - passed
        logprobs = passed if is_forward else logprobs
    reference_logprobs = sampler.logprobs(sequences, of_reference=True)
    return Rollouts(
        queries,
        query_responses,
        num_tokens,
        completions=completions,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs.masked_fill(padding, INVALID_LOGPROB),
        ended=ended,
        mismatch=mismatch,
    )


def _sampled(
    sampler: Sampler, queries: Queries, on_progress: Callable[[float], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sampled token ids [B, Q + T] and their log-probabilities at generation, [B, T]."""
    chunks, num_done = [], 0
    for chunk in queries.split(sampler.config.forward_batch_size):
        replies_per_token = chunk.num_rows / sampler.config.max_new_tokens

        def told(
            num_tokens: int, *, start: int = num_done, rate: float = replies_per_token
        ) -> None:
            on_progress(start + rate * num_tokens)

        chunks.append(sampler.generate(chunk, on_token=told))
        num_done += chunk.num_rows
    length = max(ids.size(1) for ids, _ in chunks)
    num_tokens = length - queries.token_ids.size(1)
    pad_id = sampler.pad_token_id
    query_responses = torch.cat([pad_right(ids, length, pad_id) for ids, _ in chunks])
    logprobs = torch.cat([pad_right(part, num_tokens, INVALID_LOGPROB) for _, part in chunks])
    return query_responses, logprobs


def logprobs_from(dtype: str, config: RolloutConfig) -> Literal["generation", "forward"]:
    """Returns the source of log-probabilities for a policy with parameters of a dtype."""
    return config.logprobs or ("generation" if dtype in ("float32", "float64") else "forward")
