"""Requests are checked, merged with the front's defaults, and translated to scales."""

from contextlib import suppress
from dataclasses import replace

import pytest

from firm.fronts.confidence import half_width
from firm.serving.chat_templates import HH_TEMPLATE
from firm.serving.requests import (
    MAX_MESSAGES,
    MAX_SCHEMA,
    ChatRequest,
    RequestRefused,
    check_fields,
    defaults,
    parse_body,
    translate,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
SHARE = 0.5 + 0.5 * (0.9 + half_width(0.01, 8, 1 - 0.05 / 3) - 0.25) / 0.75
"""Share of helpful at which its bound is 0.9, and the rest goes to harmless."""
MET = f"tiny@helpful={round(SHARE, 6):g},harmless={round(1 - SHARE, 6):g}"


@pytest.mark.parametrize(
    ("request_", "shares", "model"),
    [
        ({}, (0.5, 0.5), "tiny@helpful=0.5,harmless=0.5"),
        ({"model": "tiny"}, (0.5, 0.5), "tiny@helpful=0.5,harmless=0.5"),
        ({"preference": {"helpful": 0.25}}, (0.25, 0.75), "tiny@helpful=0.25,harmless=0.75"),
        ({"model": "tiny@helpful=0.7"}, (0.7, 0.3), "tiny@helpful=0.7,harmless=0.3"),
        ({"model": "tiny@preference:helpful=1"}, (1, 0), "tiny@helpful=1,harmless=0"),
        ({"model": "tiny@base"}, (0, 0), "tiny@base"),
        (
            {"model": "tiny@target:helpful=1,harmless=1"},
            (2 / 3, 1 / 3),
            "tiny@helpful=0.666667,harmless=0.333333",
        ),
        ({"target": [0, 1]}, (0, 1), "tiny@helpful=0,harmless=1"),
        ({"require": "helpful>=0.9"}, (SHARE, 1 - SHARE), MET),
        ({"model": "tiny@require:helpful>=0.9"}, (SHARE, 1 - SHARE), MET),
    ],
)
def test_a_trade_off_in_the_body_or_the_name_becomes_scales(served, request_, shares, model):
    own = translate({"messages": MESSAGES, "top_k": 3, **request_}, served, "tiny")
    assert list(own.scales.values()) == pytest.approx(shares, abs=1e-6)
    assert own.model == model
    # the front's defaults, without what only this endpoint knows
    system = {"role": "system", "content": "Be brief."}
    assert own.body == {"messages": [system, *MESSAGES], "top_k": 3, "temperature": 0.7}


def test_the_request_s_own_system_message_and_sampling_take_precedence(served):
    messages = [{"role": "system", "content": "Rhyme."}, *MESSAGES]
    own = translate({"messages": messages, "temperature": 0}, served, "tiny")
    assert own.body == {"messages": messages, "temperature": 0}


def tool(name="add", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def formatted(**schema):
    return {"type": "json_schema", "json_schema": {"name": "own", "schema": schema}}


CYCLE = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 2}
BOMB = {str(n): {"anyOf": [{"items": {"$ref": f"#/$defs/{n + 1}"}}] * 5} for n in range(20)}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
REFUSED = {
    "a preference beyond 1": ({"preference": [0.6, 0.6]}, "sum to 1"),
    "an unknown objective": ({"model": "tiny@happy=1"}, "unknown objective 'happy'"),
    "no trade-off after @": ({"model": "tiny@"}, "name=share pairs"),
    "a bound that nothing meets": ({"require": "helpful>=3"}, "no mixture meets"),
    "two trade-offs": ({"model": "tiny@helpful=1", "target": [1, 1]}, "state the trade-off once"),
    "two in the body": ({"target": [1, 1], "preference": [1, 0]}, "pass one of"),
    "certainty": ({"require": "kl<=1", "confidence": 1}, "confidence must be between"),
    "confidence in words": ({"confidence": "high"}, "confidence must be between"),
    "scales": ({"lora": []}, "lora is set from the preference"),
    "another model": ({"model": "other"}, "there is no model 'other'"),
    "a model that is no name": ({"model": 3}, "there is no model 3"),
    "a long model": ({"model": "x" * 9999}, "there is no model 'xxx"),
    "a typing error": ({"temperatur": 1}, "no field 'temperatur' .*; did you mean 'temperature'"),
    "a grammar": ({"grammar": "root ::= ("}, "no field 'grammar' .*: use response_format"),
    "messages in words": ({"messages": "Hi"}, "messages must be a list, got 'Hi'"),
    "a message in words": ({"messages": ["Hi"]}, "messages.0 must be a mapping, got 'Hi'"),
    "no messages": ({"messages": []}, "messages must be non-empty"),
    "too many": ({"messages": MESSAGES * (MAX_MESSAGES + 1)}, f"at most {MAX_MESSAGES} items"),
    "no role": ({"messages": [{"content": "Hi"}]}, "messages.0.role is missing"),
    "role 5": ({"messages": [{"role": 5, "content": "Hi"}]}, "messages.0.role must be 'system',"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0 must be an object with role and"),
    "content 5": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a t"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images, .* not supported"),
    "hot": ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
    "hotter": ({"temperature": 10**400}, "temperature must be"),
    "below zero": ({"temperature": -1}, "temperature must be at least 0, got -1"),
    "a million replies": ({"n": 10**6}, "n must be at most 3, got 1000000; .*--num_slots"),
    "no replies": ({"n": 0}, "n must be at least 1"),
    "all the tokens": ({"max_tokens": 10**30}, "max_tokens must be at most"),
    "more than the context": ({"max_tokens": 257}, "max_tokens must be at most 256, .*--context"),
    "the later name": ({"max_completion_tokens": 257}, "max_tokens must be at most 256"),
    "a long seed": ({"seed": 10**3999}, "seed must be at most"),
    "a stop 3": ({"stop": 3}, "stop must be a list"),
    "an empty stop": ({"stop": [""]}, "stop.0 must be a text of at least 1"),
    "many stops": ({"stop": ["a"] * 17}, "stop must be of at most 16 items"),
    "likely tokens": ({"top_logprobs": 10**6}, "top_logprobs must be at most 20"),
    "a token in words": ({"logit_bias": {"the": 1}}, "logit_bias.the must be a text that matches"),
    "likely tokens of tools": (
        {"tools": [tool()], "logprobs": True},
        "logprobs must not come with tools",
    ),
    "tools 3": ({"tools": 3}, "tools must be a list, got 3"),
    "a tool 3": ({"tools": [3]}, "tools.0 must be a mapping, got 3"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "name is missing"),
    "another tool": (
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        "of tools",
    ),
    "an odd choice": ({"tool_choice": "all"}, "tool_choice must be 'none', 'auto' or 'required'"),
    "a format": ({"response_format": {"type": "yaml"}}, "response_format.type must be 'text'"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "an object with json_schema"),
    "a pattern": (
        {"response_format": formatted(items={"pattern": "((a?){100}){20}"})},
        "response_format.json_schema.schema must be a JSON schema without patterns",
    ),
    "a pattern of a tool": (
        {"tools": [tool(anyOf=[{"patternProperties": {}}])]},
        "tools.0.function.parameters must be a JSON schema without patterns",
    ),
    "a long schema": (
        {"response_format": formatted(enum=["a" * MAX_SCHEMA])},
        f"a JSON schema of at most {MAX_SCHEMA} characters",
    ),
    "a schema within itself": (
        {"response_format": formatted(**{"$ref": "#/$defs/a", "$defs": {"a": CYCLE}})},
        f"at most {MAX_SCHEMA} characters, with its references written out",
    ),
    "a bomb of references": (
        {"response_format": formatted(**{"$ref": "#/$defs/0", "$defs": BOMB})},
        f"at most {MAX_SCHEMA} characters, with its references written out",
    ),
    "long tools": (
        {"tools": [tool(f"add{index}", enum=["a" * 8000]) for index in range(5)]},
        f"JSON schemas of at most {4 * MAX_SCHEMA} characters",
    ),
    "long requirements": ({"require": "kl<=1," * 1000}, "require must have at most 1000 char"),
    "long requirements in the name": ({"model": "tiny@require:" + "kl<=1," * 1000}, "at most 1000"),
    "options in words": ({"chat_template_kwargs": "thinking"}, "chat_template_kwargs must be"),
    "many options": ({"chat_template_kwargs": {"a": [[]] * 9999}}, "must be of at most 8192 char"),
    "a near trade-off": ({"preferences": {"helpful": 1}}, "did you mean 'preference'"),
    "another word for it": ({"weights": {"helpful": 1}}, "is stated by preference, target or req"),
    "a near one in the name": ({"model": "tiny@preferences:helpful=1"}, "mean 'preference'"),
    "a client's own field": ({"extra_body": {"top_k": 1}}, "put its keys into the body"),
    "a preference elsewhere": ({"metadata": {"Preferences": 1}}, "no effect in metadata"),
    "a preference of a message": (
        {"messages": [{**MESSAGES[0], "preference": {"helpful": 1}}]},
        "preference has no effect in messages: put preference into the body",
    ),
    "audio": ({"modalities": ["text", "audio"]}, "modalities.1 must be 'text'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_wrong_is_refused_with_its_name(served, name):
    request, words = REFUSED[name]
    with pytest.raises(RequestRefused, match=words) as refusal:
        translate({"messages": MESSAGES, **request}, served, "tiny", num_slots=3, context=256)
    assert refusal.value.status == (404 if "model" in words else 400)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"preference": {"helpfull": 1}}, "preference"),
        ({"target": {"helpfull": 1}}, "target"),
        ({"require": "kl<"}, "require"),
        ({"model": "tiny@helpfull=1"}, "model"),
        ({"model": "tiny@require:" + "kl<=1," * 1000}, "model"),
        ({"model": "tiny@helpful=1", "target": [1, 1]}, "target"),
        ({"lora": []}, "lora"),
    ],
)
def test_a_trade_off_that_is_wrong_is_named_as_the_parameter(served, request_, param):
    with pytest.raises(RequestRefused) as refusal:
        translate({"messages": MESSAGES, **request_}, served, "tiny")
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "must be valid JSON"),
        (b"[" * 10_000, "must be valid JSON .recursion limit exceeded"),
        (b"[]", "must be a JSON object, got list"),
        (b"", "must be valid JSON"),
        (rb'{"a": "\ud800"}', "must be valid JSON"),
        (b'{"a": "\xff"}', "must be valid JSON"),
        (b'{"a": NaN}', "must be valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "must be valid JSON .number out of range"),
    ],
)
def test_a_body_is_strict_json(text, words):
    with pytest.raises(RequestRefused, match=words):
        parse_body(text)


