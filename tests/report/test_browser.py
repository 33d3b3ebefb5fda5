"""The page as a browser shows it: Chromium, driven over its debugging pipe, opens the real file."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from firm.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason=f"no browser to open the page in: none of {', '.join(NAMES)} found"
)

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
        self.show(scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self._call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 500)
        self._call("Page.navigate", url="about:blank")
        self.complaints.clear()
        self.requests.clear()
        self._call("Page.navigate", url=path.as_uri())
        self.wait_until(f"{DRAWN} !== undefined")

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

    def __call__(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    ends = [*os.pipe(), *os.pipe()]
    # Away from 3 and 4, which the browser's own ends become.
    far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends]
    for end in ends:
        os.close(end)
    read_command, command, answer, write_answer = far
    browser = subprocess.Popen(
        [
            *(sys.executable, "-c", ON_PIPE + "os.execv(sys.argv[3], sys.argv[3:])"),
            *(str(read_command), str(write_answer), str(PROGRAM)),
            "--headless",
            "--remote-debugging-pipe",
            "--no-first-run",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has none
            *(f"--disable-{name}" for name in QUIET.split()),
            f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
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
            browser.wait(timeout=20)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()


def rows_of(run_path: Path, **fields: Any) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


@pytest.fixture
def full_run(make_run: Callable[..., Path]) -> Path:
    """A run that has something to show in every part of the page, with long words in it."""
    return make_run(
        objectives=("helpful", "harmless", "humorous"),
        num_done=3,
        failures={2: ("client_1", "the update is not finite in 'layers.0.attention.q.lora_A'" * 3)},
        alarms={1: "β has no effect " + "x" * 80},
        has_gram=True,
    )


@pytest.mark.parametrize(
    ("width", "scheme", "final"),
    [(390, "light", False), (390, "dark", True), (1280, "light", True), (1280, "dark", False)],
)
def test_a_browser_draws_all_without_complaint_network_or_sideways_scrolling(
    page: Page, full_run: Path, width: int, scheme: str, final: bool
) -> None:
    page.open(write_report(full_run, final=final), width=width, scheme=scheme)
    assert page.complaints == []
    num_figures = page("document.querySelectorAll('[data-figure]').length")
    num_drawn = page("document.querySelectorAll('[data-figure]:has(.js-line, .point)').length")
    assert num_drawn == num_figures > 25
    page("document.querySelectorAll('details').forEach((part) => { part.open = true })")
    assert page("innerWidth") == width
    assert page("document.documentElement.scrollWidth") <= width
    assert page.requests
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}


def test_every_marker_stands_where_metrics_jsonl_says(page: Page, make_run) -> None:
    run_path = make_run(objectives=("helpful", "harmless", "humorous"), num_done=4, has_gram=True)
    page.open(write_report(run_path, final=False))
    shown = {figure.pop("name"): figure for figure in page(SHOWN)}
    clients = [f"client_{index}" for index in range(4)]

    def over_rounds(rows, value):
        return [(row["round"], y) for row in rows if (y := value(row)) is not None]

    def per_client(value):
        return {name: over_rounds(rows_of(run_path, client=name), value) for name in clients}

    def client_means(value):
        means = []
        for round_number in range(1, 5):
            values = [value(row) for row in rows_of(run_path, kind="client", round=round_number)]
            known = [y for y in values if y is not None]
            means += [(round_number, fmean(known))] if known else []
        return means

    rounds = rows_of(run_path, kind="round")
    validation = rows_of(run_path, kind="evaluation", split="validation")
    test = rows_of(run_path, kind="evaluation", split="test")
    plane = [
        [(e["scores"]["helpful"]["mean"], e["scores"]["harmless"]["mean"]) for e in rows]
        for rows in (validation, test)
    ]
    names = ("helpful", "harmless", "humorous")
    expected = {
        "plane-helpful-harmless": dict(
            zip(("validation, after each round", "test, base and aligned"), plane, strict=True)
        ),
        "reward-harmless": per_client(lambda row: row["reward_raw"]["harmless"])
        | {
            "global model, validation": over_rounds(
                validation, lambda row: row["scores"]["harmless"]["mean"]
            )
        },
        "reward-spread": {
            name: client_means(lambda row, key=name: row["reward_raw_std"][key]) for name in names
        },
        "reward-correlation": {
            f"{a} / {b}": client_means(lambda row, key=f"{a}-{b}": row["reward_correlation"][key])
            for a, b in (names[:2], names[::2], names[1:])
        },
        "reward-length": {
            name: client_means(lambda row, key=name: row["reward_length_correlation"][key])
            for name in names
        },
        "truncated": {
            name: client_means(lambda row, key=name: row["reward_truncated_share"][key])
            for name in names
        }
        | {"replies that the length limit cut": client_means(lambda row: 1 - row["end_share"])},
        "weights-spread": {
            name: over_rounds(rounds, lambda row, key=name: row["weights_spread"][key])
            for name in names
        },
        "stationarity": {"bound": over_rounds(rounds, lambda row: row["stationarity"])},
        "drift": {"drift": over_rounds(rounds, lambda row: row["drift"])},
        "kl": per_client(lambda row: row["kl"])
        | {"global model, validation": over_rounds(validation, lambda row: row["kl"])},
    }
    for figure, points_by_name in expected.items():
        traces = shown[figure]["traces"]
        drawn = {t["name"]: list(zip(t["x"], t["y"], strict=True)) for t in traces}
        assert drawn.keys() == points_by_name.keys(), figure
        # Markers stand at hundredths of a pixel.
        near = [1e-4 * abs(b - a) for a, b in (shown[figure][f"{axis}_range"] for axis in "xy")]
        for trace, markers in zip(traces, shown[figure]["markers"], strict=True):
            points = points_by_name[trace["name"]]
            assert len(markers) == len(points) > 1, (figure, trace["name"])
            for at_data, at_screen, point in zip(
                drawn[trace["name"]], markers, points, strict=True
            ):
                assert at_data == pytest.approx(point, rel=1e-12), (figure, trace["name"])
                for axis in range(2):
                    assert at_screen[axis] == pytest.approx(point[axis], abs=near[axis], rel=0)


def test_an_error_in_the_script_of_the_page_is_seen(page: Page, make_run) -> None:
    path = write_report(make_run(num_done=1), final=False)
    path.write_text(path.read_text().replace("drawAll();", "drawAll(); undefined.thing;"))
    page.open(path)
    assert "Cannot read properties of undefined" in " ".join(page.complaints)


def test_what_the_policy_of_the_page_forbids_is_seen(page: Page, make_run) -> None:
    path = write_report(make_run(num_done=1), final=False)
    picture = "<img src='http://127.0.0.1:9/picture.png'><script nonce"
    path.write_text(path.read_text().replace("<script nonce", picture, 1))
    page.open(path)
    assert "Content Security Policy" in " ".join(page.complaints)


def test_page_and_plots_follow_the_colour_scheme_while_open(page: Page, make_run) -> None:
    page.open(write_report(make_run(num_done=1), final=False), scheme="light")
    paper = "document.querySelector('[data-figure]').layout.paper_bgcolor"
    assert page(paper) == "#ffffff"
    assert page("getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 244)"
    page.show("dark")
    page.wait_until(f"{paper} === '#1b1e22'")
    assert page("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 22)"
    text = "document.querySelector('[data-figure] .xtick text').style.fill"
    page.wait_until(f"{text} === 'rgb(163, 171, 181)'")
