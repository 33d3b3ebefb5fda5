"""The page with sliders, as a browser shows it and as a person uses it."""

import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from safetensors.torch import load_file, save_file

from firm.cli.explore import cli, serve
from firm.fronts import Front
from firm.jobs.chat import SIDES, ChatConfig, Conversation
from firm.jobs.finished_runs import parse_over_run
from firm.run import UserError
from tests import smoke
from tests.explored import ask, served, slide, visit

POLICY = ("--policy.path", str(smoke.POLICY), "--check_base", "false")
MARKERS = """[...document.querySelectorAll(".js-plotly-plot")].map((plot) =>
    plot.data.filter(({ name }) => name.startsWith("the sliders")).map(({ x, y }) => [x[0], y[0]])
)"""


@pytest.fixture(scope="module")
def strong(bent, tmp_path_factory):
    """The bent run, with an adapter that answers differently at each preference."""
    place = Path(shutil.copytree(bent, tmp_path_factory.mktemp("front") / "strong"))
    slopes = load_file(place / "adapter/conditioned.safetensors")
    slopes = {name: 200 * value for name, value in slopes.items()}
    save_file(slopes, place / "adapter/conditioned.safetensors")
    return place


@pytest.fixture(scope="module")
def address(strong):
    """Where the page of that run is served."""
    with served(strong, *POLICY) as address:
        yield address


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

    page("document.querySelector('#anew').click()")
    page.wait_until("document.querySelectorAll('#aligned .message').length == 0")
    assert page.complaints == []


def test_all_sliders_at_zero_are_no_wish(explored):
    page = explored
    before = page(MARKERS)
    slide(page, 0, 0)
    slide(page, 1, 0)
    page.wait_until("document.querySelector('#reached').innerText.includes('above 0')")
    assert page(MARKERS)[0][0][1] == pytest.approx(1.0)  # where the second slider alone led
    assert before != page(MARKERS)
    assert page.complaints == []


def test_bad_input_ends_in_one_line(strong, run, refusal, tmp_path):
    assert "--run runs/mine, a conditioned run" in refusal(cli, [])
    assert "has no front.json: explore a finished run" in refusal(cli, ["--run", str(run)])
    assert "no run at" in refusal(cli, ["--run", str(tmp_path)])
    place = Path(shutil.copytree(strong, tmp_path / "collapsed"))
    front = Front.load(place / "front.json")
    points = tuple(replace(point, collapse="one reply") for point in front.points)
    replace(front, points=points).save(place / "front.json")
    assert "collapsed: train more" in refusal(cli, ["--run", str(place), *POLICY])


def test_without_gradio_it_says_how_to_get_it(strong, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    line = refusal(cli, ["--run", str(strong), "--policy.path", "no/model"])
    assert "pip install 'firm-align[explore]'" in line


def test_where_no_port_is_free_it_says_so():
    class Page:
        def launch(self, **_):
            raise OSError("Cannot find empty port in range: 7860-7959.")

    with pytest.raises(UserError, match="cannot be served at any port from 7860; give another"):
        serve(Page(), None)


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(strong, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)  # it is not even looked for
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(cli, ["--run", str(strong), "--policy.path", "no/model", "--port", port])
    assert f"cannot be served at {port}; give another one" in line
