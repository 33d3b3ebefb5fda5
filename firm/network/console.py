"""An administrator's actions from afar: submit a run, watch it, stop it."""

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import (
    InternalError,
    JobNotRunning,
    NoClientsAvailable,
    NoConnection,
    NoReply,
    SessionClosed,
)
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.fuel.hci.proto import MetaKey, MetaStatusValue

from firm.federation.outside import check_name, printable
from firm.network.controller import REASON, RESTART, RETURNED, SAID
from firm.network.jobs import server_app, site_app
from firm.network.kits import ADMIN

LOST = (SessionClosed, ConnectionError, NoConnection)
"""Raised where the server cannot be reached any more."""
_ENDING = re.compile(
    rf"\S+ \S+ - controller - [A-Z]+ - (?P<mark>{re.escape(REASON)}|{re.escape(RESTART)})"
    r"(?P<reason>.*)"
)
"""A line of the log that ``SitesController`` wrote; what a site says stands further right."""


@contextmanager
def session(kit: Path, *, timeout: float = 15.0) -> Iterator[Session]:
    """Yields a session with the server, as the administrator whose kit this is."""
    with contextlib.redirect_stdout(io.StringIO()):
        opened = new_secure_session(ADMIN, str(kit), timeout=timeout)
    opened.set_timeout(3.0)  # that the server waits for a site which is gone
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

    The job is configuration alone: which workflow, one that the server allows, runs there by its
    import path, with which JSON-able arguments, and that the sites' own processes are to be
    attached. It begins when all sites are connected. Heartbeats are in seconds, between two signs
    of life of a site's process and until it counts as dead.
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
            (job / path).write_text(json.dumps(content, indent=2), encoding="utf-8")
        return opened.submit_job(str(job))


def unfinished(opened: Session) -> dict[str, str]:
    """Returns the jobs that wait or run, and the name of each."""
    # A job that ran when the server was killed is listed as running ever after.
    alive = {job.job_id for job in opened.get_system_info().job_info}
    return {
        job["job_id"]: printable(job["job_name"])
        for job in opened.list_jobs()
        if job["status"] == "SUBMITTED" or job["job_id"] in alive
    }


def jobs(opened: Session, num_jobs: int = 10) -> list[list[str]]:
    """Returns name, status and time of the last jobs, the newest first."""
    return [
        [printable(job["job_name"]), printable(job["status"]), printable(job["submit_time"])[:19]]
        for job in opened.list_jobs(limit=num_jobs, reverse=True)
    ]


def status(opened: Session, job: str) -> str:
    """Returns the status of a job, in FLARE's words."""
    return printable(opened.get_job_meta(job).get("status"))


def connected(opened: Session) -> set[str]:
    """Returns the names of the sites that are connected."""
    return {printable(client.name) for client in opened.get_system_info().client_info}


def without_part(opened: Session) -> list[str]:
    """Returns the sites that are connected and have no part in the job that runs.

    A site that was away when a job began takes part once the run is started again.
    """
    try:
        rows = opened.get_client_job_status() or []
    except NoClientsAvailable:
        return []
    return [
        printable(row[MetaKey.CLIENT_NAME])
        for row in rows
        if row[MetaKey.STATUS] == MetaStatusValue.NO_JOBS
    ]


def said(opened: Session, job: str, num_heard: int) -> list[str]:
    """Returns the lines that a running job has said after so many; none when it has just ended."""
    with contextlib.suppress(JobNotRunning, NoReply, InternalError):
        answer = opened.do_app_command(job, SAID, {"num_heard": num_heard})
        return [printable(line) for line in answer["lines"]]
    return []


def tell_returned(opened: Session, job: str, sites: list[str]) -> None:
    """Sends a job the names of sites that are back, so that it ends before its next round."""
    with contextlib.suppress(JobNotRunning, NoReply, InternalError):  # it has just ended
        opened.do_app_command(job, RETURNED, {"sites": sites})


def reason(opened: Session, job: str) -> tuple[str, bool]:
    """Returns why a run ended early, as the server's log says, and whether to start it again.

    The reason is empty when there is none. Of a job that was refused the log says nothing; what the
    parties answered to it stands beside it.
    """
    logs = opened.get_job_logs(job, "server")["logs"]
    for line in reversed("\n".join(map(str, logs.values())).split("\n")):
        if ending := _ENDING.match(line):
            return printable(ending["reason"].strip(), max_length=2000), ending["mark"] == RESTART
    answers = opened.get_job_meta(job).get("job_deploy_detail") or []
    problems = [printable(answer) for answer in answers if not str(answer).endswith(": OK")]
    return "; ".join(problems), False
