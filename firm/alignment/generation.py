"""Sampling: from prompts to tokens with log-probabilities, and from tokens to finished texts."""

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

from firm.alignment.prompts import PromptFormat
from firm.alignment.sequences import (
    ALONE,
    INVALID_LOGPROB,
    TEMPERATURE_GUARD,
    Alone,
    Queries,
    set_preferences,
    token_logprobs,
)
from firm.federation.engines.processes import Team
from firm.fields import NOT_IN_PAPER, Hint, NumTokens, PositiveFloat, PositiveInt, configuration


@configuration
class RolloutConfig:
    """How responses are sampled and where they end."""

    max_new_tokens: Annotated[NumTokens, NOT_IN_PAPER] = 128
    """Longest response in tokens."""
    temperature: Annotated[
        PositiveFloat, Hint("PPO needs samples, not the greedy reply"), NOT_IN_PAPER
    ] = 0.7
    """Sampling temperature."""
    max_prompt_tokens: Annotated[NumTokens, NOT_IN_PAPER] = 256
    """Longest prompt in tokens; longer ones lose their oldest turns, but no system message."""
    stop_strings: Annotated[list[str] | None, NOT_IN_PAPER] = None
    """A response ends before any of these texts: a policy that writes the next human turn would
    otherwise be scored for it. null takes the human tag of HH-RLHF where prompts have that form,
    and none with a chat template or plain prompts, whose replies may well hold such a text."""
    end_tokens: Annotated[list[str], NOT_IN_PAPER] = field(default_factory=list)
    """Tokens that end a response beside the tokenizer's EOS and the ends in the model's
    generation_config.json, as the tokenizer spells them."""
    forward_batch_size: PositiveInt = 64
    """Responses that are generated and scored by the models at once; bounds memory."""
    cache: Annotated[Literal["dynamic", "static"], NOT_IN_PAPER] = "dynamic"
    """How keys and values are kept: in tensors that grow with each token, or in static ones of the
    greatest length, for which transformers compiles the steps on a GPU; that takes a minute once,
    and again for batches of another size."""
    logprobs: Annotated[Literal["generation", "forward"] | None, NOT_IN_PAPER] = None
    """Where the sampling policy's log-probabilities come from: the cached steps that generated the
    response (as in TRL), or a forward pass of the shape that the reference's has, so that rounding
    adds nothing to their KL. null takes generation for a policy in float32, where the two agree to
    some 1e-6, and forward for one in less precision."""

    def __post_init__(self) -> None:
        if "" in (self.stop_strings or ()):
            raise ValueError(
                f"rollout.stop_strings must not hold an empty text, got {self.stop_strings}: "
                "every reply would end before it began."
            )


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, generation_config: Any = None
) -> list[int]:
    """Returns the ids of the tokens that end a response, the tokenizer's EOS first.

    Args:
        tokenizer: The policy's tokenizer.
        config: Names further end tokens.
        generation_config: The model's generation config, with one `eos_token_id` or a list: chat
            models end a turn with other tokens than a document.

    Raises:
        ValueError: An end token is not one token of the vocabulary.
    """
    own = getattr(generation_config, "eos_token_id", None)
    of_model = own if isinstance(own, list | tuple) else [own]
    ids: list[Any] = [tokenizer.eos_token_id, *of_model]
    vocabulary = tokenizer.get_vocab()
    for token in config.end_tokens:
        if token not in vocabulary:
            raise ValueError(
                f"rollout.end_tokens: {token!r} is not a token of the policy's tokenizer: "
                "give it as the tokenizer spells it (a newline may be '<0x0A>' or 'Ċ')."
            )
        ids.append(vocabulary[token])
    return list(dict.fromkeys(int(each) for each in ids if each is not None))


