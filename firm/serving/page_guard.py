"""Guard of a page that only this machine may open: refuses foreign requests, files and bodies."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

from firm.serving.local import foreign

FILE_ROUTES = ("file", "upload", "upload_progress", "process_recording", "proxy")
"""Gradio's routes to files and other machines, which the page does not need."""


MAX_BODY = 1_000_000
"""Largest body of a request in bytes; those of the page have some KB."""
LISTENER_SECONDS = 1.0
"""Time within which a page that has asked opens the connection on which it gets the reply."""
_LISTENERS: Counter[str] = Counter()
"""Number of open connections for replies, by the page's session."""


class PageGuard:
    """An ASGI application that checks the host, origin and path of each request.

    Foreign pages are refused (see `foreign`), and file uploads and downloads are rejected, whatever
    the environment allows Gradio.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Rejects a request, or passes it to the application."""
        problem = None if scope["type"] == "lifespan" else _problem(scope)
        if problem is None:
            with _listening(scope):
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            status, text = problem
            content_type = (b"content-type", b"text/plain; charset=utf-8")
            start = {"type": "http.response.start", "status": status, "headers": [content_type]}
            await send(start)
            await send({"type": "http.response.body", "body": text.encode()})


def _problem(scope: Any) -> tuple[int, str] | None:
    """Returns status and text of a rejection, or None if the request is allowed."""
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    problem = foreign(headers.get(b"host", ""), headers.get(b"origin"))
    if problem is not None:
        return 403, f"{problem}\n"
    if any(part.partition("=")[0] in FILE_ROUTES for part in scope["path"].split("/")):
        return 404, "This page does not transfer files.\n"
    if scope.get("method") in ("POST", "PUT", "PATCH"):
        size = headers.get(b"content-length")
        if size is None:
            return 411, "State the length of the body.\n"
        if not size.isdecimal() or int(size) > MAX_BODY:
            return 413, f"The body is larger than {MAX_BODY:,} bytes.\n"
    return None


@contextmanager
def _listening(scope: Any) -> Iterator[None]:
    """Counts the connection on which a page gets its replies, as long as it is open."""
    session = ""
    if scope["type"] == "http" and scope["path"].endswith("/queue/data"):
        session = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
    _LISTENERS[session] += 1
    try:
        yield
    finally:
        _LISTENERS[session] -= 1
        if not _LISTENERS[session]:
            del _LISTENERS[session]


def is_heard(session: str | None) -> bool:
    """Returns whether a page still waits for its reply, or comes to wait for it soon."""
    end = time.monotonic() + LISTENER_SECONDS
    while session not in _LISTENERS:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
