"""A FLARE server and its sites on this machine, with mutual TLS, for as long as one job takes."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firm.network import console, kits
from firm.network.daemons import Daemons, flare_command, free_port, wait_for_port


@dataclass(frozen=True)
class Running:
    """A federation that runs on this machine."""

    kits: dict[str, Path]
    """By party: "server", "admin" and the sites."""
    daemons: list[Daemons]
    """The server's, and each site's."""

    def status_at_end(self, opened: Any, job: str) -> str:
        """Waits for a job's end and returns how it ended, in FLARE's words."""
        while not (status := str(opened.get_job_meta(job).get("status"))).startswith("FINISHED"):
            for each in self.daemons:
                each.watch()
            time.sleep(0.5)
        return status


@contextmanager
def federation(
    folder: Path,
    *,
    name: str,
    controller: str,
    arguments: Mapping[str, Any],
    sites: list[str],
    site_command: Callable[[str, Path], list[str]],
    environment: Mapping[str, str],
    reroute: Callable[[int], int] | None = None,
) -> Iterator[Running]:
    """Makes kits and starts everything, for as long as the context lasts.

    Args:
        folder: For the kits; empty.
        name: Of the federation.
        controller: Dotted name of the ``SitesController`` that is the job.
        arguments: Its arguments.
        sites: Their names.
        site_command: From a site's name and its profile to the command of its own process.
        environment: Variables of all processes, beside this one's own.
        reroute: From the server's port to the one by which the sites reach it.
    """
    with ExitStack() as stack:
        port = free_port()
        made = kits.provision(folder, name=name, host="localhost", port=port, sites=sites)
        kits.prepare_server(made["server"], controller=controller, arguments=arguments)

        def start(party: str, commands: dict[str, list[str]]) -> Daemons:
            output = made[party] / "output.txt"
            return stack.enter_context(Daemons(commands, output=output, environment=environment))

        daemons = [start("server", {"server": flare_command("server", made["server"])})]
        wait_for_port(port)
        sites_port = reroute(port) if reroute else port
        for site in sites:
            profile = kits.prepare_site(made[site], site=site)
            _redirect(made[site], port, sites_port)
            connection = flare_command("client", made[site], site)
            process = site_command(site, profile)
            daemons.append(start(site, {"connection": connection, "process": process}))
        yield Running(made, daemons)


def run_job(folder: Path, *, out: Path, heartbeat_timeout: float, **options: Any) -> Any:
    """Returns what one job of a federation has written as JSON when it has come to its end.

    Args:
        folder: For the kits; empty.
        out: The file that the job's controller writes.
        heartbeat_timeout: Seconds without a sign of life after which a site's process is dead.
        options: The other arguments of ``federation``; its name is the job's.

    Raises:
        RuntimeError: The job ended early; with FLARE's reason.
    """
    with (
        federation(folder, **options) as running,
        console.session(running.kits["admin"]) as opened,
    ):
        job = console.submit(
            opened,
            **{key: options[key] for key in ("name", "sites", "controller", "arguments")},
            heartbeat_interval=1.0,
            heartbeat_timeout=heartbeat_timeout,
        )
        running.status_at_end(opened, job)
        reason = console.reason(opened, job)[0]
    if not out.exists():
        raise RuntimeError(f"the job ended early: {reason}")
    return json.loads(out.read_text(encoding="utf-8"))


def _redirect(kit: Path, port: int, other: int) -> None:
    """Lets a site reach its server by another port."""
    path = kit / "startup/fed_client.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f":{port}", f":{other}"), encoding="utf-8")
