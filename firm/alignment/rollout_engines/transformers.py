"""The rollout engine `transformers`: samples with the policy's own passes, in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)

from firm.alignment.adapters.forward import cast_once
from firm.alignment.adapters.lora import adapted_modules
from firm.alignment.compiled import compiles, sample_compiled
from firm.alignment.decoding import (
    Draws,
    SamplingPart,
    SamplingState,
    decode_,
    prefill,
    sampled_tokens,
)
from firm.alignment.rollout_engines.engine import RolloutEngine, SampledTokens, SampleRequest
from firm.alignment.sequences import (
    INVALID_LOGPROB,
    TEMPERATURE_GUARD,
    Queries,
    cached_pass,
    pad_right,
    set_preferences,
    shares_prompts,
    takes_attention_masks,
)
from firm.base.errors import DivergedError


class TransformersEngine(RolloutEngine):
    """Samples from a model with the adapter in its slot.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model, tokenizer

    def sample(self, requests: list[SampleRequest]) -> list[SampledTokens]:
        """Returns the samples of each request, one after the other; see `RolloutEngine`."""
        samples = []
        for request in requests:
            assert request.adapter is None  # `TransformersConfig.stacked` takes others
            samples.append(SampledTokens(*generate(self._model, request, self._tokenizer)))
        return samples


class JointEngine(RolloutEngine):
    """Samples for several adapters by the policy's joint passes."""

    def __init__(self, joint: Callable[[list[SampleRequest]], Sequence[SampledTokens]]) -> None:
        self._joint = joint

    def sample(self, requests: list[SampleRequest]) -> Sequence[SampledTokens]:
        """Returns the samples of each request; see `RolloutEngine`."""
        return self._joint(requests)


@torch.no_grad()
def generate(
    model: Any, request: SampleRequest, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples responses with the adapter in a model's slot, with log-probabilities.

    Overrides the sampling defaults of the checkpoint. The sampled tokens do not depend on the
    team's size.

    Returns:
        Token ids [B, Q + T], which start with the queries, and log-probabilities [B, T] under the
        tempered sampling distribution.
    """
    queries, team, config = request.queries, request.team, request.config
    draws = Draws(request)
    own = request if team.size == 1 else replace(request, queries=queries.rows(draws.rows))
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]  # checked when it was loaded
    width = queries.token_ids.size(1)
    with team.unanimous():
        if not own.queries.num_rows:  # the batch has fewer rows than the team has processes
            ids, logprobs = own.queries.token_ids, torch.empty(0, 0, device=queries.device)
        elif config.cache == "dynamic" and (
            shares_prompts(model) or (config.compile is True and compiles(model, config))
        ):
            ids, logprobs = _decode_with_own_loop(model, own, draws)
        else:
            ids, logprobs = _generate_with_transformers(model, own, draws)
        if not logprobs.isfinite().all():
            raise DivergedError("the policy's logits")
        responses = ids[:, width:]
        is_end = torch.isin(responses, torch.tensor(request.end_ids, device=responses.device))
        is_after = (is_end.cumsum(1) - is_end.long() > 0) | (responses < 0)  # keeps the first end
        ids = torch.cat((own.queries.token_ids, responses.masked_fill(is_after, pad_id)), dim=1)
    if team.size == 1:
        return ids, logprobs
    gathered = team.gather((ids, logprobs, draws.vocabulary))
    length = max(part.size(1) for _, part, _ in gathered)
    draws.vocabulary = max(vocabulary for _, _, vocabulary in gathered)
    draws.skip_to(length)  # so that the next batch starts from equal generators
    sequences = [pad_right(part, width + length, pad_id) for part, _, _ in gathered]
    parts = [pad_right(part, length, INVALID_LOGPROB) for _, part, _ in gathered]
    return torch.cat(sequences).to(queries.device), torch.cat(parts).to(queries.device)


def _generate_with_transformers(
    model: Any, request: SampleRequest, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [B, Q + T] and log-probabilities [B, T] sampled by transformers."""
    queries, config, end_ids = request.queries, request.config, request.end_ids
    set_preferences(model, queries.preferences)
    sampling = _Sampling(request, draws)
    # a checkpoint's sampling defaults, which transformers applies to every call, are hidden: with
    # `min_p`, for example, log-probabilities would not be those of the sampling distribution
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own, model.generation_config = base.generation_config, GenerationConfig()
    try:
        sequences = model.generate(
            input_ids=torch.masked_fill(queries.token_ids, ~queries.mask, 0),
            attention_mask=queries.mask,
            logits_processor=LogitsProcessorList([sampling]),
            generation_config=GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                do_sample=False,  # `sampling` does
                eos_token_id=list(end_ids) or None,
                pad_token_id=end_ids[0] if end_ids else 0,  # must have an embedding, unlike padding
                cache_implementation="static" if config.cache == "static" else None,
            ),
        )
    finally:
        model.generation_config = base.generation_config = own  # PEFT sets that of its base
    # on "mps", transformers may sample a token after the last one, and take it back
    num_tokens = sequences.size(1) - queries.token_ids.size(1)
    return sequences, torch.stack(sampling.logprobs[:num_tokens], dim=1)


def _decode_with_own_loop(
    model: Any, request: SampleRequest, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [B, Q + T], -1 after the end, and log-probabilities [B, T]."""
    queries, config, num_tokens = request.queries, request.config, count()

    def run(rows: _OwnRows, token_ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        request.on_token(next(num_tokens))
        set_preferences(model, rows.preferences)
        return cached_pass(model, token_ids, mask, positions, cache)

    first, index = queries.distinct()
    part = SamplingPart.of(request, draws)
    rows, prompts = _OwnRows(queries), _OwnRows(queries.rows(first))
    prepares_masks = takes_attention_masks(model)  # its own passes are of other rows
    with cast_once(model):
        passed = prefill(run, prompts, index if len(first) < queries.num_rows else None)
        if config.compile is True and compiles(model, config):
            results = sample_compiled(
                model,
                passed,
                [part],
                mask=queries.mask,
                preferences=queries.preferences,
                adapters=[None],
                is_base=any(layer.disable_adapters for layer in adapted_modules(model).values()),
                on_token=request.on_token,
            )
            if results is not None:
                return results[0]
        replies = SamplingState([part])
        decode_(run, passed, rows, replies, prepares_masks=prepares_masks)
    return replies.results()[0]


class _OwnRows:
    """Rows of one part, with their preferences; implements `DecodedRows`."""

    def __init__(self, queries: Queries) -> None:
        self.token_ids, self.mask = queries.token_ids, queries.mask
        self.counts = [queries.num_rows]
        self.preferences = queries.preferences

    def restrict(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """Keeps the rows at these indices; see `DecodedRows`."""
        (rows,) = kept
        self.counts = [len(rows)]
        if self.preferences is not None:
            self.preferences = self.preferences[rows]
        return rows


class _Sampling(LogitsProcessor):
    """Samples tokens and records their log-probabilities; greedy search then selects the tokens.

    Holds the scores [b, V] of one token at a time: those of all would take more memory than
    anything else in a rollout.
    """

    def __init__(self, request: SampleRequest, draws: Draws) -> None:
        self._draws, self._on_token = draws, request.on_token
        self._temperature = request.config.temperature + TEMPERATURE_GUARD
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self._on_token(len(self.logprobs))
        numbers = self._draws.draw(scores.size(-1))
        tokens, logprobs = sampled_tokens(scores / self._temperature, numbers)
        self.logprobs.append(logprobs)
        return torch.zeros_like(scores).scatter_(1, tokens[:, None], 1.0)
