"""Sampling with a cache: equal prompts are passed once, and finished rows are dropped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from firm.alignment.head import LARGE_VOCABULARY
from firm.alignment.sequences import INVALID_LOGPROB, TEMPERATURE_GUARD, token_logprobs
from firm.base.devices import copy_of_generator, set_generator

if TYPE_CHECKING:
    from firm.alignment.rollout_engines.engine import SampleRequest

KEPT_SHARE = 0.9
"""Finished rows are dropped once the share of unfinished replies is at most this; below 1, because
compacting the cache takes time."""


class DecodedRows(Protocol):
    """Rows of a batch, in parts that are sampled separately."""

    token_ids: torch.Tensor
    """Left-padded prompts, [N, Q]."""
    mask: torch.Tensor
    """Mask of the prompts' tokens, bool [N, Q]."""
    counts: list[int]
    """Rows of each part."""

    def restrict(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """Keeps the rows of each part at these indices; returns their indices in the batch."""
        ...


class Draws:
    """Random numbers of a request's rows, token by token, from its generator.

    A team's process samples some rows of a batch as a single process would if it sampled all of
    them: every process draws the random numbers of all rows and uses those of its own.

    Args:
        request: The whole batch.
    """

    def __init__(self, request: "SampleRequest") -> None:
        self._num_rows, self._device = request.queries.num_rows, request.queries.device
        self._generator, self._num_drawn = request.generator, 0
        self.rows = request.team.share(self._num_rows)
        """Rows of this process."""
        self.vocabulary = 0  # unknown before the first token, hence to processes without rows

    def draw(self, vocabulary: int) -> torch.Tensor:
        """Returns the `random_numbers` of this process's rows for a token."""
        self.vocabulary = vocabulary
        self._num_drawn += 1
        options = {"device": self._device, "generator": self._generator}
        return random_numbers(self._num_rows, vocabulary, **options)[self.rows]

    def save(self) -> Any:
        """Returns the state of the generator, and the number of tokens drawn."""
        own = self._generator
        state = copy_of_generator(self._device) if own is None else own.get_state()
        return state, self._num_drawn

    def restore(self, state: Any) -> None:
        """Restores a state returned by `save`."""
        generator, self._num_drawn = state
        if self._generator is None:
            set_generator(generator)
        else:
            self._generator.set_state(generator)

    def skip_to(self, num_tokens: int) -> None:
        """Draws for the remaining tokens of the team's longest row, to keep generators equal."""
        while self._num_drawn < num_tokens:
            self.draw(self.vocabulary)


@dataclass(frozen=True, eq=False)
class SamplingPart:
    """Prompts whose replies are sampled with the same settings and generator."""

    token_ids: torch.Tensor
    """The prompts, [b, Q]."""
    draws: Draws
    """Random numbers of all b rows."""
    temperature: float
    """Sampling temperature."""
    max_new_tokens: int
    """Maximum length of a reply."""
    end_ids: Sequence[int]
    """Tokens that end a reply."""

    @classmethod
    def of(cls, request: "SampleRequest", draws: Draws | None = None) -> Self:
        """Returns the prompts of a request; those of a share of it have the draws of the whole."""
        config, ids, draws = request.config, request.queries.token_ids, draws or Draws(request)
        return cls(ids, draws, config.temperature, config.max_new_tokens, request.end_ids)


Run = Callable[..., Any]
"""Returns a model's output, from some rows, their next token ids [n, L], the mask of all tokens up
to them, the ids' positions and the cache."""


class SamplingState:
    """State of sampling the replies to the prompts of several parts, N rows.

    Args:
        parts: The prompts.
    """

    def __init__(self, parts: Sequence[SamplingPart]) -> None:
        self._parts = parts
        counts = [len(part.token_ids) for part in parts]
        ends = list(accumulate(counts))
        self._spans = [slice(end - own, end) for end, own in zip(ends, counts, strict=True)]
        device = parts[0].token_ids.device
        temperatures = [part.temperature + TEMPERATURE_GUARD for part in parts]
        self._temperature: Any = temperatures[0]
        if len(set(temperatures)) > 1:
            values = torch.tensor(temperatures, device=device)
            self._temperature = values.repeat_interleave(torch.tensor(counts, device=device))[
                :, None
            ]
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._is_open = torch.ones(ends[-1], dtype=torch.bool, device=device)
        self._rows = torch.arange(ends[-1], device=device)  # still in the batch
        self._counts = counts
        self._ends = [torch.tensor(list(part.end_ids), device=device) for part in parts]
        self._has_same_ends = len({tuple(part.end_ids) for part in parts}) == 1
        self._lengths: list[int | None] = [None] * len(parts)
        self.num_open = counts
        """Number of unfinished replies of each part; 0 at its maximum length."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples the next tokens [n] of the rows in the batch from their logits [n, V]."""
        is_done = [length is not None for length in self._lengths]
        numbers = draw_numbers(self._parts, is_done, logits.size(-1))[self._rows]
        temperature = self._temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[self._rows]
        chosen, own_logprobs = sampled_tokens(logits / temperature, numbers)
        tokens = torch.full_like(self._is_open, -1, dtype=torch.long)  # of all N rows
        logprobs = own_logprobs.new_full(tokens.shape, INVALID_LOGPROB)
        tokens[self._rows] = chosen
        logprobs[self._rows] = own_logprobs
        self._tokens.append(tokens.masked_fill(~self._is_open, -1))
        self._logprobs.append(logprobs)
        if self._has_same_ends:
            is_end = torch.isin(tokens, self._ends[0])
        else:
            own = zip(self._spans, self._ends, strict=True)
            is_end = torch.cat([torch.isin(tokens[span], ends) for span, ends in own])
        self._is_open = self._is_open & ~is_end
        open_rows = self._is_open.tolist()  # the only value of a token that is waited for
        self.num_open = [sum(open_rows[span]) for span in self._spans]
        for at, part in enumerate(self._parts):
            if self._lengths[at] is not None or len(self._tokens) == part.max_new_tokens:
                self.num_open[at] = 0
            if not self.num_open[at] and self._lengths[at] is None:
                self._lengths[at] = len(self._tokens)
        return chosen

    def keep(self, count: int) -> list[torch.Tensor]:
        """Keeps `count` rows of each part in the batch, including all unfinished ones.

        Returns:
            Indices of each part's rows among its rows in the batch.
        """
        places, rows = [], []
        for own in self._rows.split(self._counts):
            chosen = self._is_open[own].int().argsort(descending=True, stable=True)[:count]
            places.append(chosen)
            rows.append(own[chosen])
        self._rows, self._counts = torch.cat(rows), [len(own) for own in rows]
        return places

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each part's token ids [b, Q + T], -1 after the end, and log-probabilities [b, T].

        T is the length of the part's longest reply.
        """
        tokens, logprobs = torch.stack(self._tokens, 1), torch.stack(self._logprobs, 1)
        return results_of(self._parts, tokens, logprobs, self._lengths)


def draw_numbers(
    parts: Sequence[SamplingPart], is_done: Sequence[bool], vocabulary: int
) -> torch.Tensor:
    """Returns a token's random numbers of all rows of several parts, [N, ...].

    Generators advance as for all rows, so finished rows consume random numbers too. Parts that are
    done draw none, and get ones.
    """
    drawn = [
        None if done else part.draws.draw(vocabulary)
        for part, done in zip(parts, is_done, strict=True)
    ]
    like = next(own for own in drawn if own is not None)
    every = [
        like.new_ones(len(part.token_ids), *like.shape[1:]) if own is None else own
        for part, own in zip(parts, drawn, strict=True)
    ]
    return torch.cat(every) if len(every) > 1 else every[0]


def results_of(
    parts: Sequence[SamplingPart],
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    lengths: Sequence[int | None],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Divides tokens and log-probabilities [N, T] by part; see `SamplingState.results`."""
    found, start = [], 0
    for part, length in zip(parts, lengths, strict=True):
        span, start = slice(start, start + len(part.token_ids)), start + len(part.token_ids)
        ids = torch.cat([part.token_ids, tokens[span, :length]], 1)
        found.append((ids, logprobs[span, :length]))
    return found


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Result of the pass over D distinct prompts, of which N rows are to be continued."""

    cache: Any
    """Keys and values of the prompts, or another state."""
    logits: torch.Tensor
    """Logits of the first tokens, [D, V]."""
    positions: torch.Tensor
    """Positions of the prompts' last tokens, [D, 1]."""
    index: torch.Tensor | None
    """The prompt of each row, [N]; None if they are the same."""


def prefill(run: Run, prompts: DecodedRows, index: torch.Tensor | None) -> Prefilled:
    """Passes prompts through a model.

    Args:
        run: The model.
        prompts: Rows with the distinct prompts.
        index: The row among `prompts` of each row, [N]; None if they are the same.
    """
    positions = prompts.mask.cumsum(1) - prompts.mask.long()
    ids = prompts.token_ids.masked_fill(~prompts.mask, 0)
    output = run(prompts, ids, prompts.mask, positions, None)
    # a head may be on another device
    logits = output.logits[:, -1].to(prompts.mask.device, torch.float32)
    return Prefilled(output.past_key_values, logits, positions[:, -1:], index)


def decode_(
    run: Run,
    first: Prefilled,
    rows: DecodedRows,
    replies: SamplingState,
    *,
    prepares_masks: bool,
) -> None:
    """Samples the replies of all parts until they end.

    Args:
        run: The model.
        first: Result of the pass over the prompts; its cache is overwritten.
        rows: Rows of the replies; in the end those that are still in the batch.
        replies: State of their parts.
        prepares_masks: Whether `run` gets attention's masks of single tokens, [n, 1, 1, L] or None
            without padding, by which it need not look for padding; see `takes_attention_masks`.
    """
    cache, logits, positions = first.cache, first.logits, first.positions
    mask = rows.mask
    device = mask.device
    if first.index is not None:
        cache.reorder_cache(first.index)  # also copies states of linear attention
        logits, positions = logits[first.index], positions[first.index]
    is_padded = (~mask).any(1).tolist() if prepares_masks else []
    while True:
        tokens = replies.sample(logits)
        num_open = max(replies.num_open)
        if not num_open:
            return
        positions = positions + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if num_open <= KEPT_SHARE * max(rows.counts):
            kept = rows.restrict(replies.keep(num_open))
            cache.reorder_cache(kept)
            tokens, positions, mask = tokens[kept], positions[kept], mask[kept]
            is_padded = (~mask).any(1).tolist() if prepares_masks else []
        own_mask: torch.Tensor | None = mask
        if prepares_masks:
            own_mask = mask[:, None, None] if any(is_padded) else None
        output = run(rows, tokens[:, None], own_mask, positions, cache)
        logits = output.logits[:, -1].to(device, torch.float32)  # [N, V]


def random_numbers(
    num_rows: int,
    vocabulary: int,
    *,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Returns the random numbers by which `sampled_tokens` samples one token of each of N rows.

    Returns:
        Exponential variates [N, V], as `torch.multinomial` draws; or, for large vocabularies, for
        which these take longer than a model's layers, one uniform variate per row, [N].
    """
    if vocabulary < LARGE_VOCABULARY:
        draws = torch.empty(num_rows, vocabulary, device=device)
        return draws.exponential_(generator=generator)
    # sums in float32 would end before the rarest tokens; "mps" has nothing else
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.rand(num_rows, dtype=dtype, device=device, generator=generator)


def sampled_tokens(
    scores: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a token from each row of tempered logits, by `random_numbers` of the rows.

    Samples the token with the largest ratio of probability to exponential variate, or the one at
    which the cumulative probability exceeds the uniform variate; never one of probability 0.

    Args:
        scores: Tempered logits, [n, V].
        numbers: Exponential variates [n, V] or uniform ones [n].

    Returns:
        Tokens and their log-probabilities, each [n]. A log-probability is NaN if logits of its row
        are.
    """
    probabilities = torch.softmax(scores, dim=-1)  # [n, V]
    if numbers.ndim == 2:
        tokens = (probabilities / numbers).argmax(-1)
        return tokens, token_logprobs(scores[:, None], tokens[:, None])[:, 0]
    sums = probabilities.cumsum(-1, dtype=numbers.dtype)  # float64: rare tokens are not lost
    thresholds = numbers[:, None] * sums[:, -1:]  # below the sum even if the number rounds to 1
    tokens = torch.searchsorted(sums, thresholds, right=True)
    tokens = tokens.clamp(max=scores.size(-1) - 1)  # NaN is above all sums
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()
