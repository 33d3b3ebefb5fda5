"""Secure aggregation: the server gets the mean that it would have had, and no update."""

import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from firm.federation import Engine, LocalEngine, RoundFailed
from firm.federation.aggregation import flat
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.robust import RobustConfig
from firm.federation.options.secure import TASKS, MasksConfig
from firm.federation.options.secure.masking import STEP, from_bytes, real_numbers
from firm.federation.options.secure.messages import (
    Confirmed,
    MaskedUpdate,
    Revealed,
    SharedKeys,
    Trained,
)
from firm.federation.options.secure.part import Part
from firm.federation.options.secure.protocol import sparse_graph
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import (
    FedAvgConfig,
    FedCmooConfig,
    FirmConfig,
    FsmgdaConfig,
    QFedAvgConfig,
)
from firm.network.agreement import Agreement, Ledger
from firm.network.site_policy import SitePolicy
from tests.federation.options.secure.conftest import NAMES, Losing

STRATEGIES = {"firm": (firm_round, FirmConfig), "fedavg": (fedavg, FedAvgConfig)}
CLOSE = 1e-6
TRUSTING = MasksConfig(num_colluders=0)  # a client of three may drop out


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
    cfg = kind(**options, secure="masks", masks=TRUSTING)
    secure, rows = _run(strategy, cfg.around(LocalEngine(new_clients()), len(NAMES)), start, cfg)
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
    cfg = FedAvgConfig(secure="masks")
    secure, _ = fedavg(start, NAMES, cfg.around(Doubles(new_clients()), len(NAMES)), cfg)
    assert 0 < _distance(plain.adapter, secure.adapter) <= STEP / 2 * (1 + 1e-6)


@pytest.mark.parametrize("option", [{"fails_in": (2,)}, {"diverges_in": (2,)}], ids=str)
def test_a_client_that_drops_out_is_not_in_the_mean(option, new_clients, start):
    cfg = FedAvgConfig(aggregation="by_examples")
    plain, _ = _run(fedavg, LocalEngine(new_clients(b=option)), start, cfg)
    cfg = replace(cfg, secure="masks", masks=TRUSTING)
    secure, rows = _run(
        fedavg, cfg.around(LocalEngine(new_clients(b=option)), len(NAMES)), start, cfg
    )
    assert [row["round"]["clients"] for row in rows] == [NAMES, ["a", "c"], NAMES]
    assert rows[1]["round"]["failures"][0]["client"] == "b"
    assert _distance(plain.adapter, secure.adapter) < CLOSE


def test_a_single_update_is_no_mean(new_clients, start):
    clients = new_clients(a={"fails_in": (1,)}, b={"fails_in": (1,)})
    cfg = FedAvgConfig(secure="masks")
    with pytest.raises(RoundFailed, match="1 client finished round 1, quorum 2"):
        fedavg(start, NAMES, cfg.around(LocalEngine(clients), len(NAMES)), cfg)


def test_a_site_keeps_back_an_update_that_is_too_long(new_clients, start):
    cfg = FedAvgConfig(secure="masks", max_update_norm=0.01)
    with pytest.raises(RoundFailed, match=r"norm 0\.\d+, above max_update_norm 0.01, and stays"):
        fedavg(start, NAMES, cfg.around(LocalEngine(new_clients()), len(NAMES)), cfg)


def test_a_site_keeps_back_an_update_that_masks_cannot_hold(new_clients, start):
    cfg = FedAvgConfig(secure="masks", masks=TRUSTING)
    _, rows = fedavg(
        start, NAMES, cfg.around(LocalEngine(new_clients(b={"lr": 1e4})), len(NAMES)), cfg
    )
    assert rows["round"]["clients"] == ["a", "c"]
    assert "cannot be added under masks" in rows["round"]["failures"][0]["reason"]


def test_noise_of_clients_goes_under_masks(new_clients, start):
    privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client", noise_seed=3)
    plain, rows = _run(fedavg, LocalEngine(new_clients()), start, FedAvgConfig(privacy=privacy))
    cfg = FedAvgConfig(privacy=privacy, secure="masks")
    secure, secure_rows = _run(
        fedavg, cfg.around(LocalEngine(new_clients()), len(NAMES)), start, cfg
    )
    assert _distance(plain.adapter, secure.adapter) < CLOSE
    assert secure_rows[-1]["round"]["privacy"] == rows[-1]["round"]["privacy"]


