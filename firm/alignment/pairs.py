"""Pairs of replies that people ranked, in the forms of TRL's preference data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from firm.alignment.prompt_data import PromptsConfig, load_prompts
from firm.alignment.prompts import (
    AUTO,
    HUMAN,
    ChatMessage,
    Prompt,
    PromptFormat,
    is_hh,
    plain_message,
)
from firm.base.fields import NOT_IN_PAPER, configuration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLY_FIELDS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that are part of a reply, beside its text."""


@dataclass(frozen=True)
class Pair:
    """A prompt and two replies to it, of which people preferred the first."""

    prompt: Prompt
    chosen: str
    """Text of the preferred reply."""
    rejected: str
    """Text of the other one."""
    objective: str = ""
    """Objective by which people ranked the replies; empty if there is only one."""
    fields: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    """Further fields of the two replies' messages, such as `tool_calls`."""

    @property
    def replies(self) -> tuple[str, str]:
        """The preferred reply and the other one."""
        return self.chosen, self.rejected

    @property
    def messages(self) -> tuple[ChatMessage, ChatMessage]:
        """The replies as messages of the assistant."""
        first, second = (
            {"role": "assistant", "content": text, **fields}
            for text, fields in zip(self.replies, self.fields, strict=True)
        )
        return first, second

    @property
    def extra_fields(self) -> list[str]:
        """Names of `REPLY_FIELDS` that a reply has."""
        return [name for name in REPLY_FIELDS if any(name in fields for fields in self.fields)]

    @property
    def is_equal(self) -> bool:
        """Whether the replies are the same, up to white space around their texts."""
        parts = [
            (text.strip(), *(fields.get(name) for name in REPLY_FIELDS))
            for text, fields in zip(self.replies, self.fields, strict=True)
        ]
        return parts[0] == parts[1]

    def swapped(self) -> "Pair":
        """Returns the pair with the other reply as the preferred one."""
        fields = self.fields[::-1]
        return replace(self, chosen=self.rejected, rejected=self.chosen, fields=fields)


@configuration
class PairsConfig(PromptsConfig):
    """Source of pairs: prompts whose rows also hold two ranked replies."""

    ranked_by: Annotated[str, NOT_IN_PAPER] = ""
    """Field with the index of the preferred reply, for rows that hold `response_0` and `response_1`
    and rank them by several criteria: "better_response_id" or "safer_response_id" in
    PKU-SafeRLHF. Empty: rows hold `chosen` and `rejected`."""


@configuration(source=NOT_IN_PAPER)
class RankedPairsConfig(PairsConfig):
    """Pairs that people ranked by one objective, and the parts to hold out."""

    named_by: str = ""
    """Field that names the objective of a row, for a source with several objectives: rows in which
    it differs from the objective's name are left out. Empty: the objective ranks all rows."""
    validation: str | None = None
    """Split to evaluate on after every round, such as "test[:50%]"; null: pairs of up to a tenth of
    the prompts in `split`, which are not trained on."""
    test: str | None = None
    """Split to evaluate on before and after training; null: likewise."""


def load_pairs(
    config: PairsConfig,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    objective: str = "",
    given: Iterable[Prompt] | None = None,
    prompt_format: PromptFormat = AUTO,
    on_note: Callable[[str], None] | None = None,
) -> list[Pair]:
    """Returns the pairs of one or more sources, or of the given rows, in order.

    A row has a `prompt`, text or chat messages, and `chosen` and `rejected` as texts or as messages
    of the assistant. If it has none, the prompt is the common beginning of the two. Otherwise only
    dialogues repeat it, as messages or in HH-RLHF's form: a text that happens to begin as its
    prompt does is kept whole. Rows whose two replies are equal, or follow different prompts, and
    dialogues that end without one are dropped, and `on_note` receives their number. Limits on
    tokens require the policy's tokenizer.

    Raises:
        ValueError: A source cannot be read, a row holds no two replies or a reply with more than
            text and `REPLY_FIELDS`, or no pair is left.
    """
    prompts = load_prompts(
        config, tokenizer, given=given, prompt_format=prompt_format, on_note=on_note
    )
    named_by = getattr(config, "named_by", "")
    chosen = [row for row in prompts if not named_by or row.columns.get(named_by) == objective]
    if not chosen:
        raise ValueError(
            f"no row of {len(prompts)} has {objective!r} in the field {named_by!r}: correct "
            "named_by, or the objective's name."
        )
    rows = [pair_of(row, config.ranked_by, objective=objective) for row in chosen]
    pairs = [pair for pair in rows if pair and not pair.is_equal]
    if not pairs:
        raise ValueError(
            f"no pair is left of {len(rows)}, since their replies are equal or follow different "
            "prompts: choose another source."
        )
    if on_note and len(pairs) < len(rows):
        on_note(
            f"{len(rows) - len(pairs)} of {len(rows)} pairs are dropped, since their replies are "
            "equal, empty or follow different prompts."
        )
    return pairs


