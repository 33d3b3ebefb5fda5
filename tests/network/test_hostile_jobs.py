"""What whoever holds the administrator's kit, or the server, can ask of a site over real FLARE."""

import json
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from nvflare.fuel.flare_api.api_spec import AuthorizationError, InternalError
from nvflare.private.admin_defs import Message
from nvflare.private.defs import CellChannel, SysCommandTopic, TrainingTopic, new_cell_message

from benchmarks.loopback import Running, federation
from firm.network import certificates, console, jobs, kits
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import search_path

ROOT = Path(__file__).parents[2]
CONTROLLER = "tests.network.test_hostile_jobs.Program"
STOCK = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"

REQUESTS = {
    TrainingTopic.CHECK_STATUS: "",
    SysCommandTopic.SHELL: "cat startup/client.key",
    SysCommandTopic.CONFIGURE_SITE_LOG: "DEBUG",
    SysCommandTopic.SYS_INFO: "",
    SysCommandTopic.REPORT_ENV: "",
    TrainingTopic.DELETE_RUN: "",
    TrainingTopic.RESTART: "",
    TrainingTopic.SHUTDOWN: "",
}
"""What a hostile server asks of a site's connection; the first of it any server does."""


class Program(SitesController):
    """Asks the site's connection for what a hostile server would, and its process for nothing.

    Args:
        name: Of a run.
        folder: Where the site's answers go; empty for nowhere.
    """

    def __init__(self, name: str, folder: str = "") -> None:
        super().__init__()
        self._answers = Path(folder) / "answers.json" if folder else None

    def work(self, channel: FlareChannel) -> None:
        """Does so, and leaves the sites a while."""
        assert self._answers
        answers = {topic: self._ask(topic, body) for topic, body in REQUESTS.items()}
        self._answers.write_text(json.dumps(answers), encoding="utf-8")
        time.sleep(8)

    def _ask(self, topic: str, body: str) -> str:
        engine: Any = self.engine
        reply = engine.get_cell().send_request(
            target="bank",
            channel=CellChannel.CLIENT_MAIN,
            topic="admin",
            request=new_cell_message({}, Message(topic=topic, body=body)),
            timeout=5.0,
        )
        return str(getattr(reply.payload, "body", reply.payload))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server and one site, whose own process waits for a job and does nothing."""
    folder = tmp_path_factory.mktemp("hostile")
    with federation(
        folder / "kits",
        name="hostile",
        controller=CONTROLLER,
        arguments={"name": jobs.NAME, "folder": str(folder)},
        sites=["bank"],
        site_command=lambda site, profile: [sys.executable, "-c", "import time; time.sleep(999)"],
        environment=search_path(ROOT),
    ) as started:
        yield folder, started


def _submit(running: Running, tmp_path: Path, *, sites: Mapping[str, Any], servers: Any, meta: Any):
    """Submits a job as whoever holds the administrator's kit can, and returns how it ended."""
    job = tmp_path / "job"
    files = {f"site/{path}": content for path, content in sites.items()}
    files |= {f"server/{path}": content for path, content in servers.items()} | {"meta.json": meta}
    for name, content in files.items():
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with console.session(running.kits["admin"]) as opened:
        identifier = opened.submit_job(str(job))
        return running.status_at_end(opened, identifier), console.reason(opened, identifier)[0]


def _parts(folder: Path) -> dict[str, Any]:
    meta = {
        "name": "run",
        "resource_spec": {},
        "min_clients": 1,
        "mandatory_clients": ["bank"],
        "deploy_map": {"server": ["server"], "site": ["bank"]},
    }
    return {
        "sites": json.loads(json.dumps(jobs.site_app(1.0, 8.0))),
        "servers": jobs.server_app(CONTROLLER, {"name": "run", "folder": str(folder)}),
        "meta": meta,
    }


def _executor(parts: dict[str, Any]) -> dict[str, Any]:
    return parts["sites"]["config/config_fed_client.json"]["executors"][0]["executor"]


def _with_command(parts: dict[str, Any], marker: Path) -> None:
    command = ["bash", "-c", f"touch {marker}"]
    _executor(parts)["path"] = STOCK
    _executor(parts)["args"] = {"execution_mode": "external_process", "command": command}


def _with_script(parts: dict[str, Any], marker: Path) -> None:
    script = marker.with_suffix(".py")
    script.write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    _executor(parts)["path"] = STOCK
    _executor(parts)["args"] = {"execution_mode": "in_process", "task_script_path": str(script)}


def _with_command_for_our_executor(parts: dict[str, Any], marker: Path) -> None:
    arguments = {"execution_mode": "external_process", "command": f"touch {marker}"}
    _executor(parts)["args"] |= arguments


def _with_code(parts: dict[str, Any], marker: Path) -> None:
    parts["sites"]["custom/sitecustomize.py"] = f"open({str(marker)!r}, 'w')\n"


