"""Parts of an engine's replies, which become one response, and the errors in their place."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from firm.serving.requests import RequestRefused

_MOST = 300
"""Characters of the engine's error message that a response repeats."""


def refusal(error: Mapping[str, Any] | Exception, *, max_context: int) -> RequestRefused:
    """Returns the answer to a request that llama.cpp refused.

    Args:
        error: Its object `error`, or the exception that it raised.
        max_context: The model's own context.
    """
    if isinstance(error, Exception):
        return RequestRefused(_sentence(str(error)))
    if error.get("type") == "exceed_context_size_error":
        remedy = ", or serve with a larger --context"
        if error.get("n_ctx", 0) >= max_context:
            remedy = "; the model has no longer one"
        return RequestRefused(
            f"the prompt has {error.get('n_prompt_tokens')} tokens, and the context is "
            f"{error.get('n_ctx')}: shorten the messages{remedy}.",
            param="messages",
            code="context_length_exceeded",
        )
    status = error.get("code", 500)
    return RequestRefused(
        _sentence(str(error.get("message"))), status if status in range(400, 600) else 500
    )


def _sentence(text: str) -> str:
    return f"llama.cpp refuses the request: {text[:_MOST].strip().rstrip('.')}."


def total_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns OpenAI's `usage` of several replies to one prompt, of which each has its own."""
    prompt = usages[0]["prompt_tokens"]
    completion = sum(each["completion_tokens"] for each in usages)
    total = {"completion_tokens": completion, "total_tokens": prompt + completion}
    return {**usages[0], **total}


def begin_with_text(chunk: dict[str, Any], begun: set[int]) -> dict[str, Any]:
    """Returns a part of a reply without the white space before its first word.

    Models without a chat template reply with a space first, which such a template writes itself in
    later turns.

    Args:
        chunk: Part of a reply.
        begun: Indices of the choices that have had a word; those in this part are added.
    """
    choices = []
    for part in chunk["choices"]:
        content = part["delta"].get("content")
        if content and part["index"] not in begun:
            content = content.lstrip()
            part = {**part, "delta": {**part["delta"], "content": content}}
            if content:
                begun.add(part["index"])
        choices.append(part)
    return {**chunk, "choices": choices}


def without_likely(chunk: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of a reply with the log-probabilities of its own tokens alone."""
    choices = []
    for part in chunk["choices"]:
        if own := part.get("logprobs"):
            entries = [{**entry, "top_logprobs": []} for entry in own["content"]]
            part = {**part, "logprobs": {**own, "content": entries}}
        choices.append(part)
    return {**chunk, "choices": choices}


def assemble(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the response whose parts are given, the last one with its usage."""
    reply: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        reply |= {key: value for key, value in chunk.items() if key != "choices"}
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {
                    "index": part["index"],
                    "message": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                },
            )
            _append(choice, part)
    return {
        **reply,
        "object": "chat.completion",
        "choices": [choices[index] for index in sorted(choices)],
    }


def _append(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Extends a choice of a response by a part of it."""
    message, delta = choice["message"], part["delta"]
    for key in ("content", "reasoning_content"):
        if delta.get(key):
            message[key] = message.get(key, "") + delta[key]
    for call in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        own, function = calls[call["index"]], call.get("function", {})
        own["id"] += call.get("id") or ""
        for key in ("name", "arguments"):
            own["function"][key] += function.get(key) or ""
    if part.get("logprobs"):
        choice["logprobs"] = choice["logprobs"] or {"content": []}
        choice["logprobs"]["content"] += part["logprobs"]["content"]
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
