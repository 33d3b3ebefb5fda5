"""Sampling with a cache: equal prompts are passed once, and finished rows are dropped."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from firm.alignment.head import LARGE_VOCABULARY
from firm.alignment.sequences import INVALID_LOGPROB, TEMPERATURE_GUARD, token_logprobs

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

    def span(self, index: int) -> slice:
        """Returns the slice of a part's rows."""
        ...

    def restrict(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """Keeps the rows of each part at these indices; returns their indices in the batch."""
        ...


class SamplingState:
    """State of sampling the replies to the prompts of a part.

    Args:
        token_ids: The prompts, [b, Q].
        draw: Returns the `random_numbers` of all b rows, from the size of the vocabulary.
        temperature: Sampling temperature.
        max_new_tokens: Maximum length of a reply.
        end_ids: Tokens that end a reply.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        draw: Callable[[int], torch.Tensor],
        *,
        temperature: float,
        max_new_tokens: int,
        end_ids: Sequence[int],
    ) -> None:
        self._prompts, self._draw = token_ids, draw
        self._temperature = temperature + TEMPERATURE_GUARD
        self._max_new_tokens = max_new_tokens
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        device = token_ids.device
        self._is_open = torch.ones(len(token_ids), dtype=torch.bool, device=device)
        self._rows = torch.arange(len(token_ids), device=device)  # still in the batch
        self._ends = torch.tensor(list(end_ids), device=device)
        self.num_open = len(self._rows)
        """Number of unfinished replies; 0 at the maximum length."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples the next tokens [n] of the rows in the batch from their logits [n, V]."""
        if not self.num_open:
            return torch.zeros_like(self._rows)
        # generators advance as for all rows, so finished rows must consume random numbers too
        numbers = self._draw(logits.size(-1))[self._rows]
        chosen, own_logprobs = sampled_tokens(logits / self._temperature, numbers)
        tokens = torch.full_like(self._is_open, -1, dtype=torch.long)  # of all b rows
        logprobs = own_logprobs.new_full(tokens.shape, INVALID_LOGPROB)
        tokens[self._rows] = chosen
        logprobs[self._rows] = own_logprobs
        self._tokens.append(tokens.masked_fill(~self._is_open, -1))
        self._logprobs.append(logprobs)
        self._is_open = self._is_open & ~torch.isin(tokens, self._ends)
        is_longest = len(self._tokens) == self._max_new_tokens
        self.num_open = 0 if is_longest else int(self._is_open.sum())
        return chosen

    def keep(self, count: int) -> torch.Tensor:
        """Keeps `count` rows in the batch, including all unfinished ones; returns their indices."""
        places = self._is_open[self._rows].int().argsort(descending=True, stable=True)[:count]
        self._rows = self._rows[places]
        return places

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token ids [b, Q + T], -1 after the end, and log-probabilities [b, T]."""
        tokens = torch.stack(self._tokens, dim=1)
        return torch.cat([self._prompts, tokens], 1), torch.stack(self._logprobs, dim=1)


def decode_(
    run: Callable[..., Any],
    prompts: DecodedRows,
    index: torch.Tensor | None,
    rows: DecodedRows,
    replies: Sequence[SamplingState],
) -> None:
    """Samples the replies of all parts until they end.

    Args:
        run: Returns a model's output, from some rows, their next token ids [n, L], the mask of all
            tokens up to them, the ids' positions and the cache.
        prompts: Rows with the distinct prompts.
        index: The row among `prompts` of each row, [N]; None if they are the same.
        rows: Rows of the replies; in the end those that are still in the batch.
        replies: State of each part.
    """
    positions = prompts.mask.cumsum(1) - prompts.mask.long()
    ids = prompts.token_ids.masked_fill(~prompts.mask, 0)
    output = run(prompts, ids, prompts.mask, positions, None)
    cache = output.past_key_values
    device = prompts.mask.device  # a head may be on another one
    logits = output.logits[:, -1].to(device, torch.float32)  # [D, V]
    mask, positions = rows.mask, positions[:, -1:]
    if index is not None:
        cache.reorder_cache(index)  # also copies states of linear attention
        logits, positions = logits[index], positions[index]
    while True:
        tokens = torch.cat([r.sample(logits[rows.span(at)]) for at, r in enumerate(replies)])
        num_open = max(reply.num_open for reply in replies)
        if not num_open:
            return
        positions = positions + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if num_open <= KEPT_SHARE * max(rows.counts):
            kept = rows.restrict([reply.keep(num_open) for reply in replies])
            cache.reorder_cache(kept)
            tokens, positions, mask = tokens[kept], positions[kept], mask[kept]
        output = run(rows, tokens[:, None], mask, positions, cache)
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
