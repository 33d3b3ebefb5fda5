"""Checks of OpenAI's chat requests, and their translation to an engine's.

A trade-off stands in the body, as `preference`, `target` or `require`, or in the model's name:
`NAME@helpful=0.7`, `NAME@target:helpful=0.7,harmless=0.3`, `NAME@require:harmless>=0.6`, or
`NAME@base` for the base model. All other fields have a type and a range in `ChatRequest`; a request
with another field is refused, as OpenAI does.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from annotated_types import Interval, Len
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from firm.base.preferences import TRADE_OFFS
from firm.base.registry import did_you_mean
from firm.base.schema import in_words
from firm.serving.chat_templates import HH_TEMPLATE
from firm.serving.front import ServedFront

MAX_BODY = 2**20
"""Maximum length of a request in bytes, several times the longest contexts that are served."""
MAX_MESSAGES = 1024
"""Maximum number of messages of a request."""
MAX_SCHEMA = 8192
"""Maximum length of a JSON schema in characters, with its references written out; llama.cpp takes
two seconds for one of this length and eight for twice as much, in which it does nothing else."""
MAX_TRADE_OFF = 1000
"""Maximum length of a trade-off in characters."""
BASE = "base"
"""Part of a model's name after the @ that selects the base model, without adapters."""

_LONGEST = 200
"""Characters of a value that an error message repeats."""