def test_null_takes_the_front_s_default(served):
    request = {"messages": MESSAGES, "temperature": None, "top_k": None, "preference": None}
    assert translate(request, served, "tiny").body["temperature"] == 0.7
    assert "top_k" not in translate(request, served, "tiny").body


def test_stops_and_template_options_are_added_to_the_front_s(served):
    options = {"date_string": "26 Jul 2024", "thinking": True}
    request = {"stop": ["\n\nHuman:"], "chat_template_kwargs": options}
    front = replace(served, request=request)
    for own in ("END", ["END", "\n\nHuman:"]):
        body = {"messages": MESSAGES, "stop": own, "chat_template_kwargs": {"thinking": False}}
        body = translate(body, front, "tiny").body
        assert body["stop"] == ["\n\nHuman:", "END"]
        assert body["chat_template_kwargs"] == {"date_string": "26 Jul 2024", "thinking": False}
    body = translate({"messages": MESSAGES, "stop": None}, front, "tiny").body
    assert body["stop"] == ["\n\nHuman:"]


def test_a_developer_message_is_a_system_message(served):
    messages = [{"role": "developer", "content": "Rhyme."}, *MESSAGES]
    body = translate({"messages": messages}, served, "tiny").body
    assert body["messages"] == [{"role": "system", "content": "Rhyme."}, *MESSAGES]


