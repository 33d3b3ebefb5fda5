"""Requests are translated or refused with a status; the server is closed to other machines."""

import http.client
import json
import threading
from contextlib import closing, contextmanager

import pytest

from firm.fronts.confidence import half_width
from firm.serving.endpoint import MAX_BODY, Endpoint, Refused, models, translated
from firm.serving.local import is_local

MESSAGES = [{"role": "user", "content": "Hi"}]


class Echo:
    """An engine whose reply is the request; the word "bad" is refused."""

    def __init__(self, served):
        self.served = served

    def reply(self, body, scales, on_chunk=None):
        if body["messages"][-1]["content"] == "bad":
            raise ValueError("bad words")
        content = {"body": body, "scales": scales, "model": "file.gguf"}
        if on_chunk is None:
            return content
        for part in range(3):
            if on_chunk({**content, "part": part}):
                break
        return None


@contextmanager
def serving(served, **options):
    given = {"name": "tiny", "host": "127.0.0.1", "port": 0, **options}
    with Endpoint(Echo(served), **given) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(served):
    with serving(served) as server:
        yield server


def ask(server, path="/v1/chat/completions", body=None, **headers):
    """Returns status and text of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    place = server.server_address[:2]
    with closing(http.client.HTTPConnection(*place, timeout=30)) as connection:
        if body is None:
            connection.request("GET", path, headers=named)
        else:
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, text, {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        return response.status, response.read().decode()


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
    own = translated({"messages": MESSAGES, "top_k": 3, **request_}, served, "tiny")
    assert list(own.scales.values()) == pytest.approx(shares, abs=1e-6)
    assert own.model == model
    # the front's defaults, without what only this endpoint knows
    system = {"role": "system", "content": "Be brief."}
    assert own.body == {"messages": [system, *MESSAGES], "top_k": 3, "temperature": 0.7}


def test_the_request_s_own_system_message_and_sampling_take_precedence(served):
    messages = [{"role": "system", "content": "Rhyme."}, *MESSAGES]
    own = translated({"messages": messages, "temperature": 0}, served, "tiny")
    assert own.body == {"messages": messages, "temperature": 0}


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"preference": [0.6, 0.6]}, 400, "sum to 1"),
        ({"model": "tiny@happy=1"}, 400, "unknown objective 'happy'"),
        ({"model": "tiny@"}, 400, "name=share pairs"),
        ({"require": "helpful>=3"}, 400, "no mixture meets"),
        ({"model": "tiny@helpful=1", "target": [1, 1]}, 400, "state the trade-off once"),
        ({"target": [1, 1], "preference": [1, 0]}, 400, "pass one of"),
        ({"require": "kl<=1", "confidence": 1}, 400, "confidence must be between"),
        ({"require": "kl<=1", "confidence": "high"}, 400, "confidence must be between"),
        ({"lora": []}, 400, "lora is set from the preference"),
        ({"messages": "Hi"}, 400, "messages must be a list"),
        ({"messages": ["Hi"]}, 400, "messages must be a list"),
        ({"model": "other"}, 404, "there is no model 'other'"),
        ({"model": 3}, 404, "there is no model 3"),
    ],
)
def test_what_cannot_be_served_is_refused(server, request_, status, message):
    body = {"messages": MESSAGES, **request_}
    with pytest.raises(Refused):
        translated(body, server.engine.served, "tiny")
    code, text = ask(server, body=body)
    error = json.loads(text)["error"]
    assert (code, error["code"]) == (status, status)
    assert message in error["message"]


def test_a_reply_names_the_model_at_its_preference(server):
    status, text = ask(server, body={"messages": MESSAGES, "model": "tiny@helpful=0.7"})
    reply = json.loads(text)
    assert status == 200
    assert reply["model"] == "tiny@helpful=0.7,harmless=0.3"
    assert reply["scales"] == pytest.approx({"helpful": 0.7, "harmless": 0.3})


def test_a_stream_is_sent_as_events(server):
    body = {"messages": MESSAGES, "stream": True, "preference": [1, 0]}
    status, text = ask(server, body=body)
    *parts, done, rest = text.split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert [chunk["part"] for chunk in chunks] == [0, 1, 2]
    assert {chunk["model"] for chunk in chunks} == {"tiny@helpful=1,harmless=0"}


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_bad_request(server, stream):
    body = {"messages": [{"role": "user", "content": "bad"}], "stream": stream}
    status, text = ask(server, body=body)
    assert (status, json.loads(text)["error"]["message"]) == (400, "bad words")


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
        translated({"messages": MESSAGES, "model": name}, served, "tiny")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"path": "/v1/elsewhere"}, 404),
        ({"path": "/v1/elsewhere", "body": {}}, 404),
        ({"path": "/health"}, 200),
        ({"body": b"{"}, 400),
        ({"body": b"[" * 10_000}, 400),
        ({"body": []}, 400),
        ({"body": {}, "Content_Type": "text/plain"}, 415),  # which pages may send without asking
        ({"body": b"", "Content_Length": str(MAX_BODY + 1)}, 413),
        ({"body": b"", "Content_Length": "-1"}, 413),
        ({"body": b"", "Content_Length": "many"}, 411),
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


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_machines_need_a_key(served, host):
    assert not is_local(host)
    with pytest.raises(ValueError, match="which needs a key: pass --api_key_file"):
        Endpoint(Echo(served), name="tiny", host=host, port=0)


@pytest.mark.every_case
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1"])
def test_a_server_for_this_machine_needs_none(host):
    assert is_local(host)


def test_a_server_for_others_takes_any_host_with_the_key(served):
    with serving(served, host="0.0.0.0", api_key="secret") as server:
        assert (
            ask(server, "/v1/models", Host="example.org", Authorization="Bearer secret")[0] == 200
        )
        assert ask(server, "/v1/models", Host="example.org")[0] == 401
