"""A browser that tests drive: Chromium, over its debugging pipe."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
QUIET = "gpu quic background-networking component-update sync extensions dev-shm-usage"
TIMEOUT_S = 60
ON_PIPE = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
"""Chromium reads commands from descriptor 3 and answers on 4."""
DRAWN = "document.documentElement?.dataset.drawn"
SHOWN = """[...document.querySelectorAll("[data-figure]")].map((plot) => {
    const { xaxis, yaxis } = plot._fullLayout;
    const traces = [...plot.querySelectorAll(".scatterlayer .trace")];
    const position = (node) => node.getAttribute("transform").match(/-?[\\d.]+/g).map(Number);
    return {
        name: plot.dataset.figure,
        traces: plot.data.map(({ name, type, x, y }) => ({ name, type, x, y })),
        x_range: xaxis.range.map(Number), y_range: yaxis.range.map(Number),
        // Values read back from where the markers stand on the screen.
        markers: traces.map((trace) => [...trace.querySelectorAll(".points .point")].map((node) => {
            const [left, top] = position(node);
            return [xaxis.p2c(left), yaxis.p2c(top)];
        })),
    };
})"""


class Page:
    """A tab of the browser and what it complained of or asked for since it opened a file."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._count, self._session = b"", 0, {}
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        """Opens a file in a window of that width and waits until all its figures are drawn."""
        self.visit(path.as_uri(), width=width, scheme=scheme)
        self.wait_until(f"{DRAWN} !== undefined")

    def visit(self, address: str, *, width: int = 1280, scheme: str = "light") -> None:
        """Opens an address in a window of that width."""
        self.show(scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self._call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 500)
        self._call("Page.navigate", url="about:blank")
        self.complaints.clear()
        self.requests.clear()
        self._call("Page.navigate", url=address)

    def show(self, scheme: str) -> None:
        """Tells the page that its reader prefers the colour scheme."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def wait_until(self, condition: str) -> None:
        """Waits until a condition holds, or the page complains."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self(condition) and not self.complaints:
            assert time.monotonic() < deadline, f"{condition} does not come true"
            time.sleep(0.05)

    def write(self, text: str) -> None:
        """Writes a text into what has the focus."""
        self._call("Input.insertText", text=text)

    def shown(self) -> dict[str, dict[str, Any]]:
        """Returns what every figure of the page shows, by its name."""
        return {figure.pop("name"): figure for figure in self(SHOWN)}

    def __call__(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, section: str | None = None, *, height: int | None = None) -> bytes:
        """Returns a PNG of the whole page, of its beginning, or of a section with its margin."""
        area = self(
            "(({ left, top, width, height }) => [left, top + scrollY, width, height])"
            f"(document.querySelector({json.dumps(section or 'html')}).getBoundingClientRect())"
        )
        margin = 20 if section else 0
        clip = {
            "x": max(0, area[0] - margin),
            "y": max(0, area[1] - margin),
            "width": area[2] + 2 * margin,
            "height": height or area[3] + 2 * margin,
            "scale": 1,
        }
        answer = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(details["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(details["args"]))
            case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                self.complaints.append(details["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser's tab; tests that want it are skipped where there is no browser."""
    if PROGRAM is None:
        pytest.skip(f"no browser to open the page in: none of {', '.join(NAMES)} found")
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Yields a tab of a browser that keeps what it keeps in the folder ``profile``."""
    ends = [*os.pipe(), *os.pipe()]
    # Away from 3 and 4, which the browser's own ends become.
    far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends]
    for end in ends:
        os.close(end)
    read_command, command, answer, write_answer = far
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", ON_PIPE + "os.execv(sys.argv[3], sys.argv[3:])"),
            *(str(read_command), str(write_answer), str(PROGRAM)),
            "--headless",
            "--remote-debugging-pipe",
            "--no-first-run",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has none
            *(f"--disable-{name}" for name in QUIET.split()),
            f"--user-data-dir={profile}",
        ],
        pass_fds=(read_command, write_answer),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_command)
    os.close(write_answer)
    try:
        yield Page(command, answer)
    finally:
        os.close(command)  # the browser ends when nobody commands it
        os.close(answer)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
