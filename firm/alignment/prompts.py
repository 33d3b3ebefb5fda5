r"""Stage 1 of a round: prompts in the words that a policy reads.

A prompt is a dialogue in the form of Anthropic's HH-RLHF, `"\n\nHuman: ...\n\nAssistant:"`; reward
models see it like that. The policy sees what `PromptFormat` makes of it: the dialogue as it is,
the messages of its tokenizer's chat template, or the bare question inside a text of the user's.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from firm.fields import NOT_IN_PAPER, configuration

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TAGS = {"user": HUMAN, "assistant": ASSISTANT}
_SOURCES = ("prompt", "messages", "chosen")
"""Fields that a prompt is read from, the first that a row has."""
_ARGUMENTS = ("prompts", "completions")
"""Keywords of a reward function that no field of the data may take."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One dialogue that waits for a reply."""

    text: str
    r"""Turns that open with `"\n\nHuman:"` and `"\n\nAssistant:"`; the last one is an empty turn of
    the assistant."""
    kind: str = ""
    """The group that it comes from, such as "helpful"; empty when the data do not say."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The row's further fields, such as an `answer`, which reward functions get by keyword."""


@configuration(source=NOT_IN_PAPER)
class PromptFormat:
    """How a dialogue becomes the text that the policy continues."""

    name: Literal["auto", "hh", "chat", "plain"] = "auto"
    """"hh": the dialogue as it is; "chat": its turns in the tokenizer's chat template; "plain": the
    last human turn alone, without role tags; "auto": chat where the tokenizer has a template, else
    hh."""
    template: str = "{prompt}"
    """The text around the last human turn under "plain"; {prompt} is where the turn goes."""
    system_prompt: str = ""
    """Opening system message under "chat"; none when empty."""
    date_string: str = "26 Jul 2024"
    """The date that a chat template may print (Llama 3.2 does). Left to the template it would be
    today's, and prompts would change from day to day."""

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ValueError(
                "the prompt template must say where the prompt goes, got "
                f"{self.template!r}: put {{prompt}} into it."
            )


AUTO = PromptFormat()


def as_dialogue(text: str) -> str:
    r"""Returns the text as a dialogue that waits for a reply.

    White space around it is dropped; a text without role tags counts as one human turn.

    Raises:
        ValueError: The text has role tags, but does not begin with the human's or does not end with
            the assistant's.

    >>> as_dialogue("How are you?")
    '\n\nHuman: How are you?\n\nAssistant:'
    """
    dialogue = "\n\n" + text.strip()
    if HUMAN not in dialogue and ASSISTANT not in dialogue:
        return f"{HUMAN} {text.strip()}{ASSISTANT}"
    if not (dialogue.startswith(HUMAN) and dialogue.endswith(ASSISTANT)):
        raise ValueError(
            f"a dialogue must begin with {HUMAN!r} and end with {ASSISTANT!r}: "
            "add the missing tag, or remove all tags to make it one human turn."
        )
    return dialogue


def as_prompt(row: Any, *, place: str, kind: str = "") -> Prompt:
    """Returns the prompt of one row of data, as `load_prompts` describes it.

    Raises:
        ValueError: The row is malformed; the message names the `place` and repeats no text.
    """
    expected = (
        "give an object with a text or chat turns as `prompt`, with `messages`, or with `chosen` "
        f"that has {ASSISTANT!r} inside."
    )
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: got a JSON {type(row).__name__}: {expected}")
    source = next((name for name in _SOURCES if row.get(name) is not None), "")
    text = row.get(source)
    if isinstance(text, list):
        try:
            text = dialogue_of_turns(text, drops_answer=source != "prompt")
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    elif source == "chosen" and isinstance(text, str):
        before, tag, _ = text.rpartition(ASSISTANT)
        text = before + tag
    if not isinstance(text, str) or not text.strip():
        got = "an empty text" if isinstance(text, str) else f"fields {', '.join(map(str, row))}"
        raise ValueError(f"{place}: no prompt in {got}: {expected}")
    kind = row.get("kind") or kind
    if not isinstance(kind, str):
        raise ValueError(f"{place}: `kind` must be a text, got {type(kind).__name__}.")
    for name, value in (("the prompt", text), ("`kind`", kind)):
        if half := re.search("[\ud800-\udfff]", value):
            raise ValueError(
                f"{place}: {name} has half a surrogate pair at character {half.start() + 1}, "
                "which no tokenizer reads: remove it."
            )
    try:
        dialogue = as_dialogue(text)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    columns = {str(name): value for name, value in row.items() if name not in (source, *_ARGUMENTS)}
    return Prompt(dialogue, kind, columns)


