"""A FLARE server and its sites on this machine, with mutual TLS, for as long as one job takes."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from firm.network import console, kits
from firm.network.daemons import Daemons, flare_command, free_port, wait_for_port


def run_job(
    folder: Path,
    *,
    name: str,
    controller: str,
    arguments: Mapping[str, Any],
    sites: list[str],
    site_command: Callable[[str, Path], list[str]],
    environment: Mapping[str, str],
    heartbeat_timeout: float,
    reroute: Callable[[int], int] | None = None,
) -> str:
    """Makes kits, starts everything, runs one job to its end, and ends everything.

    Args:
        folder: For the kits; empty.
        name: Of the federation and the job.
        controller: Dotted name of the ``SitesController`` that is the job.
        arguments: Its arguments.
        sites: Their names.
        site_command: From a site's name and its profile to the command of its own process.
        environment: Variables of all processes, beside this one's own.
        heartbeat_timeout: Seconds without a sign of life after which a site's process is dead.
        reroute: From the server's port to the one by which the sites reach it.

    Returns:
        Why the job ended early, or an empty text.
    """
    with ExitStack() as stack:
        port = free_port()
        made = kits.provision(folder, name=name, host="localhost", port=port, sites=sites)
        kits.prepare_server(made["server"], controller=controller)

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
        with console.session(made["admin"]) as opened:
            job = console.submit(
                opened,
                name=name,
                sites=sites,
                controller=controller,
                arguments=dict(arguments),
                heartbeat_interval=1.0,
                heartbeat_timeout=heartbeat_timeout,
            )
            while not str(opened.get_job_meta(job).get("status")).startswith("FINISHED"):
                for each in daemons:
                    each.watch()
                time.sleep(0.5)
            return console.reason(opened, job)[0]


def _redirect(kit: Path, port: int, other: int) -> None:
    """Lets a site reach its server by another port."""
    path = kit / "startup/fed_client.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f":{port}", f":{other}"), encoding="utf-8")