@pytest.mark.slow
def test_an_outsider_is_not_heard(running, tmp_path):
    _, started = running
    root = started.kits["admin"] / "startup/rootCA.pem"
    host, port = kits.server_address(started.kits["admin"])
    others = kits.provision(tmp_path, name="hostile", host=host, port=port, sites=["bank"])
    for party in ("admin", "bank"):
        assert certificates.refusal(started.kits[party], host, port) is None
        shutil.copy(root, others[party] / "startup/rootCA.pem")
        refusal = certificates.refusal(others[party], host, port)
        assert str(refusal).startswith("the server rejects this kit's certificate")
    context = ssl.create_default_context(cafile=root)
    with (
        socket.create_connection((host, port), timeout=5) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        assert secured.recv(1) == b""  # it ends the connection
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 2" not in connection.recv(100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_with_command, "executors[0].executor.path must be"),
        (_with_script, "executors[0].executor.path must be"),
        (_with_command_for_our_executor, "executor.args.command is not allowed"),
        (_with_code, "the file custom is not allowed"),
    ],
)
def test_a_site_runs_nothing_that_a_job_brings(running, tmp_path, change, told):
    folder, started = running
    marker, parts = tmp_path / "marker", _parts(folder)
    change(parts, marker)
    status, reason = _submit(started, tmp_path, **parts)
    assert not marker.exists()
    assert status == "FINISHED:FAILED_TO_RUN"
    assert told in reason
    log = (started.kits["bank"] / "output.txt").read_text(encoding="utf-8")
    assert "gate - ERROR - the job is refused: " in log
    assert told in log


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
def test_a_server_runs_nothing_else_that_a_job_asks_for(running, tmp_path):
    folder, started = running
    for number, (change, told) in enumerate(
        [
            ({"args": {"name": "../../x", "folder": str(folder)}}, "args.name must be a name"),
            ({"args": {"name": "run", "folder": str(tmp_path)}}, "args.folder must be"),
            ({"path": "nvflare.app_common.workflows.fedavg.FedAvg"}, "workflows[0].path must be"),
        ]
    ):
        parts = _parts(folder)
        parts["servers"]["config/config_fed_server.json"]["workflows"][0] |= change
        (tmp_path / str(number)).mkdir()
        status, reason = _submit(started, tmp_path / str(number), **parts)
        assert status == "FINISHED:FAILED_TO_RUN"
        assert told in reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
def test_a_job_whose_metadata_ask_for_more_is_not_run(running, tmp_path):
    folder, started = running
    parts = _parts(folder)
    parts["meta"]["stats_pool_config"] = {"x": "y"}
    status, _ = _submit(started, tmp_path, **parts)
    assert status.startswith("FINISHED:")
    assert "COMPLETED" not in status
    log = (started.kits["server"] / "output.txt").read_text(encoding="utf-8")
    assert "the job is refused: meta.stats_pool_config is not allowed" in log


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
def test_an_administrator_has_no_commands_but_those_of_a_run(running, tmp_path):
    folder, started = running
    parts = _parts(folder)
    _with_code(parts, tmp_path / "marker")
    _submit(started, tmp_path, **parts)  # it waits until the site is connected
    with console.session(started.kits["admin"]) as opened:
        assert console.connected_sites(opened) == {"bank"}
        for command in (
            *("cat server output.txt", "ls server", "cat bank startup/client.key"),
            *("sys_info server", "sys_info client bank", "report_resources client bank"),
            *("report_env bank", "report_version client bank", "configure_site_log server DEBUG"),
            *("shutdown client bank", "restart client bank", "shutdown server"),
            *("remove_client bank", "disable_client bank", "show_scopes client bank"),
            *("dead bank x", "cells", "show_config_vars bank", "process_info bank", "stress 3 3"),
            *("register_study x", "list_studies", "admin_check_status server", "list_sessions"),
        ):
            with pytest.raises((AuthorizationError, InternalError)):
                opened._do_command(command)
        job = opened.list_jobs()[0]["job_id"]
        for command in ("download_job", "clone_job", "delete_job", "list_job"):
            with pytest.raises(AuthorizationError):
                opened._do_command(f"{command} {job}")
        with pytest.raises(AuthorizationError):
            opened._do_command(f"configure_job_log {job} client bank DEBUG")
        assert console.connected_sites(opened) == {"bank"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
def test_the_job_of_this_project_runs_and_its_server_reads_no_file_of_a_site(running, tmp_path):
    folder, started = running
    status, _ = _submit(started, tmp_path, **_parts(folder))
    assert status == "FINISHED:COMPLETED"
    answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    assert "running_jobs" in answers.pop(TrainingTopic.CHECK_STATUS)
    assert set(answers.values()) == {"invalid_request"}
