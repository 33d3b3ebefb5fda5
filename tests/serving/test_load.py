"""Requests wait in a bounded queue, and end with their clients; slow clients are let go."""

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from firm.serving import connection
from tests.serving.served import Echo, ask, chunk, serving

PATIENCE_S = 30


class Gated(Echo):
    """An engine that says a word each millisecond until its gate is open."""

    num_slots = 1

    def __init__(self, served, num_slots=1):
        super().__init__(served)
        self.num_slots = num_slots
        self.gate = threading.Event()
        self.started, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.asked = []

    def reply(self, body, scales, on_chunk):
        self.asked.append(body["messages"][-1]["content"])
        self.started.release()
        while not self.gate.wait(0.001):
            if on_chunk(chunk(0, {"content": "word "})):
                self.stopped.release()
                return
        super().reply(body, scales, on_chunk)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def body(text="Hi", **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def connect(server, content, *, length=None, kind="application/json"):
    """Returns a connection on which a request has been sent."""
    text = json.dumps(content).encode()
    own = socket.create_connection(server.server_address, timeout=PATIENCE_S)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    own.sendall(f"{head}Content-Length: {length or len(text)}\r\n\r\n".encode() + text)
    return own


def until(is_true):
    """Waits until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_bounded_number_waits_and_others_are_told_when_to_come_back(served, pool):
    engine = Gated(served)
    with serving(served, engine, max_waiting=2) as server:
        waiting = [pool.submit(ask, server, body=body(str(index))) for index in range(3)]
        until(lambda: server._slots._num_admitted == 3)
        with closing(http.client.HTTPConnection(*server.server_address)) as own:
            for _ in range(2):  # on one connection, which stays open
                text = json.dumps(body())
                own.request(
                    "POST", "/v1/chat/completions", text, {"Content-Type": "application/json"}
                )
                response = own.getresponse()
                error = json.loads(response.read())["error"]
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert error["message"] == "2 requests are waiting already: try again later."
                assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert ask(server, "/v1/models")[0] == 200  # no reply, so no place
        engine.gate.set()
        assert [each.result(PATIENCE_S)[0] for each in waiting] == [200] * 3
        assert ask(server, body=body())[0] == 200


@pytest.mark.every_case
@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_stops_when_the_client_leaves(served, stream):
    engine = Gated(served)
    with serving(served, engine) as server:
        own = connect(server, body(stream=stream))
        assert engine.started.acquire(timeout=PATIENCE_S)
        own.close()
        assert engine.stopped.acquire(timeout=PATIENCE_S)
        engine.gate.set()
        assert ask(server, body=body())[0] == 200


@pytest.mark.every_case
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_waiting_is_never_asked_for(served, stream, pool):
    engine = Gated(served)
    with serving(served, engine) as server:
        first = pool.submit(ask, server, body=body("first"))
        assert engine.started.acquire(timeout=PATIENCE_S)
        for index in range(5):
            own = connect(server, body("left", stream=stream))
            until(lambda index=index: server._slots._num_admitted == 2)
            own.close()
            until(lambda: server._slots._num_admitted == 1)
        last = pool.submit(ask, server, body=body("last"))
        engine.gate.set()
        assert first.result(PATIENCE_S)[0] == last.result(PATIENCE_S)[0] == 200
    assert engine.asked == ["first", "last"]


def test_several_replies_take_several_slots_and_are_not_overtaken(served, pool):
    engine = Gated(served, num_slots=2)
    with serving(served, engine) as server:
        pool.submit(ask, server, body=body("one"))
        assert engine.started.acquire(timeout=PATIENCE_S)
        both = pool.submit(ask, server, body=body("two", n=2))
        until(lambda: server._slots._num_admitted == 2)
        last = pool.submit(ask, server, body=body("three"))
        until(lambda: server._slots._num_admitted == 3)
        assert engine.asked == ["one"]  # a slot is free, but for two
        engine.gate.set()
        assert both.result(PATIENCE_S)[0] == last.result(PATIENCE_S)[0] == 200
    assert engine.asked == ["one", "two", "three"]


def test_requests_for_several_slots_do_not_wait_for_each_other(served, pool):
    engine = Gated(served, num_slots=2)
    with serving(served, engine) as server:
        asked = [pool.submit(ask, server, body=body("one")) for _ in range(2)]
        until(lambda: len(engine.asked) == 2)
        asked += [pool.submit(ask, server, body=body("two", n=2)) for _ in range(2)]
        until(lambda: server._slots._num_admitted == 4)
        engine.gate.set()
        assert [each.result(PATIENCE_S)[0] for each in asked] == [200] * 4


def test_who_leaves_while_waiting_for_several_slots_keeps_none(served, pool):
    engine = Gated(served, num_slots=2)
    with serving(served, engine) as server:
        first = pool.submit(ask, server, body=body("one"))
        assert engine.started.acquire(timeout=PATIENCE_S)
        own = connect(server, body("left", n=2))
        until(lambda: server._slots._free._value == 0)
        own.close()
        until(lambda: server._slots._free._value == 1)
        engine.gate.set()
        assert first.result(PATIENCE_S)[0] == 200
    assert engine.asked == ["one"]


def test_every_one_of_a_crowd_is_answered(served):
    async def come(place):
        reader, writer = await asyncio.open_connection(*place)
        text = json.dumps(body()).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        status = (await reader.read())[9:12]
        writer.close()
        return status

    async def crowd(place):
        return Counter(await asyncio.gather(*(come(place) for _ in range(300))))

    with serving(served, max_waiting=10) as server:
        found = asyncio.run(crowd(server.server_address))
    assert found[b"200"] >= 13  # slots and places
    assert found[b"200"] + found[b"429"] == 300


def test_a_head_that_does_not_come_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_S", 0.1)
    with serving(served) as server:
        for text in (b"", b"GET /health HTTP/1.1\r\nHost: loc"):
            with socket.create_connection(server.server_address, timeout=PATIENCE_S) as own:
                own.sendall(text)
                assert own.recv(100) == b""
        # also on a connection that was in use
        with closing(http.client.HTTPConnection(*server.server_address, timeout=30)) as own:
            own.request("GET", "/health")
            assert own.getresponse().read() == b'{"status": "ok"}'
            own.sock.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            assert own.sock.recv(100) == b""


def test_a_slow_reply_is_no_slow_head(served, monkeypatch, pool):
    monkeypatch.setattr(connection, "IDLE_S", 0.05)
    engine = Gated(served)
    with serving(served, engine) as server:
        own = pool.submit(ask, server, body=body())
        assert engine.started.acquire(timeout=PATIENCE_S)
        time.sleep(0.2)
        engine.gate.set()
        assert own.result(PATIENCE_S)[0] == 200


def test_a_body_that_does_not_come_is_refused(served, monkeypatch):
    monkeypatch.setattr(connection, "BODY_S", 0.1)
    with serving(served) as server, connect(server, body(), length=5000) as own:
        answer = own.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body must arrive within 0.1 s" in answer
        until(lambda: server._slots._num_admitted == 0)


def test_who_does_not_take_the_answer_is_let_go(served, monkeypatch):
    monkeypatch.setattr(connection, "SEND_S", 0.1)

    class Talker(Echo):
        def reply(self, body, scales, on_chunk):
            while not on_chunk(chunk(0, {"content": "word " * 20_000})):
                time.sleep(0.001)

    with serving(served, Talker(served)) as server:
        own = connect(server, body(stream=True))
        until(lambda: server._slots._num_admitted == 1)
        until(lambda: server._slots._num_admitted == 0)
        until(lambda: server._slots._free._value == 3)
        own.close()


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_long_body_is_read_and_dropped_so_that_the_answer_arrives(served, kind):
    with serving(served) as server:
        messages = [{"role": "user", "content": ""}] * 250_000  # 8 MB
        with connect(server, {"messages": messages}, kind=kind) as own:
            assert own.recv(100).startswith(b"HTTP/1.1 41")


@pytest.mark.every_case
@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_is_answered_and_logged_without_the_request(served, stream, caplog):
    class Broken(Echo):
        def reply(self, body, scales, on_chunk):
            raise KeyError(body["messages"][-1]["content"])

    with serving(served, Broken(served)) as server, caplog.at_level(logging.DEBUG):
        status, text = ask(server, body=body("my secret", stream=stream))
    error = json.loads(text)["error"]
    assert (status, error["type"], error["param"]) == (500, "server_error", None)
    assert "the server has a defect" in error["message"]
    assert "my secret" not in text + caplog.text
    assert "a request ended with KeyError at" in caplog.text


def test_an_error_within_a_stream_is_its_last_event(served):
    class Failing(Echo):
        def reply(self, body, scales, on_chunk):
            on_chunk({**chunk(0, {}), "prompt_progress": {"total": 5, "processed": 5}})
            on_chunk(chunk(0, {"content": "word"}))
            on_chunk({"error": {"code": 500, "message": "out of memory", "type": "server_error"}})

    with serving(served, Failing(served)) as server:
        status, text = ask(server, body=body(stream=True))
        first, last, rest = text.split("\n\n")
        assert (status, rest) == (200, "")
        assert json.loads(first[6:])["choices"][0]["delta"] == {"content": "word"}
        assert json.loads(last[6:])["error"]["message"].endswith("out of memory.")
        status, text = ask(server, body=body())
        assert (status, json.loads(text)["error"]["type"]) == (500, "server_error")


@pytest.mark.every_case
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_ends_early_is_an_error(served, stream):
    class Mute(Echo):
        def reply(self, body, scales, on_chunk):
            pass

    with serving(served, Mute(served)) as server:
        status, text = ask(server, body=body(stream=stream))
        assert (status, json.loads(text)["error"]["type"]) == (500, "server_error")


def test_who_sends_a_refused_body_slowly_is_answered(served, monkeypatch):
    monkeypatch.setattr(connection, "BODY_S", 0.1)
    with serving(served) as server, connect(server, body(), length=5000, kind="text/plain") as own:
        assert own.recv(100).startswith(b"HTTP/1.1 415 ")


def test_a_server_ends_although_replies_are_computed(served, pool):
    engine = Gated(served)
    with serving(served, engine) as server:
        own = pool.submit(ask, server, body=body())
        assert engine.started.acquire(timeout=PATIENCE_S)
    assert engine.stopped.acquire(timeout=PATIENCE_S)
    status, text = own.result(PATIENCE_S)
    assert (status, json.loads(text)["error"]["type"]) == (503, "server_error")


def test_a_body_in_chunks_is_read(served):
    text, headers = json.dumps(body()).encode(), {"Content-Type": "application/json"}
    with (
        serving(served) as server,
        closing(http.client.HTTPConnection(*server.server_address, timeout=30)) as own,
    ):
        parts = iter([text[:5], text[5:]])
        own.request("POST", "/v1/chat/completions", parts, headers, encode_chunked=True)
        assert own.getresponse().status == 200
