"""Prompts and responses as rows of tokens, and forward passes over them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from firm.alignment.adapters.forward import OwnRows
from firm.alignment.head import Head, chosen_logprobs, head_inputs, head_of, no_positions
from firm.alignment.prompts import Prompt
from firm.federation.processes import Team
from firm.gradients.per_sequence import taken_rows

INVALID_LOGPROB = 1.0
"""Log-probability at padding: equal in policy and reference, so that ratio and KL are neutral."""

TEMPERATURE_GUARD = 1e-7
"""Added to every temperature, as in TRL, for bitwise parity."""

Index = slice | np.ndarray | torch.Tensor
"""Rows to select: a slice or indices."""

BY_OBJECTIVE = {"axis": 1}
"""Field metadata of tensors [M, B, ...], with rows along the second axis."""


@dataclass(frozen=True)
class Rows:
    """B rows: tensors [B, ...] (or ``BY_OBJECTIVE``), lists of length B, and records of B rows.

    Fields of other types are shared by all rows.
    """

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        first = fields(self)[0]
        value = getattr(self, first.name)
        if isinstance(value, Rows):
            return value.num_rows
        return len(value) if isinstance(value, list) else value.size(first.metadata.get("axis", 0))

    @property
    def device(self) -> torch.device:
        """Device of the first tensor."""
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), torch.Tensor | Rows):
                return value.device
        return torch.device("cpu")

    def to(self, device: Any) -> Self:
        """Returns the rows with all tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.to(device)
            for name, value in values.items()
            if isinstance(value, torch.Tensor | Rows)
        }
        return replace(self, **moved)

    def rows(self, index: Index) -> Self:
        """Returns a record of the selected rows, in the index's order; tensors are copied."""
        chosen = torch.arange(self.num_rows)[index]
        taken = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Rows):
                value = value.rows(chosen)
            elif isinstance(value, list):
                value = list(map(value.__getitem__, chosen.tolist()))
            elif isinstance(value, torch.Tensor):
                value = value[chosen] if field.metadata.get("axis", 0) == 0 else value[:, chosen]
            taken[field.name] = value
        return replace(self, **taken)

    def split(self, size: int | None) -> list[Self]:
        """Splits the rows into parts of ``size``, the last one possibly smaller; None: one part."""
        num_rows = self.num_rows
        if size is None or size >= num_rows:
            return [self]
        starts = range(0, num_rows, size)
        return [self.rows(slice(start, start + size)) for start in starts]


class Examples(Rows):
    """A batch of B examples from which an estimator computes M losses."""

    @property
    def is_judged(self) -> torch.Tensor:
        """True if the example counts for the objective, bool [M, B] on the CPU."""
        raise NotImplementedError

    @property
    def preferences(self) -> torch.Tensor | None:
        """Preferences of the examples for a conditioned policy, [B, M]."""
        raise NotImplementedError

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of each example, [B]; equal for replies to one prompt."""
        raise NotImplementedError

    def trimmed(self) -> Self:
        """Returns the examples without columns that are padding in all rows."""
        raise NotImplementedError

    def parts(self, size: int | None) -> list[Self]:
        """Splits the examples into parts of ``size`` with little padding, for a pass each.

        Examples of similar length share a part; None, or a size of at least B, returns all of them
        as they are.
        """
        if size is None or size >= self.num_rows:
            return [self]
        order = self.lengths.argsort(stable=True).cpu()  # ties keep their order: results repeat
        return [part.trimmed() for part in self.rows(order).split(size)]


class SingleProcess(Team):
    """The team of a client with one process, which has all rows and tells nobody."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor

    def gather(self, content: Any) -> list[Any]:
        """Returns the only value."""
        return [content]

    @contextmanager
    def unanimous(self) -> Iterator[None]:
        """Opens a context without an effect: an error has nobody else to reach."""
        yield


SINGLE_PROCESS = SingleProcess(0, 1)


def by_chunks(
    function: Callable[[Any], torch.Tensor],
    rows: Rows,
    *,
    size: int,
    team: Team = SINGLE_PROCESS,
    dim: int = 0,
) -> torch.Tensor:
    """Applies a function to B rows, ``size`` at a time; returns its values, of size B at ``dim``.

    Each process of the team computes its share of every chunk; all get the complete result.
    """
    results = []
    for chunk in rows.split(size):
        if team.size == 1:
            results.append(function(chunk))
            continue
        own = chunk.rows(team.share(chunk.num_rows))  # of a chunk, so that memory is limited too
        with team.unanimous():
            result = function(own) if own.num_rows else None  # fewer rows than processes
        parts = [part for part in team.gather(result) if part is not None]
        results.append(torch.cat(parts, dim).to(rows.device))
    return torch.cat(results, dim)


