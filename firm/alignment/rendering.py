"""Chat templates, rendered in a process of their own with limits on time and memory.

A template is a program in the tokenizer's folder, which may come from someone else. Jinja's sandbox
keeps it from files and code, but not from endless loops, from huge texts, or from nesting that
overflows the interpreter's stack. One process, started at the first conversation, renders all
templates of this process and ends with it.
"""

import atexit
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

TEMPLATE_SECONDS = 10.0
"""Time limit of a chat template for one conversation; normally it takes milliseconds."""
TEMPLATE_BYTES = 512 * 2**20
"""Memory that a chat template may take in addition to its process's, on Linux; normally some KB."""
MAX_CHARACTERS = 20_000_000
"""Longest text of a conversation."""
_START_SECONDS = 300.0
"""Time limit of the start, which takes one or two seconds on an idle machine."""
_PROGRAM = "from firm.alignment.rendering import answer_requests; answer_requests()"


class TemplateBroken(Exception):
    """Raised when a chat template does not compile, or exceeds a limit; the message says which."""


class TemplateRejects(Exception):
    """Raised when a chat template rejects a conversation; the message says why."""


def render(template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Returns a conversation as a chat template writes it.

    Args:
        template: Source of the template, in Jinja.
        messages: The conversation.
        options: Variables of the template, and the options of transformers'
            `render_jinja_template`.

    Raises:
        TemplateBroken: The template does not compile, or exceeds a limit.
        TemplateRejects: It raises an exception.
    """
    request = {"template": template, "messages": messages, "options": options}
    # the sandbox shows other types to a template as their name, too
    text = json.dumps(request, default=lambda value: f"<{type(value).__name__}>")
    answer = _renderer(os.getpid()).ask(text)  # a forked process has none
    if "broken" in answer:
        raise TemplateBroken(answer["broken"])
    if "rejects" in answer:
        raise TemplateRejects(answer["rejects"])
    return answer["text"]


@cache
def _renderer(owner: int) -> "_Renderer":
    return _Renderer(owner)


class _Renderer:
    """The other process, which is started again after it had to be ended."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, request: str) -> dict[str, str]:
        with self._lock:
            process = self._process = self._process or _start()
            assert process.stdin
            try:
                process.stdin.write(request.encode() + b"\n")
                process.stdin.flush()
                answer = _read_line(process, TEMPLATE_SECONDS)
            except BrokenPipeError:
                answer = b""
            except BaseException:  # also after an interrupt: its answer would be the next one's
                self._end()
                raise
            if answer is None:
                self._end()
                return {"broken": f"it takes longer than {TEMPLATE_SECONDS:g} s"}
            if not answer:
                code = self._end()
                reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return {"broken": f"it crashes the process that renders it ({reason})"}
            return json.loads(answer)

    def close(self) -> None:
        if self._owner == os.getpid():
            self._end()

    def _end(self) -> int:
        """Ends the process, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(0.2)  # it ends by itself with its input, unless it renders
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        return process.wait()


def _start() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],  # -P: no modules from the current folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # a thread of NumPy's library would reserve memory of its own
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the parent, which then ends it
    )
    if not _read_line(process, _START_SECONDS):
        process.kill()
        process.communicate()
        raise RuntimeError("the process that renders chat templates did not start.")
    return process


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Returns the next line; None after the time limit, and nothing if the process has ended."""
    assert process.stdout
    file: IO[bytes] = process.stdout
    parts = []
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while selector.select(seconds):
            part = os.read(file.fileno(), 2**20)
            parts.append(part)
            if not part or part.endswith(b"\n"):
                return b"".join(parts) if part else b""
    return None


def answer_requests() -> None:
    """Renders the conversations on standard input until it ends: the other process's program."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    from firm.base.json_text import json_text
    from firm.base.sanitize import first_line

    def answer(template: str, messages: Any, options: dict[str, Any]) -> dict[str, str]:
        try:
            [text], _ = render_jinja_template([messages], chat_template=template, **options)
        except TemplateSyntaxError as error:
            return {"broken": f"line {error.lineno}: {error.message}"}
        except MemoryError:
            return {"broken": f"it takes more than {TEMPLATE_BYTES >> 20} MiB of memory"}
        except RecursionError:
            return {"broken": "it is nested too deeply"}
        except Exception as error:  # templates may raise anything
            return {"rejects": first_line(error)}
        if len(text) > MAX_CHARACTERS:
            return {"broken": f"it writes more than {MAX_CHARACTERS:,} characters"}
        return {"text": text}

    output = os.dup(1)
    os.dup2(2, 1)  # nothing but answers goes there
    render_jinja_template([[]], chat_template="")  # what is imported late is imported now
    _limit_memory()
    with open(output, "wb") as answers:
        answers.write(b"ready\n")
        answers.flush()
        for line in sys.stdin.buffer:
            request = json.loads(line)
            answers.write(json_text(answer(**request)).encode() + b"\n")
            answers.flush()


def _limit_memory() -> None:
    """Limits this process to the memory that it has and `TEMPLATE_BYTES`, on Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return
    used = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
    limit, (_, most) = int(used) * 1024 + TEMPLATE_BYTES, resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
