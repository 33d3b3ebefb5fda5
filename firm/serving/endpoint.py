"""OpenAI's chat endpoint, whose requests state a preference, a target or requirements.

`firm.serving.requests` checks requests and translates them to scales of adapters; sampling,
batching and templates are the engine's, and connections uvicorn's. A request has a place from
before its body is read: as many as the engine has slots are answered, a bounded number wait, and
others are refused at once. The engine stops when the client leaves.
"""

import asyncio
import gc
import hmac
import logging
import socket
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from threading import Event
from traceback import extract_tb
from typing import Any, Self

import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from firm.serving.connection import IDLE_S, SEND_S, Connection, LeftError, TimedProtocol
from firm.serving.llama import LlamaEngine
from firm.serving.local import check_host, family_of, foreign, is_local
from firm.serving.replies import (
    assemble,
    begin_with_text,
    refusal,
    total_usage,
    without_likely,
)
from firm.serving.requests import (
    EngineRequest,
    RequestRefused,
    check_places,
    defaults,
    model_entry,
    models,
    parse_body,
    translate,
)
from firm.serving.slots import Slots

logger = logging.getLogger(__name__)
BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""


class Endpoint:
    """An HTTP server of `/v1/chat/completions`, `/v1/models`, its entries and `/health`.

    Args:
        engine: The engine with its front.
        name: Name of the model in requests.
        host: Address to bind.
        port: Port; 0 takes a free one.
        api_key: Key that requests must carry as bearer token; None on this machine alone.
        max_waiting: Number of requests that may wait while others are answered.

    Raises:
        ValueError: When other machines could reach the server without a key, or the front's
            defaults are no fields of requests.
        OSError: When the address is in use.
    """

    def __init__(
        self,
        engine: LlamaEngine,
        *,
        name: str,
        host: str,
        port: int,
        api_key: str | None = None,
        max_waiting: int = 64,
    ) -> None:
        check_host(host, api_key)
        defaults(engine.served)
        self.engine, self.name = engine, name
        self._api_key, self._is_local = api_key, is_local(host)
        self._slots = Slots(engine.num_slots, max_waiting)
        self._socket = socket.create_server((host, port), family=family_of(host), backlog=BACKLOG)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of accepted connections too
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SEND_S)
        self._pool = ThreadPoolExecutor(engine.num_slots, thread_name_prefix="firm-serve")
        self._reader = ThreadPoolExecutor(1)  # a body of 1 MB may take 30 MB when it is read
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                loop="asyncio",
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=1,
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="critical",  # requests may be private
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._pool.shutdown()
        self._reader.shutdown()

    @property
    def server_address(self) -> tuple[str, int]:
        """Host and port."""
        return self._socket.getsockname()[:2]

    @property
    def url(self) -> str:
        """Address of the server."""
        host, port = self.server_address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve_forever(self) -> None:
        """Answers requests until interrupted, or until `shutdown` in another thread."""
        gc.freeze()  # otherwise a long body takes 0.4 s, to look through all that is loaded
        try:
            self._server.run(sockets=[self._socket])
        finally:
            gc.unfreeze()

    def shutdown(self) -> None:
        """Has `serve_forever` return."""
        self._server.should_exit = True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; errors have OpenAI's form, and are never logged with the request."""
        own = Connection(scope, receive, send)
        try:
            await self._route(own)
        except LeftError:
            pass
        except RequestRefused as error:
            await own.refuse(error)
        except asyncio.CancelledError:  # by uvicorn, a second after Ctrl-C
            await own.refuse(
                RequestRefused("the server has stopped; the request was not answered.", 503)
            )
        except Exception as error:
            place = extract_tb(error.__traceback__)[-1]
            words = f"{type(error).__name__} at {place.filename}:{place.lineno}"
            logger.error("a request ended with %s", words)
            await own.refuse(
                RequestRefused("the server has a defect; the request was not answered.", 500)
            )

    async def _route(self, own: Connection) -> None:
        self._check_allowed(own.request)
        match own.request.method, own.request.scope["path"]:
            case "GET", "/health":
                await own.send_json({"status": "ok"})
            case "GET", "/v1/models" | "/v1/models/":
                await own.send_json(models(self.engine.served, self.name))
            case "GET", path if path.startswith("/v1/models/"):
                model_id = path.removeprefix("/v1/models/")
                await own.send_json(model_entry(self.engine.served, self.name, model_id))
            case "POST", "/v1/chat/completions":
                with self._slots.admit():
                    await self._chat(own)
            case method, path:
                raise RequestRefused(
                    f"there is no {method} {path[:80]!r}: use POST /v1/chat/completions or GET "
                    "/v1/models.",
                    404,
                )

    def _check_allowed(self, request: Request) -> None:
        headers, key = request.headers, self._api_key
        if self._is_local:
            problem = foreign(headers.get("host", ""), headers.get("origin"))
            if problem is not None:
                raise RequestRefused(problem, 403)
        if key is not None and request.scope["path"] != "/health":
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                message = "the API key is missing or wrong: pass it as bearer token."
                raise RequestRefused(message, 401, code="invalid_api_key")

    async def _chat(self, own: Connection) -> None:
        check_places({}, own.request.query_params)
        text = await own.read()
        engine = self.engine
        limits = {"num_slots": engine.num_slots, "context": engine.context}
        limits["max_context"] = engine.max_context
        request = await asyncio.get_running_loop().run_in_executor(
            self._reader,
            lambda: translate(parse_body(text), engine.served, self.name, **limits),
        )
        await own.while_connected(self._reply(own, request))

    async def _reply(self, own: Connection, request: EngineRequest) -> None:
        async with aclosing(self._parts(request)) as parts:
            if not request.body.get("stream"):
                await own.send_json(assemble([part async for part in parts]))
                return
            first = await anext(parts)  # until then, an error has a status
            await own.begin_events()
            await own.send_event(first)
            async for part in parts:
                if part["choices"] or request.has_usage:
                    await own.send_event(part)
            await own.end_events()

    async def _parts(self, request: EngineRequest) -> AsyncGenerator[dict[str, Any]]:
        """Yields the parts of a reply, the last one with its usage.

        Raises:
            RequestRefused: When the engine refuses the request.
        """
        usages, begun = [], set[int]()
        async with aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                if "error" in chunk:
                    raise refusal(chunk["error"], max_context=self.engine.max_context)
                if "prompt_progress" in chunk:
                    continue
                if not chunk["choices"]:
                    usages.append(chunk["usage"])
                    if len(usages) < request.num_replies:
                        continue
                    chunk["usage"] = total_usage(usages)
                if not request.has_likely:
                    chunk = without_likely(chunk)
                yield {**begin_with_text(chunk, begun), "model": request.model}
        if len(usages) < request.num_replies:
            raise RequestRefused("llama.cpp has ended the reply early.", 500)

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[dict[str, Any]]:
        """Yields the chunks of the engine, which stops at the next one if this is closed."""
        chunks: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        loop, has_left, num = asyncio.get_running_loop(), Event(), request.num_replies

        def put(chunk: dict[str, Any] | Exception | None) -> bool:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            return has_left.is_set()

        def compute() -> None:
            try:
                # all replies come in parts, those of the prompt among them, which can be stopped
                options = {"stream_options": {"include_usage": True}, "return_progress": True}
                body = {**request.body, "stream": True, **options}
                self.engine.reply(body, request.scales, put)
            except Exception as error:
                put(error)
            else:
                put(None)

        await self._slots.take(num)
        computing = loop.run_in_executor(self._pool, compute)
        computing.add_done_callback(lambda _: self._slots.free(num))
        try:
            while (chunk := await chunks.get()) is not None:
                if isinstance(chunk, ValueError):
                    raise refusal(chunk, max_context=self.engine.max_context)
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            has_left.set()
