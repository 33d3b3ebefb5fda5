"""Commands of a federation's parties: create and start kits, submit and follow runs."""

import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from firm.base.sanitize import printable
from firm.jobs.network_config import (
    CONTROLLER,
    HOME_VARIABLE,
    OUTPUT,
    AdminConfig,
    FederationConfig,
    ServerConfig,
    SiteConfig,
    check_role,
    federation_of,
    kit_config,
    run_config,
    server_address,
    site_identities,
    site_name,
)
from firm.network import certificates, console, kits
from firm.network.daemons import Daemons, flare_command, free_port, search_path, wait_for_port
from firm.network.jobs import NAME
from firm.run.config import to_yaml
from firm.run.errors import UserError
from firm.run.lock import check_not_held
from firm.run.progress import print_table

PORT = 8002
"""The server's port by default."""
START_TIMEOUT = 600
"""Seconds that a site waits for the server's part of a run to start."""
SITE_PROCESS = "firm.jobs.network"
"""Module run by a site's process, with the kit as its argument."""


def provision(cfg: FederationConfig) -> None:
    """Creates the kits."""
    run = run_config(cfg.run, cfg.overrides)
    clients = sum(map(len, cfg.sites.values()))
    if run.num_clients != clients:
        raise UserError(
            f"num_clients must be the number of clients in sites, {clients}, got "
            f"{run.num_clients}; change one of them."
        )
    if cfg.out.exists():
        raise UserError(
            f"{cfg.out} already exists; kits are created only once, with new keys. Choose another "
            "folder, or remove it."
        )
    port = cfg.port or PORT
    made = kits.provision(
        cfg.out,
        name=cfg.name,
        host=cfg.host,
        port=port,
        sites=list(cfg.sites),
        valid_days=cfg.valid_days,
    )
    for kit in made.values():
        (kit / "federation.yaml").write_text(to_yaml(replace(cfg, port=port)), encoding="utf-8")
        (kit / "run.yaml").write_text(to_yaml(run), encoding="utf-8")
    certificates.share_certificates(made, cfg.sites)
    commands = {"server": "start-server", "admin": "submit"}
    print_table(
        f"{cfg.name}: send each party its folder, and keep `authority` to yourself",
        ["party", "folder", "start with"],
        [
            [
                party,
                str(kit),
                f"firm network {commands.get(party, 'start-site')} --kit {shlex.quote(str(kit))}",
            ]
            for party, kit in sorted(made.items(), key=lambda item: item[0] != "server")
        ],
    )


def start_server(cfg: ServerConfig) -> None:
    """Runs the server until it is stopped."""
    check_role(cfg.kit, "server")
    host, port = server_address(cfg.kit)
    daemons = _server(cfg)
    print(f"server {host}:{port}, log {cfg.kit / OUTPUT}", flush=True)
    _keep_running(daemons)


def start_site(cfg: SiteConfig) -> None:
    """Runs a site until it is stopped: the connection to the server and the site process."""
    check_role(cfg.kit, "site")
    host, port = server_address(cfg.kit)
    daemons = _site(cfg)
    _find_server(cfg.kit, waits=True)
    print(f"{site_name(cfg.kit)}: server {host}:{port}, log {cfg.kit / OUTPUT}", flush=True)
    _keep_running(daemons)


def submit(cfg: AdminConfig) -> None:
    """Starts or resumes a run, and waits until it ends.

    If the server or a site is lost and reconnects, the run restarts from its last checkpoint.
    """
    check_role(cfg.kit, "admin")
    federation = federation_of(cfg.kit)
    _find_server(cfg.kit, waits=False)
    while _one_job(cfg, federation):
        _find_server(cfg.kit, waits=True)


def status(cfg: AdminConfig) -> None:
    """Prints the connected sites and the current runs."""
    check_role(cfg.kit, "admin")
    federation = federation_of(cfg.kit)
    host, port = server_address(cfg.kit)
    _find_server(cfg.kit, waits=False)
    with console.session(cfg.kit) as opened:
        connected = console.connected_sites(opened)
        rows = [[s, "connected" if s in connected else "not connected"] for s in federation.sites]
        print_table(f"{federation.name}: server {host}:{port}", ["site", ""], rows)
        print_table("runs", ["name", "status", "submitted"], console.jobs(opened))


def stop(cfg: AdminConfig) -> None:
    """Stops the current runs; `submit` resumes from their last checkpoints."""
    check_role(cfg.kit, "admin")
    _find_server(cfg.kit, waits=False)
    with console.session(cfg.kit) as opened:
        jobs = console.unfinished_jobs(opened)
        for job, name in jobs.items():
            opened.abort_job(job)
            print(f"stopping {name}")
        if not jobs:
            print("no run is active")


def demo(cfg: FederationConfig) -> None:
    """Runs a whole federation on this machine: creates kits, starts parties, completes a run."""
    port = cfg.port or free_port()
    _check_port(port)
    provision(replace(cfg, host="localhost", port=port))
    with ExitStack() as stack:
        stack.enter_context(_server(ServerConfig(cfg.out / "server")))
        wait_for_port(port)
        for site in cfg.sites:
            stack.enter_context(_site(SiteConfig(cfg.out / site)))
        submit(AdminConfig(cfg.out / "admin"))
    print(f"report   {cfg.out / 'server/runs/run/report.html'}")