@dataclass(frozen=True)
class Queries(Rows):
    """B prompts to respond to."""

    prompts: list[Prompt]
    """The original prompts."""
    token_ids: torch.Tensor
    """Token ids of the prompts for the policy, left-padded, [B, Q]."""
    lengths: torch.Tensor
    """Number of tokens of each prompt, [B]; all ids before them are padding."""
    preferences: torch.Tensor | None = None
    """Preferences for a conditioned policy, [B, M]; None for equal shares."""
    is_cut: list[bool] | None = None
    """Truncated prompts, as a flag per prompt."""

    @property
    def mask(self) -> torch.Tensor:
        """Mask of the prompts' tokens, bool [B, Q]."""
        num_tokens = self.token_ids.size(1)
        positions = torch.arange(num_tokens, device=self.token_ids.device)
        return positions >= num_tokens - self.lengths.unsqueeze(1)  # [B, Q]

    def trimmed(self) -> "Queries":
        """Returns the prompts without columns that are padding in all rows."""
        longest = max(1, int(self.lengths.max()))
        return replace(self, token_ids=self.token_ids[:, -longest:])

    def repeated(self, count: int) -> "Queries":
        """Repeats every prompt `count` times, adjacently; B * count rows."""
        return self.rows(torch.arange(self.num_rows).repeat_interleave(count))

    def distinct(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds rows with equal tokens and preferences.

        Returns:
            Indices of the first row of each of D prompts, [D]; and the index of every row's prompt
            among these, [B].
        """
        parts = [self.token_ids, self.lengths[:, None]]
        if self.preferences is not None:
            parts.append(self.preferences)
        # float64 holds ids and shares exactly
        rows = torch.cat([part.cpu().double() for part in parts], dim=1)
        numbers: dict[tuple[float, ...], int] = {}
        index = [numbers.setdefault(tuple(row), len(numbers)) for row in rows.tolist()]
        first = [index.index(number) for number in range(len(numbers))]
        return torch.tensor(first), torch.tensor(index, device=self.device)


@dataclass(frozen=True)
class Sequences(Rows):
    """B prompts with their responses, the input of a forward pass."""

    queries: Queries
    """The prompts, of Q tokens."""
    query_responses: torch.Tensor
    """Prompt and response token ids, [B, Q + T]."""
    num_tokens: torch.Tensor
    """Number of tokens of each response, including the end token, [B]; later tokens are ignored."""

    @property
    def mask(self) -> torch.Tensor:
        """Mask of the responses' tokens, including the end token, bool [B, T]."""
        return self._positions < self.num_tokens.unsqueeze(1)

    @property
    def attention_mask(self) -> torch.Tensor:
        """Mask of the tokens of prompts and responses, bool [B, Q + T]."""
        return torch.cat((self.queries.mask, self.mask), dim=1)

    @property
    def context_length(self) -> int:
        """Q, the common padded length of the prompts."""
        return self.queries.token_ids.size(1)

    @property
    def responses(self) -> torch.Tensor:
        """Response token ids, [B, T]."""
        return self.query_responses[:, self.context_length :]

    def trimmed(self) -> Self:
        """Returns the rows without columns that are padding in all prompts."""
        queries = self.queries.trimmed()
        num_columns = queries.token_ids.size(1) + self.responses.size(1)
        ids = self.query_responses[:, -num_columns:]  # padding is on the left
        return replace(self, queries=queries, query_responses=ids)

    @property
    def _positions(self) -> torch.Tensor:
        num_positions = self.query_responses.size(1) - self.queries.token_ids.size(1)
        return torch.arange(num_positions, device=self.query_responses.device).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class SampledSequences(Sequences):
    """B sampled responses of at most T tokens to prompts of Q tokens."""

    completions: list[str]
    """Texts of the responses, cut before stop strings, without special tokens."""
    ended: torch.Tensor
    """True if the response ended with an end token or stop string, bool [B]."""
    generation_logprobs: torch.Tensor | None = None
    """Log-probabilities of the response tokens from generation, [B, T], if the engine has them."""
    staleness: int = 0
    """Local steps by which the adapter that sampled is older than the one that trains."""

    @property
    def completion_ids(self) -> list[list[int]]:
        """Token ids of each response, including the end token."""
        rows = zip(self.responses.tolist(), self.num_tokens.tolist(), strict=True)
        return [ids[:length] for ids, length in rows]


@dataclass(frozen=True, kw_only=True)
class Rollouts(SampledSequences):
    """B sampled responses with their log-probabilities."""

    logprobs: torch.Tensor
    """Log-probabilities of the response tokens under the sampling policy, [B, T], from the source
    `RolloutConfig.logprobs`."""
    reference_logprobs: torch.Tensor
    """Log-probabilities under the reference (the policy without its adapter), [B, T]."""
    mismatch: torch.Tensor | None = None
    """Difference of log-probabilities between generation and a forward pass, [B, T], 0 at padding;
    rounding only, unless an older adapter sampled (`staleness`). None without a forward pass."""

    @property
    def value_mask(self) -> torch.Tensor:
        """Mask of positions with a value: the response and one position after it, bool [B, T]."""
        return self._positions <= self.num_tokens.unsqueeze(1)  # the state after the last token

    @property
    def reward_index(self) -> torch.Tensor:
        """Position of the reward, [B]: after the last token, or at it at the maximum length."""
        return self.num_tokens.clamp(max=self.logprobs.size(1) - 1)


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of a response's tokens, and the entropies of their distributions."""

    logprobs: torch.Tensor
    """Log-probabilities, [B, T]; arbitrary at padding."""
    entropies: Callable[[], torch.Tensor]
    """Returns the entropies in nats, without a gradient, [B, T]."""


def left_padded(rows: Sequence[Sequence[int]], *, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows on the left; returns token ids [B, Q] and the length of each row, [B]."""
    lengths = [len(ids) for ids in rows]
    length = max(lengths, default=0)
    padded = [[fill] * (length - len(ids)) + list(ids) for ids in rows]
    return torch.tensor(padded, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)


def pad_right(values: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    """Returns rows [B, ...] padded on the right to `length`."""
    missing = length - values.size(1)
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities of `token_ids` [B, T] under `logits` [B, T, V], shape [B, T].

    Processes one row at a time to avoid a second tensor [B, T, V]. Ids outside the vocabulary are
    padding, with arbitrary values.
    """
    token_ids = token_ids.clamp(max=logits.size(-1) - 1)
    # a log-sum-exp in bfloat16 loses digits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = torch.gather(logits, -1, token_ids.unsqueeze(-1)).squeeze(-1)  # [B, T]
    return chosen - torch.stack([*map(partial(torch.logsumexp, dim=-1), logits)])


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of each token's distribution in nats, from logits [B, T, V] to [B, T]."""
    probabilities = torch.softmax(logits, dim=-1)  # [B, T, V]
    return torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)


def forward(model: Any, token_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """Returns the output of a model on padded ids [B, L], with the hidden states [B, L, H].

    For a language model the only entry of `hidden_states` is the input of its head:
    `output_hidden_states` would keep the states of all layers, and those of Gemma 3n are [4, B, L,
    H]. Positions count only the tokens in the mask [B, L], so that padding does not shift a text.
    If `head_of` knows the model's head, `head` is set and the logits are empty, [B, 0, V]; see
    `token_scores`.
    """
    head = head_of(model)
    with head_inputs(model, None if head is None else no_positions) as states:
        output = model(
            input_ids=torch.masked_fill(token_ids, ~attention_mask, 0),
            attention_mask=attention_mask,
            position_ids=attention_mask.cumsum(1) - attention_mask.long(),
            return_dict=True,
            use_cache=False,
        )
    output.hidden_states = (states[0] if states else output.last_hidden_state,)
    output.head = head
    return output


Expand = Callable[[Sequence[torch.Tensor], torch.Tensor], Sequence[torch.Tensor]]
"""Returns the rows [B, ...] of tensors [D, ...] at an index [B]."""


@dataclass(frozen=True)
class ReplyStates:
    """The output of a pass over prompts and replies, where it is needed."""

    head: Head
    """The model's head."""
    states: torch.Tensor
    """Its inputs, from which the responses' tokens are predicted, [B, T, H]."""


def forward_prompts_once(
    model: Any, sequences: Sequences, expand: Expand = taken_rows
) -> ReplyStates:
    """Returns the states that predict the responses; passes equal prompts through the model once.

    See `states_of_replies`; a model must allow it (`may_pass_prompts_once`).
    """
    queries, head = sequences.queries, head_of(model)
    assert head is not None
    first, index = queries.distinct()
    prompts = queries.rows(first)
    passes = iter((prompts, queries))

    def run(token_ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        set_preferences(model, next(passes).preferences)
        return cached_states(model, token_ids, mask, cache)

    own = sequences.responses, sequences.attention_mask
    cache, asked = new_cache(model), (prompts.token_ids, prompts.mask)
    return ReplyStates(head, states_of_replies(run, cache, asked, own, index, expand))


def states_of_replies(
    run: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor],
    cache: DynamicCache,
    prompts: tuple[torch.Tensor, torch.Tensor],
    replies: tuple[torch.Tensor, torch.Tensor],
    index: torch.Tensor,
    expand: Expand = taken_rows,
) -> torch.Tensor:
    """Returns the states that predict the tokens of B replies to D prompts, [B, T, H].

    The keys and values of the prompts, and the states that predict the first tokens, are copied for
    the replies, which are a second pass.

    Args:
        run: Returns the states [n, L, H] of the next tokens [n, L], from the mask of all tokens up
            to them and the cache; called for the prompts, and then for the replies.
        cache: An empty cache.
        prompts: Token ids [D, Q] and their mask.
        replies: Token ids [B, T], and the mask of prompts and replies, [B, Q + T].
        index: Prompt of each reply, [B].
        expand: Copies the rows of the first pass for the second one.
    """
    token_ids, mask = replies
    last = run(*prompts, cache)[:, -1:]  # predicts the first tokens of the replies, [D, 1, H]
    layers: list[Any] = cache.layers
    kept = [last, *(each for layer in layers for each in (layer.keys, layer.values))]
    last, *copies = expand(kept, index)
    del kept  # without gradients, the first pass's keys and values
    for layer, keys, values in zip(layers, copies[::2], copies[1::2], strict=True):
        layer.keys, layer.values = keys, values  # those of the reply's prompt, [B, ...]
    if token_ids.size(1) < 2:
        return last[:, : token_ids.size(1)]
    return torch.cat([last, run(token_ids[:, :-1], mask[:, :-1], cache)], dim=1)


def new_cache(model: Any) -> DynamicCache:
    """Returns an empty cache of a model's keys and values."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def cached_states(
    model: Any, token_ids: torch.Tensor, mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """Returns the inputs of the head from a pass over the next tokens [n, L], [n, L, H].

    Args:
        model: A model that `may_pass_prompts_once`.
        token_ids: The tokens.
        mask: Mask of all tokens up to them.
        cache: Keys and values of those before, to which theirs are added.
    """
    width = token_ids.size(1)
    token_ids = token_ids.masked_fill(~mask[:, -width:], 0)
    positions = (mask.cumsum(1) - mask.long())[:, -width:]  # padding does not count
    with head_inputs(model, no_positions) as states:
        continued_pass(model, token_ids, mask, positions, cache)
    return states[0]


def continued_pass(
    model: Any,
    token_ids: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor,
    cache: Any,
) -> Any:
    """Returns the output of a pass over the next tokens, whose keys and values the cache takes."""
    return model(
        input_ids=token_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
    )


def may_pass_prompts_once(model: Any) -> bool:
    """Returns whether `forward_prompts_once` gives a model's states, and gradients through them.

    That needs keys and values in all layers, and a head that `head_of` knows; gradient
    checkpointing keeps none.
    """
    if not shares_prompts(model):
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (
        not base._is_stateful
        and all(isinstance(layer, DynamicLayer) for layer in new_cache(model).layers)
        and not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    )


def shares_prompts(model: Any) -> bool:
    """Returns whether rollouts pass equal prompts through a model once, for all their replies.

    That needs keys and values to copy, and pays where `head_of` knows the model's head: with a
    large vocabulary. Sharded models, whose processes run equal passes, have no such head.
    """
    return "past_key_values" in forward_options(model) and head_of(model) is not None


def forward_options(model: Any) -> Mapping[str, Any]:
    """Returns the parameters of a model's forward pass, by name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters


def cached_pass(
    model: Any,
    token_ids: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor,
    cache: Any,
) -> Any:
    """Returns the output of a pass over the next tokens [n, L], with the last logits, [n, 1, V].

    The mask is of all tokens up to them, or attention's own if `takes_attention_masks`.

    For a large head, their hidden states are copied to adjacent memory: torch would multiply a view
    of some positions, as transformers' `logits_to_keep` makes one, by a copy of the head per row.
    """
    is_large = head_of(model) is not None

    def last_position(states: torch.Tensor) -> torch.Tensor:
        return states[:, -1:].contiguous() if is_large else states[:, -1:]

    with head_inputs(model, last_position):
        return continued_pass(model, token_ids, mask, positions, cache)


_takes_attention_masks: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def takes_attention_masks(model: Any) -> bool:
    """Returns whether passes over single tokens may get attention's masks, [n, 1, 1, L] or None.

    From a mask of tokens [n, L] transformers makes these in each pass, and waits for the device to
    learn whether any token is padding. Models whose layers all attend to all tokens by torch's own
    attention use nothing else of a mask; that is compared on a few tokens, once.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base not in _takes_attention_masks:
        _takes_attention_masks[base] = has_plain_cache(base) and _is_same_by_any_mask(model)
    return _takes_attention_masks[base]


def has_plain_cache(model: Any) -> bool:
    """Returns whether a model keeps all keys and values, for torch's own attention."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (
        "past_key_values" in forward_options(model)
        and not base._is_stateful
        and base.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
        and all(type(layer) is DynamicLayer for layer in new_cache(base).layers)
    )


@torch.no_grad()
def _is_same_by_any_mask(model: Any) -> bool:
    """Returns whether a token's logits are the same by a mask of tokens and by attention's."""
    ids = torch.arange(1, 5, device=model.get_input_embeddings().weight.device).expand(2, -1)
    adapter = getattr(model, "adapter_forward", None)
    with nullcontext() if adapter is None else adapter.of(OwnRows()):
        for is_padded in (True, False):
            mask = torch.ones_like(ids, dtype=torch.bool)
            mask[0, 0] = not is_padded
            positions = mask.cumsum(1) - mask.long()
            found = []
            for own in (mask, mask[:, None, None] if is_padded else None):
                cache = new_cache(model)
                continued_pass(model, ids[:, :-1], mask[:, :-1], positions[:, :-1], cache)
                try:
                    output = continued_pass(model, ids[:, -1:], own, positions[:, -1:], cache)
                except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
                    return False  # the model reads the mask of tokens
                found.append(output.logits)
            if not torch.equal(*found):
                return False
    return True


def set_preferences(model: Any, preferences: torch.Tensor | None) -> None:
    """Sets the preferences [b, M] of rows in subsequent passes; None for equal shares.

    They remain until others are set, since gradient checkpointing recomputes activations in the
    backward pass. Adapters that are not conditioned ignore them.
    """
    forward = getattr(model, "adapter_forward", None)  # an `AdapterForward`
    if forward is not None:
        forward.rows.preferences = preferences


def response_logits(logits: torch.Tensor, context_length: int, temperature: float) -> torch.Tensor:
    """Selects the logits [B, Q + T, V] that predict the response, tempered, [B, T, V].

    At least in float32: dividing in lower precision would round each logit once more.
    """
    logits = logits[:, context_length - 1 : -1]  # a token is predicted one position before it
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) / (temperature + TEMPERATURE_GUARD)


