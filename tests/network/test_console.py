"""What a server tells an administrator is shown, and obeyed by no terminal."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from firm.network import console
from firm.network.controller import REASON, RESTART

HOSTILE = "bank\x1b[2J\x1b]0;title\x07\r\nround 9/9\u202e\u2028"
LINE = "2026-11-22 20:32:18,194 - {name} - ERROR - {text}"


class Server:
    """A server that says hostile things, as FLARE's session hands them on."""

    def __init__(self, log: str = "", detail: list[str] | None = None):
        self.log, self.detail = log, detail

    def get_system_info(self):
        client = SimpleNamespace(name=HOSTILE)
        return SimpleNamespace(job_info=[], client_info=[client])

    def list_jobs(self, **options):
        job = {"job_id": "1", "job_name": HOSTILE, "status": "SUBMITTED", "submit_time": HOSTILE}
        return [job, job | {"status": HOSTILE}]

    def do_app_command(self, job, topic, arguments):
        return {"lines": [HOSTILE, 3, "round 1/9"]}

    def get_job_meta(self, job):
        return {"status": HOSTILE, "job_deploy_detail": self.detail}

    def get_job_logs(self, job, target):
        return {"logs": {"server": self.log}}


def _texts(value):
    if isinstance(value, str):
        return [value]
    values = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return [text for each in values for text in _texts(each)]


@pytest.mark.parametrize(
    "ask",
    [
        console.unfinished_jobs,
        console.jobs,
        console.connected_sites,
        lambda opened: [console.status(opened, "1")],
        lambda opened: console.output_lines(opened, "1", 0),
        lambda opened: [console.reason(opened, "1")[0]],
    ],
)
@pytest.mark.parametrize(
    "server",
    [
        Server(log=LINE.format(name="controller", text=REASON + HOSTILE.replace("\n", ""))),
        Server(detail=[HOSTILE, "server: OK"]),
    ],
)
def test_nothing_that_a_terminal_obeys_is_returned(ask, server):
    texts = _texts(ask(server))
    assert texts
    assert all(text.isprintable() for text in texts)


def test_a_line_cannot_be_forged_into_what_was_said():
    lines = console.output_lines(Server(), "1", 0)
    assert lines[1:] == ["3", "round 1/9"]
    assert lines[0].startswith("bank\\x1b[2J")
    assert lines[0].endswith("\\r\\nround 9/9\\u202e\\u2028")


@pytest.mark.parametrize("mark", [REASON, RESTART])
def test_only_the_controllers_own_line_of_the_log_ends_a_run(mark):
    own = LINE.format(name="controller", text=f"{mark}the quorum is gone")
    forged = [
        LINE.format(name="engine", text=f"client_1: {RESTART}forged"),
        LINE.format(name="engine", text=f"x - controller - INFO - {RESTART}forged"),
        f"ValueError: {RESTART}forged",
    ]
    log = "\n".join([forged[0], own, *forged])
    assert console.reason(Server(log), "1") == ("the quorum is gone", mark == RESTART)
    assert console.reason(Server("\n".join(forged)), "1") == ("", False)


def test_whoever_refused_a_job_says_why():
    refusals = ["server: OK", "bank: the job is refused: x is not allowed"]
    assert console.reason(Server(detail=refusals), "1") == (refusals[1], False)


@pytest.mark.parametrize("name", ["../run", "", "a/b", "a\nb"])
def test_a_job_is_called_by_no_path(name):
    with pytest.raises(ValueError, match=r"a job's name must be at most 64 letters"):
        console.submit(
            Server(),  # type: ignore[arg-type]  # nothing is asked of it
            name=name,
            sites=["bank"],
            controller="x.Y",
            arguments={},
            heartbeat_interval=1.0,
            heartbeat_timeout=8.0,
        )


def test_a_session_hides_warnings_of_the_connection(tmp_path, monkeypatch, caplog):
    opened = SimpleNamespace(set_timeout=lambda seconds: None, close=lambda: None)
    monkeypatch.setattr(console, "new_secure_session", lambda *_, **options: opened)
    monkeypatch.setattr(logging.getLogger("nvflare"), "level", logging.NOTSET)
    cell = logging.getLogger("nvflare.fuel.f3.cellnet.cell.Cell")
    with console.session(tmp_path):
        cell.warning("Receiving unknown req_id, discarded")
        cell.error("broken")
    assert [record.message for record in caplog.records] == ["broken"]