@pytest.mark.parametrize("num_lost", [0, 2])
def test_shares_of_the_noise_are_enough_whoever_drops_out(num_lost, new_client, start):
    """Six clients, f = 1, so four in a sum and three of them honest: each adds zS / √3."""
    names, size = list("abcdef"), 20_000
    parameters = {"first": torch.zeros(size)}
    privacy = PrivacyConfig(clip_norm=0.5, noise_multiplier=2.0, at="sum", noise_seed=3)
    cfg = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=1), privacy=privacy)
    clients = [
        new_client(name, torch.zeros(2, size), parameters=parameters, lr=0.0) for name in names
    ]
    lost = {("send_masked", name) for name in names[:num_lost]}
    engine = Losing(cfg.around(LocalEngine(clients), len(NAMES)), lost)
    state, rows = fedavg(replace(start, adapter=parameters), names, engine, cfg)
    count = len(names) - num_lost
    assert len(rows["round"]["clients"]) == count
    noise_of_sum = count * state.adapter["first"].double().numpy()
    share = 2.0 * 0.5 / 3**0.5
    assert noise_of_sum.std() == pytest.approx(share * count**0.5, rel=0.03)
    assert 3**0.5 * share == pytest.approx(2.0 * 0.5)  # the three honest ones of the fewest
    # ε is that of a trusted server's noise, for the server too
    central = replace(privacy, at="server")
    _, plain = fedavg(
        replace(start, adapter=parameters),
        names,
        LocalEngine(clients),
        FedAvgConfig(privacy=central),
    )
    entry = rows["round"]["privacy"]
    assert entry["epsilon"] == entry["epsilon_server"] == plain["round"]["privacy"]["epsilon"]
    assert cfg.spent_epsilon(1) == pytest.approx(entry["epsilon"])


def test_noise_of_the_sum_costs_less_than_that_of_each_client(new_clients, start):
    results = {}
    for at in ("client", "sum"):
        privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at=at, noise_seed=3)
        cfg = FedAvgConfig(privacy=privacy, secure="masks")
        _, rows = _run(fedavg, cfg.around(LocalEngine(new_clients()), len(NAMES)), start, cfg)
        results[at] = rows[-1]["round"]["privacy"]
    assert results["sum"]["epsilon_server"] == results["client"]["epsilon_server"]
    assert results["sum"]["epsilon"] > results["client"]["epsilon"]  # of √n times the noise


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
    plain = Spy(LocalEngine(new_clients()))
    fedavg(start, NAMES, plain, FedAvgConfig())
    cfg = FedAvgConfig(secure="masks")
    secure = Spy(cfg.around(LocalEngine(new_clients()), len(NAMES)))
    fedavg(start, NAMES, secure, cfg)
    steps = (Trained, SharedKeys, MaskedUpdate, Confirmed, Revealed)
    assert [type(content) for content in secure.contents] == [step for step in steps for _ in NAMES]
    updates = [flat(content.adapter) for content in plain.contents]
    own = [value for content in secure.contents for value in _tensors(vars(content))]
    assert len(own) == len(NAMES)  # the masked updates are the only tensors
    numbers = [real_numbers(from_bytes(value), 6) for value in own]
    for update, masked in itertools.product(updates, numbers):
        assert np.abs(masked[:-1] - (update - flat(start.adapter)).numpy()).max() > 100


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_sites_send_nothing_of_an_update(name, new_network, new_clients, start):
    strategy, kind = STRATEGIES[name]
    plain, _ = _run(strategy, LocalEngine(new_clients()), start, kind())
    engine, channel = new_network(kind(secure="masks"))
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
    assert _distance(plain.adapter, state.adapter) < CLOSE
    assert not any(isinstance(each, Part) for each in _reachable(engine, but=channel))
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


@pytest.mark.parametrize(
    ("task", "is_in_sum"),
    [
        ("share_keys", False),
        ("send_masked", False),
        ("confirm_members", True),
        ("reveal_shares", True),
    ],
)
def test_a_client_that_is_lost_in_a_sum_does_not_end_the_round(
    task, is_in_sum, new_network, new_clients, start
):
    names = ["a", "b", "c", "d", "e", "f"]
    cfg = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=1))
    engine, channel = new_network(cfg, names, sites={name: [name] for name in names})
    channel.lose = {(task, "b")}
    state, rows = fedavg(start, names, engine, cfg)
    left = names if is_in_sum else [name for name in names if name != "b"]
    plain, _ = fedavg(start, left, LocalEngine(new_clients(names)), FedAvgConfig())
    assert rows["round"]["clients"] == left
    assert [each["client"] for each in rows["round"]["failures"]] == ["b"]
    assert rows["round"]["secure"]["num_updates"] == len(left)
    assert _distance(plain.adapter, state.adapter) < CLOSE
    assert state.accepted == dict.fromkeys(left, 1)


