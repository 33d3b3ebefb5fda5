"""Requests to servers of reward models, with tries, time limits and errors that name the server."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from firm.base.sanitize import first_line, printable

KEY = "FIRM_SERVER_KEY"
"""Environment variable with the key of servers that ask for one."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Requests:
    """Sends JSON to one server.

    Args:
        url: Its address, such as http://node7:8000.
        timeout_s: Longest wait for an answer, in seconds.
        num_retries: Further tries of a request that is not answered.
        num_requests: Requests at a time.

    Raises:
        ValueError: The address is none.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 60.0, num_retries: int = 2, num_requests: int = 16
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must be an address such as http://node7:8000, got {url!r}.")
        if timeout_s <= 0 or num_retries < 0 or num_requests < 1:
            raise ValueError(
                "timeout_s must be positive, num_retries non-negative and num_requests at least 1, "
                f"got {timeout_s}, {num_retries} and {num_requests}."
            )
        self.url = url.rstrip("/")
        self._timeout_s, self._num_retries, self._num_requests = (
            timeout_s,
            num_retries,
            num_requests,
        )

    def post(self, path: str, content: Mapping[str, Any]) -> Any:
        """Returns the JSON of an answer.

        Raises:
            ValueError: The server does not answer, or refuses the request.
        """
        key, reason = os.environ.get(KEY), ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for _ in range(self._num_retries + 1):
            try:
                answer = httpx.post(
                    f"{self.url}{path}", json=content, headers=headers, timeout=self._timeout_s
                )
                if answer.status_code == 200:
                    return answer.json()
            except (httpx.HTTPError, ValueError) as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                continue
            reason = f"status {answer.status_code}: {printable(answer.text, max_length=200)}"
            if answer.status_code < 500 and answer.status_code != 429:
                break
        raise ValueError(
            f"{self.url}{path} does not answer ({reason}): check the server, or its url."
        )

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Returns a function's results for all items, several at a time."""
        with ThreadPoolExecutor(self._num_requests, "reward") as pool:
            return list(pool.map(function, items))
