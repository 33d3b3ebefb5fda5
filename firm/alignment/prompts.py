r"""Stage 1 of a local step: prompts, and their conversion to the policy's tokens.

A prompt is a conversation of messages, which is passed to the tokenizer's chat template unchanged,
or a text that is not parsed. The text form of Anthropic's HH-RLHF, `"\n\nHuman:
...\n\nAssistant:"`, is parsed into messages only if a whole source has it (`PromptsConfig.reader`),
so that a text cannot forge turns.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal

from firm.alignment.rendering import TemplateBroken, TemplateRejects, render
from firm.base.fields import NOT_IN_PAPER, configuration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TAGS = {"user": HUMAN, "assistant": ASSISTANT}
_SYSTEM = ("system", "developer")
"""Roles of system messages, which truncation keeps and HH-RLHF's form moves to human turns."""
_SOURCES = ("prompt", "messages", "chosen")
"""Fields that may contain a prompt; the first one present is used."""
_IMAGES = ("images", "image")
"""TRL's fields for the images of a prompt, which language models do not read."""
_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Keyword arguments of reward functions, which fields of the data must not override."""

ChatMessage = Mapping[str, Any]
"""One turn: `role`, `content`, and further fields of a chat template such as `tool_calls`."""

Reader = Literal["text", "hh"]
"""Reading of a text as a prompt: unchanged, or parsed into the turns of HH-RLHF's form."""


@dataclass(frozen=True)
class Prompt:
    """A conversation to reply to, with the further fields of its row."""

    text: str | None = None
    """Original text of the prompt; None for chat messages."""
    kind: str = ""
    """Group of the prompt, such as "helpful"; empty if the data do not specify it."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Further fields of the row, such as `answer`, passed to reward functions by keyword."""
    messages: tuple[ChatMessage, ...] = field(default=(), hash=False)
    """Messages of the conversation; by default a single user message with the text."""
    tools: Sequence[Any] | None = field(default=None, compare=False)
    """Tools that the chat template describes to the model."""
    template_options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Variables of the chat template, which override those of `PromptFormat`."""
    is_implicit: bool = field(default=False, compare=False)
    """True if the row has no field with the prompt, which is the beginning of `chosen`."""
    place: str = field(default="", compare=False)
    """Name of the row for messages, such as "pairs.jsonl, line 3"."""

    def __post_init__(self) -> None:
        if not self.messages:
            one_turn = ({"role": "user", "content": self.text or ""},)
            object.__setattr__(self, "messages", one_turn)

    @property
    def given(self) -> str | list[ChatMessage]:
        """The text or the messages, as passed to reward functions."""
        return list(self.messages) if self.text is None else self.text

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages as roles and texts for display, with tool calls as JSON."""
        turns = []
        for message in self.messages:
            calls = message.get("tool_calls")
            shown = json.dumps(calls, ensure_ascii=False, default=str) if calls else ""
            content = "\n".join(filter(None, [_content(message), shown]))
            turns.append({"role": message["role"], "content": content})
        return turns

    @property
    def transcript(self) -> str:
        """The text, or the messages with their roles, for logs, tables and terminals."""
        if self.text is not None:
            return self.text
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in self.turns)


