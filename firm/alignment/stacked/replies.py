"""Sampling in joint passes, with the same replies as if each client sampled alone."""

import torch

from firm.alignment.generation import random_numbers, sampled_tokens
from firm.alignment.sequences import INVALID_LOGPROB, TEMPERATURE_GUARD
from firm.alignment.stacked.passes import ClientPart


class SamplingState:
    """State of sampling the replies to one client's prompts."""

    def __init__(self, part: ClientPart) -> None:
        assert part.config is not None
        self._part, self._config = part, part.config
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        device = part.token_ids.device
        self._is_open = torch.ones(len(part.token_ids), dtype=torch.bool, device=device)
        self._rows = torch.arange(len(part.token_ids), device=device)  # still in the batch
        self._ends = torch.tensor(list(part.end_ids), device=device)
        self.num_open = len(self._rows)
        """Number of unfinished replies; 0 at the maximum length."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples the next tokens [n] of the rows in the batch from their logits [n, V]."""
        if not self.num_open:
            return torch.zeros_like(self._rows)
        scores = logits / (self._config.temperature + TEMPERATURE_GUARD)
        # generators advance as for all rows, so finished rows must consume random numbers too
        numbers = random_numbers(
            len(self._is_open),
            logits.size(-1),
            device=logits.device,
            generator=self._part.generator,
        )
        chosen, own_logprobs = sampled_tokens(scores, numbers[self._rows])
        tokens = torch.full_like(self._is_open, -1, dtype=torch.long)
        logprobs = tokens.new_full(tokens.shape, INVALID_LOGPROB, dtype=scores.dtype)
        tokens[self._rows] = chosen
        logprobs[self._rows] = own_logprobs
        self._tokens.append(tokens.masked_fill(~self._is_open, -1))
        self._logprobs.append(logprobs)
        self._is_open = self._is_open & ~torch.isin(tokens, self._ends)
        is_longest = len(self._tokens) == self._config.max_new_tokens
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
        return torch.cat([self._part.token_ids, tokens], 1), torch.stack(self._logprobs, dim=1)