@pytest.mark.parametrize("task", ["send_masked", "reveal_shares"])
def test_a_round_fails_when_more_are_lost_than_a_sum_bears(task, new_network, start):
    names = ["a", "b", "c", "d", "e", "f"]
    cfg = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=1))  # four must stay
    engine, channel = new_network(cfg, names, sites={name: [name] for name in names})
    channel.lose = {(task, "a"), (task, "b")}
    fedavg(start, names, engine, cfg)
    channel.lose |= {(task, "c")}
    with pytest.raises(RoundFailed, match=rf"3 clients answered {task}, 4 must .*resume") as raised:
        fedavg(start, names, engine, cfg)
    assert all(spent > 0 for spent in raised.value.spent)


@pytest.mark.slow
def test_a_sum_of_fewer_updates_than_the_quorum_is_not_opened(new_network, start):
    names = ["a", "b", "c", "d", "e", "f"]
    cfg = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=0), quorum=5)
    engine, channel = new_network(cfg, names, sites={name: [name] for name in names})
    channel.lose = {("send_masked", "a"), ("send_masked", "b")}
    with pytest.raises(RoundFailed, match="4 clients answered send_masked, 5 must"):
        fedavg(start, names, engine, cfg)
    channel.lose = {("reveal_shares", "a"), ("reveal_shares", "b")}  # they are in the sum
    assert fedavg(start, names, engine, cfg)[1]["round"]["secure"]["num_updates"] == 6


@pytest.mark.slow
def test_a_model_that_the_guard_went_back_to_is_summed_again_in_one_process(new_clients, start):
    cfg = FedAvgConfig(secure="masks", clients_per_round=2, masks=TRUSTING)
    engine = cfg.around(LocalEngine(new_clients()), len(NAMES))
    state, rows = _run(fedavg, engine, start, cfg, num_rounds=2)
    state = replace(state, adapter=start.adapter)
    for _ in range(3):
        after, row = fedavg(replace(state, adapter=start.adapter), NAMES, engine, cfg)
        state = replace(after, adapter=start.adapter)
        rows.append(row)
    assert len({tuple(row["round"]["clients"]) for row in rows}) > 1


@pytest.mark.slow
def test_a_sum_over_few_neighbours_is_that_of_all(new_clients, start):
    names = [f"client_{index:03d}" for index in range(80)]
    masks = MasksConfig(num_colluders=2, neighbours="few")
    assert sparse_graph(80, 2) is not None
    cfg = FedAvgConfig(secure="masks", masks=masks)
    plain, _ = fedavg(start, names, LocalEngine(new_clients(names)), FedAvgConfig())
    engine = Losing(
        cfg.around(LocalEngine(new_clients(names)), len(names)), {("send_masked", names[7])}
    )
    state, rows = fedavg(start, names, engine, cfg)
    left = [name for name in names if name != names[7]]
    plain, _ = fedavg(start, left, LocalEngine(new_clients(names)), FedAvgConfig())
    assert rows["round"]["clients"] == left
    assert _distance(plain.adapter, state.adapter) < CLOSE


def test_a_site_that_sends_other_numbers_ends_the_round_in_one_line(new_clients, start):
    class Garbage(LocalEngine):
        def __init__(self, engine):
            self._inner = engine

        def map(self, request, clients):
            replies, failures = self._inner.map(request, clients)
            for reply in replies:
                if isinstance(reply.content, MaskedUpdate) and reply.client == "b":
                    reply.content.numbers.random_(generator=torch.Generator().manual_seed(0))
            return replies, failures

    cfg = FedAvgConfig(secure="masks")
    engine = Garbage(cfg.around(LocalEngine(new_clients()), len(NAMES)))
    with pytest.raises(RoundFailed, match="is not the sum of 3 updates: a client sent other"):
        fedavg(start, NAMES, engine, cfg)


@pytest.mark.parametrize(
    "change", [lambda n: n[:-1], lambda n: torch.cat([n, n], dim=1)], ids=["shorter", "wider"]
)
def test_masked_numbers_of_another_size_are_refused(change, new_clients, start):
    class Reshaped(LocalEngine):
        def __init__(self, engine):
            self._inner = engine

        def map(self, request, clients):
            replies, failures = self._inner.map(request, clients)
            return [
                replace(
                    reply, content=replace(reply.content, numbers=change(reply.content.numbers))
                )
                if isinstance(reply.content, MaskedUpdate) and reply.client == "b"
                else reply
                for reply in replies
            ], failures

    cfg = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=0))
    engine = Reshaped(cfg.around(LocalEngine(new_clients()), len(NAMES)))
    _, rows = fedavg(start, NAMES, engine, cfg)
    assert rows["round"]["clients"] == ["a", "c"]
    assert "numbers must be uint8 of shape [4, 6]" in rows["round"]["failures"][0]["reason"]