def test_a_list_of_texts_is_one_text(served):
    parts = [{"type": "text", "text": "Where is"}, {"type": "text", "text": "my ladder?"}]
    body = translate({"messages": [{"role": "user", "content": parts}]}, served, "tiny").body
    assert body["messages"][-1]["content"] == "Where is\nmy ladder?"


def test_a_reply_of_the_client_can_be_sent_back(served):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    unused = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}
    request = {"messages": [*MESSAGES, {**reply, **unused}, result]}
    _, _, first, second = translate(request, served, "tiny").body["messages"]
    assert first == {"role": "assistant", "tool_calls": [call]}
    assert second == result


@pytest.mark.slow
def test_a_reply_without_text_can_be_sent_back(served):
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    body = translate({"messages": [*MESSAGES, refused, *MESSAGES]}, served, "tiny").body
    assert body["messages"][2] == {"role": "assistant", "content": ""}


@pytest.mark.slow
def test_hh_rlhfs_form_has_no_messages_of_tools(served):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    for message in (
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ):
        request = {"messages": [*MESSAGES, message, *MESSAGES]}
        with pytest.raises(RequestRefused, match="the form of HH-RLHF"):
            translate(request, replace(served, chat_template=HH_TEMPLATE), "tiny")


@pytest.mark.slow
def test_penalties_look_back_no_further_than_the_context(served):
    for given, taken in ((-1, 256), (10**9, 256), (64, 64), (0, 0)):
        request = {"messages": MESSAGES, "repeat_last_n": given}
        body = translate(request, served, "tiny", context=256).body
        assert body["repeat_last_n"] == taken


