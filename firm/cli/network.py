"""Runs a federation over a network: makes kits, starts the parties, submits and follows runs."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from firm.fields import did_you_mean
from firm.jobs import network_parties
from firm.jobs.network import site_process
from firm.jobs.network_config import AdminConfig, FederationConfig, ServerConfig, SiteConfig
from firm.run import run_cli

COMMANDS = {
    "provision": (network_parties.provision, FederationConfig),
    "start-server": (network_parties.start_server, ServerConfig),
    "start-site": (network_parties.start_site, SiteConfig),
    "submit": (network_parties.submit, AdminConfig),
    "status": (network_parties.status, AdminConfig),
    "stop": (network_parties.stop, AdminConfig),
    "demo": (network_parties.demo, FederationConfig),
}


def cli(argv: Sequence[str] | None = None, *, description: str = "") -> None:
    """Runs the command that the first argument names."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["site-process"] and len(argv) == 2:
        site_process(Path(argv[1]))
        return
    if not argv or argv[0] not in COMMANDS:
        width = max(map(len, COMMANDS))
        lines = [f"  {name:<{width}}  {_title(each)}" for name, (each, _) in COMMANDS.items()]
        heading = "Commands, of which COMMAND --help prints the keys:"
        print("\n".join([f"{description}\n", heading, *lines]))
        if argv[:1] not in ([], ["-h"], ["--help"]):
            line = f"there is no command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}"
            print(f"\nfirm network: error: {line}", file=sys.stderr)
        raise SystemExit(0 if argv[:1] in ([], ["-h"], ["--help"]) else 2)
    command, config = COMMANDS[argv[0]]
    run_cli(command, config, argv[1:], description=command.__doc__ or "")


def _title(command: Callable) -> str:
    return (command.__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    cli()
