"""An endpoint in a thread of the test, with engines that need no model."""

import http.client
import json
import threading
from contextlib import closing, contextmanager

from firm.serving.endpoint import Endpoint

MESSAGES = [{"role": "user", "content": "Hi"}]


HEAD = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": "file.gguf"}


class Echo:
    """An engine whose reply is a space and the request, in three parts; "bad" is refused."""

    num_slots, context, max_context = 3, 256, 512

    def __init__(self, served):
        self.served = served

    def reply(self, body, scales, on_chunk):
        if body["messages"][-1]["content"] == "bad":
            raise ValueError("bad words")
        text = json.dumps({"body": body, "scales": scales})
        parts = [" ", text[:9], text[9:]]
        for index in range(body.get("n", 1)):
            for part in parts:
                likely = [{"token": part}] * body.get("top_logprobs", 0)  # none at all for 0
                more = {"logprobs": {"content": [{"token": part, "top_logprobs": likely}]}}
                if on_chunk(chunk(index, {"content": part}, **(more if likely else {}))):
                    return
            on_chunk(chunk(index, {}, "stop"))
            usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
            on_chunk({**HEAD, "choices": [], "usage": usage})


def chunk(index, delta, reason=None, **more):
    choice = {"index": index, "delta": delta, "finish_reason": reason, **more}
    return {**HEAD, "choices": [choice]}


@contextmanager
def serving(served, engine=None, **options):
    given = {"name": "tiny", "host": "127.0.0.1", "port": 0, **options}
    with Endpoint(engine or Echo(served), **given) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


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
