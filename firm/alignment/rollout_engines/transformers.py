"""The rollout engine `transformers`: samples with the policy's own passes, in this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

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
    Part,
    SamplingState,
    decode_,
    prefill,
    random_numbers,
    sampled_tokens,
)
from firm.alignment.rollout_engines.engine import SampledTokens, SampleRequest
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
from firm.base.devices import copy_of_generator, set_generator

if TYPE_CHECKING:  # its default is the configuration below
    from firm.alignment.rollout_config import RolloutConfig


class TransformersEngine:
    """Samples from a model with the adapter in its slot; implements `RolloutEngine`.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model, tokenizer

    def sample(self, requests: list[SampleRequest]) -> list[SampledTokens]:
        """Returns the samples of each request, one after the other; see `RolloutEngine`."""
        return [self._samples(request) for request in requests]

    def close(self) -> None:
        """Does nothing, since the model is the policy."""

    def _samples(self, request: SampleRequest) -> SampledTokens:
        assert request.adapter is None  # `TransformersConfig.stacked` takes others
        return SampledTokens(*generate(self._model, request, self._tokenizer))


class JointEngine:
    """Samples for several adapters by the policy's joint passes; implements `RolloutEngine`."""

    def __init__(self, joint: Callable[[list[SampleRequest]], Sequence[SampledTokens]]) -> None:
        self._joint = joint

    def sample(self, requests: list[SampleRequest]) -> Sequence[SampledTokens]:
        """Returns the samples of each request; see `RolloutEngine`."""
        return self._joint(requests)

    def close(self) -> None:
        """Does nothing, since the model is the policy."""


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
    queries, team = request.queries, request.team
    draws = _Draws(queries.num_rows, team.share(queries.num_rows), request.config, queries.device)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]  # checked when it was loaded
    if team.size == 1:
        return _generate(model, request, pad_id, draws)
    own = replace(request, queries=queries.rows(draws.rows))  # this process's share
    with team.unanimous():
        ids, logprobs = _generate(model, own, pad_id, draws)
    gathered = team.gather((ids, logprobs, draws.vocabulary))
    parts = [(ids, logprobs) for ids, logprobs, _ in gathered]
    length = max(logprobs.size(1) for _, logprobs in parts)
    draws.vocabulary = max(vocabulary for _, _, vocabulary in gathered)
    draws.skip_to(length)  # so that the next batch starts from equal generators
    context_length = queries.token_ids.size(1)
    sequences = [pad_right(ids, context_length + length, pad_id) for ids, _ in parts]
    logprobs = [pad_right(part, length, INVALID_LOGPROB) for _, part in parts]
    return torch.cat(sequences).to(queries.device), torch.cat(logprobs).to(queries.device)


def _generate(
    model: Any, request: SampleRequest, pad_id: int, draws: "_Draws"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with the global generator; the rows may be a team's share."""
    query_ids = request.queries.token_ids
    if not len(query_ids):  # the batch has fewer rows than the team has processes
        return query_ids, torch.empty(0, 0, device=query_ids.device)
    is_dynamic = request.config.cache == "dynamic"
    if is_dynamic and (shares_prompts(model) or compiles(model, request.config)):
        sequences, logprobs = _decode_with_own_loop(model, request, draws)
    else:
        sequences = _generate_with_transformers(model, request, draws)
        logprobs = draws.logprobs(sequences.size(1) - query_ids.size(1))
    if not logprobs.isfinite().all():
        raise RuntimeError(
            "sampling the replies: the policy's logits are not finite; lower the learning rate, or "
            "use policy.dtype float32 or bfloat16."
        )
    responses = sequences[:, query_ids.size(1) :]
    is_end = torch.isin(responses, torch.tensor(request.end_ids, device=responses.device))
    is_after = (is_end.cumsum(1) - is_end.long() > 0) | (responses < 0)  # the first end is kept
    return torch.cat((query_ids, responses.masked_fill(is_after, pad_id)), dim=1), logprobs


def _generate_with_transformers(
    model: Any, request: SampleRequest, draws: "_Draws"
) -> torch.Tensor:
    """Returns token ids [B, Q + T] sampled by transformers."""
    queries, config, end_ids = request.queries, request.config, request.end_ids
    set_preferences(model, queries.preferences)
    with _without_sampling_defaults(model):
        return model.generate(
            input_ids=torch.masked_fill(queries.token_ids, ~queries.mask, 0),
            attention_mask=queries.mask,
            logits_processor=LogitsProcessorList([_TokenReport(request.on_token), draws]),
            generation_config=GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                do_sample=False,  # `draws` samples
                eos_token_id=list(end_ids) or None,
                pad_token_id=end_ids[0] if end_ids else 0,  # must have an embedding, unlike padding
                cache_implementation="static" if config.cache == "static" else None,
            ),
        )


