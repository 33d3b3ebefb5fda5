"""How a reward model reads a dialogue and a reply: the spelling that it was trained on.

The wrong spelling raises no error and costs accuracy in silence. A config can hold the scores of
known examples against that; see `reward_models.golden`.
"""

from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from firm.federation.outside import first_line

CallFormat = Literal["hh_pair", "question_answer", "chat_template", "plain", "response"]

ASSISTANT = "\n\nAssistant:"


def present(
    format: CallFormat, prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    r"""Returns the one text, or the pair of texts, that the tokenizer gets.

    Args:
        format: See `RewardModelConfig.format`.
        prompt: A dialogue in the form of HH-RLHF. "question_answer" and "chat_template" take it
            apart, and take a text without role tags for one human turn.
        completion: The reply.
        tokenizer: The reward model's, which has the chat template.

    Raises:
        ValueError: The dialogue cannot be taken apart, or the chat template refuses it.

    >>> present("hh_pair", "\n\nHuman: Hi\n\nAssistant:", " Hello!", tokenizer=None)
    ('\n\nHuman: Hi \n\nAssistant:', 'Hello!')
    """
    if format == "hh_pair":
        return _hh_question(prompt), completion.lstrip(" ")
    if format == "plain":
        return (_joined(prompt, completion),)
    if format == "response":
        return (completion,)
    # Imported here, because the package brings TRL along: seconds, and a warning on standard error.
    from firm.alignment.prompts import PromptFormat, as_dialogue, parse_dialogue

    messages = parse_dialogue(as_dialogue(prompt))
    if format == "question_answer":
        questions = [turn["content"] for turn in messages if turn["role"] == "user"]
        return (questions or [""])[-1], completion.strip()
    messages.append({"role": "assistant", "content": completion.strip()})
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, date_string=PromptFormat.date_string
        )
    except (TemplateError, TypeError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(
            "the classifier's chat template refuses a dialogue of "
            f"{', '.join(turn['role'] for turn in messages)} ({reason}): choose another `format`."
        ) from error
    assert isinstance(text, str)
    return (text,)


def check_format(format: CallFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises a ``ValueError`` where a tokenizer cannot spell a format."""
    if format == "chat_template" and not tokenizer.chat_template:
        raise ValueError(
            "the format 'chat_template' needs a chat template, and the classifier's tokenizer has "
            "none: choose the format that the model card shows."
        )
    num_special = [tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True)]
    if format == "question_answer" and num_special[0] == num_special[1]:
        raise ValueError(
            "the format 'question_answer' needs a tokenizer that separates a pair of texts, and "
            "the classifier's glues them together: choose the format that the model card shows."
        )


def _hh_question(prompt: str) -> str:
    """Returns a dialogue as the Ray2333 model cards spell it: a space before the last tag."""
    question = prompt.removesuffix(ASSISTANT)
    return prompt if question == prompt else question.rstrip(" ") + " " + ASSISTANT


def _joined(prompt: str, completion: str) -> str:
    """Returns one text; a chat template's reply lacks the space after a tag in HH-RLHF."""
    is_glued = prompt.endswith(ASSISTANT) and completion and not completion[0].isspace()
    return prompt + (" " if is_glued else "") + completion
