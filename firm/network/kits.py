"""Installation kit of each party of a network: keys, addresses and permissions.

Kits are created by FLARE's own provisioning. This module adds the settings that our job needs and,
above all, restricts the rest: a kit runs no code that comes with a job, and no components other
than ours.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.signature import SignatureBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from firm.base.json_text import json_text
from firm.network.jobs import EXECUTOR
from firm.network.link import write_profile

ADMIN = "admin@firm.org"
"""The party that submits runs."""

SERVER_RIGHTS = (
    "submit_job",
    "abort_job",
    "app_command",
    "check_status",
    "list_jobs",
    "get_job_meta",
    "get_job_log",
)
"""Commands that an administrator may execute at the server."""
SITE_RIGHTS = ("submit_job", "check_status")
"""Commands that an administrator may execute at a site."""

SETTINGS = {"site": "fed_client.json", "server": "fed_server.json", "admin": "fed_admin.json"}
"""File in `startup` with the settings of a party, by its role."""

_DENIED = ("byoc", "shell_commands", "operate", "manage_job", "download_job", "clone_job")
_ORGANISATION = "firm"


def provision(
    folder: Path, *, name: str, host: str, port: int, sites: list[str], valid_days: int = 360
) -> dict[str, Path]:
    """Creates a kit for each party, with certificates of a new certificate authority.

    Args:
        folder: Destination of the kits, each in a subfolder named after its party. The
            subfolder `authority` holds the signing key, which no party needs.
        name: Name of the federation.
        host: Name or address at which sites reach the server; its certificate contains it.
        port: The server's only port.
        sites: Names of the sites.
        valid_days: Validity of the certificates in days.

    Returns:
        The kits by party: "server", "admin" and the sites.
    """
    participants: list[dict[str, Any]] = [
        {
            "name": host,
            "type": "server",
            "org": _ORGANISATION,
            "fed_learn_port": port,
            "admin_port": port,
        },
        *({"name": site, "type": "client", "org": _ORGANISATION} for site in sites),
        {"name": ADMIN, "type": "admin", "org": _ORGANISATION, "role": "project_admin"},
    ]
    project = prepare_project(
        {"api_version": 3, "name": name, "description": "", "participants": participants}
    )
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config"),
        CertBuilder(root_valid_days=valid_days),
        SignatureBuilder(),
    ]
    draft = folder / ".draft"
    draft.mkdir(mode=0o700, parents=True)  # it has the authority's key until all are moved
    with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints a report
        Provisioner(str(draft), builders).provision(project)
    made = draft / name / "prod_00"
    kits = {}
    for party, theirs in {"server": host, "admin": ADMIN, **{site: site for site in sites}}.items():
        kits[party] = folder / party
        shutil.move(made / theirs, kits[party])
        kits[party].chmod(0o700)
    shutil.move(draft / name / "state", folder / "authority")
    (folder / "authority").chmod(0o700)
    shutil.rmtree(draft)
    return kits


def prepare_server(kit: Path, *, controller: str, arguments: Mapping[str, Any]) -> None:
    """Configures a server's kit in place: its storage, and the only workflow that may run.

    Args:
        kit: Folder of the kit.
        controller: Import path of the workflow's class.
        arguments: Allowed arguments, JSON-serializable; ``jobs.NAME`` as a value allows any name.
    """
    allowed = {"controller": controller, "arguments": [list(pair) for pair in arguments.items()]}
    resources = _resources(kit, builds=controller, gate="ServerGate", arguments=allowed)
    storage = resources["snapshot_persistor"]["args"]["storage"]["args"]
    storage["root_dir"] = str((kit / "snapshots").resolve())
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str((kit / "jobs").resolve())
        if component["id"] == "job_scheduler":  # a job waits for its sites, for more than a day
            # FLARE computes 2 to the power of the count, which overflows at 1024
            component["args"] |= {"max_schedule_count": 1000, "max_schedule_interval": 120.0}
    _write(kit / "local/resources.json", resources)
    _restrict(kit, SERVER_RIGHTS)


def prepare_site(kit: Path, *, site: str) -> Path:
    """Configures a site's kit in place; returns the profile with which its process attaches.

    Raises:
        ValueError: FLARE cannot connect processes in a folder with this path.
    """
    place = (kit / "attach").resolve()
    unusable = [c for c in str(place) if c in "?#" or not c.isprintable()]
    if unusable:
        raise ValueError(
            f"the path of a site's kit must not contain {unusable[0]!r}, since FLARE parses paths "
            f"as addresses, got {str(place.parent)!r}; move the kit."
        )
    resources = _resources(kit, builds=EXECUTOR, gate="SiteGate", arguments={})
    resources["allow_log_streaming"] = False  # logs may quote prompts
    resources["components"] = [
        component for component in resources["components"] if component["id"] != "site_log_streamer"
    ]
    _write(kit / "local/resources.json", resources)
    _restrict(kit, SITE_RIGHTS)
    place.mkdir(mode=0o700, exist_ok=True)
    listener = {
        "scheme": "shared-file",
        "resources": {"root_dir": str(place), "connection_security": "clear"},
    }
    _write(kit / "local/comm_config.json", {"client_api_attach": listener})
    profile = kit / "local/attach_profile.json"
    write_profile(profile, site=site, meeting_place=place)
    return profile


def role_of(kit: Path) -> str:
    """Returns the role of a kit's party, a key of `SETTINGS`.

    Raises:
        ValueError: The folder is not a kit.
    """
    for role, name in SETTINGS.items():
        if (kit / "startup" / name).is_file():
            return role
    raise ValueError(
        f"{kit} is not a kit of a server, a site or an administrator; create kits with "
        "firm network provision."
    )


def server_address(kit: Path) -> tuple[str, int]:
    """Returns the host and port of the server that a kit belongs to.

    Raises:
        ValueError: The folder is not a kit, or the kit does not require certificates.
    """
    role = role_of(kit)
    path = kit / "startup" / SETTINGS[role]
    content = json.loads(path.read_text(encoding="utf-8"))
    if role == "admin":
        security = content["admin"]
        target = f"{security['host']}:{security['port']}"
    else:
        server = content["servers"][0]
        target = server["service"]["target"]
        security = content["client"] if role == "site" else server
    if security.get("connection_security") != "mtls":
        raise ValueError(
            f"connection_security in {path} must be 'mtls', since both sides need certificates, "
            f"got {security.get('connection_security')!r}."
        )
    host, port = target.rsplit(":", 1)
    return host, int(port)


def _resources(kit: Path, *, builds: str, gate: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the components that FLARE builds when it starts, with a gate before every job."""
    path = kit / "local/resources.json.default"
    resources = json.loads(path.read_text(encoding="utf-8"))
    resources["class_allow_list"] = [builds]
    resources["class_list_enforcement_mode"] = "enforce"
    resources["app_validator"] = {"path": "firm.network.gate.AppGate", "args": arguments}
    for component in resources["components"]:
        if component["id"] == "process_launcher":
            component |= {"path": f"firm.network.gate.{gate}", "args": arguments}
    return resources


def _restrict(kit: Path, rights: Iterable[str]) -> None:
    """Limits an administrator to the `rights` that a run needs, and forbids code in jobs."""
    path = kit / "local/authorization.json.default"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["permissions"] = {
        "project_admin": {**dict.fromkeys(rights, "any"), **dict.fromkeys(_DENIED, "none")}
    }
    _write(kit / "local/authorization.json", content)
    kit.chmod(0o700)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json_text(content, indent=2) + "\n", encoding="utf-8")
