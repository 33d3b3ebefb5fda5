"""The configuration of a federation over a network, and of its parties."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firm.federation.options.secure.protocol import KeyRing
from firm.federation.outside import check_name
from firm.fields import (
    BoundedInt,
    NonNegativeInt,
    NumWorkers,
    Port,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.jobs.alignment_config import AlignmentConfig
from firm.network import certificates, kits
from firm.network.site import SitePolicy
from firm.run.config import compose
from firm.run.errors import UserError
from firm.run.shipped import CONFIGS

OUTPUT = "output.txt"
"""What the processes of a kit print, in its folder."""


@configuration
class FederationConfig:
    """Who takes part, and in what."""

    sites: dict[str, list[NonNegativeInt]]
    """Numbers of each site's clients."""
    out: Path
    """Folder of the kits."""
    name: str = "federation"
    """Of the federation."""
    host: str = "localhost"
    """Name by which the sites reach the server; it stands in its certificate."""
    port: Port = 8002
    """The server's one port."""
    valid_days: BoundedInt = 360
    """After which the certificates end."""
    run: Path = CONFIGS / "miniature.yaml"
    """Configuration of the run."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run and their values, such as {rounds: 8}, laid over it."""
    timeout: PositiveInt = 3600
    """Seconds that a site has for its part of a round."""
    meeting_timeout: PositiveInt = 20
    """Seconds that a site which was lost has to come back, in each round."""
    heartbeat_interval: PositiveFloat = 5.0
    """Seconds between two signs of life of a site's process."""
    heartbeat_timeout: float = 30.0
    """Seconds without one after which it counts as dead."""

    def __post_init__(self) -> None:
        clients = sorted(client for own in self.sites.values() for client in own)
        if not self.sites or not all(self.sites.values()) or clients != list(range(len(clients))):
            raise ValueError(
                "sites must give each of the clients 0, 1, ... to one site, and each site one, got "
                f"{self.sites}."
            )
        check_name(self.name, "a federation's name")
        for site in self.sites:
            check_name(site, "a site's name")
        if strange := [name for name in self.sites if name in ("server", "admin", "authority")]:
            raise ValueError(f"a site cannot be called {strange[0]!r}; choose another name.")
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ValueError(
                "heartbeat_timeout must be longer than heartbeat_interval, got "
                f"{self.heartbeat_timeout:g} and {self.heartbeat_interval:g}."
            )


@dataclass(frozen=True)
class ServerConfig:
    """The server's own part."""

    kit: Path
    """The server's kit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run that are the server's own, such as {data.test.source: held_out.jsonl}."""


@configuration
class SiteConfig:
    """A site's own part."""

    kit: Path
    """The site's kit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run that are the site's own, such as {data.train.source: ours.jsonl,
    policy.path: /models/llama}."""
    own_prompts: bool = False
    """Whether all prompts of data.train are this site's; if not, its clients take the shards that
    the run's partition gives them, which is for trials on one file."""
    policy: SitePolicy = field(default_factory=SitePolicy)
    """What may leave the site beside the adapter."""
    processes: NumWorkers = 1
    """Processes of the site, one for each of its GPUs, by torchrun."""
    processes_per_client: NumWorkers = 1
    """How many of them work as one on a client."""


@dataclass(frozen=True)
class AdminConfig:
    """Whoever starts, watches and stops runs."""

    kit: Path
    """The administrator's kit."""
    name: str = "run"
    """Of the run, and of its folder at the server; a name that is there already goes on from its
    last checkpoint."""
    follow: bool = True
    """Whether to wait until the run ends."""

    def __post_init__(self) -> None:
        check_name(self.name, "a run's name")


def run_config(base: Path, overrides: Mapping[str, Any]) -> AlignmentConfig:
    """Returns the run's configuration."""
    return compose(AlignmentConfig, [base], list(overrides.items()))


def kit_config(kit: Path, overrides: Mapping[str, Any]) -> AlignmentConfig:
    """Returns the run's configuration for one party, with this party's overrides.

    Plugins are code, so each party names its own; the kit's plugins are not imported.
    """
    return compose(AlignmentConfig, [kit / "run.yaml"], [("plugins", []), *overrides.items()])


def federation_of(kit: Path) -> FederationConfig:
    """Returns the configuration of a kit's federation."""
    path = kit / "federation.yaml"
    if not path.is_file():
        raise UserError(f"{kit} is no kit; make kits with firm network provision.")
    return compose(FederationConfig, [path], [])


def site_name(kit: Path) -> str:
    """Returns the name of a kit's site."""
    sites = federation_of(kit).sites
    names = [site for site in sites if kit.resolve().name == site]
    if not names:
        raise UserError(
            f"{kit} must be called as its site ({', '.join(sites)}); give the folder its name back."
        )
    return names[0]


def site_identities(kit: Path) -> KeyRing:
    """Returns the long-term keys of secure aggregation in a site's kit, by client.

    They are those of the sites' certificates, with which no server can sign.
    """
    site, clients = site_name(kit), clients_by_site(federation_of(kit))
    try:
        own = certificates.signing_key(kit)
        public = {name: certificates.public_key(kit, name) for name in clients}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{kit} lacks keys of secure aggregation ({error}); take startup/client.key and the "
            f"folder {certificates.SITES} from the kit as it was made, or have new kits made for "
            "all parties."
        ) from error
    return KeyRing(
        dict.fromkeys(clients[site], own),
        {client: public[name] for name, own in clients.items() for client in own},
    )


def certificates_digest(kit: Path) -> str:
    """Returns a digest of the sites' certificates in a kit, which all parties must share."""
    digest = hashlib.sha256()
    for site in sorted(federation_of(kit).sites):
        path = kit / certificates.SITES / f"{site}.crt"
        digest.update(path.read_bytes() if path.is_file() else b"missing")
    return digest.hexdigest()[:16]


def clients_by_site(federation: FederationConfig) -> dict[str, list[str]]:
    """Returns the names of clients by site."""
    return {site: [f"client_{index}" for index in own] for site, own in federation.sites.items()}


def server_address(kit: Path) -> tuple[str, int]:
    """Returns host and port of a kit's server, after checking the kit's certificate."""
    federation_of(kit)
    try:
        address = kits.server_address(kit)
    except ValueError as error:
        raise UserError(str(error)) from error
    if problem := certificates.expiry(kit):
        raise UserError(f"{problem}; ask whoever made the kits for new ones.")
    return address
