"""Sampling: generates tokens with log-probabilities, and converts them to finished texts."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Annotated, Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)

from firm.alignment.decoding import SamplingState, decode_, random_numbers, sampled_tokens
from firm.alignment.prompts import PromptFormat
from firm.alignment.sequences import (
    ALONE,
    INVALID_LOGPROB,
    TEMPERATURE_GUARD,
    Alone,
    Queries,
    cached_pass,
    set_preferences,
    shares_prompts,
)
from firm.federation.engines.processes import Team
from firm.fields import NOT_IN_PAPER, Hint, NumTokens, PositiveFloat, PositiveInt, configuration


@configuration
class RolloutConfig:
    """Sampling of responses, and where they end."""

    max_new_tokens: Annotated[NumTokens, NOT_IN_PAPER] = 128
    """Maximum length of a response in tokens."""
    temperature: Annotated[
        PositiveFloat, Hint("PPO needs samples, not the greedy reply"), NOT_IN_PAPER
    ] = 0.7
    """Sampling temperature."""
    max_prompt_tokens: Annotated[NumTokens, NOT_IN_PAPER] = 256
    """Maximum length of a prompt in tokens; longer prompts lose their oldest turns, but keep system
    messages."""
    stop_strings: Annotated[list[str] | None, NOT_IN_PAPER] = None
    """A response ends before any of these strings, so that a policy that goes on to write the next
    human turn is not scored for it. null uses the human tag of HH-RLHF for prompts in that form,
    and none with a chat template or plain prompts, whose replies may contain such a string."""
    end_tokens: Annotated[list[str], NOT_IN_PAPER] = field(default_factory=list)
    """Tokens that end a response, in addition to the tokenizer's EOS and the end tokens in the
    model's generation_config.json, as spelled by the tokenizer."""
    forward_batch_size: PositiveInt = 64
    """Batch size of generation and of the models' forward passes, to limit memory."""
    cache: Annotated[Literal["dynamic", "static"], NOT_IN_PAPER] = "dynamic"
    """Key-value cache: dynamic grows with each token; static is allocated at the maximum length, so
    that transformers compiles the steps on a GPU, which takes a minute for each batch size."""
    logprobs: Annotated[Literal["generation", "forward"] | None, NOT_IN_PAPER] = None
    """Source of the sampling policy's log-probabilities: generation, the cached steps that
    generated the response (as in TRL); or forward, a forward pass of the same shape as the
    reference's, so that rounding does not add to their KL. null uses generation for policies in
    float32, where the two agree to about 1e-6, and forward in lower precision."""

    def __post_init__(self) -> None:
        if "" in (self.stop_strings or ()):
            raise ValueError(
                f"rollout.stop_strings must not contain an empty string, got {self.stop_strings}: "
                "every reply would be empty."
            )


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
    own = getattr(generation_config, "eos_token_id", None)
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