@configuration(source=NOT_IN_PAPER)
class PromptFormat:
    """Conversion of a prompt to the text that the policy continues."""

    name: Literal["auto", "hh", "chat", "plain"] = "auto"
    """"chat": the messages in the tokenizer's chat template; "hh": the messages in HH-RLHF's form;
    "plain": only the last user message, without role tags; "auto": chat if the tokenizer has a
    template, otherwise hh. A text is one user message."""
    template: str = "{prompt}"
    """Template of "plain", in which {prompt} is replaced by the last user message."""
    system_prompt: str = ""
    """System message for conversations without one, under "chat"; none if empty."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}. A row's field
    `chat_template_kwargs` takes precedence."""
    date_string: str = "26 Jul 2024"
    """Date for chat templates that print one, such as Llama 3.2's. Otherwise they would use the
    current date, and prompts would change from day to day."""

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ValueError(f"the prompt template must contain {{prompt}}, got {self.template!r}.")

    def kind_for(self, tokenizer: "PreTrainedTokenizerBase") -> Literal["hh", "chat", "plain"]:
        """Returns the format of prompts for a tokenizer.

        Raises:
            ValueError: When the format is "chat" and the tokenizer has no chat template.
        """
        if self.name == "auto":
            return "chat" if tokenizer.chat_template else "hh"
        if self.name == "chat" and not tokenizer.chat_template:
            raise ValueError(
                "the prompt format 'chat' needs a chat template, and the policy's tokenizer has "
                "none: choose 'hh' or 'plain'."
            )
        return self.name

    def check(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Checks that every option applies to the format that a tokenizer gets.

        Raises:
            ValueError: When an option belongs to another format, or as in `kind_for`.
        """
        kind = self.kind_for(tokenizer)
        for option in fields(self):
            needed = _FORMATS_WITH.get(option.name, kind)
            default = {} if option.name == "template_options" else option.default
            if kind != needed and getattr(self, option.name) != default:
                raise ValueError(
                    f"policy.prompt.{option.name} applies to the prompt format {needed!r}, and the "
                    f"policy's prompts have {kind!r}: remove it, or set policy.prompt.name."
                )

    def stop_strings(self, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
        """Returns the strings that would start another human turn in a reply.

        Empty for chat templates, which end turns by tokens, and for plain prompts, which have no
        turns.
        """
        return [HUMAN] if self.kind_for(tokenizer) == "hh" else []


_FORMATS_WITH = {
    "template": "plain",
    "system_prompt": "chat",
    "template_options": "chat",
    "date_string": "chat",
}
"""Options of `PromptFormat` that apply to one format only."""
AUTO = PromptFormat()


# --- Rows of data ---------------------------------------------------------------------------------


def reader_of(rows: Iterable[Any]) -> Reader:
    """Returns "hh" if most texts among the rows' prompts have HH-RLHF's form, else "text".

    This is decided per source, so that a single row cannot cause its text to be parsed.
    """
    texts = [text for row in rows if isinstance(text := _source_of(row)[1], str)]
    # a few forged rows do not count
    return "hh" if 2 * sum(map(is_hh, texts)) > len(texts) else "text"


def is_hh(text: str) -> bool:
    r"""Returns whether a text starts with HH-RLHF's human tag and contains the assistant's tag.

    >>> is_hh("\n\nHuman: How are you?\n\nAssistant:"), is_hh("How are you?")
    (True, False)
    """
    dialogue = "\n\n" + text.strip()
    return dialogue.startswith(HUMAN) and ASSISTANT in dialogue


def as_prompt(row: Any, *, place: str, kind: str = "", reader: Reader = "text") -> Prompt:
    """Returns the prompt of a row of data, as described in `load_prompts`.

    Args:
        row: The row, a mapping of fields.
        place: Name of the row for messages.
        kind: Kind of the prompt if the row does not specify it.
        reader: Parsing of texts.

    Raises:
        ValueError: When the row is malformed; the message names the `place`, but quotes no text.
    """
    expected = (
        "use an object with a text or chat messages as `prompt`, with `messages`, or with "
        "`chosen` and `rejected`."
    )
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: got a JSON {type(row).__name__}: {expected}")
    source, value = _source_of(row)
    kind = row.get("kind") or kind
    if not isinstance(kind, str):
        raise ValueError(f"{place}: `kind` must be a text, got {type(kind).__name__}.")
    _check_readable({"the prompt": value, "`kind`": kind}, place)
    if images := [name for name in _IMAGES if row.get(name)]:
        raise ValueError(
            f"{place}: the row has `{images[0]}`, which a language model does not read: remove the "
            "field, or the row."
        )
    # of a ranked pair both replies are kept, also where the prompt is a part of one
    own = source if source != "chosen" else ""
    columns = {str(name): value for name, value in row.items() if name not in (own, *_ARGUMENTS)}
    try:
        if isinstance(value, str):
            text, messages = _read_text(value, row.get("rejected"), source, reader)
        else:
            rejected = row.get("rejected")
            if source == "chosen" and isinstance(value, list) and isinstance(rejected, list):
                value = common_beginning(value, rejected)  # the replies follow it
            text, messages = None, _read_messages(value, drops_answer=source != "prompt")
        tools, options = _template_fields(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if not (messages if text is None else text.strip()):
        names = (f"{name}{' (null)' * (own is None)}" for name, own in row.items())
        is_empty = value is not None and source != "chosen"  # which holds a reply, too
        got = "an empty text" if is_empty else f"fields {', '.join(names)}"
        raise ValueError(f"{place}: no prompt in {got}: {expected}")
    is_implicit = source == "chosen"
    return Prompt(
        text, kind, columns, messages, tools, options, is_implicit=is_implicit, place=place
    )


def _source_of(row: Any) -> tuple[str, Any]:
    """Returns the name and value of the field with a row's prompt; ("", None) if there is none."""
    row = row if isinstance(row, Mapping) else {}
    source = next((name for name in _SOURCES if row.get(name) is not None), "")
    return source, row.get(source)


def _read_text(
    text: str, rejected: Any, source: str, reader: Reader
) -> tuple[str, tuple[ChatMessage, ...]]:
    """Returns a prompt's text, and its messages if the reader parses it."""
    if reader == "hh":
        if source == "chosen":
            before, tag, _ = text.rpartition(ASSISTANT)
            text = before + tag
        text = _hh_dialogue(text)
        return text, _turns(text)
    if source == "chosen":  # the prompt is the common prefix of the two
        text = _common_beginning(text, rejected)
    return text, ()


def _hh_dialogue(text: str) -> str:
    """Returns a text in HH-RLHF's form, stripped.

    A text without tags becomes one human turn.
    """
    dialogue = "\n\n" + text.strip()
    if text.strip() and HUMAN not in dialogue and ASSISTANT not in dialogue:
        return f"{HUMAN} {text.strip()}{ASSISTANT}"
    if not (dialogue.startswith(HUMAN) and dialogue.endswith(ASSISTANT)):
        raise ValueError(
            f"a text in HH-RLHF's form must start with {HUMAN!r} and end with {ASSISTANT!r}: "
            "add the missing tag, or set `reader: text` to use texts unchanged."
        )
    return dialogue


def _common_beginning(chosen: str, rejected: Any) -> str:
    if not isinstance(rejected, str):
        raise ValueError(
            "a row with a text as `chosen` needs a text `rejected`, so that their common prefix is "
            f"the prompt, or HH-RLHF's form with {ASSISTANT!r}: add one of them."
        )
    shared = common_beginning(chosen, rejected)
    following = (text[len(shared) : len(shared) + 1] for text in (chosen, rejected))
    if shared[-1:].isalnum() and any(character.isalnum() for character in following):
        shared = re.sub(r"\w+\Z", "", shared) or shared  # a shared part of a word is the replies'
    # the space before a word belongs to the reply's first token
    return shared.removesuffix(" ")


def common_beginning(first: Any, *others: Any) -> Any:
    """Returns the longest text or list with which all given ones begin."""
    rows = zip(first, *others, strict=False)
    return first[: sum(1 for _ in takewhile(lambda row: row.count(row[0]) == len(row), rows))]


def _read_messages(value: Any, *, drops_answer: bool) -> tuple[ChatMessage, ...]:
    """Returns a field's chat messages; `drops_answer` removes the assistant's at the end."""
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        raise ValueError(
            "a prompt must be a text or a list of chat messages, got a JSON "
            f"{type(value).__name__}: correct it."
        )
    messages = [plain_message(turn, number) for number, turn in enumerate(value, start=1)]
    while drops_answer and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] in ("assistant", *_SYSTEM):
        raise ValueError(
            "chat messages must end with a message of the user or a tool, to which the assistant "
            f"replies, got {', '.join(roles) or 'none'}: add or remove messages."
        )
    return tuple(messages)


