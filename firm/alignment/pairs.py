"""Pairs of replies that people ranked, in the forms of TRL's preference data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from firm.alignment.prompt_data import PromptsConfig, load_prompts
from firm.alignment.prompts import AUTO, Prompt, PromptFormat, is_hh
from firm.fields import NOT_IN_PAPER, configuration


@dataclass(frozen=True)
class Pair:
    """A prompt and two replies to it, of which people preferred the first."""

    prompt: Prompt
    chosen: str
    rejected: str
    objective: str = ""
    """Objective by which people ranked the replies; empty if there is only one."""

    @property
    def replies(self) -> tuple[str, str]:
        """The preferred reply and the other one."""
        return self.chosen, self.rejected


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
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    objective: str = "",
    given: Iterable[Prompt] | None = None,
    prompt_format: PromptFormat = AUTO,
    on_note: Callable[[str], None] | None = None,
) -> list[Pair]:
    """Returns the pairs of one or more sources, or of the given rows, in order.

    A row has a `prompt`, text or chat messages, and `chosen` and `rejected` as texts or as messages
    of the assistant; or whole dialogues as `chosen` and `rejected`, with or without a `prompt` that
    they repeat. Rows whose two replies are equal, or follow different prompts, are dropped, and
    `on_note` receives their number. Limits on tokens require the policy's tokenizer.

    Raises:
        ValueError: A source cannot be read, a row holds no two replies, or no pair is left.
    """
    prompts = load_prompts(
        config, tokenizer, given=given, prompt_format=prompt_format, on_note=on_note
    )
    named_by = getattr(config, "named_by", "")
    numbered = [
        (number, row)
        for number, row in enumerate(prompts, 1)
        if not named_by or row.columns.get(named_by) == objective
    ]
    if not numbered:
        raise ValueError(
            f"no row of {len(prompts)} has {objective!r} in the field {named_by!r}: correct "
            "named_by, or the objective's name."
        )
    rows = [pair_of(row, config.ranked_by, place=f"pair {number}") for number, row in numbered]
    pairs = [
        replace(pair, objective=objective)
        for pair in rows
        if pair and pair.chosen.strip() != pair.rejected.strip()
    ]
    if not pairs:
        raise ValueError(
            f"no pair is left of {len(rows)}, since their replies are equal or follow different "
            "prompts: choose another source."
        )
    if on_note and len(pairs) < len(rows):
        on_note(
            f"{len(rows) - len(pairs)} of {len(rows)} pairs are dropped, since their replies are "
            "equal or follow different prompts."
        )
    return pairs


def pair_of(prompt: Prompt, ranked_by: str = "", *, place: str = "the pair") -> Pair | None:
    """Returns the pair that a prompt's row holds; None if its replies follow different prompts.

    Args:
        prompt: Prompt with the fields of its row.
        ranked_by: See `PairsConfig.ranked_by`.
        place: Name of the row for messages.

    Raises:
        ValueError: The row does not hold two replies; the message quotes no text.
    """
    columns = prompt.columns
    better, worse = "chosen", "rejected"
    if ranked_by:
        index = columns.get(ranked_by)
        if index not in (0, 1):
            raise ValueError(
                f"{place}: `{ranked_by}` must be 0 or 1, the index of the preferred reply, got "
                f"{index!r}: correct it, or drop the row."
            )
        better, worse = f"response_{index}", f"response_{1 - index}"
    texts = []
    for name in (better, worse):
        before, reply = _split(columns.get(name))
        if not reply:
            raise ValueError(
                f"{place}: `{name}` must be a reply, as a text or as messages that end with the "
                f"assistant's, and the row has the fields {', '.join(columns) or 'none'}: correct "
                "the row."
            )
        if before and before != [_bare(turn) for turn in prompt.messages]:
            return None
        texts.append(reply)
    # whole dialogues as texts open with the prompt
    opening = (prompt.text or "").lstrip()
    opens = [bool(opening) and text.lstrip().startswith(opening) for text in texts]
    if all(opens):
        texts = [text.lstrip()[len(opening) :] for text in texts]
    elif any(opens) and is_hh(opening):
        return None
    return Pair(prompt, *texts)


def _split(value: Any) -> tuple[list[tuple[Any, str]], str]:
    """Returns the messages before a reply, and the reply; it is empty if there is none."""
    if isinstance(value, str):
        return [], value
    if not isinstance(value, Sequence) or not all(isinstance(turn, Mapping) for turn in value):
        return [], ""
    turns = [_bare(turn) for turn in value]
    start = len(turns)
    while start and turns[start - 1][0] == "assistant":
        start -= 1
    return turns[:start], "\n\n".join(content for _, content in turns[start:])


def _bare(turn: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns a message's role and stripped text."""
    content = turn.get("content") or ""
    if isinstance(content, list):  # parts of text, which prompts have joined
        content = "".join(str(part.get("text") or "") for part in content)
    return turn.get("role"), content.strip()
