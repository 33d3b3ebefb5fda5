"""Secure aggregation: the server gets the mean that it would have had, and no update."""

import gc
from dataclasses import replace

import pytest
import torch

from firm.federation import Engine, LocalEngine, RoundFailed
from firm.federation.options.masking import STEP, Key
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.robust import RobustConfig
from firm.federation.options.secure import (
    MaskedUpdate,
    OpenedMean,
    OpenSum,
    SecureEngine,
    SecureSums,
)
from firm.federation.serialization import unpack
from firm.federation.strategies.fedavg import FedAvgConfig, fedavg
from firm.federation.strategies.fedcmoo import FedCmooConfig
from firm.federation.strategies.firm import FirmConfig, firm_round
from firm.federation.strategies.fsmgda import FsmgdaConfig
from firm.federation.strategies.qfedavg import QFedAvgConfig
from firm.network.agreement import Agreement, Ledger
from firm.network.site import Site, SitePolicy
from firm.network.sites import SitesEngine
from tests.channels import MemoryChannel

STRATEGIES = {"firm": (firm_round, FirmConfig), "fedavg": (fedavg, FedAvgConfig)}
NAMES = ["a", "b", "c"]
PLACES = {"hospital": ["a"], "bank": ["b", "c"]}
CLOSE = 1e-6


@pytest.fixture
def new_clients(new_client):
    """Builds three clients of different sizes and data: ``new_clients(b={"fails_in": (1,)})``."""

    def build(**options):
        return [
            new_client(
                name,
                torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]) + index,
                num_examples=10 + 7 * index,
                **options.get(name, {}),
            )
            for index, name in enumerate(NAMES)
        ]

    return build


def _run(strategy, engine, state, cfg, num_rounds=3):
    rows = []
    for _ in range(num_rounds):
        state, metrics = strategy(state, NAMES, engine, cfg)
        rows.append(metrics)
    return state, rows


def _distance(first, second):
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "by_examples"},
        {"server_learning_rate": 0.5},
        {"clients_per_round": 2},
        {"max_update_norm": 100.0},
        {"num_local_steps": 3, "share_gram": True},
    ],
    ids=str,
)
def test_a_run_ends_where_it_would_without(name, options, new_clients, start):
    strategy, kind = STRATEGIES[name]
    plain, plain_rows = _run(strategy, LocalEngine(new_clients()), start, kind(**options))
    engine = SecureSums().around(LocalEngine(new_clients()))
    secure, rows = _run(strategy, engine, start, kind(**options, secure="masks"))
    assert _distance(start.adapter, plain.adapter) > 0
    assert _distance(plain.adapter, secure.adapter) < CLOSE
    for with_masks, without in zip(rows, plain_rows, strict=True):
        assert with_masks["round"]["clients"] == without["round"]["clients"]
        assert "drift" in without["round"]
        assert "drift" not in with_masks["round"]
        for own, other in zip(with_masks["clients"], without["clients"], strict=True):
            assert own["weights"][0] == pytest.approx(other["weights"][0], abs=1e-3)
            assert own["num_examples"] == 1  # a size tells of the data


def test_one_round_is_right_to_half_a_step(new_clients, start):
    """Of floats that hold more digits than a step has."""
    start = replace(start, adapter={n: v.double() for n, v in start.adapter.items()})

    class Doubles(LocalEngine):
        def map(self, request, clients):
            request = replace(request, adapter={n: v.float() for n, v in request.adapter.items()})
            replies, failures = super().map(request, clients)
            doubled = [
                replace(
                    reply,
                    content=replace(
                        reply.content,
                        adapter={n: v.double() for n, v in reply.content.adapter.items()},
                    ),
                )
                for reply in replies
            ]
            return doubled, failures

    plain, _ = fedavg(start, NAMES, Doubles(new_clients()), FedAvgConfig())
    engine = SecureEngine(Doubles(new_clients()), Key.generate())
    secure, _ = fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))
    assert 0 < _distance(plain.adapter, secure.adapter) <= STEP / 2 * (1 + 1e-6)


@pytest.mark.parametrize("option", [{"fails_in": (2,)}, {"diverges_in": (2,)}], ids=str)
def test_a_client_that_drops_out_is_not_in_the_mean(option, new_clients, start):
    cfg = FedAvgConfig(aggregation="by_examples")
    plain, _ = _run(fedavg, LocalEngine(new_clients(b=option)), start, cfg)
    engine = SecureSums().around(LocalEngine(new_clients(b=option)))
    secure, rows = _run(fedavg, engine, start, replace(cfg, secure="masks"))
    assert [row["round"]["clients"] for row in rows] == [NAMES, ["a", "c"], NAMES]
    assert rows[1]["round"]["failures"][0]["client"] == "b"
    assert _distance(plain.adapter, secure.adapter) < CLOSE


def test_a_single_update_is_no_mean(new_clients, start):
    clients = new_clients(a={"fails_in": (1,)}, b={"fails_in": (1,)})
    engine = SecureSums().around(LocalEngine(clients))
    with pytest.raises(RoundFailed, match="1 client finished round 1, quorum 2"):
        fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))


