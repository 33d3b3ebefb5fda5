"""Stage 2 of a local step: samples responses, with log-probabilities of policy and reference.

Prompts are left-padded, so that all responses start in the same column. A response ends at the
first end token (see `end_token_ids`) or when a stop string is complete; later tokens are masked
everywhere, and the text is cut before the stop string.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.advantages import masked_mean
from firm.alignment.generation import end_token_ids, find_ends, stop_strings
from firm.alignment.prompts import AUTO, Prompt, PromptFormat, fitting_token_ids
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import (
    RolloutEngine,
    SampledTokens,
    SampleRequest,
    TransformersEngine,
)
from firm.alignment.sequences import (
    INVALID_LOGPROB,
    SINGLE_PROCESS,
    Queries,
    Rollouts,
    SampledSequences,
    Sequences,
    SingleProcess,
    by_chunks,
    left_padded,
    pad_right,
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
    team: Team | SingleProcess = SINGLE_PROCESS
    """Processes that share the rows; all get the whole result."""
    engine: RolloutEngine | None = None
    """Engine that samples from `model`; its own passes by default."""
    prompts_once: bool = False
    """Pass equal prompts through the model once, as `Policy.prompts_once`."""

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
    ) -> SampledTokens:
        """Returns samples of replies to the prompts; see `SampleRequest` for `on_token`."""
        engine = self.engine or TransformersEngine(self.model, self.tokenizer)
        (samples,) = engine.sample(
            [SampleRequest(queries, self.config, self.end_ids, team=self.team, on_token=on_token)]
        )
        return samples

    def logprobs(self, sequences: Sequences, *, of_reference: bool) -> torch.Tensor:
        """Returns the responses' log-probabilities from forward passes, [B, T]."""

        def logprobs_of(rows: Sequences) -> torch.Tensor:
            return response_logprobs(
                self.model, rows, self.config.temperature, prompts_once=self.prompts_once
            )

        with self.reference() if of_reference else nullcontext():
            size = self.config.forward_batch_size
            return by_chunks(logprobs_of, sequences, size=size, team=self.team)


@torch.no_grad()
def sample(
    sampler: Sampler, queries: Queries, *, on_progress: Callable[[float], None] = lambda _: None
) -> SampledSequences:
    """Samples responses to left-padded prompts.

    Args:
        sampler: The policy's sampler.
        queries: B prompts, left-padded to Q tokens.
        on_progress: Called at each token with the number of replies so far, including fractions of
            unfinished ones.
    """
    sampled, at_generation = _sample_tokens(sampler, queries, on_progress)
    num_tokens, ended, completions = find_ends(
        sampled[:, queries.token_ids.size(1) :],
        tokenizer=sampler.tokenizer,
        end_ids=sampler.end_ids,
        stop_strings=sampler.stop_strings,
    )
    return SampledSequences(
        queries,
        sampled.masked_fill(sampled < 0, sampler.pad_token_id),
        num_tokens,
        completions=completions,
        ended=ended,
        generation_logprobs=at_generation,
    )


@torch.no_grad()
def with_logprobs(
    sampler: Sampler, sampled: SampledSequences, *, measures_mismatch: bool = False
) -> Rollouts:
    """Returns sampled responses with their log-probabilities under policy and reference.

    Args:
        sampler: The policy's sampler.
        sampled: B responses.
        measures_mismatch: Whether to measure the `mismatch` even if log-probabilities come from
            generation, at the cost of a forward pass.
    """
    config, at_generation = sampler.config, sampled.generation_logprobs
    padding = ~sampled.mask  # [B, T]

    def pass_over(*, of_reference: bool) -> torch.Tensor:
        logprobs = sampler.logprobs(sampled, of_reference=of_reference)
        return logprobs.masked_fill(padding, INVALID_LOGPROB)

    precision = str(sampler.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    logprobs, mismatch = at_generation, None
    if at_generation is not None:
        logprobs = at_generation.masked_fill(padding, INVALID_LOGPROB)
    is_forward = logprobs is None or logprobs_from(precision, config) == "forward"
    if is_forward or measures_mismatch:
        own = pass_over(of_reference=False)  # of the same shape as the reference's pass
        mismatch = None if logprobs is None else logprobs - own
        logprobs = own if is_forward else logprobs
    if mismatch is not None and config.engine.samples_itself:
        config.engine.check_mismatch(masked_mean(mismatch**2, sampled.mask).sqrt().item())
    assert logprobs is not None
    reference_logprobs = pass_over(of_reference=True)  # [B, T]
    known = {field.name: getattr(sampled, field.name) for field in fields(sampled)}
    return Rollouts(
        **known, logprobs=logprobs, reference_logprobs=reference_logprobs, mismatch=mismatch
    )


def rollout(
    sampler: Sampler,
    queries: Queries,
    *,
    measures_mismatch: bool = False,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Rollouts:
    """Samples responses with log-probabilities of policy and reference; see the two stages."""
    sampled = sample(sampler, queries, on_progress=on_progress)
    return with_logprobs(sampler, sampled, measures_mismatch=measures_mismatch)


def _sample_tokens(
    sampler: Sampler, queries: Queries, on_progress: Callable[[float], None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns sampled token ids [B, Q + T], and their log-probabilities [B, T] if there are any."""
    chunks, num_done = [], 0
    for chunk in queries.split(sampler.config.forward_batch_size):
        replies_per_token = chunk.num_rows / sampler.config.max_new_tokens

        def report(num: int, *, start: int = num_done, rate: float = replies_per_token) -> None:
            on_progress(start + rate * num)

        chunks.append(sampler.generate(chunk, on_token=report))
        num_done += chunk.num_rows
    length = max(chunk.token_ids.size(1) for chunk in chunks)
    num_tokens = length - queries.token_ids.size(1)  # T, of the longest chunk
    # -1: no token
    token_ids = torch.cat([pad_right(chunk.token_ids, length, -1) for chunk in chunks])
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    if len(parts) < len(chunks):
        return token_ids, None
    return token_ids, torch.cat([pad_right(part, num_tokens, INVALID_LOGPROB) for part in parts])


def logprobs_from(dtype: str, config: RolloutConfig) -> Literal["generation", "forward"]:
    """Returns the source of log-probabilities for a policy with parameters of a dtype."""
    is_exact = dtype in ("float32", "float64") and not config.engine.samples_itself
    return config.logprobs or ("generation" if is_exact else "forward")