def plain_message(turn: Any, number: int) -> ChatMessage:
    """Returns a chat message with its text parts joined and None fields removed."""
    turn = _without_none(turn) if isinstance(turn, Mapping) else {}
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, list):  # a list of parts, as for multimodal models
        kinds = [
            part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            for part in content
        ]
        if others := [kind for kind in kinds if kind != "text"]:
            raise ValueError(
                f"chat message {number} has a part of type {others[0]!r}, which a language model "
                "does not read: use parts of type text."
            )
        parts = [part.get("text") for part in content]
        content = None if None in parts else "".join(map(str, parts))
        turn = {**turn, "content": content}
    has_content = isinstance(content, str) or (content is None and bool(turn.get("tool_calls")))
    if not isinstance(role, str) or not role or not has_content:
        raise ValueError(
            f"chat message {number} must have a `role`, such as user, assistant, system or tool, "
            "and a text as `content`: correct it."
        )
    return turn


def _without_none(value: Any) -> Any:
    """Removes None fields from nested data, with which data sets pad their tables."""
    if isinstance(value, Mapping):
        return {name: _without_none(own) for name, own in value.items() if own is not None}
    return [_without_none(own) for own in value] if isinstance(value, list) else value


def _template_fields(row: Mapping[str, Any]) -> tuple[Sequence[Any] | None, Mapping[str, Any]]:
    """Returns the tools and template options of a row, which have TRL's field names."""
    tools = _from_json(row.get("tools"))
    options = _from_json(row.get("chat_template_kwargs"))
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`tools` must be a list, got {type(tools).__name__}: correct it.")
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"`chat_template_kwargs` must be an object, got {type(options).__name__}: correct it."
        )
    return _without_none(tools) or None, _without_none(options or {})


