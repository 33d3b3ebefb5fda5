"""Given replies in the policy's tokens, as it would sample them after the prompt.

With a chat template, prompt and reply are rendered together, and the tokens after the prompt's are
the reply's: white space, an empty block of reasoning and the end of the turn are those that the
template writes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from firm.alignment.pairs import Pair
from firm.alignment.prompts import (
    ChatMessage,
    PromptFormat,
    common_beginning,
    format_dialogue,
    format_prompt,
)


@dataclass(frozen=True)
class EncodedReplies:
    """The replies of a pair in the policy's tokens."""

    reply_ids: tuple[list[int], list[int]]
    """Tokens of the preferred and the other reply, with the end token."""
    num_unread: int = 0
    """Number of tokens at the end of the prompt that the template does not write before a given
    reply, such as those that open a block of reasoning."""


def encode_replies(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_format: PromptFormat,
    end_ids: Sequence[int],
    on_note: Callable[[str], None] = lambda _: None,
) -> list[EncodedReplies]:
    """Returns the replies of pairs in the policy's tokens, without truncation.

    Args:
        pairs: The pairs.
        tokenizer: Tokenizer of the policy, as returned by `load_tokenizer`.
        prompt_format: Format of the prompts.
        end_ids: Tokens that end a sampled reply; see `end_token_ids`. A reply ends at the first one
            that the template writes after its text; if there is none, the first of these is added.
        on_note: Receives notes on texts that the template writes otherwise than given.

    Raises:
        ValueError: The format has no place for a field of a reply, such as `tool_calls`, or the
            template rejects a conversation.
    """
    if prompt_format.kind_for(tokenizer) == "chat":
        return _from_template(pairs, tokenizer, prompt_format, end_ids, on_note)
    is_hh = prompt_format.kind_for(tokenizer) == "hh"
    texts = []
    for pair in pairs:
        if names := pair.extra_fields:
            raise _no_place(pair, names[0], "a prompt format without a chat template")
        # in HH-RLHF's form a space follows the assistant's tag
        texts += [f" {text.strip()}" if is_hh else text for text in pair.replies]
    ids = [[*own, *end_ids[:1]] for own in _token_ids(texts, tokenizer)]
    return [EncodedReplies((ids[at], ids[at + 1])) for at in range(0, len(ids), 2)]


def _from_template(
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    end_ids: Sequence[int],
    on_note: Callable[[str], None],
) -> list[EncodedReplies]:
    texts, closings, ends = [], [], list(end_ids[:1])
    for pair in pairs:
        opening = format_prompt(pair.prompt, tokenizer, prompt_format)
        texts.append(opening)
        for text, message in zip(pair.replies, pair.messages, strict=True):
            whole = format_dialogue(pair.prompt, message, tokenizer, prompt_format)
            _check_fields(pair, message, whole, tokenizer, prompt_format)
            texts.append(whole)
            closings.append(_closing(opening, whole, text.strip()))
    ids = _token_ids(texts, tokenizer)
    num_after_end = _num_after_end(closings, tokenizer, end_ids)
    encoded, unread, num_changed = [], Counter[str](), 0
    for at, pair in enumerate(pairs):
        opening, *wholes = texts[3 * at : 3 * at + 3]
        opening_ids, *whole_ids = ids[3 * at : 3 * at + 3]
        # a token that spans the end of the prompt is the reply's
        num_read = len(common_beginning(opening_ids, *whole_ids))
        if not all(whole.startswith(opening) for whole in wholes):
            _check_prompt(pair, opening, wholes, tokenizer, prompt_format)
            unread[str(tokenizer.decode(opening_ids[num_read:]))] += 1
        first, second = (
            own[num_read : len(own) - after] if after is not None else own[num_read:] + ends
            for own, after in zip(whole_ids, num_after_end[2 * at : 2 * at + 2], strict=True)
        )
        encoded.append(EncodedReplies((first, second), len(opening_ids) - num_read))
        num_changed += sum(
            text.strip() not in whole for text, whole in zip(pair.replies, wholes, strict=True)
        )
    for tail, count in unread.items():
        on_note(
            f"the chat template ends a prompt with {tail!r} when a reply is sampled, and writes "
            f"given replies without it: {count} of {len(pairs)} pairs are learned without it."
        )
    if num_changed:
        on_note(
            f"the chat template changes the text of {num_changed} of {2 * len(pairs)} replies, "
            "which are learned as it writes them."
        )
    return encoded


def _closing(opening: str, whole: str, text: str) -> str:
    """Returns what follows a reply's text; all that follows the prompt if it has none."""
    start = opening if whole.startswith(opening) else common_beginning(opening, whole)
    reply = whole[len(start) :]
    return reply.rpartition(text)[2] if text else reply


def _token_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    ids: Any = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _num_after_end(
    closings: Sequence[str], tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]
) -> list[int | None]:
    """Returns how many tokens follow the first end token of each closing; None if it has none."""
    by_closing: dict[str, int | None] = {}
    for closing in dict.fromkeys(closings):
        (ids,) = _token_ids([closing], tokenizer)
        first = next((at for at, token in enumerate(ids) if token in end_ids), None)
        by_closing[closing] = None if first is None else len(ids) - first - 1
    return [by_closing[closing] for closing in closings]


def _check_fields(
    pair: Pair,
    message: ChatMessage,
    whole: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
) -> None:
    """Raises `ValueError` if the template omits a field of a reply."""
    for name in pair.extra_fields:
        if not message.get(name):
            continue
        bare = {"content": "", **{key: own for key, own in message.items() if key != name}}
        if format_dialogue(pair.prompt, bare, tokenizer, prompt_format) == whole:
            raise _no_place(pair, name, "the policy's chat template")


def _no_place(pair: Pair, name: str, what: str) -> ValueError:
    return ValueError(
        f"{pair.prompt.place or 'a pair'}: a reply has `{name}`, which {what} does not write: "
        "remove the field, or the row, or use a tokenizer whose template writes it."
    )


def _check_prompt(
    pair: Pair,
    opening: str,
    wholes: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
) -> None:
    """Raises `ValueError` if the template writes the conversation before a reply otherwise."""
    asked = format_prompt(pair.prompt, tokenizer, prompt_format, has_opening=False)
    same = common_beginning(opening, *wholes)
    if len(same) < len(common_beginning(opening, asked)):
        raise ValueError(
            f"{pair.prompt.place or 'a pair'}: the chat template writes the prompt otherwise when "
            f"a reply follows it, from character {len(same) + 1} on: use a tokenizer with another "
            "template."
        )
