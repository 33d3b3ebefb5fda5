"""Clients and sites in memory for secure sums."""

import pytest
import torch

from firm.federation import Failure, LocalEngine
from firm.federation.options.secure import KeyRing, SecureEngine
from firm.federation.serialization import unpack
from firm.network.agreement import Agreement, Ledger
from firm.network.site import Site
from firm.network.site_policy import SitePolicy
from firm.network.sites import SitesEngine
from tests.channels import MemoryChannel

NAMES = ["a", "b", "c"]
SITES = {"hospital": ["a"], "bank": ["b", "c"]}


@pytest.fixture
def new_clients(new_client):
    """Builds clients of different sizes and data: ``new_clients(b={"fails_in": (1,)})``."""

    def build(names=NAMES, **options):
        return [
            new_client(
                name,
                torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]) + index,
                num_examples=10 + 7 * index,
                **options.get(name, {}),
            )
            for index, name in enumerate(names)
        ]

    return build


class Losing:
    """An engine that loses some clients' answers to some tasks.

    Args:
        engine: The engine.
        lost: Pairs of task and client.
    """

    def __init__(self, engine, lost):
        self._engine, self.lost = engine, set(lost)

    def map(self, request, clients):
        replies, failures = self._engine.map(request, clients)
        kept = [reply for reply in replies if (request.task, reply.client) not in self.lost]
        gone = [reply.client for reply in replies if reply not in kept]
        return kept, [*failures, *(Failure(name, "lost") for name in gone)]


class LosingChannel(MemoryChannel):
    """A network in memory that loses answers of sites, by task and client."""

    def __init__(self, sites):
        super().__init__(sites)
        self.lose = set()
        self.spoil = self._lose

    def _lose(self, site, answer):
        message = unpack(self.asked[-1][1])
        asked = {(message.get("task"), name) for name in message.get("clients", ())}
        return None if asked & self.lose else answer


@pytest.fixture
def new_network(new_clients):
    """Builds an engine over sites in memory, with its channel."""

    def build(
        cfg,
        names=NAMES,
        *,
        sites=SITES,
        policy=None,
        ledgers=None,
        rings=None,
        run="run",
        **options,
    ):
        clients = {client.name: client for client in new_clients(names, **options)}
        rings = rings or key_rings(sites)
        agreement = {
            site: Agreement(cfg, objectives=("left", "right"), num_rounds=9, clients=own)
            for site, own in sites.items()
        }
        policy = policy or SitePolicy()
        built = {}
        for site, own in sites.items():
            path = None if ledgers is None else ledgers / f"{site}.jsonl"
            ledger = Ledger(agreement[site], policy.budget, path)

            def build_engine(setup, own=own, ring=rings[site], ledger=ledger):
                return SecureEngine(
                    LocalEngine([clients[name] for name in own]),
                    ring,
                    num_clients=sum(map(len, sites.values())),
                    run=run,
                    least_in_mean=policy.least_in_mean,
                    repeats=policy.repeats,
                    ledger=ledger,
                )

            built[site] = Site(
                build_engine,
                own,
                fingerprint={},
                agreement=agreement[site],
                policy=policy,
                ledger=ledger,
            )
        channel = LosingChannel(built)
        engine = SitesEngine(channel, sites, names, timeout=5.0, meeting_timeout=1.0)
        assert engine.meet({}, {}) == []
        return engine, channel

    return build


def key_rings(sites):
    """Returns the key ring of each site: its own keys, and all public ones."""
    own = {site: KeyRing.generate(names) for site, names in sites.items()}
    public = {name: key for ring in own.values() for name, key in ring._public.items()}
    return {site: KeyRing(ring._own, public) for site, ring in own.items()}
