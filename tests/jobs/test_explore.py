"""The page with sliders, as a browser shows it and as a person uses it."""

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import socket
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from firm.base.extras import install_command
from firm.cli.main import COMMANDS
from firm.fronts import Front
from firm.jobs.chat import SIDES, Conversation
from firm.jobs.configs import ChatConfig
from firm.jobs.explore import MAX_WAITING, serve
from firm.jobs.finished_runs import parse_over_run
from firm.run import UserError
from firm.serving import page_guard
from tests import smoke
from tests.explored import ask, served, slide, visit

cli = COMMANDS["explore"].run

POLICY = ("--policy.path", str(smoke.POLICY), "--check_base", "false")
MARKERS = """[...document.querySelectorAll(".js-plotly-plot")].map((plot) =>
    plot.data.filter(({ name }) => name.startsWith("the sliders")).map(({ x, y }) => [x[0], y[0]])
)"""


@pytest.fixture(scope="module")
def address(strong, tmp_path_factory):
    """Where the page of that run is served, in an environment that would open it to others."""
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    secret.write_text("secret")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "ALLOWED_PATHS": str(secret.parent),
            "MCP_SERVER": "True",
            "ROOT_PATH": "https://example.org/elsewhere",
            "SERVER_NAME": "0.0.0.0",
            "SHARE": "True",
        }.items():
            environment.setenv(f"GRADIO_{name}", value)
        with served(strong, *POLICY) as address:
            yield address


