"""The formats in which reward models read a dialogue and a reply, as in their training.

A wrong format raises no error and silently costs accuracy. A config can list the scores of known
examples to detect it; see `reward_models.golden`.
"""

from typing import TYPE_CHECKING, Any

from firm.alignment.prompts import (
    ASSISTANT,
    PromptFormat,
    apply_template,
    as_hh,
    check_template,
    prompt_of,
)
from reward_models.config import CallFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def present(
    format: CallFormat, prompt: Any, completion: str, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, ...]:
    r"""Returns the one text, or the pair of texts, that the tokenizer gets.

    Args:
        format: See `RewardModelConfig.format`.
        prompt: A `Prompt`, or a text or messages that `prompt_of` reads.
        completion: The reply.
        tokenizer: The reward model's, which has the chat template.

    Raises:
        ValueError: The format has no form of the conversation, or the chat template refuses it.

    >>> present("hh_pair", "\n\nHuman: Hi\n\nAssistant:", " Hello!", tokenizer=None)
    ('\n\nHuman: Hi \n\nAssistant:', 'Hello!')
    """
    if format == "response":
        return (completion,)
    prompt = prompt_of(prompt)
    if format in ("hh_pair", "plain"):
        try:
            asked = as_hh(prompt)
        except ValueError as error:
            raise ValueError(
                f"the classifier's format {format!r}: {str(error).partition(':')[0]}; choose "
                "another `format`, such as chat_template or response."
            ) from error
        if format == "plain":
            return (_join(asked, completion),)
        # a space before the last tag, as the Ray2333 model cards spell it
        question = asked.removesuffix(ASSISTANT)
        asked = asked if question == asked else f"{question.rstrip(' ')} {ASSISTANT}"
        return asked, completion.lstrip(" ")
    if format == "question_answer":
        asked = [turn.get("content") or "" for turn in prompt.messages if turn["role"] == "user"]
        return (asked or [""])[-1], completion.strip()
    reply = {"role": "assistant", "content": completion.strip()}
    try:
        text = apply_template(
            tokenizer,
            [*prompt.messages, reply],
            tools=prompt.tools,
            date_string=PromptFormat.date_string,
        )
    except ValueError as error:
        raise ValueError(f"the classifier: {error}; or choose another `format`.") from error
    return (text,)


def check_format(format: CallFormat, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises a ``ValueError`` where a tokenizer cannot spell a format."""
    if format == "chat_template":
        if not tokenizer.chat_template:
            raise ValueError(
                "the format 'chat_template' needs a chat template, and the classifier's tokenizer "
                "has none: choose the format that the model card shows."
            )
        check_template(tokenizer)
    num_special = [tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True)]
    if format == "question_answer" and num_special[0] == num_special[1]:
        raise ValueError(
            "the format 'question_answer' needs a tokenizer that separates a pair of texts, and "
            "the classifier's glues them together: choose the format that the model card shows."
        )


def _join(prompt: str, completion: str) -> str:
    """Returns one text; a chat template's reply lacks the space after a tag in HH-RLHF."""
    is_glued = prompt.endswith(ASSISTANT) and completion and not completion[0].isspace()
    return prompt + (" " if is_glued else "") + completion
