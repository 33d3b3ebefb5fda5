"""Remote actions of an administrator: submitting, monitoring and stopping a run."""

import contextlib
import io
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import (
    InternalError,
    JobNotRunning,
    NoConnection,
    NoReply,
    SessionClosed,
)
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from firm.base.json_text import json_text
from firm.base.sanitize import check_name, printable
from firm.network.controller import REASON, RESTART, SAID
from firm.network.jobs import server_app, site_app
from firm.network.kits import ADMIN

LOST = (SessionClosed, ConnectionError, NoConnection)
"""Exceptions raised once the server can no longer be reached."""
_ENDING = re.compile(
    rf"\S+ \S+ - controller - [A-Z]+ - (?P<mark>{re.escape(REASON)}|{re.escape(RESTART)})"
    r"(?P<reason>.*)"
)
"""Matches log lines of ``SitesController`` from their start, so that text sent by a site, which
appears later in a line, cannot imitate one."""


@contextmanager
def session(kit: Path, *, timeout: float = 15.0) -> Iterator[Session]:
    """Opens a session with the server, as the administrator that owns the kit."""
    # its connection warns, for example of answers that come too late
    logging.getLogger("nvflare").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints its connection attempts
        opened = new_secure_session(ADMIN, str(kit), timeout=timeout)
    opened.set_timeout(3.0)  # seconds that the server waits for a job to answer
    try:
        yield opened
    finally:
        opened.close()


def submit(
    opened: Session,
    *,
    name: str,
    sites: list[str],
    controller: str,
    arguments: Mapping[str, Any],
    heartbeat_interval: float,
    heartbeat_timeout: float,
) -> str:
    """Submits a run and returns the job's identifier.

    The job consists of configuration only: the import path of a workflow that the server allows,
    its JSON-serializable arguments, and the instruction to attach to the sites' own processes. It
    starts when all sites are connected. `heartbeat_interval` is the time in seconds between two
    heartbeats of a site's process, and `heartbeat_timeout` the time until the process is considered
    dead.
    """
    meta = {
        "name": check_name(name, "a job's name"),
        "resource_spec": {},
        "min_clients": len(sites),
        "mandatory_clients": sites,
        "deploy_map": {"server": ["server"], "site": sites},
    }
    apps = {
        "server": server_app(controller, arguments),
        "site": site_app(heartbeat_interval, heartbeat_timeout),
    }
    files = {f"{party}/{path}": app[path] for party, app in apps.items() for path in app}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / name
        for path, content in ({"meta.json": meta} | files).items():
            (job / path).parent.mkdir(parents=True, exist_ok=True)
            (job / path).write_text(json_text(content, indent=2), encoding="utf-8")
        return opened.submit_job(str(job))


def unfinished_jobs(opened: Session) -> dict[str, str]:
    """Returns the names of queued and running jobs by their identifiers."""
    # If the server was killed, a job that ran at that time is listed as running forever.
    alive = {job.job_id for job in opened.get_system_info().job_info}
    return {
        job["job_id"]: printable(job["job_name"])
        for job in opened.list_jobs()
        if job["status"] == "SUBMITTED" or job["job_id"] in alive
    }


def jobs(opened: Session, num_jobs: int = 10) -> list[list[str]]:
    """Returns name, status and submission time of the latest jobs, newest first."""
    return [
        [printable(job["job_name"]), printable(job["status"]), printable(job["submit_time"])[:19]]
        for job in opened.list_jobs(limit=num_jobs, reverse=True)
    ]


def status(opened: Session, job: str) -> str:
    """Returns the status of a job, in FLARE's words."""
    return printable(opened.get_job_meta(job).get("status"))


def connected_sites(opened: Session) -> set[str]:
    """Returns the names of the sites that are connected."""
    return {printable(client.name) for client in opened.get_system_info().client_info}


def output_lines(opened: Session, job: str, num_heard: int) -> list[str]:
    """Returns a running job's output after the first `num_heard` lines; empty if it just ended."""
    with contextlib.suppress(JobNotRunning, NoReply, InternalError):
        answer = opened.do_app_command(job, SAID, {"num_heard": num_heard})
        return [printable(line) for line in answer["lines"]]
    return []


def reason(opened: Session, job: str) -> tuple[str, bool]:
    """Returns why a run ended early, from the server's log, and whether to restart it.

    The reason is empty if there is none. The log has no entry for a job that was refused; in that
    case, the reason is taken from the parties' answers in the job's metadata.
    """
    logs = opened.get_job_logs(job, "server")["logs"]
    for line in reversed("\n".join(map(str, logs.values())).split("\n")):
        if ending := _ENDING.match(line):
            return printable(ending["reason"].strip(), max_length=2000), ending["mark"] == RESTART
    answers = opened.get_job_meta(job).get("job_deploy_detail") or []
    problems = [printable(answer) for answer in answers if not str(answer).endswith(": OK")]
    return "; ".join(problems), False
