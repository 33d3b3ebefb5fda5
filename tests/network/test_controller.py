"""The server's end of the wire: what a job says, and what it makes of what others say."""

import io
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from nvflare.apis.shareable import Shareable
from rich.console import Console

from firm.network import controller
from firm.network.controller import REASON, RESTART, SitesController, Transcript
from firm.network.sites import Lost, SitesReturned
from firm.run import Progress

HOSTILE = "gone\x1b[2J\n2026-11-22 20:32:18,194 - controller - INFO - " + RESTART + "forged"


def test_a_job_ends_when_its_follower_has_heard_the_last_line(monkeypatch):
    monkeypatch.setattr(controller, "FOLLOWING", 60.0)
    transcript = Transcript(io.StringIO())
    transcript.write("round 1\n")
    assert transcript.since(0) == ["round 1"]
    transcript.write("round 2\n")
    waiting = threading.Thread(target=transcript.wait_until_heard)
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    assert transcript.since(1) == ["round 2"]
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_job_waits_for_nobody_who_does_not_follow(monkeypatch):
    transcript = Transcript(io.StringIO())
    transcript.write("round 1\n")
    start = time.monotonic()
    transcript.wait_until_heard()  # nobody has asked
    transcript.since(1)
    transcript.write("round 2\n")
    monkeypatch.setattr(controller, "FOLLOWING", 0.1)
    transcript.wait_until_heard()  # somebody has left
    assert time.monotonic() - start < 10


def test_a_transcript_passes_on_everything_and_keeps_whole_lines():
    file = io.StringIO()
    transcript = Transcript(file)
    for text in ("round", " 1\nround 2\n", "", "rou"):
        assert transcript.write(text) == len(text)
    assert file.getvalue() == "round 1\nround 2\nrou"
    assert transcript.lines == ["round 1", "round 2"]


def test_a_run_shows_a_line_per_round_in_it():
    transcript = Transcript(io.StringIO())
    with Progress(9, ["a"], ["x"], console=Console(file=transcript)) as progress:
        for number in (1, 2):
            progress.event("round_finished", row={"round": number, "seconds": 3.0})
    assert [line.split("  ")[0] for line in transcript.lines] == ["round 1/9", "round 2/9"]


def test_a_sites_return_code_is_shown_and_obeyed_by_no_terminal():
    answer = Shareable()
    answer.set_return_code(HOSTILE)
    lost = controller._read(answer)
    assert isinstance(lost, Lost)
    assert lost.reason.isprintable()


class _Fails(SitesController):
    def __init__(self, error):
        super().__init__()
        self.error, self.panics = error, []

    def work(self, channel):
        raise self.error

    def panic(self, reason):
        self.panics.append(reason)


@pytest.mark.parametrize(
    ("error", "mark"),
    [(ValueError(HOSTILE), REASON), (SitesReturned(HOSTILE), RESTART)],
)
def test_the_last_line_of_a_failed_jobs_log_is_the_controllers(monkeypatch, caplog, error, mark):
    channel = SimpleNamespace(transcript=Transcript(io.StringIO()))
    monkeypatch.setattr(controller, "FlareChannel", lambda _: channel)
    program = _Fails(error)
    with caplog.at_level("INFO"):
        program.run()
    last = caplog.records[-1].getMessage()
    assert caplog.records[-1].exc_info is None
    assert last.startswith(f"{mark}gone")
    assert last.isprintable()
    assert program.panics == [last.removeprefix(mark)]
