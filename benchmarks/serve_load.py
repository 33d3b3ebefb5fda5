"""What clients of `firm serve` meet: many at once, some that leave, and ten thousand in a row.

    python benchmarks/serve_load.py --export runs/front-gguf [--tokens 8] [--requests 10000]

Starts `firm serve` on an export with llama.cpp's files, and prints for each case the number of
answers by status, of connections that ended without one, the median and the 95th percentile of the
seconds to an answer, and the server's memory before and after. `clients that leave` ask for 400
tokens and close; the seconds are those of one request after them. Clients share the machine with
the server, so that seconds compare cases and not machines.
"""

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from firm.run.progress import print_table

RESET = "no answer"
CROWDS = (50, 200, 500)
NUM_LEAVERS = 20
NUM_AT_ONCE = 8
"""Connections that the requests in a row use."""
PATIENCE_S = 300


class Answer(NamedTuple):
    """How a request ended."""

    status: str
    seconds: float


def message(tokens: int, **fields: Any) -> bytes:
    """Returns an HTTP request for a reply of so many tokens."""
    messages = [{"role": "user", "content": "Where is my ladder?"}]
    return post({"messages": messages, "max_tokens": tokens, "ignore_eos": True, **fields})


def post(content: Any) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, text: bytes) -> Answer:
    """Returns the answer to a request on a connection of its own."""
    start = time.monotonic()
    answer = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                with suppress(OSError):  # an answer may come before the body has been sent
                    writer.write(text)
                    await writer.drain()
                answer = await reader.read()
            finally:
                writer.close()
    status = answer[9:12].decode() if answer.startswith(b"HTTP/1.") else RESET
    return Answer(status, time.monotonic() - start)


async def leave(port: int, text: bytes) -> None:
    """Sends a request, and closes before the answer."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()


async def crowd(port: int, num: int, tokens: int) -> list[Answer]:
    """Returns the answers to clients that come at the same moment."""
    return await asyncio.gather(*(ask(port, message(tokens)) for _ in range(num)))


async def after_leavers(port: int, tokens: int, **fields: Any) -> list[Answer]:
    """Returns the answer to a request that follows clients that left."""
    await asyncio.gather(*(leave(port, message(400, **fields)) for _ in range(NUM_LEAVERS)))
    return [await ask(port, message(tokens))]


async def in_a_row(port: int, num: int, tokens: int) -> list[Answer]:
    """Returns the answers to many requests, a few at once."""
    answers: list[Answer] = []

    async def work() -> None:
        while len(answers) < num:
            answers.append(await ask(port, message(tokens)))

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return answers[:num]


async def large(port: int) -> list[Answer]:
    """Returns the answer to 8 MB of a quarter of a million messages."""
    return [await ask(port, post({"messages": [{"role": "user"}] * 250_000, "x": "x" * 2**22}))]


async def many_large(port: int) -> list[Answer]:
    """Returns the answers to bodies of 1 MB, whose 250,000 lists take more when read."""
    text = post({"messages": [[]] * 250_000})
    return await asyncio.gather(*(ask(port, text) for _ in range(CROWDS[0])))


def resident_mb(process: int) -> float:
    """Returns the memory of a process in MB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {process} has no memory: did the server end?")


@contextmanager
def serving(folder: Path, more: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields the port and the process of a server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    command = [sys.executable, "-m", "firm", "serve", "--export", str(folder), "--port", str(port)]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) as server:
        try:
            for line in server.stdout or ():
                if "press Ctrl-C" in line:
                    break
            yield port, server.pid
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()


def measured(name: str, work: Coroutine[Any, Any, list[Answer]], process: int) -> list[str]:
    """Returns a row of the table."""
    before = resident_mb(process)
    answers = asyncio.run(work)
    counts = Counter(answer.status for answer in answers)
    num_lost = counts.pop(RESET, 0)
    seconds = sorted(answer.seconds for answer in answers)
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    times = [f"{cuts[9]:.2f}", f"{cuts[18]:.2f}"]
    memory = [f"{before:.0f}", f"{resident_mb(process):.0f}"]
    return [name, statuses or "none", str(num_lost), *times, *memory]


def main() -> None:
    """Measures each case, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help="of `firm export --to gguf`")
    parser.add_argument("--tokens", type=int, default=8, help="of a reply")
    parser.add_argument("--requests", type=int, default=10_000, help="in a row")
    args, more = parser.parse_known_args()
    rows = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the server too
    with serving(args.export, more) as (port, process):

        def measure(name: str, work: Coroutine[Any, Any, list[Answer]]) -> None:
            rows.append(measured(name, work, process))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)

        measure("first", crowd(port, 1, args.tokens))
        for num in CROWDS:
            measure(f"{num} at once", crowd(port, num, args.tokens))
        measure("after clients that leave", after_leavers(port, args.tokens))
        measure("after streams that leave", after_leavers(port, args.tokens, stream=True))
        measure("250,000 messages, 8 MB", large(port))
        measure(f"{CROWDS[0]} times 250,000 lists, 1 MB", many_large(port))
        measure(f"{args.requests} in a row", in_a_row(port, args.requests, args.tokens))
    print_table(
        f"Requests of {args.tokens} tokens",
        ["case", "answers", "no answer", "median s", "95 % s", "MB before", "MB after"],
        rows,
    )


if __name__ == "__main__":
    main()