def pair_of(prompt: Prompt, ranked_by: str = "", *, objective: str = "") -> Pair | None:
    """Returns the pair that a prompt's row holds; None if its replies follow different prompts.

    Args:
        prompt: Prompt with the fields of its row.
        ranked_by: See `PairsConfig.ranked_by`.
        objective: Objective by which the replies are ranked.

    Raises:
        ValueError: The row does not hold two replies; the message quotes no text.
    """
    columns, place = prompt.columns, prompt.place or "the pair"
    better, worse = "chosen", "rejected"
    if ranked_by:
        if ranked_by not in columns:
            raise ValueError(
                f"{place}: has no field `{ranked_by}` with the index of the preferred reply, only "
                f"{', '.join(columns)}: correct ranked_by, or drop the row."
            )
        index = columns[ranked_by]
        if isinstance(index, bool) or index not in (0, 1):
            raise ValueError(
                f"{place}: `{ranked_by}` must be 0 or 1, the index of the preferred reply, got "
                f"{index!r}: correct it, or drop the row."
            )
        better, worse = f"response_{int(index)}", f"response_{1 - int(index)}"
    texts, fields = [], []
    for name in (better, worse):
        try:
            before, text, more = _split(columns.get(name), prompt)
        except ValueError as error:
            raise ValueError(f"{place}: `{name}`: {error}") from None
        if not text.strip() and not any(key in more for key in REPLY_FIELDS):
            others = f"the fields {', '.join(columns)}" if columns else "only a prompt"
            got = "an empty reply" if name in columns else others
            raise ValueError(
                f"{place}: `{name}` must be a reply, as a text or as messages that end with the "
                f"assistant's, got {got}: correct the row."
            )
        if before and before != [_bare(turn) for turn in prompt.messages]:  # another conversation
            return None
        texts.append(text)
        fields.append(more)
    opening = (prompt.text or "").lstrip()  # empty for chats, whose replies were split off above
    if prompt.is_implicit or any(map(is_hh, texts)):
        # the texts are whole dialogues, which begin with the prompt
        if not all(text.lstrip().startswith(opening) for text in texts):
            return None
        texts = [text.lstrip()[len(opening) :] for text in texts]
        if any(HUMAN in text for text in texts if is_hh(opening + text)):  # a further turn
            return None
        if not all(text.strip() or own for text, own in zip(texts, fields, strict=True)):
            return None
    return Pair(prompt, texts[0], texts[1], objective, (fields[0], fields[1]))


def _split(value: Any, prompt: Prompt) -> tuple[list[tuple[Any, ...]], str, dict[str, Any]]:
    """Returns the messages before a reply, its text, and further fields of its message.

    The text is empty if there is no reply.

    Raises:
        ValueError: A message of the reply is malformed, or not the assistant's.
    """
    if isinstance(value, str):
        return [], value, {}
    if not isinstance(value, Sequence) or not all(isinstance(turn, Mapping) for turn in value):
        return [], "", {}
    turns = [plain_message(turn, number) for number, turn in enumerate(value, 1)]
    start = len(turns)
    while start and turns[start - 1]["role"] == "assistant":  # a reply may have several messages
        start -= 1
    before = [_bare(turn) for turn in turns[:start]]
    own = [_bare(turn) for turn in prompt.messages]
    repeats = before[: len(own)] == own
    others = [role for role, *_ in (before[len(own) :] if repeats else before)]
    if others and (repeats or others[0] == "assistant"):
        roles = ", ".join((*others, "assistant"))
        raise ValueError(
            f"a reply must be messages of the assistant alone, got {roles}: cut the row before the "
            "other messages."
        )
    replies = turns[start:]
    more = [
        # data sets pad messages with empty lists of calls
        {
            k: v
            for k, v in turn.items()
            if k not in ("role", "content") and (v or k not in REPLY_FIELDS)
        }
        for turn in replies
    ]
    if len(replies) > 1 and (names := [n for n in REPLY_FIELDS if any(n in m for m in more)]):
        raise ValueError(f"a reply with `{names[0]}` must be one message, got {len(replies)}.")
    text = "\n\n".join((turn.get("content") or "").strip() for turn in replies)
    return before, text, more[0] if len(replies) == 1 else {}


def _bare(turn: ChatMessage) -> tuple[Any, ...]:
    """Returns a message's role, stripped text and calls, by which two messages are the same."""
    return turn["role"], (turn.get("content") or "").strip(), turn.get("tool_calls") or None
