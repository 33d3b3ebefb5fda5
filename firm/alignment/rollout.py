"""Stage 2 of a round: prompts become responses with log-probabilities, by policy and reference.

Prompts are left-padded so that every response starts in the same column. A response ends at the
first end token (EOS or a configured one) or where a stop string is complete; what the model wrote
after that is masked out everywhere, and the text is cut before the stop string.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)

from firm.alignment.prompts import (
    PromptFormat,
    encode_prompts,
    format_prompt,
    truncate_by_turns,
)
from firm.alignment.rows import ALONE, Rows, by_chunks
from firm.federation import Team

INVALID_LOGPROB = 1.0
"""Log-probability at padding: equal in policy and reference, so that ratio and KL are neutral."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled and where they end."""

    max_new_tokens: int = 128
    """Longest response in tokens. Not in the paper."""
    temperature: float = 0.7
    """Sampling temperature. Not in the paper."""
    max_prompt_tokens: int = 256
    """Longest prompt in tokens; longer ones lose their beginning. Not in the paper."""
    stop_strings: list[str] = field(default_factory=lambda: ["\n\nHuman:"])
    """A response ends before any of these texts: a policy that writes the next human turn would
    otherwise be scored for it. Not in the paper."""
    end_tokens: list[str] = field(default_factory=list)
    """Tokens that end a response beside EOS, as the tokenizer spells them. Not in the paper."""
    forward_batch_size: int = 64
    """Responses that are generated and scored by the models at once; bounds memory."""
    logprobs: Literal["generation", "forward"] | None = None
    """Where the sampling policy's log-probabilities come from: the cached steps that generated the
    response (as in TRL), or a forward pass of the shape that the reference's has, so that rounding
    adds nothing to their KL. null takes generation for a policy in float32, where the two agree to
    some 1e-6, and forward for one in less precision. Not in the paper."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.max_prompt_tokens < 1 or self.forward_batch_size < 1:
            raise ValueError(
                "rollout.max_new_tokens, max_prompt_tokens and forward_batch_size must be at "
                f"least 1, got {self.max_new_tokens}, {self.max_prompt_tokens} and "
                f"{self.forward_batch_size}."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature must be positive, got {self.temperature}: "
                "PPO needs samples, not the greedy reply."
            )
        if "" in self.stop_strings:
            raise ValueError(
                f"rollout.stop_strings must not hold an empty text, got {self.stop_strings}: "
                "every reply would end before it began."
            )


@dataclass(frozen=True)
class Queries(Rows):
    """B prompts that wait for a response."""

    prompts: list[str]
    """Dialogues, as the reward models read them."""
    token_ids: torch.Tensor
    """The same as the policy reads them, left-padded, [B, Q]."""

    def to(self, device: Any) -> "Queries":
        """Returns the prompts with their tokens on a device."""
        return replace(self, token_ids=self.token_ids.to(device))

    def repeated(self, count: int) -> "Queries":
        """Returns every prompt so many times in a row, [B * count]."""
        return (
            self.rows(torch.arange(self.num_rows).repeat_interleave(count)) if count > 1 else self
        )


@dataclass(frozen=True)
class Sequences(Rows):
    """B prompts with their responses: what a forward pass reads."""

    queries: Queries
    """The prompts, of Q tokens."""
    query_responses: torch.Tensor
    """Prompt and raw response token ids, [B, Q + T]."""

    @property
    def context_length(self) -> int:
        """Q, the common padded length of the prompts."""
        return self.queries.token_ids.size(1)

    @property
    def responses(self) -> torch.Tensor:
        """Raw response token ids, [B, T]."""
        return self.query_responses[:, self.context_length :]


@dataclass(frozen=True)
class Rollouts(Sequences):
    """B sampled responses of at most T tokens to prompts of Q tokens."""

    completions: list[str]
    """Texts of the responses, cut before a stop string, without special tokens."""
    logprobs: torch.Tensor
    """Log-probabilities of the response tokens under the sampling policy, [B, T], from where
    `RolloutConfig.logprobs` says."""
    reference_logprobs: torch.Tensor
    """The same under the reference (the policy without its adapter), [B, T]."""
    last_index: torch.Tensor
    """Index of the last token of each response, [B]."""
    ended: torch.Tensor
    """Whether the response came to an end by itself, bool [B]."""
    mismatch: torch.Tensor | None = None
    """Log-probabilities at generation minus those of a forward pass, [B, T], 0 at padding; rounding
    alone. None where there was no forward pass."""

    @property
    def mask(self) -> torch.Tensor:
        """Tokens of the response, its end token included, bool [B, T]."""
        return self._positions <= self.last_index.unsqueeze(1)

    @property
    def value_mask(self) -> torch.Tensor:
        """Positions that have a value: the response and one after it, bool [B, T]."""
        return self._positions <= self.last_index.unsqueeze(1) + 1

    @property
    def score_index(self) -> torch.Tensor:
        """Where the score is paid: after the last token, or on it when there is no room, [B]."""
        after = self.last_index + 1
        return torch.where(after < self.logprobs.size(1), after, self.last_index)

    @property
    def num_tokens(self) -> torch.Tensor:
        """Length of each response in tokens, [B]."""
        return self.last_index + 1

    @property
    def _positions(self) -> torch.Tensor:
        return torch.arange(self.logprobs.size(1), device=self.logprobs.device).unsqueeze(0)


def encode_dialogues(
    dialogues: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
) -> Queries:
    """Returns dialogues as the policy reads them, left-padded to Q tokens.

    Args:
        dialogues: B dialogues that wait for a reply; a long one loses its oldest turns.
        tokenizer: The policy's, padding left, its pad token unlike EOS.
        prompt_format: How the policy reads a dialogue.
        max_prompt_tokens: Upper bound of Q.
    """
    texts = [
        format_prompt(
            truncate_by_turns(dialogue, tokenizer, max_prompt_tokens, prompt_format=prompt_format),
            tokenizer,
            prompt_format,
        )
        for dialogue in dialogues
    ]
    token_ids, _ = encode_prompts(texts, tokenizer, max_prompt_tokens=max_prompt_tokens)
    return Queries(list(dialogues), token_ids)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `token_ids` [B, T] under `logits` [B, T, V], shape [B, T].

    Rows are taken one at a time, so that no second tensor [B, T, V] is held.
    """
    logits = _at_least_float32(logits)  # a log-sum-exp in bfloat16 loses digits
    chosen = torch.gather(logits, -1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def forward(model: Any, token_ids: torch.Tensor, pad_token_id: int) -> Any:
    """Output of a causal language model on padded ids [B, L], hidden states included.

    Positions count the real tokens only, so that padding does not move a text.
    """
    attention_mask = token_ids != pad_token_id
    return model(
        input_ids=torch.masked_fill(token_ids, ~attention_mask, 0),
        attention_mask=attention_mask,
        position_ids=attention_mask.cumsum(1) - attention_mask.long(),
        return_dict=True,
        output_hidden_states=True,
        use_cache=False,
    )


def response_logits(logits: torch.Tensor, context_length: int, temperature: float) -> torch.Tensor:
    """The part of logits [B, Q + T, V] that predicts the response, tempered, [B, T, V].

    In float32 at least: dividing in less precision would round each logit once more.
    """
    logits = logits[:, context_length - 1 : -1]
    return _at_least_float32(logits) / (temperature + TEMPERATURE_GUARD)


def response_logprobs(
    model: Any, sequences: Sequences, pad_token_id: int, temperature: float
) -> torch.Tensor:
    """Returns the responses' log-probabilities in a forward pass, shape [B, T]."""
    logits = forward(model, sequences.query_responses, pad_token_id).logits
    logits = response_logits(logits, sequences.context_length, temperature)
    return token_logprobs(logits, sequences.responses)


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


TEMPERATURE_GUARD = 1e-7
"""Added to every temperature, as TRL does; it is part of the bit-for-bit parity."""


def end_token_ids(tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> list[int]:
    """Ids of the tokens that end a response, EOS first.

    Raises:
        ValueError: An end token is not one token of the vocabulary.
    """
    eos: Any = tokenizer.eos_token_id
    ids = [] if eos is None else [int(eos)]
    vocabulary = tokenizer.get_vocab()
    for token in config.end_tokens:
        if token not in vocabulary:
            raise ValueError(
                f"rollout.end_tokens: {token!r} is not a token of the policy's tokenizer: "
                "give it as the tokenizer spells it (a newline may be '<0x0A>' or 'Ċ')."
            )
        ids.append(vocabulary[token])
    return ids


@torch.no_grad()
def generate(
    model: Any,
    queries: Queries,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    end_ids: Sequence[int],
    team: Team = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of at most `max_new_tokens` tokens and their log-probabilities.

    Args:
        model: The policy; its own sampling defaults are overridden.
        queries: B prompts of Q tokens.
        tokenizer: Gives the pad id.
        config: Length and temperature.
        end_ids: Tokens after which a row is finished.
        team: Divides the rows; whatever its size, all rows get the tokens that one process would
            have sampled.

    Returns:
        Token ids [B, Q + T], the queries as they came, and log-probabilities [B, T] under the
        tempered distribution that was sampled from.
    """
    if team.size == 1:
        return _generate(model, queries, tokenizer, config, end_ids)
    draws = _SharedDraws(queries.num_rows, team.share(queries.num_rows), config)
    own = queries.rows(draws.rows)
    ids, logprobs = team.together(lambda: _generate(model, own, tokenizer, config, end_ids, draws))
    gathered = team.gather((ids, logprobs, draws.vocabulary))
    parts = [(ids, logprobs) for ids, logprobs, _ in gathered]
    length = max(logprobs.size(1) for _, logprobs in parts)
    draws.vocabulary = max(vocabulary for _, _, vocabulary in gathered)
    draws.skip_to(length, queries.device)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    context_length = queries.token_ids.size(1)
    sequences = [_pad_right(ids, context_length + length, pad_id) for ids, _ in parts]
    logprobs = [_pad_right(part, length, INVALID_LOGPROB) for _, part in parts]
    return torch.cat(sequences).to(queries.device), torch.cat(logprobs).to(queries.device)


def _generate(
    model: Any,
    queries: Queries,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    end_ids: Sequence[int],
    draws: "_SharedDraws | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and log-probabilities, by the global generator or by draws that a team shares."""
    query_ids = queries.token_ids
    if not len(query_ids):  # a batch smaller than the team
        return query_ids, torch.empty(0, 0, device=query_ids.device)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]  # checked when it was loaded
    attention_mask = query_ids != pad_id
    with _without_sampling_defaults(model):
        output = model.generate(
            input_ids=torch.masked_fill(query_ids, ~attention_mask, 0),
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([draws] if draws else []),
            generation_config=GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                do_sample=draws is None,
                temperature=config.temperature + TEMPERATURE_GUARD if draws is None else None,
                top_k=0 if draws is None else None,
                top_p=1.0 if draws is None else None,
                eos_token_id=list(end_ids) or None,
                pad_token_id=pad_id,
                output_scores=True,
                return_dict_in_generate=True,
            ),
        )
    responses = output.sequences[:, query_ids.size(1) :]
    scores = torch.stack(output.scores if draws is None else draws.logits, dim=1)  # [B, T, V]
    return torch.cat((query_ids, responses), dim=1), token_logprobs(scores, responses)


class _SharedDraws(LogitsProcessor):
    """Samples some rows of a batch as one process would that samples all of them.

    `torch.multinomial` draws one exponential variate per token of the vocabulary and takes the
    largest ratio of probability to variate. Here every process draws the variates of all rows, uses
    those of its own, and leaves the largest ratio to a greedy search.
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
        """Draws what the longest of the team's rows have needed, so that all generators agree."""
        for _ in range(num_tokens - len(self.logits)):
            self._draw(device)

    def _draw(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self._num_rows, self.vocabulary, device=device).exponential_()


@contextmanager
def _without_sampling_defaults(model: Any) -> Iterator[None]:
    """Hides a checkpoint's own sampling settings, which transformers lays under every request.

    With a `min_p` or `suppress_tokens` of the checkpoint in force, the log-probabilities would be
    those of another distribution than the one that PPO's ratios are taken in.
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
    config: RolloutConfig,
    end_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Where each response ends, whether it ended by itself, and its text.

    Args:
        responses: Raw response ids, shape [B, T].
        tokenizer: Decodes them.
        config: Stop strings.
        end_ids: Tokens that end a response; they belong to it.

    Returns:
        Index of the last token [B] (the end token, or the one that completes a stop string), bool
        [B], and the texts without special tokens and stop strings. A pad token that the policy
        sampled cuts a response short, as in TRL.
    """
    num_tokens = responses.size(1)
    last, ended, texts = [], [], []
    for row in responses.tolist():
        end = next((i for i, token in enumerate(row) if token in end_ids), None)
        kept = row[: num_tokens if end is None else end + 1]
        if tokenizer.pad_token_id in kept:
            kept = kept[: kept.index(tokenizer.pad_token_id)]
        text: Any = tokenizer.decode(kept, skip_special_tokens=True)
        has_stop = any(stop in text for stop in config.stop_strings)
        if has_stop:
            kept = _until_stop(kept, tokenizer, config.stop_strings)
            text = tokenizer.decode(kept, skip_special_tokens=True)
            text = text[: min(i for stop in config.stop_strings if (i := text.find(stop)) >= 0)]
        last.append(len(kept) - 1)
        ended.append(end is not None or has_stop)
        texts.append(text)
    device = responses.device
    return torch.tensor(last, device=device), torch.tensor(ended, device=device), texts


def _until_stop(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]
) -> list[int]:
    """The shortest beginning of `token_ids` whose text holds a stop string."""
    low, high = 1, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        text = tokenizer.decode(token_ids[:middle], skip_special_tokens=True)
        if any(stop in text for stop in stop_strings):
            high = middle
        else:
            low = middle + 1
    return token_ids[:low]


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
    """Sampled responses to left-padded prompts, with both policies' log-probabilities.

    Args:
        model: The policy, a causal language model with an adapter.
        queries: B prompts, left-padded to Q tokens.
        tokenizer: The policy's tokenizer; its pad token differs from EOS.
        config: How to sample, where responses end, and where log-probabilities come from.
        reference: A context inside which `model` is the reference policy (adapter off).
        team: Divides the rows among its processes; all get the whole result.
        measures_mismatch: Whether the `mismatch` is there also where generation's log-probabilities
            are taken, for another forward pass.
    """
    end_ids = end_token_ids(tokenizer, config)
    sampled = [
        generate(model, chunk, tokenizer=tokenizer, config=config, end_ids=end_ids, team=team)
        for chunk in queries.split(config.forward_batch_size)
    ]
    length = max(ids.size(1) for ids, _ in sampled)
    pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    sequences = Sequences(
        queries, torch.cat([_pad_right(ids, length, pad_id) for ids, _ in sampled])
    )
    num_tokens = length - sequences.context_length
    at_generation = torch.cat([_pad_right(p, num_tokens, INVALID_LOGPROB) for _, p in sampled])
    last_index, ended, completions = find_ends(
        sequences.responses, tokenizer=tokenizer, config=config, end_ids=end_ids
    )
    positions = torch.arange(num_tokens, device=at_generation.device)
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


def logprobs_from(dtype: str, config: RolloutConfig) -> Literal["generation", "forward"]:
    """Where the log-probabilities of a policy come from whose parameters have a type."""
    return config.logprobs or ("generation" if dtype in ("float32", "float64") else "forward")


def _pad_right(values: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    missing = length - values.size(1)
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values
