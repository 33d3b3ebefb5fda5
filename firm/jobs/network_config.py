"""Configurations of a federation over a network, and of its parties."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from firm.base.fields import (
    NonNegativeInt,
    NumWorkers,
    Port,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.base.sanitize import check_name
from firm.jobs.alignment_config import AlignmentConfig
from firm.network.site_policy import SitePolicy
from firm.run.config import compose, to_dict
from firm.run.differences import leaves
from firm.run.errors import UserError
from firm.run.shipped import CONFIGS

if TYPE_CHECKING:
    from firm.federation.options.secure.protocol import KeyRing

CONTROLLER = "firm.jobs.network.AlignmentController"
"""The only workflow that a server allows."""
OUTPUT = "output.txt"
"""File with the output of a kit's processes, in the kit."""
HOME_VARIABLE = "FIRM_FOLDER"
"""Environment variable with the folder that relative paths of a run start from, since FLARE runs
jobs in other folders."""
_HOST = r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"


@configuration
class FederationConfig:
    """A run across sites."""

    sites: dict[str, list[NonNegativeInt]]
    """Indices of the clients at each site."""
    out: Path
    """Folder for the kits."""
    name: str = "federation"
    """Name of the federation."""
    host: str = "localhost"
    """Name or address at which sites reach the server, as in its certificate."""
    port: Port | None = None
    """The server's only port; default: 8002, and a free one in a demo."""
    valid_days: Annotated[int, Interval(ge=1, le=360)] = 360
    """Validity of the certificates in days; FLARE's last at most 360."""
    run: Path = CONFIGS / "miniature.yaml"
    """Configuration of the run."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run to override, with their values, such as {rounds: 8}."""
    timeout: PositiveInt = 3600
    """Time limit for a site in a round, in seconds."""
    meeting_timeout: PositiveInt = 20
    """Seconds to wait in each round for a lost site to be ready again."""
    heartbeat_interval: PositiveFloat = 5.0
    """Seconds between two heartbeats of a site's process."""
    heartbeat_timeout: float = 30.0
    """Seconds without a heartbeat after which a site's process counts as dead."""

    def __post_init__(self) -> None:
        clients = sorted(client for own in self.sites.values() for client in own)
        if not self.sites or not all(self.sites.values()) or clients != list(range(len(clients))):
            raise ValueError(
                "sites must assign each client 0, 1, ... to exactly one site, and at least one "
                f"client to each site, got {self.sites}."
            )
        check_name(self.name, "a federation's name")
        if not re.fullmatch(_HOST, self.host):
            raise ValueError(
                f"host must be a host name or an IPv4 address, got {self.host!r}; sites can reach "
                "an IPv6 address by a name."
            )
        for site in self.sites:
            if "." in check_name(site, "a site's name"):
                raise ValueError(f"a site's name must not contain '.', got {site!r}.")
            if site in ("server", "admin", "authority", self.host):
                owner = "the host's" if site == self.host else "reserved"
                raise ValueError(f"the name {site!r} is {owner}; choose another name of the site.")
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ValueError(
                "heartbeat_timeout must be longer than heartbeat_interval, got "
                f"{self.heartbeat_timeout:g} and {self.heartbeat_interval:g}."
            )


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server."""

    kit: Path
    """The server's kit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run that the server sets for itself, such as {data.test.source:
    held_out.jsonl}."""


@configuration
class SiteConfig:
    """Settings of a site."""

    kit: Path
    """The site's kit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run that the site sets for itself, such as {data.train.source: ours.jsonl,
    policy.path: /models/llama}."""
    own_prompts: bool = False
    """Train on all prompts of data.train; otherwise, the site's clients take their shards of the
    run's partition, for trials with one file at all sites."""
    policy: SitePolicy = field(default_factory=SitePolicy)
    """Limits on the data that may leave the site."""
    processes: NumWorkers = 1
    """Processes of the site, one per GPU, started by torchrun."""
    processes_per_client: NumWorkers = 1
    """Processes that train a client together."""


@dataclass(frozen=True)
class AdminConfig:
    """Settings of the administrator, who submits, monitors and stops runs."""

    kit: Path
    """The administrator's kit."""
    name: str = "run"
    """Name of the run and of its folder at the server; an existing run continues from its last
    checkpoint."""
    follow: bool = True
    """Wait until the run ends."""

    def __post_init__(self) -> None:
        check_name(self.name, "a run's name")


def run_config(base: Path, overrides: Mapping[str, Any]) -> AlignmentConfig:
    """Returns the run's configuration."""
    return _for_sites(compose(AlignmentConfig, [base], list(overrides.items())))