def test_many_examples_fit_under_masks_and_few_beside_them_keep_their_digits(new_client, start):
    counts = {"a": 10**9, "b": 200_000, "c": 131_072}

    def clients(counts):
        return [
            new_client(
                name, torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]) + index, num_examples=n
            )
            for index, (name, n) in enumerate(counts.items())
        ]

    for sizes in (counts, {"a": 1, "b": 2, "c": 3}):
        cfg = FedAvgConfig(aggregation="by_examples")
        plain, _ = fedavg(start, NAMES, LocalEngine(clients(sizes)), cfg)
        cfg = replace(cfg, secure="masks")
        secure, _ = fedavg(start, NAMES, cfg.around(LocalEngine(clients(sizes)), len(NAMES)), cfg)
        assert _distance(plain.adapter, secure.adapter) < 2e-6


def test_a_site_may_let_nothing_out_but_under_masks(new_network, start):
    policy = SitePolicy(tasks=TASKS)
    engine, _ = new_network(FedAvgConfig(), policy=policy)
    with pytest.raises(RoundFailed, match="policy does not allow the task 'local_training'"):
        fedavg(start, NAMES, engine, FedAvgConfig())
    engine, _ = new_network(FedAvgConfig(secure="masks"), policy=policy)
    fedavg(start, NAMES, engine, FedAvgConfig(secure="masks"))


@pytest.mark.parametrize(
    "server", [FedAvgConfig(), FedAvgConfig(secure="masks")], ids=["plain", "masks"]
)
def test_a_site_that_agreed_to_one_is_not_asked_for_the_other(server, new_network, start):
    agreed = replace(server, secure=None if server.secure else "masks")
    engine, _ = new_network(agreed)
    with pytest.raises(RoundFailed, match="is not part of the agreed run"):
        fedavg(start, NAMES, engine, server)


def test_opening_spends_no_epsilon(new_network, start):
    privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client")
    cfg = FedAvgConfig(privacy=privacy, secure="masks")
    engine, channel = new_network(cfg)
    _run(fedavg, engine, start, cfg)
    ledgers = [site.ledger for site in channel.sites.values()]
    answers = sum((ledger.answers for ledger in ledgers), start=type(ledgers[0].answers)())
    assert [answers[name, "masked_training"] for name in NAMES] == [3, 3, 3]
    assert sum(answers[name, "reveal_shares"] for name in NAMES) == 9
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
        (FirmConfig, {"num_local_epochs": 2}, "num_local_epochs must be null, got 2"),
        (FirmConfig, {"clients_per_round": 1}, "clients_per_round must be in that range, got 1"),
        (
            FirmConfig,
            {"clients_per_round": 4, "masks": MasksConfig(num_colluders=3)},
            "masks.num_colluders of at most 2",
        ),
        (FirmConfig, {"clients_per_round": 2000}, "2 to 1024 updates.*got 2000"),
        (
            FirmConfig,
            {"privacy": PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)},
            "privacy.at must be sum or client, got server",
        ),
    ],
)
def test_what_needs_single_updates_is_refused(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        kind(**options, secure="masks")


def test_masks_are_for_secure_sums():
    with pytest.raises(ValueError, match="masks requires secure masks, got MasksConfig"):
        FirmConfig(masks=MasksConfig(num_colluders=1))


def test_a_share_of_noise_is_for_sums_under_masks():
    privacy = PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0, at="sum")
    with pytest.raises(ValueError, match=r"with privacy.at sum, secure must be masks, got null"):
        FirmConfig(privacy=privacy)


def test_a_client_without_its_site_has_no_key(new_clients, start):
    with pytest.raises(RoundFailed, match="ask it through a SecureEngine"):
        fedavg(start, NAMES, LocalEngine(new_clients()), FedAvgConfig(secure="masks"))


@pytest.mark.every_case
@pytest.mark.parametrize(("clients_per_round", "num_clients"), [(4, 9), (None, 1), (2, 3)])
def test_a_round_that_colluders_may_fill_but_for_one_is_refused_before_it(
    clients_per_round, num_clients
):
    cfg = FedAvgConfig(secure="masks", clients_per_round=clients_per_round)
    key = "clients_per_round" if clients_per_round else "num_clients"
    with pytest.raises(ValueError, match=f"^{key}: a sum of .* hides nothing from"):
        cfg.check_federation(num_clients)
    replace(cfg, clients_per_round=5).check_federation(9)


def test_more_updates_than_a_sum_takes_are_refused_before_the_first_round():
    cfg = FedAvgConfig(secure="masks")
    with pytest.raises(ValueError, match=r"num_clients: .* at most 1024 updates, got 1025"):
        cfg.check_federation(1025)