def token_scores(output: Any, sequences: Sequences, temperature: float) -> TokenScores:
    """Returns the scores of the responses' tokens from the output of a pass over them."""
    if isinstance(output, ReplyStates):
        return scores_of_states(output.head, output.states, sequences.responses, temperature)
    if output.head is not None:
        states = output.hidden_states[0][:, sequences.context_length - 1 : -1]  # [B, T, H]
        return scores_of_states(output.head, states, sequences.responses, temperature)
    logits = response_logits(output.logits, sequences.context_length, temperature)
    return scores_of_logits(logits, sequences.responses)


def scores_of_logits(logits: torch.Tensor, token_ids: torch.Tensor) -> TokenScores:
    """Returns the scores of tokens [B, T] under tempered logits [B, T, V]."""
    logprobs = token_logprobs(logits, token_ids)
    # computed only where it is logged
    return TokenScores(logprobs, lambda: entropy(logits.detach()))


def scores_of_states(
    head: Head, states: torch.Tensor, token_ids: torch.Tensor, temperature: float
) -> TokenScores:
    """Returns the scores of tokens [B, T] from the head's inputs [B, T, H]."""
    logprobs, entropies = chosen_logprobs(head, states, token_ids, temperature + TEMPERATURE_GUARD)
    return TokenScores(logprobs, lambda: entropies)


def response_logprobs(
    model: Any, sequences: Sequences, temperature: float, *, prompts_once: bool = False
) -> torch.Tensor:
    """Returns the responses' log-probabilities from a forward pass, shape [B, T]."""
    set_preferences(model, sequences.queries.preferences)
    output = (
        forward_prompts_once(model, sequences)
        if prompts_once
        else forward(model, sequences.query_responses, sequences.attention_mask)
    )
    return token_scores(output, sequences, temperature).logprobs
