"""OpenAI's chat endpoint, whose requests state a preference, a target or requirements.

It translates requests to scales of adapters and passes them to an engine; sampling, batching and
templates are the engine's. A trade-off stands in the body, as `preference`, `target` or `require`,
or in the model's name: `NAME@helpful=0.7`, `NAME@target:helpful=0.7,harmless=0.3`,
`NAME@require:harmless>=0.6`, or `NAME@base` for the base model.
"""

import hmac
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from firm.serving.front import TRADE_OFFS, ServedFront
from firm.serving.local import foreign, is_local

MAX_BODY = 8 * 2**20
"""Maximum length of a request in bytes."""
BASE = "base"
"""Part of a model's name after the @ that selects the base model, without adapters."""


class Engine(Protocol):
    """Replies at given scales; see `firm.serving.llama.LlamaEngine`."""

    served: ServedFront

    def reply(self, body: Any, scales: Any, on_chunk: Any = None) -> dict[str, Any] | None:
        """Returns the reply to a chat request, or passes its parts to `on_chunk`."""
        ...


class Refused(ValueError):
    """Raised for a request that is answered with an error.

    Args:
        message: Problem, input and remedy.
        status: HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Translated:
    """A request for the engine."""

    body: dict[str, Any]
    scales: dict[str, float]
    model: str
    """Name of the model at the preference that was found, for the response."""


def translated(request: Mapping[str, Any], served: ServedFront, name: str) -> Translated:
    """Returns a chat request with the scales of its trade-off.

    Args:
        request: OpenAI's request with the trade-off in its body or in the model's name.
        served: The front.
        name: The served model's name.

    Raises:
        Refused: When the model or the trade-off does not exist, or is stated twice.
    """
    body = {**served.request, **request}
    given = {key: body.pop(key) for key in TRADE_OFFS if key in body}
    confidence = body.pop("confidence", 0.95)
    if "lora" in body:
        raise Refused("lora is set from the preference: pass preference, target or require.")
    if not isinstance(confidence, int | float) or not 0.5 < confidence < 1:
        raise Refused(f"confidence must be between 0.5 and 1, got {confidence!r}.")
    model = body.pop("model", name)
    known, at, words = model.partition("@") if isinstance(model, str) else ("", "", "")
    if known != name:
        raise Refused(f"there is no model {model!r}: use {name} or {name}@TRADE-OFF.", 404)
    if at and given:
        raise Refused(
            f"state the trade-off once, got {next(iter(given))} in the body and {words} in the "
            "model's name."
        )
    if words == BASE:
        scales = dict.fromkeys(served.adapters, 0.0)
        return Translated(_with_system(body, served), scales, f"{name}@{BASE}")
    if at:
        key, colon, value = words.partition(":")
        is_named = bool(colon) and key in TRADE_OFFS
        given = {key: value} if is_named else {"preference": words}
    try:
        scales = served.scales(confidence=float(confidence), **given)
    except ValueError as error:
        raise Refused(str(error)) from error
    return Translated(_with_system(body, served), scales, model_at(name, scales))


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


def _with_system(body: dict[str, Any], served: ServedFront) -> dict[str, Any]:
    """Returns a request with the front's system prompt, unless it has its own."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise Refused("messages must be a list of objects with role and content.")
    if not served.system_prompt or any(each.get("role") == "system" for each in messages):
        return body
    system = {"role": "system", "content": served.system_prompt}
    return {**body, "messages": [system, *messages]}


def check_host(host: str, api_key: str | None) -> None:
    """Raises `ValueError` if other machines could reach a host without a key."""
    if api_key is None and not is_local(host):
        raise ValueError(
            f"host {host} can be reached from other machines, which needs a key: pass "
            "--api_key_file, or --host 127.0.0.1."
        )


def family_of(host: str) -> socket.AddressFamily:
    """Returns the address family of a host to bind."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Endpoint(ThreadingHTTPServer):
    """An HTTP server of `/v1/chat/completions`, `/v1/models` and `/health`.

    Args:
        engine: The engine with its front.
        name: Name of the model in requests.
        host: Address to bind.
        port: Port; 0 takes a free one.
        api_key: Key that requests must carry as bearer token; None on this machine alone.

    Raises:
        ValueError: When other machines could reach the server without a key.
        OSError: When the address is in use.
    """

    daemon_threads = True

    def __init__(
        self, engine: Engine, *, name: str, host: str, port: int, api_key: str | None = None
    ) -> None:
        check_host(host, api_key)
        self.engine, self.name, self.api_key = engine, name, api_key
        self.is_local = is_local(host)
        self.address_family = family_of(host)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Address of the server."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint  # type: ignore[assignment]
    server_version, sys_version = "firm", ""
    timeout = 60  # seconds without a byte of the request

    def do_GET(self) -> None:
        """Answers the list of models, or that the server is alive."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answers a chat request."""
        self._answer(self._chat)

    def _answer(self, method: Any) -> None:
        try:
            self._check_allowed()
            method()
        except Refused as error:
            self._send(error.status, _error(str(error), error.status))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _check_allowed(self) -> None:
        headers, key = self.headers, self.server.api_key
        if self.server.is_local:
            problem = foreign(headers.get("Host", ""), headers.get("Origin"))
            if problem is not None:
                raise Refused(problem, 403)
        if key is not None and self.path != "/health":
            given = headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise Refused("the API key is missing or wrong: pass it as bearer token.", 401)

    def _get(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._send(200, models(self.server.engine.served, self.server.name))
        else:
            raise Refused(f"there is no {self.path[:80]!r}: use /v1/chat/completions.", 404)

    def _chat(self) -> None:
        if self.path != "/v1/chat/completions":
            raise Refused(f"there is no {self.path[:80]!r}: use /v1/chat/completions.", 404)
        own = translated(self._body(), self.server.engine.served, self.server.name)
        try:
            if own.body.get("stream"):
                self._stream(own)
                return
            reply = self.server.engine.reply(own.body, own.scales)
        except Refused:
            raise
        except ValueError as error:  # raised by llama.cpp for requests that it refuses
            raise Refused(str(error)) from error
        self._send(200, {**(reply or {}), "model": own.model})

    def _body(self) -> dict[str, Any]:
        if self.headers.get_content_type() != "application/json":  # a page can send other types
            raise Refused("the content type must be application/json.", 415)
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise Refused("the request must state its Content-Length.", 411) from None
        if not 0 <= length <= MAX_BODY:
            raise Refused(f"a request may have {MAX_BODY} bytes, got {length}.", 413)
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError):
            raise Refused("the body must be valid JSON.") from None
        if not isinstance(body, dict):
            raise Refused(f"the body must be a JSON object, got {type(body).__name__}.")
        return body

    def _stream(self, own: Translated) -> None:
        """Sends a reply as server-sent events; the header follows the engine's first part."""
        has_begun = False

        def send(chunk: dict[str, Any]) -> bool:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Cache-Control", "no-cache")
                self.end_headers()
            try:
                self.wfile.write(f"data: {json.dumps({**chunk, 'model': own.model})}\n\n".encode())
            except OSError:  # the client has left
                return True
            return False

        self.server.engine.reply(own.body, own.scales, send)
        if has_begun:
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: requests may be private."""


def _error(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}
