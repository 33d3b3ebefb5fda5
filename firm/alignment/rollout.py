"""Stage 2 of a local step: samples responses, with log-probabilities of policy and reference.

Prompts are left-padded, so that all responses start in the same column. A response ends at the
first end token (see `end_token_ids`) or when a stop string is complete; later tokens are masked
everywhere, and the text is cut before the stop string.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.advantages import masked_mean
from firm.alignment.generation import end_token_ids, stop_strings
from firm.alignment.prompts import AUTO, Prompt, PromptFormat, fitting_token_ids
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import (
    BackgroundEngine,
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
    by_chunks,
    left_padded,
    pad_right,
    response_logprobs,
)
from firm.federation.processes import Team


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
    team: Team = SINGLE_PROCESS
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

    def begin(self, queries: Queries) -> Callable[[], SampledTokens]:
        """Begins to sample replies to prompts, and returns a function that waits for them."""
        engine = cast("BackgroundEngine", self.engine)  # as the configuration checks
        (finish,) = engine.begin(
            [SampleRequest(queries, self.config, self.end_ids, team=self.team)]
        )
        return finish

    def logprobs(self, sequences: Sequences, *, of_reference: bool) -> torch.Tensor:
        """Returns the responses' log-probabilities from forward passes, [B, T]."""
        temperature, size = self.config.temperature, self.config.forward_batch_size
        options = {"temperature": temperature, "prompts_once": self.prompts_once}
        logprobs_of = partial(response_logprobs, self.model, **options)
        with self.reference() if of_reference else nullcontext():
            return by_chunks(logprobs_of, sequences, size=size, team=self.team)


@torch.no_grad()
def sample(
    sampler: Sampler, queries: Queries, *, on_progress: Callable[[float], None] | None = None
) -> SampledSequences:
    """Samples responses to left-padded prompts.

    Args:
        sampler: The policy's sampler.
        queries: B prompts, left-padded to Q tokens.
        on_progress: Called at each token with the number of replies so far, including fractions of
            unfinished ones; None for training, which reports stages instead.
    """
    chunks, num_done = [], 0
    for chunk in queries.split(sampler.config.forward_batch_size):
        if on_progress is None:
            chunks.append(sampler.generate(chunk))
            continue
        replies_per_token = chunk.num_rows / sampler.config.max_new_tokens

        def report(num: int, *, start: int = num_done, rate: float = replies_per_token) -> None:
            on_progress(start + rate * num)

        chunks.append(sampler.generate(chunk, on_token=report))
        num_done += chunk.num_rows
    return _sequences(sampler, queries, chunks)


def begin_sampling(sampler: Sampler, queries: Queries) -> Callable[[], SampledSequences]:
    """Begins to sample by an engine that samples while this process trains.

    Returns a function that waits for the responses, which are those of the current adapter and, by
    then, one step old.
    """
    finish = sampler.begin(queries)
    return lambda: replace(_sequences(sampler, queries, [finish()]), staleness=1)


@torch.no_grad()
def _sequences(
    sampler: Sampler, queries: Queries, chunks: Sequence[SampledTokens]
) -> SampledSequences:
    """Returns the chunks of a batch as responses that end."""
    length = max(chunk.token_ids.size(1) for chunk in chunks)
    num_tokens = length - queries.token_ids.size(1)  # T, of the longest chunk
    # -1: no token
    sampled = torch.cat([pad_right(chunk.token_ids, length, -1) for chunk in chunks])
    parts = [own for chunk in chunks if (own := chunk.logprobs) is not None]
    at_generation = None
    if len(parts) == len(chunks):
        at_generation = torch.cat([pad_right(own, num_tokens, INVALID_LOGPROB) for own in parts])
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
    precision = str(sampler.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    logprobs, mismatch = at_generation, None
    if at_generation is not None:
        logprobs = at_generation.masked_fill(padding, INVALID_LOGPROB)
    is_forward = logprobs is None or logprobs_from(precision, config) == "forward"
    if is_forward or measures_mismatch:
        own = sampler.logprobs(sampled, of_reference=False)  # a pass of the reference's shape
        own = own.masked_fill(padding, INVALID_LOGPROB)
        mismatch = None if logprobs is None else logprobs - own
        logprobs = own if is_forward else logprobs
    if mismatch is not None and config.engine.samples_itself and not sampled.staleness:
        config.engine.check_mismatch(masked_mean(mismatch**2, sampled.mask).sqrt().item())
    assert logprobs is not None
    reference_logprobs = sampler.logprobs(sampled, of_reference=True)  # [B, T]
    known = {field.name: getattr(sampled, field.name) for field in fields(sampled)}
    return Rollouts(
        **known,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs.masked_fill(padding, INVALID_LOGPROB),
        mismatch=mismatch,
    )


def rollout(
    sampler: Sampler,
    queries: Queries,
    *,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Rollouts:
    """Samples responses with log-probabilities of policy and reference; see the two stages."""
    return with_logprobs(sampler, sample(sampler, queries, on_progress=on_progress))


def logprobs_from(dtype: str, config: RolloutConfig) -> Literal["generation", "forward"]:
    """Returns the source of log-probabilities for a policy with parameters of a dtype."""
    is_exact = dtype in ("float32", "float64") and not config.engine.samples_itself
    return config.logprobs or ("generation" if is_exact else "forward")


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