def _request(address, path, method="GET", body=None, **headers):
    """Returns status and content that a client of the page gets, whatever headers it sends."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(method, path, body, named)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


@pytest.fixture
def explored(address, page):
    """The page in a browser."""
    visit(page, address)
    yield page
    page.visit("about:blank")  # its server would wait for the connections


def _said(page, side):
    """Returns what stands in a dialogue."""
    return " ".join(page(f"document.querySelector('#{side}').innerText").split())


def test_a_person_moves_the_point_along_the_front_and_asks_there(explored, strong):
    page = explored
    assert page.complaints == []
    assert {urlsplit(url).hostname for url in page.requests} <= {"127.0.0.1", None}  # None: data
    slide(page, 0, 0.4)
    slide(page, 1, 0.6)
    page.wait_until("document.querySelector('#reached').innerText.includes('0.400 ±')")
    share = 0.5 + 0.25 * (0.4 - 0.25) / (0.5625 - 0.25)  # as in tests/jobs/test_front.py
    assert f"{share:.3f}" in page("document.querySelector('#reached').innerText")
    page.wait_until(f"Math.abs(({MARKERS})[0][0][0] - 0.4) < 1e-6")
    assert page(MARKERS)[0][0] == pytest.approx([0.4, 0.6])

    lines = ["Where is my ladder?", "And the mug?"]
    for turn, line in enumerate(lines):
        ask(page, line, 2 * turn + 2)
    options = ["--run", str(strong), *POLICY, "--preference", f"[{share}, {1 - share}]"]
    cfg = parse_over_run(ChatConfig, options, key="run", description="")
    conversation = Conversation(cfg)
    answers = [conversation.answer(line, turn) for turn, line in enumerate(lines)]
    for side in SIDES:
        said, at = _said(page, side), 0
        for line, answer in zip(lines, answers, strict=True):
            for part in (line, answer[side].text, *answer[side].scores):
                at = said.find(" ".join(part.split()), at)
                assert at >= 0, (part, said)
    assert page("document.querySelector('#line textarea').value") == ""

    page("document.querySelector('#restart').click()")
    page.wait_until("document.querySelectorAll('#aligned .message').length == 0")
    assert page.complaints == []


def test_all_sliders_at_zero_are_no_target(explored):
    page = explored
    before = page(MARKERS)
    slide(page, 0, 0)
    slide(page, 1, 0)
    page.wait_until("document.querySelector('#reached').innerText.includes('above 0')")
    assert page(MARKERS)[0][0][1] == pytest.approx(1.0)  # where the second slider alone led
    assert before != page(MARKERS)
    assert page.complaints == []


@pytest.mark.slow
def test_no_file_leaves_the_machine_whatever_the_environment_allows(address, tmp_path_factory):
    secret = next(tmp_path_factory.getbasetemp().glob("elsewhere*/secret.txt"))
    for path in (f"/gradio_api/file={secret}", f"/gradio_api/file/{secret}", "/gradio_api/mcp/"):
        status, text = _request(address, path)
        assert status == 404
        assert "secret" not in text


def test_no_file_comes_in(address):
    head = 'Content-Disposition: form-data; name="files"; filename="a.txt"'
    body = "\r\n".join(["--x", head, "", "a", "--x--", ""])
    kind = "multipart/form-data; boundary=x"
    status, text = _request(address, "/gradio_api/upload", "POST", body, Content_Type=kind)
    assert status == 404
    assert "a.txt" not in text


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org:7860", "localhost@x", ""])
def test_a_request_to_another_host_is_refused(address, host):
    for path in ("/", "/config", "/gradio_api/info"):
        status, text = _request(address, path, Host=host)
        assert status == 403
        assert "another host" in text


def test_a_request_from_another_page_is_refused(address):
    body = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"})
    for origin in ("https://example.org", "null"):
        status, _ = _request(address, "/gradio_api/queue/join", "POST", body, Origin=origin)
        assert status == 403


def test_names_of_this_machine_are_answered(address):
    port = urlsplit(address).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST"):
        assert _request(address, "/config", Host=host)[0] == 200


def test_what_the_page_itself_asks_for_is_answered(address):
    status, page = _request(address, "/")
    assert status == 200
    links = re.findall(r'(?:src|href)="((?:\./|/)[^"#]*)"', page)
    assert len(links) > 3
    for link in links:
        assert _request(address, f"/{link.lstrip('./')}")[0] == 200, link
    # a slider is moved
    event = {"data": [0.4, 0.6], "fn_index": 0, "session_hash": "test"}
    own = address.rstrip("/")
    kind = "application/json"
    path = "/gradio_api/queue/join"
    status, _ = _request(address, path, "POST", json.dumps(event), Origin=own, Content_Type=kind)
    assert status == 200
    status, answers = _request(address, "/gradio_api/queue/data?session_hash=test")
    assert "0.400 \\u00b1" in answers or "0.400 ±" in answers


@pytest.mark.slow
def test_bad_input_ends_in_one_line(strong, run, refusal, tmp_path):
    assert "a conditioned run with a front: pass --run runs/mine" in refusal(cli, [])
    assert "has no front.json: explore needs a finished run" in refusal(cli, ["--run", str(run)])
    assert "no run at" in refusal(cli, ["--run", str(tmp_path)])
    place = Path(shutil.copytree(strong, tmp_path / "collapsed"))
    front = Front.load(place / "front.json")
    points = tuple(replace(point, collapse="one reply") for point in front.points)
    replace(front, points=points).save(place / "front.json")
    assert "collapsed: train more" in refusal(cli, ["--run", str(place), *POLICY])


def test_without_gradio_it_says_how_to_get_it(strong, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    line = refusal(cli, ["--run", str(strong), "--policy.path", "no/model"])
    assert install_command("explore") in line


def test_where_no_port_is_free_it_says_so():
    class Page:
        def launch(self, **_):
            raise OSError("Cannot find empty port in range: 7860-7959.")

    with pytest.raises(UserError, match="cannot be served at any port from 7860; choose another"):
        serve(Page(), None)


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(strong, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)  # it is not even looked for
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(cli, ["--run", str(strong), "--policy.path", "no/model", "--port", port])
    assert f"cannot be served at {port}; choose another --port" in line


def test_a_large_body_is_refused_before_it_is_read(address):
    status, text = _request(address, "/gradio_api/queue/join", "POST", b" " * 50_000_000)
    assert (status, text) == (413, "The body is larger than 1,000,000 bytes.\n")
    parts = iter([b" " * 1000] * 10)  # of a length that is not stated
    status, text = _request(address, "/gradio_api/queue/join", "POST", parts)
    assert (status, text) == (411, "State the length of the body.\n")


def test_a_reply_is_for_those_who_listen(monkeypatch):
    monkeypatch.setattr(page_guard, "LISTENER_SECONDS", 0)
    heard = []

    async def app(scope, receive, send):
        heard.append(page_guard.is_heard("abc"))
        if scope["path"] == "/gradio_api/queue/data":
            raise ConnectionResetError  # the listener leaves

    async def request(path, query):
        headers = [(b"host", b"127.0.0.1:7860")]
        scope = {"type": "http", "path": path, "query_string": query, "headers": headers}
        with contextlib.suppress(ConnectionResetError):
            await page_guard.PageGuard(app)(scope, None, None)

    asyncio.run(request("/gradio_api/queue/data", b"session_hash=abc"))
    asyncio.run(request("/gradio_api/queue/data", b"session_hash=other"))
    asyncio.run(request("/gradio_api/queue/join", b"session_hash=abc"))
    assert heard == [True, False, False]
    assert not page_guard.is_heard("abc")
    assert not page_guard.is_heard(None)


def test_only_so_many_requests_wait_and_none_of_a_page_that_was_closed(address):
    config = json.loads(_request(address, "/config")[1])
    [asked] = [each for each in config["dependencies"] if len(each["inputs"]) == 4]
    answers = []
    for number in range(2 * MAX_WAITING):  # nobody listens
        body = {
            "data": ["Hi", None, 0.5, 0.5],
            "fn_index": asked["id"],
            "session_hash": f"{number}",
        }
        answers.append(
            _request(
                *(address, "/gradio_api/queue/join", "POST", json.dumps(body)),
                content_type="application/json",
            )
        )
    assert {status for status, _ in answers} == {200, 503}
    assert "Queue is full" in answers[-1][1]
