"""Pairs of ranked replies as rows of tokens, with the reference's log-probabilities.

The log-probabilities under the reference do not change during training. They are computed once and
kept in the user's cache, by a hash of everything that they depend on: the reference's parameters
and the tokens.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.pairs import Pair
from firm.alignment.prompts import PromptFormat, fitting_token_ids
from firm.alignment.reply_tokens import encode_replies
from firm.alignment.sequences import BY_OBJECTIVE, Examples, Queries, Sequences, left_padded
from firm.alignment.tensor_cache import Tensors, cached_tensors

TAG = b"firm reference log-probabilities 1"
"""Changes whenever equal tokens and parameters would give other values."""


@dataclass(frozen=True)
class EncodedPair:
    """A pair in the policy's tokens."""

    pair: Pair
    objective: int
    """Index of the objective by which the replies are ranked."""
    prompt_ids: list[int]
    reply_ids: tuple[list[int], list[int]]
    """Tokens of the preferred and the other reply, with the end token."""
    is_cut: tuple[bool, bool, bool]
    """Whether the prompt and each reply were truncated."""
    reference: tuple[float, float] = (0.0, 0.0)
    """Log-probabilities of the replies under the reference; see `with_references`."""


@dataclass(frozen=True)
class PairBatch(Examples):
    """B pairs, each ranked by one objective."""

    queries: Queries
    """The prompts."""
    replies: torch.Tensor
    """Token ids of the preferred and the other reply, right-padded, [B, 2, T]."""
    num_tokens: torch.Tensor
    """Number of tokens of each reply, [B, 2]."""
    reference: torch.Tensor
    """Log-probabilities of the replies under the reference, float32 [B, 2]."""
    ranked: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """True if the objective ranks the pair, bool [M, B]."""
    cut: torch.Tensor
    """Whether the prompt and each reply were truncated, bool [B, 3]."""

    @property
    def is_judged(self) -> torch.Tensor:
        """True if the objective ranks the pair, bool [M, B] on the CPU."""
        return self.ranked.cpu()

    @property
    def preferences(self) -> torch.Tensor | None:
        """Preferences of the pairs for a conditioned policy, [B, M]."""
        return self.queries.preferences

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of the prompt and the longer reply, [B]."""
        return self.queries.lengths + self.num_tokens.amax(1)  # [B]

    def trimmed(self) -> "PairBatch":
        """Returns the pairs without columns that are padding in all prompts, or in all replies."""
        replies = self.replies[:, :, : int(self.num_tokens.max())]
        return replace(self, queries=self.queries.trimmed(), replies=replies)

    @property
    def sequences(self) -> Sequences:
        """The 2 B replies with their prompts; those of a pair are adjacent."""
        queries = self.queries.repeated(2)  # [2 B, Q]
        ids = torch.cat((queries.token_ids, self.replies.flatten(0, 1)), dim=1)
        return Sequences(queries, ids, self.num_tokens.flatten())


def encode_pairs(
    pairs: Sequence[Pair],
    objectives: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_format: PromptFormat,
    end_ids: Sequence[int],
    max_prompt_tokens: int,
    max_reply_tokens: int,
    on_note: Callable[[str], None] = lambda _: None,
) -> list[EncodedPair]:
    """Returns pairs in the policy's tokens, without those that are equal after truncation.

    Prompts are truncated as for sampling. Replies are truncated at the end and then lack the end
    token, as a sampled reply of maximum length.

    Args:
        pairs: Pairs with the names of their objectives.
        objectives: Names of the M objectives.
        tokenizer: Tokenizer of the policy, as returned by `load_tokenizer`.
        prompt_format: Format of the prompts.
        end_ids: Tokens that end a sampled reply; see `end_token_ids`.
        max_prompt_tokens: Maximum number of tokens of a prompt.
        max_reply_tokens: Maximum number of tokens of a reply, with the end token.
        on_note: Receives notes on dropped pairs and on what a chat template changes.

    Raises:
        ValueError: As in `encode_replies`; also when prompts are truncated to the tokens with which
            the template opens a reply.
    """
    prompt_ids, is_cut = fitting_token_ids(
        [pair.prompt for pair in pairs],
        tokenizer,
        prompt_format=prompt_format,
        max_tokens=max_prompt_tokens,
    )
    replies = encode_replies(
        pairs, tokenizer, prompt_format=prompt_format, end_ids=end_ids, on_note=on_note
    )
    encoded = []
    for pair, ids, was_cut, own in zip(pairs, prompt_ids, is_cut, replies, strict=True):
        if was_cut and len(ids) <= own.num_unread:
            raise ValueError(
                f"max_prompt_tokens must be above {own.num_unread}, the tokens with which the chat "
                f"template opens a reply, got {max_prompt_tokens}."
            )
        # a cut reply has no end token
        first, second = (reply[:max_reply_tokens] for reply in own.reply_ids)
        are_cut = [len(reply) > max_reply_tokens for reply in own.reply_ids]
        if first != second:  # equal replies have no gradient
            encoded.append(
                EncodedPair(
                    pair,
                    objectives.index(pair.objective),
                    ids[: len(ids) - own.num_unread],
                    (first, second),
                    (was_cut, are_cut[0], are_cut[1]),
                )
            )
    if len(encoded) < len(pairs):
        on_note(
            f"{len(pairs) - len(encoded)} of {len(pairs)} pairs are dropped, since their replies "
            f"are equal after truncation to {max_reply_tokens} tokens."
        )
    return encoded


def collate(pairs: Sequence[EncodedPair], num_objectives: int, *, pad_id: int) -> PairBatch:
    """Returns pairs as a batch, padded to the longest prompt and reply."""
    token_ids, lengths = left_padded([pair.prompt_ids for pair in pairs], fill=pad_id)
    rows = [ids for pair in pairs for ids in pair.reply_ids]
    longest = max(map(len, rows))  # T
    replies = torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in rows])
    objectives = torch.tensor([pair.objective for pair in pairs])
    return PairBatch(
        Queries([pair.pair.prompt for pair in pairs], token_ids, lengths),
        replies.view(len(pairs), 2, longest),
        torch.tensor([len(ids) for ids in rows]).view(-1, 2),
        torch.tensor([pair.reference for pair in pairs], dtype=torch.float32),
        objectives == torch.arange(num_objectives)[:, None],
        torch.tensor([pair.is_cut for pair in pairs]),
    )


def with_references(
    pairs: Sequence[EncodedPair],
    logprobs_of: Callable[[Sequence[EncodedPair]], torch.Tensor],
    reference: bytes | None,
) -> list[EncodedPair]:
    """Returns the pairs with the log-probabilities of their replies under the reference.

    Args:
        pairs: N pairs.
        logprobs_of: Computes the log-probabilities, [N, 2].
        reference: Fingerprint of the reference, of `fingerprint`; None reads and writes no cache.
    """
    if not pairs:
        return []
    if reference is None:
        values = logprobs_of(pairs)
    else:
        digest = hashlib.blake2b(TAG + reference, digest_size=20)
        for pair in pairs:
            digest.update(repr((pair.prompt_ids, *pair.reply_ids)).encode())

        def is_sound(tensors: Tensors) -> bool:
            own = tensors.get("logprobs")
            return own is not None and own.shape == (len(pairs), 2) and bool(own.isfinite().all())

        values = cached_tensors(
            "references",
            digest.hexdigest(),
            lambda: {"logprobs": logprobs_of(pairs)},
            is_sound=is_sound,
        )["logprobs"]
    rows = zip(pairs, values.tolist(), strict=True)
    return [replace(pair, reference=tuple(row)) for pair, row in rows]


def fingerprint(model: Any, *settings: Any) -> bytes:
    """Returns a hash of a model's frozen parameters, its configuration and further settings."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=20)
    digest.update(model.config.to_json_string().encode())  # equal parameters may be used otherwise
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if not tensor.requires_grad:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(bits.numpy())
    return digest.digest()