def _from_json(value: Any) -> Any:
    """Decodes JSON text, in which tables store mixed types; returns other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _check_readable(values: Mapping[str, Any], place: str) -> None:
    """Raises ``ValueError`` if a text has a lone surrogate, which tokenizers cannot encode."""
    for name, value in values.items():
        for text in _texts_in(value):
            if half := re.search("[\ud800-\udfff]", text):
                raise ValueError(
                    f"{place}: {name} has a lone surrogate at character {half.start() + 1}, which "
                    "tokenizers cannot encode: remove it."
                )


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for own in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(own)


# --- HH-RLHF's text form --------------------------------------------------------------------------


def parse_hh(text: str) -> list[dict[str, str]]:
    r"""Parses a text in HH-RLHF's form into messages of "user" and "assistant".

    Strips white space around turns, merges consecutive turns of a speaker, because chat templates
    expect alternating roles, and drops empty turns.

    >>> parse_hh("\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Bye\n\nAssistant:")[1]
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


def _turns(text: str) -> tuple[ChatMessage, ...]:
    """Returns the turns of a text in HH-RLHF's form; a single empty turn if all are empty."""
    return tuple(parse_hh(text)) or ({"role": "user", "content": ""},)


def hh_text(messages: Sequence[ChatMessage]) -> str:
    r"""Returns messages in HH-RLHF's form.

    The form has only two speakers, so system messages are moved to the start of the next human
    turn.

    Raises:
        ValueError: When a message has another role than user, assistant or system.

    >>> hh_text([{"role": "user", "content": "Hi"}])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    parts, system = [], ""
    for message in messages:
        role, content = message["role"], _content(message)
        if role in _SYSTEM:
            system += f"{content}\n\n"  # until the next human turn
            continue
        if role not in _TAGS:
            raise ValueError(
                f"HH-RLHF's form does not support the role {role!r}: use a policy with a chat "
                "template, or remove such conversations."
            )
        if system and role != "user":
            parts.append(f"{HUMAN} {system.rstrip()}")
            system = ""
        parts.append(f"{_TAGS[role]} {system}{content}")
        system = ""
    return "".join(parts) + ASSISTANT


def as_hh(prompt: Prompt) -> str:
    """Returns a prompt in HH-RLHF's form; texts already in that form are unchanged.

    Raises:
        ValueError: As in `hh_text`.
    """
    is_one_turn = prompt.messages == ({"role": "user", "content": prompt.text},)
    return hh_text(prompt.messages) if prompt.text is None or is_one_turn else prompt.text


def prompt_of(value: Prompt | str | Sequence[ChatMessage]) -> Prompt:
    """Converts a text, parsed if it has HH-RLHF's form, or messages to a prompt."""
    if isinstance(value, Prompt):
        return value
    if not isinstance(value, str):
        return Prompt(messages=tuple(value))
    has_tags = is_hh(value) and value.rstrip().endswith(ASSISTANT)
    return Prompt(value, messages=_turns(value) if has_tags else ())


