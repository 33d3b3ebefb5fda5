"""The server's end of the wire: what a job says, and what it makes of what others say."""

import io
import json
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.private.admin_defs import ok_reply
from rich.console import Console

from firm.network import controller
from firm.network.controller import REASON, RESTART, FlareChannel, SitesController, Transcript
from firm.network.sites import Lost, SitesReturned
from firm.network.wire import LISTENING
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


class _Flare:
    """FLARE at a server: the controller of the job "own", and its engine."""

    def __init__(self, status_by_site: dict[str, str | None]):
        self.statuses = status_by_site  # None: the site is not connected
        self.engine = self.fl_ctx = self
        self.abort_signal = SimpleNamespace(triggered=False)

    def register_app_command(self, topic, answer): ...

    def broadcast(self, *, task, fl_ctx, targets, min_responses): ...

    def cancel_task(self, task, fl_ctx): ...

    def get_workspace(self):
        return SimpleNamespace(get_run_dir=self.folder.joinpath)

    def get_job_id(self):
        return "own"

    def get_cell(self):
        return self

    def send_aux_request(self, *, targets, **options):
        """None of the sites runs the job."""
        reply = Shareable()
        reply.set_return_code(ReturnCode.COMMUNICATION_ERROR)
        return dict.fromkeys(targets, reply)

    def broadcast_multi_requests(self, requests, timeout, optional):
        statuses = {site: self.statuses[site] for site in requests}
        return {
            site: new_cell_message({}, None if status is None else ok_reply(body=status))
            for site, status in statuses.items()
        }


def _status(*jobs: str) -> str:
    return json.dumps({"running_jobs": [{"job_id": job, "status": "started"} for job in jobs]})


BACK = {"back": _status(), "elsewhere": _status("another")}
NOT_BACK = {
    "away": None,
    "inside": _status("another", "own"),
    "hostile": "[" * 100_000,
    "strange": '{"running_jobs": 3}',
    "rude": "[]",
}


@pytest.fixture
def channel(monkeypatch):
    """A channel that has just lost all of its sites."""
    monkeypatch.setattr(controller, "_LOOK", 0.05)
    channel = FlareChannel(_Flare(BACK | NOT_BACK))  # type: ignore[arg-type]
    answers = channel.ask(dict.fromkeys(BACK | NOT_BACK, b"train"), timeout=60)
    assert all(isinstance(answer, Lost) for answer in answers.values())
    channel.answers = answers  # type: ignore[attr-defined]
    return channel


def test_lost_sites_that_are_connected_again_are_back_before_the_next_round(channel):
    channel.transcript.since(0)  # an administrator follows
    assert channel.returned() == []  # others are away, without which a job would not start
    channel._lost = set(BACK)
    assert channel.returned() == sorted(BACK)


def test_a_job_listens_until_its_follower_has_the_last_line(channel, tmp_path):
    channel.transcript._file = io.StringIO()
    channel._controller.folder = tmp_path
    marker = tmp_path / "own" / LISTENING
    marker.parent.mkdir()

    def follow():
        while not num_read:
            num_read.extend(channel.transcript.since(0))
            assert marker.exists()
            time.sleep(0.1)

    num_read: list[str] = []
    with channel.listening():
        assert marker.exists()
        channel.transcript.since(0)
        channel.transcript.write("round 1\n")
        follower = threading.Timer(0.3, follow)
        follower.start()
    assert num_read == ["round 1"]
    assert not marker.exists()
    follower.join()


def test_no_site_is_back_in_a_job_that_nobody_would_restart(channel):
    assert channel.returned() == []


def test_sites_that_are_connected_again_are_not_called_disconnected(channel):
    called = {site for site, lost in channel.answers.items() if "not connected" in lost.reason}
    assert called == set(NOT_BACK)
    assert "after a restart" in channel.answers["back"].reason


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
    channel = SimpleNamespace(listening=nullcontext)
    monkeypatch.setattr(controller, "FlareChannel", lambda _: channel)
    program = _Fails(error)
    with caplog.at_level("INFO"):
        program.run()
    last = caplog.records[-1].getMessage()
    assert caplog.records[-1].exc_info is None
    assert last.startswith(f"{mark}gone")
    assert last.isprintable()
    assert program.panics == [last.removeprefix(mark)]