def _decode_with_own_loop(
    model: Any, request: SampleRequest, draws: "_Draws"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [B, Q + T], -1 after the end, and log-probabilities [B, T]."""
    queries = request.queries

    num_tokens = count()

    def run(rows: _OwnRows, token_ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        request.on_token(next(num_tokens))
        set_preferences(model, rows.preferences)
        return cached_pass(model, token_ids, mask, positions, cache)

    first, index = queries.distinct()
    config = request.config
    part = Part(
        queries.token_ids,
        draws,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        end_ids=request.end_ids,
    )
    rows, prompts = _OwnRows(queries), _OwnRows(queries.rows(first))
    prepares_masks = takes_attention_masks(model)  # its own passes are of other rows
    with cast_once(model):
        passed = prefill(run, prompts, index if len(first) < queries.num_rows else None)
        if compiles(model, config):
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


class _TokenReport(LogitsProcessor):
    """Reports the number of generated tokens; leaves the scores unchanged."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._num_tokens = on_token, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self._on_token(self._num_tokens)
        self._num_tokens += 1
        return scores


class _Draws(LogitsProcessor):
    """Samples tokens and records their log-probabilities; greedy search then selects the tokens.

    A team's process samples some rows of a batch as a single process would if it sampled all of
    them: every process draws the random numbers of all rows and uses those of its own. Holds the
    scores [b, V] of one token at a time: those of all would take more memory than anything else in
    a rollout.

    Args:
        num_rows: Rows of the whole batch.
        rows: Rows of this process.
        config: Temperature of the samples.
        device: Device of the rows.
    """

    def __init__(
        self, num_rows: int, rows: slice, config: "RolloutConfig", device: torch.device
    ) -> None:
        self.rows = rows
        self.vocabulary = 0  # unknown before the first token, hence to processes without rows
        self._num_rows, self._device = num_rows, device
        self._num_drawn = 0
        self._temperature = config.temperature + TEMPERATURE_GUARD
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        tokens, logprobs = sampled_tokens(scores / self._temperature, self.draw(scores.size(-1)))
        self._logprobs.append(logprobs)
        return torch.zeros_like(scores).scatter_(1, tokens[:, None], 1.0)

    def logprobs(self, num_tokens: int) -> torch.Tensor:
        """Returns the log-probabilities of the first tokens, [b, T]."""
        # on "mps", transformers may sample a token after the last one, and take it back
        return torch.stack(self._logprobs[:num_tokens], dim=1)

    def draw(self, vocabulary: int) -> torch.Tensor:
        """Returns the random numbers of this process's rows for one token."""
        self.vocabulary = vocabulary
        self._num_drawn += 1
        return random_numbers(self._num_rows, vocabulary, device=self._device)[self.rows]

    def save(self) -> Any:
        """Returns the state of the generator, and the number of tokens drawn."""
        return copy_of_generator(self._device), self._num_drawn

    def restore(self, state: Any) -> None:
        """Restores a state returned by `save`."""
        generator, self._num_drawn = state
        set_generator(generator)

    def skip_to(self, num_tokens: int) -> None:
        """Draws for the remaining tokens of the team's longest row, to keep generators equal."""
        while self._num_drawn < num_tokens:
            self.draw(self.vocabulary)


@contextmanager
def _without_sampling_defaults(model: Any) -> Iterator[None]:
    """Hides the sampling defaults of a checkpoint, which transformers applies to every call.

    With `min_p`, for example, log-probabilities would not be those of the sampling distribution.
    """
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