def test_a_site_keeps_back_an_update_that_is_too_long(new_clients, start):
    engine = SecureSums().around(LocalEngine(new_clients()))
    cfg = FedAvgConfig(secure="masks", max_update_norm=0.01)
    with pytest.raises(RoundFailed, match=r"norm 0\.\d+, above max_update_norm 0.01, and stays"):
        fedavg(start, NAMES, engine, cfg)


def test_a_site_keeps_back_an_update_that_masks_cannot_hold(new_clients, start):
    clients = new_clients(b={"lr": 1e4})
    engine = SecureSums().around(LocalEngine(clients))
    _, rows = fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))
    assert rows["round"]["clients"] == ["a", "c"]
    assert "cannot be added under masks" in rows["round"]["failures"][0]["reason"]


def test_noise_of_clients_goes_under_masks(new_clients, start):
    privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client", noise_seed=3)
    plain, rows = _run(fedavg, LocalEngine(new_clients()), start, FedAvgConfig(privacy=privacy))
    engine = SecureSums().around(LocalEngine(new_clients()))
    cfg = FedAvgConfig(privacy=privacy, secure="masks")
    secure, secure_rows = _run(fedavg, engine, start, cfg)
    assert _distance(plain.adapter, secure.adapter) < CLOSE
    assert secure_rows[-1]["round"]["privacy"] == rows[-1]["round"]["privacy"]


# --- what the server has --------------------------------------------------------------------------


class Spy:
    """The server's end of an engine: keeps all that comes back."""

    def __init__(self, engine: Engine):
        self._engine, self.contents = engine, []

    def map(self, request, clients):
        replies, failures = self._engine.map(request, clients)
        self.contents += [reply.content for reply in replies]
        return replies, failures


def test_nothing_that_comes_back_is_a_clients_update(new_clients, start):
    plain, secure = Spy(LocalEngine(new_clients())), None
    fedavg(start, NAMES, plain, FedAvgConfig())
    secure = Spy(SecureEngine(LocalEngine(new_clients()), Key.generate()))
    state, _ = fedavg(start, NAMES, secure, FedAvgConfig(secure="masks"))
    assert [type(content) for content in secure.contents] == [*[MaskedUpdate] * 3, OpenedMean]
    updates = [content.adapter for content in plain.contents]
    own = [value for content in secure.contents for value in _tensors(vars(content))]
    for update in updates:
        for value in update.values():
            assert not any(torch.equal(value, other) for other in own)
    assert _distance(state.adapter, secure.contents[-1].adapter) == 0


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.fixture
def new_network(new_clients):
    """Builds an engine over sites in memory, with its channel and the sites."""

    def build(cfg, keys=None, policy=None, fingerprints=None, **options):
        key = Key.generate()
        clients = {client.name: client for client in new_clients(**options)}
        sites = {}
        for site, names in PLACES.items():
            own = (keys or {}).get(site, key)
            agreement = Agreement(cfg, objectives=("left", "right"), num_rounds=9, clients=names)
            own_policy = policy or SitePolicy()
            sites[site] = Site(
                lambda setup, names=names, own=own, own_policy=own_policy: SecureEngine(
                    LocalEngine([clients[name] for name in names]),
                    own,
                    least_in_mean=own_policy.least_in_mean,
                ),
                names,
                fingerprint={"masking key": own.identity},
                agreement=agreement,
                policy=own_policy,
                ledger=Ledger(agreement, own_policy.budget),
            )
        channel = MemoryChannel(sites)
        engine = SitesEngine(channel, PLACES, NAMES, timeout=5.0, meeting_timeout=1.0)
        problems = engine.meet({"masking key": key.identity}, {})
        return engine, channel, problems

    return build


@pytest.mark.parametrize("name", STRATEGIES)
def test_sites_send_nothing_of_an_update_and_the_mean_alone_comes_back(
    name, new_network, new_clients, start
):
    strategy, kind = STRATEGIES[name]
    plain, _ = _run(strategy, LocalEngine(new_clients()), start, kind())
    engine, channel, problems = new_network(kind(secure="masks"))
    assert problems == []
    spy = Spy(LocalEngine(new_clients()))
    state = start
    for _ in range(3):
        asked, channel.answered = len(spy.contents), []
        strategy(state, NAMES, spy, kind())  # the same updates, in clear
        state, rows = strategy(state, NAMES, engine, kind(secure="masks"))
        wire = b"".join(answer for _, answer in channel.answered)
        for update in spy.contents[asked:]:
            for value in update.adapter.values():
                assert not any(number.numpy().tobytes() in wire for number in value)
        for value in state.adapter.values():
            assert value.numpy().tobytes() in wire
    assert _distance(plain.adapter, state.adapter) < CLOSE
    assert not any(isinstance(each, Key) for each in _reachable(engine, but=channel))
    assert rows["round"]["bytes_up"] > 0


def _reachable(start, but):
    """Every object that can be reached from one, but for those behind another."""
    seen, queue = {id(but)}, [start]
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict | list | tuple | set) or hasattr(value, "__dict__"):
            queue += [each for each in gc.get_referents(value) if not callable(each)]


