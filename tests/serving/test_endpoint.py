"""Requests are translated or refused with a status; the server is closed to other machines."""

import json

import openai
import pytest

from firm.serving.endpoint import Endpoint
from firm.serving.local import foreign, is_local
from firm.serving.requests import MAX_BODY, models, translate
from tests.serving.served import HEAD, MESSAGES, Echo, ask, chunk, serving


@pytest.fixture(scope="module")
def server(served):
    with serving(served) as server:
        yield server


def test_a_reply_names_the_model_at_its_preference(server):
    status, text = ask(server, body={"messages": MESSAGES, "model": "tiny@helpful=0.7"})
    reply = json.loads(text)
    assert status == 200
    assert reply["model"] == "tiny@helpful=0.7,harmless=0.3"
    assert reply["object"] == "chat.completion"
    said = reply["choices"][0]["message"]["content"]
    assert said.startswith("{")  # without the space before it
    said = json.loads(said)
    assert said["scales"] == pytest.approx({"helpful": 0.7, "harmless": 0.3})


def test_log_probabilities_come_without_those_of_other_tokens_unless_asked_for(server):
    for likely, num in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)):
        _, text = ask(server, body={"messages": MESSAGES, "logprobs": True, **likely})
        entries = json.loads(text)["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [num] * 3
    assert ask(server, body={"messages": MESSAGES, "logprobs": False, "top_logprobs": 0})[0] == 200
    status, text = ask(server, body={"messages": MESSAGES, "top_logprobs": 2})
    assert (status, json.loads(text)["error"]["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("has_usage", [False, True])
def test_a_stream_is_sent_as_events(server, has_usage):
    body = {"messages": MESSAGES, "stream": True, "preference": [1, 0], "n": 2}
    body["stream_options"] = {"include_usage": has_usage}
    status, text = ask(server, body=body)
    *parts, done, rest = text.split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert {chunk["model"] for chunk in chunks} == {"tiny@helpful=1,harmless=0"}
    usages = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
    both = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert usages == [both] * has_usage
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text.startswith("{")
        said = json.loads(text)
        assert said["scales"] == {"helpful": 1, "harmless": 0}
        assert [choice["finish_reason"] for choice in own] == [None] * 3 + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_bad_request(server, stream):
    body = {"messages": [{"role": "user", "content": "bad"}], "stream": stream}
    status, text = ask(server, body=body)
    assert (status, json.loads(text)["error"]["message"]) == (
        400,
        "llama.cpp refuses the request: bad words.",
    )


CALLS = (
    {"reasoning_content": "The sum "},
    {"reasoning_content": "of both."},
    {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "add"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "sub", "arguments": "{}"}}]},
)


class Caller(Echo):
    """An engine that calls two tools."""

    def reply(self, body, scales, on_chunk):
        for delta in CALLS:
            on_chunk(chunk(0, delta))
        on_chunk(chunk(0, {}, "tool_calls"))
        usage = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
        on_chunk({**HEAD, "choices": [], "usage": usage})


def test_calls_of_tools_are_assembled_as_openai_s_client_does(served):
    with (
        serving(served, Caller(served)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        given = {"model": "tiny", "messages": MESSAGES}
        reply = client.chat.completions.create(**given).choices[0]
        with client.chat.completions.stream(**given) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (reply, streamed):
        assert choice.finish_reason == "tool_calls"
        calls = [
            (call.id, call.function.name, call.function.arguments)
            for call in choice.message.tool_calls
        ]
        assert calls == [("a", "add", '{"x": 1}'), ("b", "sub", "{}")]
    assert reply.message.reasoning_content == "The sum of both."


def test_the_models_are_the_measured_points(server, served):
    status, text = ask(server, "/v1/models")
    assert status == 200
    entries = json.loads(text)["data"]
    assert entries == models(served, "tiny")["data"]
    names = [entry["id"] for entry in entries]
    assert names[:3] == ["tiny", "tiny@base", "tiny@helpful=0,harmless=1"]
    assert len(names) == 2 + len(served.front.points)
    assert entries[2]["rewards"] == {"helpful": 0.0, "harmless": 1.0}
    for name in names:
        translate({"messages": MESSAGES, "model": name}, served, "tiny")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [client.models.retrieve(name).id for name in names] == names
        with pytest.raises(openai.NotFoundError, match="there is no model 'other': GET") as refusal:
            client.models.retrieve("other")
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
    assert json.loads(ask(server, "/v1/models/")[1])["data"] == entries
    assert "use POST /v1/chat/completions or GET /v1/models." in ask(server, "/v1/elsewhere")[1]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"path": "/v1/elsewhere"}, 404),
        ({"path": "/v1/elsewhere", "body": {}}, 404),
        ({"path": "/health"}, 200),
        (
            {"path": "/v1/chat/completions?preference=helpful=1", "body": {"messages": MESSAGES}},
            400,
        ),
        ({"path": "/v1/chat/completions?api-version=1", "body": {"messages": MESSAGES}}, 200),
        ({"body": b"{"}, 400),
        ({"body": b"[" * 10_000}, 400),
        ({"body": []}, 400),
        ({"body": {}, "Content_Type": "text/plain"}, 415),  # which pages may send without asking
        ({"body": b" " * (MAX_BODY + 1)}, 413),
        ({"body": b"", "Content_Length": "-1"}, 400),
        ({"body": b"", "Content_Length": "many"}, 400),
        ({"path": "/v1/models", "Host": "example.org"}, 403),
        ({"path": "/v1/models", "Host": "localhost@example.org"}, 403),
        ({"path": "/v1/models", "Origin": "https://example.org"}, 403),
        ({"path": "/v1/models", "Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
    ],
)
def test_requests_are_checked_before_they_are_answered(server, options, status):
    assert ask(server, **options)[0] == status


def test_a_key_is_asked_for_if_there_is_one(served):
    with serving(served, api_key="secret") as server:
        assert ask(server, "/health")[0] == 200
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
            assert ask(server, "/v1/models", **given)[0] == 401
            assert ask(server, body={"messages": MESSAGES}, **given)[0] == 401
        assert ask(server, "/v1/models", Authorization="Bearer secret")[0] == 200


def test_a_server_for_others_takes_any_host_with_the_key_and_none_changes_the_path(served):
    with serving(served, host="0.0.0.0", api_key="secret") as server:
        for host in ("example.org", "a/health?", "a/health#", "[", "a b"):
            assert ask(server, "/v1/models", Host=host)[0] == 401
            assert ask(server, "/v1/models", Host=host, Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_machines_need_a_key(served, host):
    assert not is_local(host)
    with pytest.raises(ValueError, match="which needs a key: pass --api_key_file"):
        Endpoint(Echo(served), name="tiny", host=host, port=0)


@pytest.mark.every_case
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1"])
def test_a_server_for_this_machine_needs_none(host):
    assert is_local(host)
    assert foreign(f"[{host}]:8080" if ":" in host else f"{host}:8080", None) is None