def stop_strings(
    config: RolloutConfig, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Returns the strings before which a response ends: the configured ones, or the format's."""
    if config.stop_strings is None:
        return prompt_format.stop_strings(tokenizer)
    return config.stop_strings


@torch.no_grad()
def generate(
    model: Any,
    queries: Queries,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    end_ids: Sequence[int],
    team: Team | Alone = ALONE,
    on_token: Callable[[int], None] = lambda _: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples responses of at most `max_new_tokens` tokens, with log-probabilities.

    Overrides the sampling defaults of the checkpoint. The sampled tokens do not depend on the
    team's size. `on_token` is called at each token with the number of tokens before it.

    Returns:
        Token ids [B, Q + T], which start with the queries, and log-probabilities [B, T] under the
        tempered sampling distribution.
    """
    draws = _Draws(queries.num_rows, team.share(queries.num_rows), config, queries.device)
    if team.size == 1:
        return _generate(model, queries, tokenizer, config, end_ids, on_token, draws)
    own = queries.rows(draws.rows)
    with team.unanimous():
        ids, logprobs = _generate(model, own, tokenizer, config, end_ids, on_token, draws)
    gathered = team.gather((ids, logprobs, draws.vocabulary))
    parts = [(ids, logprobs) for ids, logprobs, _ in gathered]
    length = max(logprobs.size(1) for _, logprobs in parts)
    draws.vocabulary = max(vocabulary for _, _, vocabulary in gathered)
    draws.skip_to(length)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    context_length = queries.token_ids.size(1)
    sequences = [pad_right(ids, context_length + length, pad_id) for ids, _ in parts]
    logprobs = [pad_right(part, length, INVALID_LOGPROB) for _, part in parts]
    return torch.cat(sequences).to(queries.device), torch.cat(logprobs).to(queries.device)


def _generate(
    model: Any,
    queries: Queries,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    end_ids: Sequence[int],
    on_token: Callable[[int], None],
    draws: "_Draws",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with the global generator; the rows may be a team's share."""
    query_ids = queries.token_ids
    if not len(query_ids):  # the batch has fewer rows than the team has processes
        return query_ids, torch.empty(0, 0, device=query_ids.device)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]  # checked when it was loaded
    if config.cache == "dynamic" and shares_prompts(model):
        sequences, logprobs = _decoded(model, queries, config, end_ids, on_token, draws)
    else:
        sequences = _generated(model, queries, config, end_ids, on_token, draws)
        logprobs = draws.logprobs(sequences.size(1) - query_ids.size(1))
    if not logprobs.isfinite().all():
        raise RuntimeError(
            "sampling the replies: the policy's logits are not finite; lower the learning rate, or "
            "use policy.dtype float32 or bfloat16."
        )
    responses = sequences[:, query_ids.size(1) :]
    is_end = torch.isin(responses, torch.tensor(end_ids, device=responses.device))
    is_after = (is_end.cumsum(1) - is_end.long() > 0) | (responses < 0)
    return torch.cat((query_ids, responses.masked_fill(is_after, pad_id)), dim=1), logprobs


def _generated(
    model: Any,
    queries: Queries,
    config: RolloutConfig,
    end_ids: Sequence[int],
    on_token: Callable[[int], None],
    draws: "_Draws",
) -> torch.Tensor:
    """Returns token ids [B, Q + T] sampled by transformers."""
    set_preferences(model, queries.preferences)
    with _without_sampling_defaults(model):
        return model.generate(
            input_ids=torch.masked_fill(queries.token_ids, ~queries.mask, 0),
            attention_mask=queries.mask,
            logits_processor=LogitsProcessorList([_Told(on_token), draws]),
            generation_config=GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                do_sample=False,  # `draws` samples
                eos_token_id=list(end_ids) or None,
                pad_token_id=end_ids[0] if end_ids else 0,  # must have an embedding, unlike padding
                cache_implementation="static" if config.cache == "static" else None,
            ),
        )


def _decoded(
    model: Any,
    queries: Queries,
    config: RolloutConfig,
    end_ids: Sequence[int],
    on_token: Callable[[int], None],
    draws: "_Draws",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [B, Q + T], -1 after the end, and log-probabilities [B, T]."""

    def run(rows: _OwnRows, token_ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        on_token(mask.size(1) - queries.token_ids.size(1))
        set_preferences(model, rows.preferences)
        return cached_pass(model, token_ids, mask, positions, cache)

    first, index = queries.distinct()
    reply = SamplingState(
        queries.token_ids,
        draws.draw,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        end_ids=end_ids,
    )
    rows, prompts = _OwnRows(queries), _OwnRows(queries.rows(first))
    decode_(run, prompts, index if len(first) < queries.num_rows else None, rows, [reply])
    return reply.result()


class _OwnRows:
    """Rows of one part, with their preferences; implements `DecodedRows`."""

    def __init__(self, queries: Queries) -> None:
        self.token_ids, self.mask = queries.token_ids, queries.mask
        self.counts = [queries.num_rows]
        self.preferences = queries.preferences

    def span(self, index: int) -> slice:
        """Returns the slice of all rows."""
        return slice(None)

    def restrict(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """Keeps the rows at these indices; see `DecodedRows`."""
        (rows,) = kept
        self.counts = [len(rows)]
        if self.preferences is not None:
            self.preferences = self.preferences[rows]
        return rows


class _Told(LogitsProcessor):
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
        self, num_rows: int, rows: slice, config: RolloutConfig, device: torch.device
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


def find_ends(
    responses: torch.Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Finds the end of each raw response [B, T], and decodes its text.

    Returns:
        Numbers of tokens [B], including the end token or the token that completes a stop string;
        whether the response ended, bool [B]; and the texts without special tokens and stop strings.
    """
    lengths, ended, texts = [], [], []
    for row in responses.tolist():
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

    lengths = range(1, len(token_ids))
    return token_ids[: 1 + bisect_left(lengths, True, key=has_stop)]


def pad_right(values: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    """Returns rows [B, ...] padded on the right to `length`."""
    missing = length - values.size(1)
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values