def _content(message: ChatMessage) -> str:
    return message.get("content") or ""


# --- Texts and tokens of the policy ---------------------------------------------------------------


def format_prompt(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_format: PromptFormat = AUTO,
    *,
    has_opening: bool = True,
) -> str:
    """Returns the text that the policy continues for a prompt, without truncation.

    `has_opening` includes the beginning of a reply that a chat template writes.

    Raises:
        ValueError: When the format is "chat" and the tokenizer has no chat template, or the
            template rejects the conversation.
    """
    name = prompt_format.kind_for(tokenizer)  # hh, chat or plain
    if name == "hh":
        return as_hh(prompt)
    if name == "plain":
        asked = [_content(m) for m in prompt.messages if m["role"] == "user"]
        return prompt_format.template.replace("{prompt}", asked[-1] if asked else "")
    return format_dialogue(
        prompt, None, tokenizer, prompt_format, add_generation_prompt=has_opening
    )


def format_dialogue(
    prompt: Prompt,
    reply: ChatMessage | None,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_format: PromptFormat = AUTO,
    **more: Any,
) -> str:
    """Returns a prompt and a reply to it, if any, as the tokenizer's chat template writes them.

    Raises:
        ValueError: When the template rejects the conversation.
    """
    messages = [*prompt.messages, *([] if reply is None else [reply])]
    if prompt_format.system_prompt and messages[0]["role"] not in _SYSTEM:
        messages.insert(0, {"role": "system", "content": prompt_format.system_prompt})
    options = {
        "date_string": prompt_format.date_string,
        **prompt_format.template_options,
        **prompt.template_options,
        **more,
    }
    return apply_template(tokenizer, messages, tools=prompt.tools, **options)


def apply_template(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[ChatMessage], **options: Any
) -> str:
    """Renders messages with a tokenizer's chat template, including special tokens.

    Raises:
        BrokenTemplateError: When the template does not compile, or exceeds a limit of
            `firm.alignment.rendering`.
        ValueError: When the template rejects the messages. Templates are third-party programs and
            may raise anything.
    """
    tools = options.get("tools")
    template = tokenizer.get_chat_template(tools=list(tools) if tools is not None else None)
    # as in `apply_chat_template`: many templates take a missing field and not None
    given = [{key: own for key, own in each.items() if own is not None} for each in messages]
    try:
        return render(template, given, {**tokenizer.special_tokens_map, **options})
    except TemplateBroken as error:
        raise BrokenTemplateError(tokenizer, str(error)) from error
    except TemplateRejects as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(
            f"the chat template rejects a conversation of {roles} ({error}): change "
            "the conversation, or use a tokenizer with another template."
        ) from error