def test_a_chosen_tool_is_the_only_one_and_required(served):
    tools = [tool("add", properties={"pattern": {"type": "string"}}), tool("subtract")]
    choice = {"type": "function", "function": {"name": "subtract"}}
    request = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
    body = translate(request, served, "tiny").body
    assert (body["tools"], body["tool_choice"]) == ([tools[1]], "required")


def test_seeds_are_reproducible_even_if_llama_cpp_draws_one_for_them(served):
    seeds = [-1, 0, 1, 2**32 - 1, 2**63 - 1]
    bodies = [translate({"messages": MESSAGES, "seed": s}, served, "tiny").body for s in seeds]
    assert all(0 <= body["seed"] < 2**32 - 1 for body in bodies)


ODD = (
    *(None, True, 0, -1, 10**30, 1e308, float("inf"), "", "\0", "@", "a=b=c", [], [None], [[[]]]),
    *({}, {"": ""}, {"helpful": None}, {"helpful": {}}, {"helpful": 1e308, "harmless": 1e308}),
    *([0, 0], [1e308, 1e308], [-1, 2], ["a", "b"], "kl<=", "kl<=1e999", "helpful>=harmless"),
)
KEYS = [*ChatRequest.model_fields, "model", "confidence", "preference", "target", "require"]


@pytest.mark.parametrize("key", KEYS)
def test_an_odd_value_is_taken_or_refused(served, key):
    for value in ODD:
        for given in (value, [value], {"type": value}, {"role": value, "content": value}):
            with suppress(RequestRefused):
                translate({"messages": MESSAGES, key: given}, served, "tiny")


def test_references_of_a_schema_are_followed_as_far_as_they_are_needed(served):
    number = {"type": "number"}
    own = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": number, "a/b": number}}
    for schema in (own, {**own, "items": {"$ref": "#/$defs/a~1b"}}, {"$ref": "#/nowhere"}):
        request = {"messages": MESSAGES, "response_format": formatted(**schema)}
        body = translate(request, served, "tiny").body
        assert body["response_format"]["json_schema"]["schema"] == schema


def test_fields_for_openai_s_accounts_are_accepted_and_dropped(served):
    request = {"messages": MESSAGES, "user": "me", "metadata": {"a": "b"}, "store": False}
    assert check_fields(request) == {"messages": MESSAGES}


def test_defaults_that_are_no_fields_are_refused_before_serving(served):
    assert defaults(served) == {"temperature": 0.7}
    with pytest.raises(RequestRefused, match="no field 'temperatur'"):
        defaults(replace(served, request={"temperatur": 1}))