def _server(cfg: ServerConfig) -> Daemons:
    """Prepares a server's processes."""
    _, port = server_address(cfg.kit)
    check_not_held(cfg.kit)
    _check_port(port)
    _keep_own_part(cfg, "server.yaml")
    kits.prepare_server(cfg.kit, controller=CONTROLLER, arguments={"name": NAME})
    return _daemons(cfg.kit, {"server": flare_command("server", cfg.kit)})


def _site(cfg: SiteConfig) -> Daemons:
    """Prepares a site's processes."""
    server_address(cfg.kit)
    check_not_held(cfg.kit)
    site = site_name(cfg.kit)
    _keep_own_part(cfg, "site.yaml")
    kits.prepare_site(cfg.kit, site=site)
    launcher = [sys.executable, "-m"]
    if cfg.processes > 1:
        launcher += ["torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(cfg.processes), "-m"]
    process = [*launcher, SITE_PROCESS, str(cfg.kit.resolve())]
    connection = flare_command("client", cfg.kit, site)
    return _daemons(cfg.kit, {"connection": connection, "process": process})


def _keep_own_part(cfg: ServerConfig | SiteConfig, name: str) -> None:
    """Checks a party's configuration and writes it to its kit for the party's process."""
    is_secure = kit_config(cfg.kit, cfg.overrides).strategy.secure is not None
    if is_secure and isinstance(cfg, SiteConfig):
        site_identities(cfg.kit)  # tells of missing keys before anything starts
    own = replace(cfg, kit=cfg.kit.resolve())
    (cfg.kit / name).write_text(to_yaml(own), encoding="utf-8")


def _daemons(kit: Path, commands: Mapping[str, list[str]]) -> Daemons:
    """Returns a kit's processes; they resolve a run's relative paths from the current folder."""
    environment = {
        **search_path(Path(__file__).parents[2]),
        HOME_VARIABLE: str(Path.cwd()),
        # a server that imports the libraries on a busy machine may exceed FLARE's 60 s
        "NVFLARE_MAX_RUNNER_SYNC_TIMEOUT": str(START_TIMEOUT),
    }
    return Daemons(commands, output=kit / OUTPUT, environment=environment)


def _keep_running(daemons: Daemons) -> None:
    """Supervises the processes until this one is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as Ctrl-C
    try:
        with daemons:
            while True:
                daemons.watch()
                time.sleep(0.5)
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"port {port} is in use ({error.strerror}); stop the process that uses it, or "
                "create kits with another port."
            ) from error


def _reach(kit: Path) -> str | None:
    """Returns why a kit's server cannot be reached, or None if it can; for sites and admins.

    Raises:
        UserError: The server responds, but it and the kit reject each other.
    """
    host, port = server_address(kit)
    try:
        problem = certificates.refusal(kit, host, port)
    except OSError as error:
        return error.strerror or str(error)
    if problem:
        raise UserError(
            f"{host}:{port}: {problem}; use the kit created together with the server's."
        )
    return None


def _find_server(kit: Path, *, waits: bool) -> None:
    """Waits until the server responds, and reports why it does not.

    Raises:
        UserError: It does not respond, and `waits` is false.
    """
    host, port = server_address(kit)
    last_problem = None
    while problem := _reach(kit):
        line = f"{host}:{port} cannot be reached ({problem})"
        if not waits:
            raise UserError(
                f"{line}; start the server with firm network start-server, or check the network."
            )
        if problem != last_problem:
            print(f"{line}; retrying", flush=True)
            last_problem = problem
        time.sleep(2)


def _one_job(cfg: AdminConfig, federation: FederationConfig) -> bool:
    """Submits a run and follows it; returns whether it must be resubmitted.

    Raises:
        UserError: The run failed or was stopped, or the server rejected it.
    """
    job = None
    try:
        with console.session(cfg.kit) as opened:
            jobs = console.unfinished_jobs(opened)
            job = next((job for job, name in jobs.items() if name == cfg.name), None)
            known = "is already running" if job else "submitted"
            job = job or console.submit(
                opened,
                name=cfg.name,
                sites=list(federation.sites),
                controller=CONTROLLER,
                arguments={"name": cfg.name},
                heartbeat_interval=federation.heartbeat_interval,
                heartbeat_timeout=federation.heartbeat_timeout,
            )
            print(f"run {cfg.name} {known}, job {printable(job)}", flush=True)
            return cfg.follow and _follow(opened, job, list(federation.sites))
    except console.LOST as error:
        if job is None and not _reach(cfg.kit):
            raise UserError(f"the server rejects the run: {printable(error)}") from error
        print("the server is lost; the run continues when it is back", flush=True)
        return True


def _follow(opened: Any, job: str, sites: list[str]) -> bool:
    """Prints a job's progress until it ends; returns whether the run must be restarted.

    Raises:
        UserError: The job failed or was stopped.
    """
    last_state, num_lines = "", 0
    while True:
        state = console.status(opened, job)
        if state == "SUBMITTED":
            connected = console.connected_sites(opened)
            away = [site for site in sites if site not in connected]
            state = f"waiting for {', '.join(away)}" if away else "waiting"
        if state.startswith("FINISHED"):
            break
        if state != last_state:
            print(state.lower(), flush=True)
            last_state = state
        if state == "RUNNING":
            lines = console.output_lines(opened, job, num_lines)
            print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
            num_lines += len(lines)
        time.sleep(1)
    if "COMPLETED" in state:
        print("finished", flush=True)
        return False
    reason, again = console.reason(opened, job)
    if again:
        print(reason, flush=True)
        return True
    raise UserError(
        f"the run has ended with {state.lower().removeprefix('finished:')}: "
        f"{reason or f'see the log of the server, {OUTPUT}'}"
    )