def kit_config(kit: Path, overrides: Mapping[str, Any]) -> AlignmentConfig:
    """Returns the run's configuration for one party, with this party's overrides.

    Plugins are code, so each party names its own; the kit's plugins are not imported.

    Raises:
        UserError: The configuration is invalid, cannot run over a network, or has a reward function
            in a file that the kit names and not the party.
    """
    plain = [("plugins", [])]
    cfg = _for_sites(compose(AlignmentConfig, [kit / "run.yaml"], [*plain, *overrides.items()]))
    own = dict(leaves(overrides))
    for key, file in leaves(to_dict(cfg)):
        if file and key.endswith(".file") and key not in own:
            raise UserError(
                f"{key} must be set in this party's own overrides, to its own copy of {file}: code "
                "that a kit names is not run."
            )
    return cfg


def _for_sites(cfg: AlignmentConfig) -> AlignmentConfig:
    """Raises ``UserError`` on settings that a run over a network cannot have."""
    if cfg.policy.shard:  # the server and most sites have one process
        raise UserError("policy.shard must be false in a run over a network, got true.")
    schedule = cfg.strategy.schedule
    for key, function in (
        ("strategy.schedule.function", schedule.function if schedule else ""),
        ("estimator.advantages", getattr(cfg.estimator, "advantages", "")),
    ):
        if function:
            raise UserError(
                f"{key} must be left out in a run over a network, where a kit's code is not run, "
                f"got {function}."
            )
    return cfg


def federation_of(kit: Path) -> FederationConfig:
    """Returns the configuration of a kit's federation."""
    path = kit / "federation.yaml"
    if not path.is_file():
        raise UserError(f"{kit} is not a kit; create kits with firm network provision.")
    return compose(FederationConfig, [path], [])


def site_name(kit: Path) -> str:
    """Returns the name of a kit's site."""
    sites = federation_of(kit).sites
    names = [site for site in sites if kit.resolve().name == site]
    if not names:
        raise UserError(
            f"{kit} must be named after its site ({', '.join(sites)}); rename the folder."
        )
    return names[0]


def site_identities(kit: Path) -> "KeyRing":
    """Returns the long-term keys of secure aggregation in a site's kit, by client.

    They are those of the sites' certificates, with which no server can sign.
    """
    from firm.federation.options.secure.protocol import KeyRing
    from firm.network import certificates

    site, clients = site_name(kit), clients_by_site(federation_of(kit))
    try:
        own = certificates.signing_key(kit)
        public = {name: certificates.public_key(kit, name) for name in clients}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{kit} lacks keys of secure aggregation ({error}); restore startup/client.key and the "
            f"folder {certificates.SITES} from the original kit, or create new kits for all."
        ) from error
    return KeyRing(
        dict.fromkeys(clients[site], own),
        {client: public[name] for name, own in clients.items() for client in own},
    )


def certificates_digest(kit: Path) -> str:
    """Returns a digest of the sites' certificates in a kit, which all parties must share."""
    from firm.network import certificates

    digest = hashlib.sha256()
    for site in sorted(federation_of(kit).sites):
        path = kit / certificates.SITES / f"{site}.crt"
        digest.update(path.read_bytes() if path.is_file() else b"missing")
    return digest.hexdigest()[:16]


def clients_by_site(federation: FederationConfig) -> dict[str, list[str]]:
    """Returns the names of clients by site."""
    return {site: [f"client_{index}" for index in own] for site, own in federation.sites.items()}


def check_role(kit: Path, role: str) -> None:
    """Raises `UserError` if a kit is that of another party than a command needs.

    Args:
        kit: The kit.
        role: The needed role, a key of `kits.SETTINGS`.
    """
    federation_of(kit)
    from firm.network import kits  # imports FLARE, which a wrong folder does not need

    try:
        own = kits.role_of(kit)
    except ValueError as error:
        raise UserError(str(error)) from error
    if own != role:
        names = {"site": "a site", "server": "the server", "admin": "the administrator"}
        commands = {"site": "start-site", "server": "start-server", "admin": "submit"}
        raise UserError(
            f"{kit} is the kit of {names[own]}, for firm network {commands[own]}; this command "
            f"needs the kit of {names[role]}."
        )


def server_address(kit: Path) -> tuple[str, int]:
    """Returns host and port of a kit's server, after checking the kit's certificate."""
    federation_of(kit)
    from firm.network import certificates, kits

    try:
        address = kits.server_address(kit)
    except ValueError as error:
        raise UserError(str(error)) from error
    if problem := certificates.expiry(kit):
        raise UserError(f"{problem}; ask the creator of the kits for new ones.")
    return address