class BrokenTemplateError(ValueError):
    """Raised when a tokenizer's chat template does not compile or exceeds a limit."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", reason: str) -> None:
        super().__init__(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} is broken "
            f"({reason}): repair it, or use another tokenizer."
        )


def check_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Checks that a tokenizer's chat template compiles and renders a message within the limits.

    The template may reject the message, for instance because it expects a system message.

    Raises:
        BrokenTemplateError: When the template does not compile or exceeds a limit.
    """
    try:
        hello = {"role": "user", "content": "Hello"}  # the shortest conversation
        apply_template(tokenizer, [hello], add_generation_prompt=True)
    except BrokenTemplateError:
        raise
    except ValueError:
        return


_SYSTEM_NOTES = {
    "hh": "HH-RLHF's form has no place for them: they are put at the start of the next human turn.",
    "plain": "the prompt format plain leaves them out: choose another policy.prompt.name.",
    "chat": "the policy's chat template leaves them out: use a tokenizer with another template.",
}
"""Notes on system messages that the policy does not read as such, by the format of prompts."""


def check_prompts(
    prompts: Iterable[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    prompt_format: PromptFormat,
    *,
    on_note: Callable[[str], None] = lambda _: None,
) -> None:
    """Checks that the policy's format accepts one prompt for each sequence of roles.

    `on_note` receives a note on system messages for which the format has no place.

    Raises:
        ValueError: When the format rejects a prompt, or its chat template omits the messages'
            texts.
    """
    kind, seen, is_noted = prompt_format.kind_for(tokenizer), set(), False
    for prompt in prompts:
        # templates branch on these
        shape = (*(m["role"] for m in prompt.messages), prompt.tools is None)
        if shape in seen:
            continue
        seen.add(shape)
        text = format_prompt(prompt, tokenizer, prompt_format)
        words = _content(prompt.messages[-1]).split()
        if kind == "chat" and words and words[0] not in text:
            raise ValueError(
                "the policy's chat template omits the text of the last message: use a tokenizer "
                "whose template supports messages with a text as `content`."
            )
        system = [_content(message) for message in prompt.messages if message["role"] in _SYSTEM]
        own = " ".join(" ".join(system or [prompt_format.system_prompt]).split())
        if own and not is_noted and (kind != "chat" or own not in " ".join(text.split())):
            on_note(f"prompts have system messages, and {_SYSTEM_NOTES[kind]}")
            is_noted = True


def token_ids(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    prompt_format: PromptFormat = AUTO,
) -> list[list[int]]:
    """Returns the policy's token ids of prompts, without truncation.

    Chat templates include their special tokens. Other prompts get the tokenizer's leading special
    tokens, such as BOS, but no trailing ones, since the policy continues the text.
    """
    texts = [format_prompt(prompt, tokenizer, prompt_format) for prompt in prompts]
    if not texts:
        return []
    rows: Any = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    opening = _opening_ids(tokenizer, prompt_format)
    return [opening + ids for ids in rows]


def _opening_ids(tokenizer: "PreTrainedTokenizerBase", prompt_format: PromptFormat) -> list[int]:
    """Returns the special tokens that precede a prompt's text."""
    if prompt_format.kind_for(tokenizer) == "chat":
        return []
    ids: Any = tokenizer("a")["input_ids"]
    bare: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = range(len(ids) - len(bare) + 1)  # some tokenizers add tokens at the end too
    return ids[: next((at for at in starts if ids[at : at + len(bare)] == bare), 0)]


def fitting_token_ids(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_format: PromptFormat = AUTO,
    max_tokens: int,
) -> tuple[list[list[int]], list[bool]]:
    """Returns token ids of prompts truncated to `max_tokens`, and whether each was truncated.

    Drops the oldest turns first, each user message with the replies to it. System messages and the
    last turn are kept; if these are too long, the beginning of the last turn is cut, or that of the
    system messages if they alone exceed the limit. If the template itself exceeds the limit, the
    last tokens are kept.

    Raises:
        ValueError: When a prompt has no tokens, or the limit is too small.
    """
    if max_tokens < 2:
        raise ValueError(f"max_prompt_tokens must be at least 2, got {max_tokens}.")
    rows = token_ids(prompts, tokenizer, prompt_format)
    is_cut = [len(ids) > max_tokens for ids in rows]
    for index, (prompt, ids) in enumerate(zip(prompts, rows, strict=True)):
        if not ids:
            raise ValueError(f"prompt {index} of {len(rows)} has no tokens: add text to it.")
        if is_cut[index]:
            rows[index] = _cut(prompt, tokenizer, prompt_format, max_tokens)
    return rows, is_cut


def _cut(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_format: PromptFormat,
    max_tokens: int,
) -> list[int]:
    """Truncates a prompt to at most `max_tokens` token ids."""

    def ids_of(candidate: Prompt) -> list[int] | None:
        try:
            (ids,) = token_ids([candidate], tokenizer, prompt_format)
        except ValueError:  # the template accepts the whole conversation but not this part
            return None
        return ids

    def fitting(candidate: Prompt) -> list[int] | None:
        ids = ids_of(candidate)
        return ids if ids is not None and len(ids) <= max_tokens else None

    shortest = prompt
    for shortest in _without_oldest(prompt):
        if ids := fitting(shortest):
            return ids
    messages = shortest.messages
    system = [at for at, message in enumerate(messages) if message["role"] in _SYSTEM]
    others = [at for at in range(len(messages)) if at not in system]
    bare = shortest
    for place in system:
        bare = _with_content(bare, place, "")
    for candidate, places in ((shortest, others), (shortest, system), (bare, others)):
        if ids := _without_beginnings(candidate, places, fitting):
            return ids
    whole = ids_of(shortest) or token_ids([prompt], tokenizer, prompt_format)[0]
    return _last_ids(whole, tokenizer, prompt_format, max_tokens)


def _without_beginnings(
    prompt: Prompt, places: Sequence[int], fitting: Callable[[Prompt], list[int] | None]
) -> list[int] | None:
    """Returns the ids after cutting the beginnings of messages until they fit, or None."""
    for place in places:
        content = _content(prompt.messages[place])
        emptied = _with_content(prompt, place, "")
        if ids := fitting(emptied):
            # of shorter ends, all fit: the first that fits is the longest
            start = bisect_left(
                range(len(content)),
                True,
                key=lambda at: bool(fitting(_with_content(prompt, place, content[at:]))),
            )
            return fitting(_with_content(prompt, place, content[start:])) or ids
        prompt = emptied
    return None


def _with_content(prompt: Prompt, place: int, content: str) -> Prompt:
    messages = list(prompt.messages)
    messages[place] = {**messages[place], "content": content}
    return replace(prompt, text=None, messages=tuple(messages))


def _without_oldest(prompt: Prompt) -> Iterator[Prompt]:
    """Yields a conversation starting at its first user message, at its second, etc.

    System messages are kept in front.
    """
    system = [message for message in prompt.messages if message["role"] in _SYSTEM]
    others = [message for message in prompt.messages if message["role"] not in _SYSTEM]
    starts = [at for at, message in enumerate(others) if message["role"] == "user"]
    for start in starts or [len(others) - 1]:
        yield replace(prompt, text=None, messages=(*system, *others[start:]))


def _last_ids(
    ids: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    prompt_format: PromptFormat,
    max_tokens: int,
) -> list[int]:
    """Returns the last token ids of a prompt, preceded by its leading special tokens."""
    opening = _opening_ids(tokenizer, prompt_format)
    if not opening and ids[:1] == [tokenizer.bos_token_id]:
        opening = ids[:1]  # from the template
    opening = opening[: max_tokens - 1]  # at least one token of the prompt
    return opening + ids[len(ids) - max_tokens + len(opening) :]
