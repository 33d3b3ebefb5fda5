"""A request's connection: time limits in both directions, and whether the client is still there."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from firm.base.json_text import json_text
from firm.serving.requests import MAX_BODY, RequestRefused

IDLE_S = 15
"""Time limit for the head of a request, and between requests, in seconds."""
BODY_S = 60
"""Time limit for the body of a request in seconds."""
SEND_S = 60
"""Time limit for the client to take a part of the answer in seconds."""
MAX_DROPPED = 64 * 2**20
"""Bytes of a refused request that are read and dropped, so that its client reads the answer."""


class LeftError(Exception):
    """Raised when the client has left, or does not take its answer."""


class TimedProtocol(H11Protocol):
    """uvicorn's protocol with a time limit for the head of a request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time of the first request's head."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(IDLE_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Stops the time when a head is complete, and starts it when another one begins."""
        before = self.cycle
        super().data_received(data)
        is_idle = before is None or before.response_complete
        if self._timer is not None and self.cycle is not before:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and self.cycle is before and is_idle:
            self._timer = self.loop.call_later(IDLE_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the time."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)


class Connection:
    """A request and the way to its client.

    Args:
        scope: ASGI's.
        receive: ASGI's.
        send: ASGI's.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = Request(scope)
        self._receive, self._send = receive, send
        self._has_body = self._is_slow = self._has_begun = False

    async def read(self) -> bytes:
        """Returns the body.

        Raises:
            RequestRefused: When it is no JSON, too long or too slow.
            LeftError: When the client leaves.
        """
        headers = self.request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page can send other types
            raise RequestRefused("the content type must be application/json.", 415)
        text = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while not self._has_body and len(text) <= MAX_BODY:
                    text += await self._next()
        except TimeoutError:
            self._is_slow = True
            raise RequestRefused(f"the body must arrive within {BODY_S} s.", 408) from None
        if len(text) > MAX_BODY:
            raise RequestRefused(f"a request may have {MAX_BODY} bytes, got more.", 413)
        return bytes(text)

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise LeftError
        self._has_body = not message.get("more_body", False)
        return message.get("body", b"")

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Awaits work, which is cancelled when the client leaves."""
        tasks = asyncio.create_task(work), asyncio.create_task(self._wait_for_leaving())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise LeftError
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_leaving(self) -> None:
        with suppress(LeftError):
            while True:
                await self._next()

    async def send_json(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Sends a whole response."""
        response = Response(json_text(content), status, headers, "application/json")
        await response(self.request.scope, self._receive, self._send_in_time)

    async def begin_events(self) -> None:
        """Begins a response of server-sent events."""
        self._has_begun = True
        head = Response(None, 200, {"Cache-Control": "no-cache"}, "text/event-stream").raw_headers
        fields = [pair for pair in head if pair[0] != b"content-length"]
        await self._send_in_time({"type": "http.response.start", "status": 200, "headers": fields})

    async def send_event(self, content: Any) -> None:
        """Sends an event with an object."""
        await self._send_part(f"data: {json_text(content)}\n\n")

    async def end_events(self) -> None:
        """Sends OpenAI's last event."""
        await self._send_part("data: [DONE]\n\n", has_more=False)

    async def _send_part(self, text: str, *, has_more: bool = True) -> None:
        part = {"type": "http.response.body", "body": text.encode(), "more_body": has_more}
        await self._send_in_time(part)

    async def refuse(self, error: RequestRefused) -> None:
        """Sends an error as the response or, within events, as the last one."""
        with suppress(LeftError):
            if self._has_begun:
                await self._send_part(f"data: {json_text(error.body())}\n\n", has_more=False)
                return
            with suppress(TimeoutError):
                await self._drop_body()
            closing = {} if self._has_body else {"Connection": "close"}
            await self.send_json(error.body(), error.status, {**error.headers, **closing})

    async def _drop_body(self) -> None:
        """Reads the rest of the body; a client that still sends might see a reset instead."""
        if self._is_slow or "expect" in self.request.headers:  # the latter waits for a word
            return
        num_bytes = 0
        async with asyncio.timeout(BODY_S):
            while not self._has_body and num_bytes < MAX_DROPPED:
                num_bytes += len(await self._next())

    async def _send_in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except TimeoutError:
            raise LeftError from None