def stop_strings(
    config: RolloutConfig, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Returns the texts before which a response ends: the given ones, or the format's."""
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
    """Returns samples of at most `max_new_tokens` tokens and their log-probabilities.

    The model's own sampling defaults are overridden. The sampled tokens do not depend on the team's
    size. `on_token` is called at each token with the number of tokens before it.

    Returns:
        Token ids [B, Q + T], the queries unchanged, and log-probabilities [B, T] under the tempered
        distribution that was sampled from.
    """
    if team.size == 1:
        return _generate(model, queries, tokenizer, config, end_ids, on_token)
    draws = _SharedDraws(queries.num_rows, team.share(queries.num_rows), config)
    own = queries.rows(draws.rows)
    with team.unanimous():
        ids, logprobs = _generate(model, own, tokenizer, config, end_ids, on_token, draws)
    gathered = team.gather((ids, logprobs, draws.vocabulary))
    parts = [(ids, logprobs) for ids, logprobs, _ in gathered]
    length = max(logprobs.size(1) for _, logprobs in parts)
    draws.vocabulary = max(vocabulary for _, _, vocabulary in gathered)
    draws.skip_to(length, queries.device)
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
    draws: "_SharedDraws | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns samples and log-probabilities, by the global generator or a team's draws."""
    query_ids = queries.token_ids
    if not len(query_ids):  # a batch smaller than the team
        return query_ids, torch.empty(0, 0, device=query_ids.device)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]  # checked when it was loaded
    attention_mask = queries.mask
    set_preferences(model, queries.preferences)
    with _without_sampling_defaults(model):
        output = model.generate(
            input_ids=torch.masked_fill(query_ids, ~attention_mask, 0),
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([_Told(on_token), *([draws] if draws else [])]),
            generation_config=GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                do_sample=draws is None,
                temperature=config.temperature + TEMPERATURE_GUARD if draws is None else None,
                top_k=0 if draws is None else None,
                top_p=1.0 if draws is None else None,
                eos_token_id=list(end_ids) or None,
                pad_token_id=end_ids[0] if end_ids else 0,  # embedded, whatever padding is
                cache_implementation="static" if config.cache == "static" else None,
                output_scores=True,
                return_dict_in_generate=True,
            ),
        )
    responses = output.sequences[:, query_ids.size(1) :]
    is_end = torch.isin(responses, torch.tensor(end_ids, device=responses.device))
    responses = responses.masked_fill(is_end.cumsum(1) - is_end.long() > 0, pad_id)
    scores = torch.stack(output.scores if draws is None else draws.logits, dim=1)  # [B, T, V]
    return torch.cat((query_ids, responses), dim=1), token_logprobs(scores, responses)


class _Told(LogitsProcessor):
    """Reports the number of tokens, and leaves the scores unchanged."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._num_tokens = on_token, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self._on_token(self._num_tokens)
        self._num_tokens += 1
        return scores


class _SharedDraws(LogitsProcessor):
    """Samples some rows of a batch just as a single process would when sampling all of them.

    `torch.multinomial` draws one exponential variate per token of the vocabulary and takes the
    largest ratio of probability to variate. Here every process draws the variates of all rows, uses
    those of its own rows, and leaves the largest ratio to a greedy search.
    """

    def __init__(self, num_rows: int, rows: slice, config: RolloutConfig) -> None:
        self.rows = rows
        self.logits: list[torch.Tensor] = []
        self.vocabulary = 0  # unknown until a token is sampled, and so to a member without rows
        self._num_rows = num_rows
        self._temperature = config.temperature + TEMPERATURE_GUARD

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.logits.append(scores / self._temperature)
        self.vocabulary = scores.size(-1)
        return torch.softmax(self.logits[-1], dim=-1) / self._draw(scores.device)[self.rows]

    def skip_to(self, num_tokens: int, device: torch.device) -> None:
        """Draws as often as the longest of the team's rows needs, so that all generators agree."""
        for _ in range(num_tokens - len(self.logits)):
            self._draw(device)

    def _draw(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self._num_rows, self.vocabulary, device=device).exponential_()


@contextmanager
def _without_sampling_defaults(model: Any) -> Iterator[None]:
    """Hides a checkpoint's own sampling settings, which transformers applies to every call.

    With `min_p` in force, for example, PPO's ratios would compare other log-probabilities.
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
    """Returns the length of each of the raw responses [B, T], whether it ended, and its text.

    Returns:
        Number of tokens [B] (up to the end token, or the one that completes a stop string), bool
        [B], and the texts without special tokens and stop strings.
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
