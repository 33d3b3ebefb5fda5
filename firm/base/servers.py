"""JSON over HTTP: requests to a server of models, with tries and time limits."""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from firm.base.sanitize import first_line, printable

FIRST_PAUSE_S = 0.25
"""Seconds before the second try of a request, which double with each try."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class ServerLost(Exception):
    """Raised when a server does not answer, is too busy, or has an error of its own."""


class JsonServer:
    """Sends JSON to one server.

    Args:
        url: Its address, such as http://node7:8000.
        key: Environment variable with the key of servers that ask for one.
        timeout_s: Longest wait for an answer, and between two tries, in seconds.
        num_retries: Further tries of a request that is not answered.
        num_requests: Requests at a time.

    Raises:
        ValueError: The address is none, or a number is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "FIRM_SERVER_KEY",
        timeout_s: float = 60.0,
        num_retries: int = 2,
        num_requests: int = 16,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must be an address such as http://node7:8000, got {url!r}.")
        if timeout_s <= 0 or num_retries < 0 or num_requests < 1:
            raise ValueError(
                "timeout_s must be positive, num_retries non-negative and num_requests at least 1, "
                f"got {timeout_s}, {num_retries} and {num_requests}."
            )
        self.url, self.num_requests = url.rstrip("/"), num_requests
        self._key, self._timeout_s, self._num_retries = key, timeout_s, num_retries
        self._client: httpx.Client | None = None  # opened when it is first needed

    def ask(self, path: str, content: Mapping[str, Any] | None = None) -> httpx.Response:
        """Returns the answer to a GET request, or to a POST request with content.

        Raises:
            ServerLost: There is none, or the server failed or was too busy, in all tries.
        """
        if self._client is None:
            key = os.environ.get(self._key)
            self._client = httpx.Client(
                base_url=self.url,
                timeout=self._timeout_s,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                limits=httpx.Limits(max_connections=self.num_requests),
            )
            weakref.finalize(self, self._client.close)
        reason, method, pause = "", "GET" if content is None else "POST", 0.0
        for number in range(self._num_retries + 1):
            time.sleep(min(pause, self._timeout_s))
            pause = FIRST_PAUSE_S * 2**number
            try:
                answer = self._client.request(method, path, json=content)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                continue
            if answer.status_code < 500 and answer.status_code != 429:
                return answer
            asked = answer.headers.get("Retry-After", "")  # seconds, or a date
            pause = max(pause, float(asked)) if asked.isdecimal() else pause
            reason = f"status {answer.status_code}: {error_text(answer)}"
        raise ServerLost(reason)

    def post(self, path: str, content: Mapping[str, Any]) -> Any:
        """Returns the JSON of the answer to a POST request.

        Raises:
            ValueError: The server does not answer, or refuses the request.
        """
        try:
            answer = self.ask(path, content)
            if answer.status_code == 200:
                return answer.json()
            reason = f"status {answer.status_code}: {error_text(answer)}"
        except (ServerLost, ValueError) as error:
            reason = str(error)
        raise ValueError(
            f"{self.url}{path} does not answer ({reason}): check the server, or its url."
        )

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Returns a function's results for all items, several at a time."""
        with ThreadPoolExecutor(self.num_requests, "server") as pool:
            return list(pool.map(function, items))

    def close(self) -> None:
        """Closes the connections; a later request opens others."""
        if self._client is not None:
            self._client.close()
        self._client = None


def error_text(answer: httpx.Response) -> str:
    """Returns the message of an answer's error, or its text."""
    try:
        content = answer.json()
        text = content.get("error", content).get("message") or answer.text
    except (AttributeError, ValueError):
        text = answer.text
    return printable(text, max_length=300)