def dialogue_of_turns(turns: Sequence[Any], *, drops_answer: bool = False) -> str:
    r"""Returns chat messages with `role` and `content` as a dialogue that waits for a reply.

    What the system says opens the first human turn: a dialogue has no third speaker.

    Args:
        turns: Messages of "user", "assistant" and, in front, "system".
        drops_answer: Whether messages after the last one of the user are left out.

    Raises:
        ValueError: A message has no such role, or no text, or the last one is not the user's.

    >>> dialogue_of_turns([{"role": "user", "content": "Hi"}])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    spoken = [_spoken(turn, number) for number, turn in enumerate(turns, start=1)]
    while drops_answer and spoken and spoken[-1][0] == "assistant":
        spoken.pop()
    roles = [role for role, _ in spoken]
    if not roles or roles[-1] != "user" or "system" in roles[1:]:
        got = ", ".join(roles) or "none"
        raise ValueError(
            f"chat turns must end with the user's, the system's first, got {got}: add or remove "
            "turns."
        )
    if roles[0] == "system":
        (_, system), (role, first), *later = spoken
        spoken = [(role, f"{system}\n\n{first}"), *later]
    return "".join(f"{_TAGS[role]} {text}" for role, text in spoken) + ASSISTANT


def _spoken(turn: Any, number: int) -> tuple[str, str]:
    """Returns the role and the text of one chat message."""
    turn = turn if isinstance(turn, Mapping) else {}
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, list):  # parts, as models that see pictures have them
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if role not in ("system", *_TAGS) or not isinstance(content, str):
        raise ValueError(
            f"chat turn {number} must have a `role`, which is user, assistant or system, and a "
            "text as `content`: correct it."
        )
    return role, content.strip()


def parse_dialogue(text: str) -> list[dict[str, str]]:
    r"""Returns the turns as chat messages with `role` ("user" or "assistant") and `content`.

    Neighbouring turns of one speaker become one message, because chat templates expect speakers to
    alternate; empty turns vanish.

    >>> parse_dialogue("\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Bye\n\nAssistant:")[1]
    {'role': 'assistant', 'content': 'Hello!'}
    """
    _, *parts = re.split(r"\n\n(Human|Assistant):", text)
    turns = [
        ("user" if role == "Human" else "assistant", content.strip())
        for role, content in zip(parts[::2], parts[1::2], strict=True)
        if content.strip()
    ]
    return [
        {"role": role, "content": "\n\n".join(content for _, content in same)}
        for role, same in groupby(turns, key=lambda turn: turn[0])
    ]


def format_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat = AUTO
) -> str:
    """Returns the text that the policy continues, for a dialogue of any length.

    Raises:
        ValueError: The format is "chat" and the tokenizer has no chat template.
    """
    name = prompt_format.name
    if name == "auto":
        name = "chat" if tokenizer.chat_template else "hh"
    if name == "hh":
        return text
    if name == "plain":
        question = text.rpartition(HUMAN)[2].removesuffix(ASSISTANT).strip()
        return prompt_format.template.replace("{prompt}", question)
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompt format 'chat' needs a chat template, and the policy's tokenizer has none: "
            "choose 'hh' or 'plain'."
        )
    messages = parse_dialogue(text)
    if prompt_format.system_prompt:
        messages.insert(0, {"role": "system", "content": prompt_format.system_prompt})
    formatted = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, date_string=prompt_format.date_string
    )
    assert isinstance(formatted, str)
    return formatted


def truncate_by_turns(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    *,
    prompt_format: PromptFormat = AUTO,
) -> str:
    """Returns the longest end of a dialogue that fits, with its last human turn and the tag.

    What is measured is the formatted prompt, special tokens included. The oldest turns go first,
    the human's with the reply to it. If the last human turn alone is too long, it loses its
    beginning.

    Raises:
        ValueError: Not even an empty human turn fits.
    """
    text = as_dialogue(text)

    def fits(dialogue: str) -> bool:
        formatted = format_prompt(dialogue, tokenizer, prompt_format)
        return len(_token_ids([formatted], tokenizer)[0]) <= max_tokens

    for turn in re.finditer(HUMAN, text):
        if fits(text[turn.start() :]):
            return text[turn.start() :]
    question = text.rpartition(HUMAN)[2].removesuffix(ASSISTANT).lstrip()
    if not fits(f"{HUMAN} {ASSISTANT}"):
        raise ValueError(
            f"no prompt fits into {max_tokens} tokens, because what the prompt format "
            f"{prompt_format.name!r} adds is longer: raise the limit or shorten the template."
        )
    too_early, fitting = 0, len(question)
    while fitting - too_early > 1:
        middle = (too_early + fitting) // 2
        if fits(f"{HUMAN} {question[middle:]}{ASSISTANT}"):
            fitting = middle
        else:
            too_early = middle
    return f"{HUMAN} {question[fitting:]}{ASSISTANT}"


def encode_prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
) -> torch.Tensor:
    """Returns the token ids of formatted prompts, [B, T], padded on the left.

    A prompt over the limit keeps its end, and its BOS when the tokenizer gives one; how many were
    cut is logged. `truncate_by_turns` cuts where a reader would, so call it before.

    Raises:
        ValueError: A text has no token, there is no pad token, or the limit leaves no room.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError("prompts of several lengths need a pad token: set tokenizer.pad_token.")
    if max_prompt_tokens < 2:
        raise ValueError(f"max_prompt_tokens must be at least 2, got {max_prompt_tokens}.")
    rows, num_cut = [], 0
    for index, ids in enumerate(_token_ids(texts, tokenizer)):
        if not ids:
            raise ValueError(f"prompt {index} of {len(texts)} has no token: give it some text.")
        if len(ids) > max_prompt_tokens:
            start = [ids[0]] if ids[0] == tokenizer.bos_token_id else []
            ids = start + ids[len(ids) - max_prompt_tokens + len(start) :]
            num_cut += 1
        rows.append(ids)
    if num_cut:
        logger.info("%d of %d prompts cut to %d tokens", num_cut, len(rows), max_prompt_tokens)
    length = max(map(len, rows), default=0)
    padded = [[tokenizer.pad_token_id] * (length - len(ids)) + ids for ids in rows]
    return torch.tensor(padded, dtype=torch.long)


def _token_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Returns the token ids of each text; a BOS that the chat template spelt out stands once."""
    rows = tokenizer(list(texts), verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in rows]