class RequestRefused(ValueError):
    """Raised for a request that is answered with an error.

    Args:
        message: Problem, input and remedy.
        status: HTTP status.
        param: Field of the request that is wrong.
        code: OpenAI's name of the error, for programs.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "requests"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class EngineRequest:
    """A request for the engine."""

    body: dict[str, Any]
    scales: dict[str, float]
    model: str
    """Name of the model at the preference that was found, for the response."""
    has_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    has_likely: bool = True
    """Whether log-probabilities come with those of the likeliest tokens."""

    @property
    def num_replies(self) -> int:
        """Number of replies, each of which takes a slot of the engine."""
        return self.body.get("n", 1)


# --- Types of the fields --------------------------------------------------------------------------


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


def _content(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PydanticCustomError("part", "a text: images, audio and files are not supported")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("part", "a list of parts with type and text")
    return "\n".join(part["text"] for part in value)  # as llama.cpp joins them


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    """Checks that a schema ends, and that it does not keep llama.cpp from everyone's replies."""
    num_left, parts = MAX_SCHEMA, [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            # "((a?){100}){20}" takes llama.cpp minutes; a property may be called pattern
            if "patternProperties" in part or any(
                "pattern" in key.lower() and not isinstance(own, dict) for key, own in part.items()
            ):
                raise PydanticCustomError("schema", "a JSON schema without patterns")
            parts += [*part, *part.values(), *_referenced_parts(value, part.get("$ref"))]
        elif isinstance(part, list):
            parts += part
        else:
            num_left -= len(json.dumps(part))
        num_left -= 2
        if num_left < 0:  # at the latest, if it contains itself
            words = "a JSON schema of at most {limit} characters, with its references written out"
            raise PydanticCustomError("schema", words, {"limit": MAX_SCHEMA})
    return value


def _referenced_parts(schema: dict[str, Any], place: Any) -> list[Any]:
    """Returns the part of a schema to which `$ref` points, if it is there."""
    part: Any = schema
    for step in place.split("/")[1:] if isinstance(place, str) else [None]:
        key = step and step.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or key not in part:
            return []
        part = part[key]
    return [part]


def _tools(value: list["_Tool"]) -> list["_Tool"]:
    if sum(len(json.dumps(tool.function.parameters)) for tool in value) > 4 * MAX_SCHEMA:
        words = "a list with JSON schemas of at most {limit} characters"
        raise PydanticCustomError("schema", words, {"limit": 4 * MAX_SCHEMA})
    return value


def _options(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > MAX_SCHEMA:
        raise PydanticCustomError("long", "of at most {limit} characters", {"limit": MAX_SCHEMA})
    return value


_Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_Schema = Annotated[dict[str, Any], AfterValidator(_schema)]
_Stops = Annotated[
    list[Annotated[str, Len(1, 256)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Len(0, 16),
]
_Share = Annotated[float, Interval(ge=0, le=1)]
_Penalty = Annotated[float, Interval(ge=-2, le=2)]
_Count = Annotated[int, Interval(ge=1, le=2**31 - 1)]
_Limit = Annotated[int, Interval(ge=-1, le=2**31 - 1)]
_Token = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class _CalledFunction(_Form):
    name: _Name
    arguments: str


class _Call(_Form):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(_Form):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_Call], Len(1, 128)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "an object with role and content")
        if self.content is None and not self.tool_calls:
            self.content = ""  # such as a refusal
        return self


class _Function(_Form):
    name: _Name
    description: str | None = None
    strict: bool | None = None
    parameters: _Schema | None = None


class _Tool(_Form):
    type: Literal["function"]
    function: _Function


class _ChosenFunction(_Form):
    name: str


class _Choice(_Form):
    type: Literal["function"]
    function: _ChosenFunction


class _NamedSchema(_Form):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: _Schema = Field(alias="schema")


class _Format(_Form):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("schema", "an object with json_schema")
        return self


class _StreamOptions(_Form):
    include_usage: bool | None = None


class ChatRequest(_Form):
    """Fields of chat requests, by OpenAI's and llama.cpp's names; null takes the default."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[_Message], Len(1, MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: _Count | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Interval(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: _Limit | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repeat_penalty: Annotated[float, Interval(ge=0, le=10)] | None = None
    repeat_last_n: _Limit | None = None
    seed: Annotated[int, Interval(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stops | None = None
    logit_bias: (
        Annotated[dict[_Token, Annotated[float, Interval(ge=-100, le=100)]], Len(0, 1024)] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Interval(ge=0, le=20)] | None = None
    tools: Annotated[list[_Tool], Len(0, 128), AfterValidator(_tools)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Format | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_options)] | None = None
    reasoning_effort: Annotated[str, Len(1, 16)] | None = None
    modalities: list[Literal["text"]] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None


_UNUSED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention"),
}
"""Fields that concern OpenAI's own accounts and caches."""


def check_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that are not null.

    Raises:
        RequestRefused: When a field is unknown, missing, or has another type or range.
    """
    given = {key: value for key, value in request.items() if key not in _UNUSED}
    try:
        return ChatRequest.model_validate(given).model_dump(exclude_none=True, by_alias=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])[:_LONGEST]
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(name, [*ChatRequest.model_fields, *TRADE_OFFS, "confidence", "model"])
        if hint == ".":
            hint = f"; a trade-off is stated by {', '.join(TRADE_OFFS[:-1])} or {TRADE_OFFS[-1]}."
        if name == "extra_body":
            hint = ": put its keys into the body itself, as OpenAI's Python client does."
        if name == "grammar":  # one of 16,000 characters stops llama.cpp, or ends it
            hint = ": use response_format with a JSON schema."
        raise RequestRefused(f"there is no field {name!r} in chat requests{hint}", param=name)
    steps = [str(step) for step in first["loc"] if "[" not in str(step)]  # no member of a union
    place = ".".join(steps)[:_LONGEST]
    if first["type"] == "missing":
        raise RequestRefused(f"{place} is missing.", param=name)
    message = f"{place} must be {in_words(first)}, got {_short(first['input'])}."
    raise RequestRefused(message, param=name)


def _short(value: Any) -> str:
    return reprlib.repr(value)[:_LONGEST]


# --- Translation ----------------------------------------------------------------------------------


def check_places(request: Mapping[str, Any], query: Iterable[str] = ()) -> None:
    """Checks that no trade-off stands where it would have no effect.

    Args:
        request: The body.
        query: Names of the parameters in the address.

    Raises:
        RequestRefused: When a preference is in the address, or within another field.
    """
    places = [("the address", name) for name in query]
    for key, value in request.items():
        if key not in TRADE_OFFS:
            parts = value if isinstance(value, list) else [value]
            places += [(key, name) for part in parts if isinstance(part, dict) for name in part]
    for place, name in places:
        if name.lower() in ("preference", "preferences"):
            message = f"{name} has no effect in {place}: put preference into the body itself."
            raise RequestRefused(message, param=name)


def parse_body(text: bytes) -> dict[str, Any]:
    """Returns the request in a body.

    Raises:
        RequestRefused: When it is not strict JSON with valid Unicode, or not an object.
    """
    try:
        request = from_json(text, allow_inf_nan=False)  # refuses lone surrogates and deep nesting
    except ValueError as error:
        raise RequestRefused(f"the body must be valid JSON ({str(error)[:_LONGEST]}).") from None
    if not isinstance(request, dict):
        raise RequestRefused(f"the body must be a JSON object, got {type(request).__name__}.")
    return request


def translate(
    request: Mapping[str, Any],
    served: ServedFront,
    name: str,
    *,
    num_slots: int = 1,
    context: int = 2**31 - 1,
    max_context: int = 2**31 - 1,
) -> EngineRequest:
    """Returns a chat request with the scales of its trade-off.

    Fields that are null, or not there, take the front's defaults. Strings that end a reply and
    options of the chat's template are added to the front's.

    Args:
        request: OpenAI's request with the trade-off in its body or in the model's name.
        served: The front.
        name: The served model's name.
        num_slots: Largest number of replies to a request.
        context: Largest number of tokens of a reply.
        max_context: The model's own context.

    Raises:
        RequestRefused: When a field is wrong, or the model or the trade-off does not exist, or is
            stated twice.
    """
    check_places(request)
    given = {key: value for key, value in request.items() if value is not None}
    stated = {key: given.pop(key) for key in TRADE_OFFS if key in given}
    confidence, model = given.pop("confidence", 0.95), given.pop("model", name)
    if "lora" in given:
        message = "lora is set from the preference: pass preference, target or require."
        raise RequestRefused(message, param="lora")
    known, at, words = model.partition("@") if isinstance(model, str) else ("", "", "")
    if known != name:
        message = f"there is no model {_short(model)}: use {name} or {name}@TRADE-OFF."
        raise RequestRefused(message, 404, param="model", code="model_not_found")
    if at and stated:
        raise RequestRefused(
            f"state the trade-off once, got {next(iter(stated))} in the body and {words[:80]} in "
            "the model's name.",
            param=next(iter(stated)),
        )
    limits = {"num_slots": num_slots, "context": context, "max_context": max_context}
    body = _engine_body(check_fields(given), served, **limits)
    options = body.pop("stream_options", {})
    has_usage = options.get("include_usage", False) is True
    has_likely = not body.get("logprobs") or bool(body.get("top_logprobs"))
    if not has_likely:
        body["top_logprobs"] = 1  # llama.cpp takes 0 for no log-probabilities at all
    if words == BASE:
        scales, label = dict.fromkeys(served.adapters, 0.0), f"{name}@{BASE}"
        return EngineRequest(body, scales, label, has_usage, has_likely)
    if at:
        key, colon, value = words.partition(":")
        is_named = bool(colon) and "=" not in key
        if is_named and key not in TRADE_OFFS:
            message = f"there is no trade-off {key[:80]!r}{did_you_mean(key, TRADE_OFFS)}"
            raise RequestRefused(message, param="model")
        stated = {key: value} if is_named else {"preference": words}
    param = "model" if at else next(iter(stated), None)
    for key, value in stated.items():
        if len(json.dumps(value)) > MAX_TRADE_OFF:
            message = f"{key} must have at most {MAX_TRADE_OFF} characters, got {_short(value)}."
            raise RequestRefused(message, param="model" if at else key)
    if not isinstance(confidence, int | float) or not 0.5 < confidence < 1:
        message = f"confidence must be between 0.5 and 1, got {_short(confidence)}."
        raise RequestRefused(message, param="confidence")
    try:
        scales = served.scales(confidence=float(confidence), **stated)
    except ValueError as error:
        raise RequestRefused(str(error), param=param) from error
    return EngineRequest(body, scales, model_at(name, scales), has_usage, has_likely)


def defaults(served: ServedFront) -> dict[str, Any]:
    """Returns the front's defaults of requests.

    Raises:
        RequestRefused: When they are no fields of requests.
    """
    own = check_fields({**served.request, "messages": [{"role": "user", "content": ""}]})
    return {key: value for key, value in own.items() if key != "messages"}


def _engine_body(
    given: dict[str, Any], served: ServedFront, *, num_slots: int, context: int, max_context: int
) -> dict[str, Any]:
    """Returns the engine's request: the fields that are given, on top of the front's."""
    own = defaults(served)
    body = {**own, **given}
    if "stop" in own:
        body["stop"] = list(dict.fromkeys([*own["stop"], *body["stop"]]))
    if "chat_template_kwargs" in own:
        options = given.get("chat_template_kwargs", {})
        body["chat_template_kwargs"] = {**own["chat_template_kwargs"], **options}
    for message in body["messages"]:
        if message["role"] == "developer":  # OpenAI's later name
            message["role"] = "system"
        is_tool = message["role"] == "tool" or "tool_calls" in message
        if is_tool and served.chat_template == HH_TEMPLATE:
            raise RequestRefused(
                "messages must have no tool_calls and no role tool: this model's prompts have the "
                "form of HH-RLHF, which has no place for them.",
                param="messages",
            )
    if "max_completion_tokens" in body:  # OpenAI's later name
        body["max_tokens"] = body.pop("max_completion_tokens")
    for key, limit, option in (("n", num_slots, "num_slots"), ("max_tokens", context, "context")):
        if body.get(key, 1) > limit:
            source = f"`firm serve --{option}` sets the limit"
            if key == "max_tokens" and context >= max_context:
                source = "the model has no longer context"
            message = f"{key} must be at most {limit}, got {body[key]}; {source}."
            raise RequestRefused(message, param=key)
    if not body.get("logprobs") and body.pop("top_logprobs", 0):
        raise RequestRefused("top_logprobs must come with logprobs: true.", param="top_logprobs")
    if body.get("logprobs") and body.get("tools"):  # llama.cpp gives none in parts
        raise RequestRefused("logprobs must not come with tools.", param="logprobs")
    if (window := body.get("repeat_last_n")) is not None:  # llama.cpp reserves so many numbers
        body["repeat_last_n"] = context if window < 0 else min(window, context)
    if "seed" in body:
        body["seed"] %= 2**32 - 1  # which itself stands for a random seed in llama.cpp
    if isinstance(choice := body.get("tool_choice"), dict):  # llama.cpp knows words only
        wanted = choice["function"].get("name")
        body["tools"] = [
            tool for tool in body.get("tools", ()) if tool["function"]["name"] == wanted
        ]
        if not body["tools"]:
            raise RequestRefused(
                f"tool_choice must be one of tools, got {_short(wanted)}.", param="tool_choice"
            )
        body["tool_choice"] = "required"
    if served.system_prompt and all(each["role"] != "system" for each in body["messages"]):
        system = {"role": "system", "content": served.system_prompt}
        body["messages"] = [system, *body["messages"]]
    return body


def model_at(name: str, scales: Mapping[str, float]) -> str:
    """Returns a model's name at a preference.

    >>> model_at("smollm2", {"plain": 0.25, "rich": 0.75})
    'smollm2@plain=0.25,rich=0.75'
    """
    return f"{name}@{','.join(f'{key}={round(share, 6):g}' for key, share in scales.items())}"


def models(served: ServedFront, name: str) -> dict[str, Any]:
    """Returns OpenAI's list of models: equal shares, the base model and the measured points."""
    entries: list[dict[str, Any]] = [
        {"id": name},
        {"id": f"{name}@{BASE}", "rewards": served.front.base},
    ]
    shares = served.front.preferences().tolist()
    for point, row in zip(served.front.points, shares, strict=True):
        preference = dict(zip(served.adapters, row, strict=True))
        entries.append(
            {
                "id": model_at(name, preference),
                "preference": preference,
                "rewards": point.rewards,
                "errors": point.errors,
                "kl": point.kl if point.kl == point.kl else None,  # JSON has no NaN
            }
        )
    return {
        "object": "list",
        "data": [{"object": "model", "created": 0, "owned_by": "firm", **own} for own in entries],
    }


def model_entry(served: ServedFront, name: str, model_id: str) -> dict[str, Any]:
    """Returns the entry of OpenAI's list of models with an id.

    Raises:
        RequestRefused: When there is none.
    """
    for entry in models(served, name)["data"]:
        if entry["id"] == model_id:
            return entry
    message = f"there is no model {_short(model_id)}: GET /v1/models lists them."
    raise RequestRefused(message, 404, param="model", code="model_not_found")