def test_a_site_with_another_key_is_told_before_the_first_round(new_network):
    other = Key.generate()
    _, _, problems = new_network(FedAvgConfig(secure="masks"), keys={"bank": other})
    assert len(problems) == 1
    assert problems[0].startswith(f"bank: its masking key is {other.identity!r}, the server's ")


def test_a_sum_that_is_not_of_its_updates_is_not_opened(start):
    key = Key.generate()
    engine = SecureEngine(LocalEngine([]), key)
    total = torch.randint(0, 256, (4, 6), dtype=torch.uint8)
    request = OpenSum(
        round=1,
        objectives=start.objectives,
        adapter=start.adapter,
        total=total,
        nonces=["0" * 32, "1" * 32],
    )
    replies, failures = engine.map(request, ["a"])
    assert replies == []
    assert "is not that of these 2 updates, or was masked with another key" in failures[0].reason


def test_the_next_client_opens_the_sum_when_one_cannot(new_network, start):
    engine, channel, _ = new_network(FedAvgConfig(secure="masks"))
    whole, _ = fedavg(
        start, NAMES, new_network(FedAvgConfig(secure="masks"))[0], FedAvgConfig(secure="masks")
    )
    lost = []

    def lose(site, answer):
        task = unpack(channel.asked[-1][1]).get("task")
        if task == "open_sum" and not lost:
            lost.append(site)
            return None
        return answer

    channel.spoil = lose
    state, rows = fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))
    assert lost == ["bank"]  # the second of three clients, in round 1
    assert _distance(whole.adapter, state.adapter) == 0
    assert rows["round"]["clients"] == NAMES
    assert rows["round"]["failures"][0]["client"] == "b"


def test_a_round_whose_sum_nobody_opens_fails(new_network, start):
    engine, _, _ = new_network(FedAvgConfig(secure="masks"), policy=SitePolicy(least_in_mean=4))
    with pytest.raises(RoundFailed, match=r"no client could open the sum of round 1 .* resume"):
        fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))


def test_a_site_may_let_nothing_out_but_under_masks(new_network, start):
    policy = SitePolicy(tasks=("masked_training", "open_sum"))
    engine, _, _ = new_network(FedAvgConfig(), policy=policy)
    with pytest.raises(RoundFailed, match="policy does not allow the task 'local_training'"):
        fedavg(start, NAMES, engine, FedAvgConfig())
    engine, _, _ = new_network(FedAvgConfig(secure="masks"), policy=policy)
    fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))


@pytest.mark.parametrize(
    "server", [FedAvgConfig(), FedAvgConfig(secure="masks")], ids=["plain", "masks"]
)
def test_a_site_that_agreed_to_one_is_not_asked_for_the_other(server, new_network, start):
    agreed = replace(server, secure=None if server.secure else "masks")
    engine, _, _ = new_network(agreed)
    with pytest.raises(RoundFailed, match="is not part of the agreed run"):
        fedavg(start, NAMES, engine, server)


def test_opening_spends_no_epsilon(new_network, start):
    privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client")
    cfg = FedAvgConfig(privacy=privacy, secure="masks")
    engine, channel, _ = new_network(cfg)
    _run(fedavg, engine, start, cfg)
    ledgers = [site.ledger for site in channel.sites.values()]
    answers = sum((ledger.answers for ledger in ledgers), start=type(ledgers[0].answers)())
    assert [answers[name, "masked_training"] for name in NAMES] == [3, 3, 3]
    assert sum(answers[name, "open_sum"] for name in NAMES) == 3
    single = Ledger(
        Agreement(cfg, objectives=("left", "right"), num_rounds=9, clients=NAMES),
        SitePolicy().budget,
    )
    for number in range(3):
        single.answered(number, "a", "masked_training")
    assert ledgers[0].epsilon("a") == single.epsilon("a")


# --- what does not go together --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (FedCmooConfig, {}, "secure covers the mean of adapters.*firm, got fedcmoo"),
        (FsmgdaConfig, {}, "secure covers the mean of adapters"),
        (QFedAvgConfig, {}, "secure covers the mean of adapters"),
        (FirmConfig, {"robust": RobustConfig("median")}, "robust.rule must be none, got median"),
        (FirmConfig, {"lora_mean": "products"}, "lora_mean must be factors, got products"),
        (FedAvgConfig, {"normalize_updates": True}, "normalize_updates must be false"),
        (FirmConfig, {"clients_per_round": 1}, "clients_per_round must be in that range, got 1"),
        (FirmConfig, {"clients_per_round": 2000}, "2 to 1024 updates.*got 2000"),
        (
            FirmConfig,
            {"privacy": PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)},
            "privacy.at must be client, got server",
        ),
    ],
)
def test_what_needs_single_updates_is_refused(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        kind(**options, secure="masks")


def test_a_client_without_its_site_has_no_key(new_clients, start):
    with pytest.raises(RoundFailed, match="ask it through a SecureEngine"):
        fedavg(start, NAMES, LocalEngine(new_clients()), FedAvgConfig(secure="masks"))
