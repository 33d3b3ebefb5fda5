import errno
import random
from dataclasses import replace

import pytest
import torch

from firm.base.quantities import QUANTITIES
from firm.federation import LocalEngine, RoundFailed
from firm.federation.engines import MemoryStates
from firm.federation.options.uploads import UploadConfig
from firm.federation.serialization import pack, unpack
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy_configs import FedCmooConfig, FirmConfig
from firm.network.agreement import Agreement
from firm.network.site import Site
from firm.network.site_policy import SitePolicy
from firm.network.sites import SitesEngine, SitesReturned
from tests.channels import MemoryChannel

FINGERPRINT = {"version": "1", "configuration": "abc"}
PLACES = {"hospital": ["client_0"], "bank": ["client_1", "client_2"]}
NAMES = ["client_0", "client_1", "client_2"]
POLICY = SitePolicy(tasks=("local_training", "share_jacobian"))


def _agreement(names, cfg=None):
    return Agreement(cfg or FirmConfig(), objectives=("left", "right"), num_rounds=9, clients=names)


@pytest.fixture
def new_clients(new_client):
    """Builds the federation's clients: ``new_clients(client_0={"fails_in": (2,)})``."""

    def build(**options):
        targets = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
        return [
            new_client(name, targets + index, **options.get(name, {}))
            for index, name in enumerate(NAMES)
        ]

    return build


@pytest.fixture
def new_network(new_clients):
    """Builds an engine over a network in memory, and its channel."""

    def build(
        policy=POLICY,
        states=None,
        places=PLACES,
        fingerprint=FINGERPRINT,
        meets=True,
        cfg=None,
        **options,
    ):
        clients = {client.name: client for client in new_clients(**options)}
        sites = {
            site: Site(
                lambda setup, site=site, names=names: LocalEngine(
                    [clients[name] for name in names], states=states and states[site]
                ),
                names,
                fingerprint=fingerprint,
                agreement=_agreement(names, cfg),
                policy=policy,
            )
            for site, names in PLACES.items()
        }
        channel = MemoryChannel(sites)
        engine = SitesEngine(channel, places, NAMES, timeout=5.0, meeting_timeout=1.0)
        if meets:
            assert engine.meet(FINGERPRINT, {}) == []
            channel.asked, channel.answered, channel.timeouts = [], [], []
        return engine, channel

    return build


def _run(engine, state, num_rounds=3, strategy="firm", cfg=None, before=lambda round: None):
    rows = []
    for number in range(state.round + 1, state.round + num_rounds + 1):
        before(number)
        state, row = STRATEGIES[strategy](state, NAMES, engine, cfg or FirmConfig())
        rows.append(row["round"])
    return state, rows


@pytest.mark.parametrize(
    "cfg",
    [
        None,
        FirmConfig(
            clients_per_round=2, preferences={"client_1": (0.3, 0.7), "client_2": (0.6, 0.4)}
        ),
    ],
    ids=["all", "sampled"],
)
def test_a_network_gives_the_adapter_of_one_process(new_network, new_clients, start, same, cfg):
    over_network, rows = _run(new_network(cfg=cfg)[0], start, cfg=cfg)
    alone, own_rows = _run(LocalEngine(new_clients()), start, cfg=cfg)
    assert same(over_network.adapter, alone.adapter)
    assert over_network.accepted == alone.accepted
    assert [row["clients"] for row in rows] == [row["clients"] for row in own_rows]


@pytest.mark.parametrize(
    "cfg",
    [FirmConfig(), FedCmooConfig(communication="one_way", compressor="none")],
    ids=lambda cfg: cfg.name,
)
def test_random_rounding_draws_at_sites_as_in_one_process(
    cfg, new_network, new_clients, start, same
):
    cfg = replace(cfg, upload=UploadConfig(bits=3, rounding="random"))
    at_sites, _ = _run(new_network(cfg=cfg)[0], start, strategy=cfg.name, cfg=cfg)
    alone, _ = _run(LocalEngine(new_clients()), start, strategy=cfg.name, cfg=cfg)
    assert same(at_sites.adapter, alone.adapter)


def test_a_round_of_two_phases_needs_nothing_more(new_network, new_clients, start, same):
    cfg = FedCmooConfig(communication="one_way", solver="exact", compressor="none")
    over_network, _ = _run(new_network(cfg=cfg)[0], start, strategy="fedcmoo", cfg=cfg)
    alone, _ = _run(LocalEngine(new_clients()), start, strategy="fedcmoo", cfg=cfg)
    assert same(over_network.adapter, alone.adapter)


def test_bytes_are_those_of_what_travels(new_network, new_clients, start):
    engine, channel = new_network()
    _, rows = _run(engine, start, 1)
    _, own_rows = _run(LocalEngine(new_clients()), start, 1)
    assert rows[0]["bytes_down"] == own_rows[0]["bytes_down"]
    contents = [r["content"] for _, answer in channel.answered for r in unpack(answer)["replies"]]
    assert rows[0]["bytes_up"] == sum(len(pack(content)) for content in contents)


def test_a_client_that_fails_is_as_if_it_had_not_been_drawn(new_network, new_clients, start, same):
    state, rows = _run(new_network(client_1={"fails_in": (2,)})[0], start)
    alone, _ = _run(LocalEngine(new_clients(client_1={"fails_in": (2,)})), start)
    assert rows[1]["failures"] == [
        {"client": "client_1", "reason": "ArithmeticError; see its site's log"}
    ]
    assert same(state.adapter, alone.adapter)


def test_what_an_error_says_leaves_a_site_only_if_its_policy_lets_it(new_network, start):
    engine, _ = new_network(policy=replace(POLICY, reasons=True), client_1={"fails_in": (2,)})
    _, rows = _run(engine, start)
    assert rows[1]["failures"] == [
        {"client": "client_1", "reason": "ArithmeticError: the quadratic has no bottom"}
    ]


def test_a_site_that_is_away_costs_its_clients_a_round_each(new_network, start):
    engine, channel = new_network()
    away = {2, 3}

    def before(number):
        channel.spoil = lambda site, answer: None if site == "bank" and number in away else answer

    state, rows = _run(engine, start, 4, before=before)
    assert [row["clients"] for row in rows] == [NAMES, ["client_0"], ["client_0"], NAMES]
    assert rows[1]["failures"] == [
        {"client": name, "reason": "its site bank is lost: no answer within 5 s"}
        for name in ("client_1", "client_2")
    ]
    assert "its site bank is lost" in rows[2]["failures"][0]["reason"]
    assert state.accepted == dict.fromkeys(NAMES, 4)


def test_a_lost_site_is_waited_for_only_shortly_until_it_answers(new_network, start):
    engine, channel = new_network()
    channel.spoil = lambda site, answer: None if site == "bank" else answer
    _run(engine, start, 2)
    assert channel.timeouts == [5.0, 1.0, 5.0]
    last = unpack([message for site, message in channel.asked if site == "bank"][-1])
    assert last["do"] == "meet"


def test_a_site_whose_process_was_started_again_is_met_again(new_network, new_clients, start, same):
    states = {site: MemoryStates() for site in PLACES}
    engine, channel = new_network(states=states)
    _, fresh = new_network(states=states, meets=False)

    def before(number):
        channel.spoil = lambda site, answer: None if site == "bank" and number == 2 else answer
        if number == 2:
            channel.sites["bank"] = fresh.sites["bank"]

    state, rows = _run(engine, start, 4, before=before)
    assert [row["clients"] for row in rows] == [NAMES, ["client_0"], NAMES, NAMES]
    assert state.accepted == dict.fromkeys(NAMES, 4)


def test_a_site_that_returns_with_another_configuration_is_reported_with_the_difference(
    new_network, start
):
    engine, channel = new_network()
    _, other = new_network(fingerprint={**FINGERPRINT, "configuration": "other"}, meets=False)

    def before(number):
        channel.spoil = lambda site, answer: None if site == "bank" and number == 2 else answer
        if number == 2:
            channel.sites["bank"] = other.sites["bank"]

    _, rows = _run(engine, start, 3, before=before)
    first, second = (row["failures"][0]["reason"] for row in rows[1:])
    assert first == "its site bank is lost: no answer within 5 s"
    assert "configuration" in second
    assert "abc" in second


def test_a_site_that_lost_an_answer_goes_on_as_if_it_had_not_been_drawn(
    new_network, new_clients, start, same
):
    engine, channel = new_network()

    def before(number):
        channel.spoil = lambda site, answer: None if site == "bank" and number == 2 else answer

    state, _ = _run(engine, start, before=before)
    spared = LocalEngine(new_clients())
    alone = start
    for names in (NAMES, ["client_0"], NAMES):
        alone, _ = STRATEGIES["firm"](alone, names, spared, FirmConfig())
    assert same(state.adapter, alone.adapter)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda answer: answer[:-1], "cannot be read"),
        (lambda answer: b"", "cannot be read"),
        (lambda answer: pack([1, 2]), "must be a mapping, got list"),
        (lambda answer: pack({**unpack(answer), 7: 0}), "cannot be read"),  # an integer as key
        (lambda answer: pack({**unpack(answer), "more": "x" * 2**25}), "cannot be read"),
        (lambda answer: pack({**unpack(answer), "number": 1}), "answered message 1 instead"),
        (lambda answer: pack({**unpack(answer), "replies": "none"}), "returned no result for it"),
        (
            lambda answer: pack({**unpack(answer), "replies": [{"client": 7}]}),
            "returned no result for it",
        ),
        (
            lambda answer: pack({**unpack(answer), "replies": [*unpack(answer)["replies"]] * 2}),
            "answered for it twice",
        ),
    ],
)
def test_an_answer_that_is_none_is_its_clients_failure(new_network, start, spoil, reason):
    engine, channel = new_network()
    first, _ = _run(engine, start, 1)
    channel.spoil = lambda site, answer: spoil(answer) if site == "hospital" else answer
    state, rows = _run(engine, first, 1)
    assert rows[0]["clients"] == ["client_1", "client_2"]
    assert reason in rows[0]["failures"][0]["reason"]
    assert state.accepted == {"client_0": 1, "client_1": 2, "client_2": 2}


def test_what_a_site_says_of_a_failure_forges_no_line(new_network, start):
    engine, channel = new_network()
    forged = "ValueError\nround 9/9  left 1.000\x1b[2J"

    def spoil(site, answer):
        failures = [{"client": "client_0", "reason": forged}]
        message = {**unpack(answer), "replies": [], "failures": failures}
        return pack(message) if site == "hospital" else answer

    channel.spoil = spoil
    _, rows = _run(engine, start, 1)
    (failure,) = rows[0]["failures"]
    assert failure["reason"] == "ValueError\\nround 9/9  left 1.000\\x1b[2J"
    channel.spoil = lambda site, answer: (
        pack({"number": unpack(answer)["number"], "problem": forged}) if site == "bank" else answer
    )
    _, rows = _run(engine, start, 1)
    assert all(failure["reason"].isprintable() for failure in rows[0]["failures"])
    assert engine.meet(FINGERPRINT, {})[0].isprintable()


def test_a_site_speaks_for_its_own_clients_alone(new_network, start):
    engine, channel = new_network()

    def usurp(site, answer):
        message = unpack(answer)
        for reply in message.get("replies", []):
            reply["client"] = "client_1" if site == "hospital" else reply["client"]
        return pack(message)

    channel.spoil = usurp
    _, rows = _run(engine, start, 1)
    assert rows[0]["clients"] == ["client_1", "client_2"]
    assert rows[0]["failures"] == [
        {"client": "client_0", "reason": "hospital returned no result for it"}
    ]


def test_a_site_that_needs_a_new_start_of_the_run_gets_one_between_rounds(new_network, start):
    engine, channel = new_network()
    channel.back = ["bank"]
    state, _ = _run(engine, start, 1)  # a start gives one round at least
    num_asked = len(channel.asked)
    with pytest.raises(SitesReturned, match="bank is back; the run continues with all sites"):
        _run(engine, state, 1)
    assert len(channel.asked) == num_asked


class FullDisk(MemoryStates):
    """States that cannot be written in one round."""

    def write(self, client, round, state):
        if round == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(client, round, state)


def test_a_full_disk_at_a_site_costs_its_clients_the_round_and_is_told(
    new_network, new_clients, start, same
):
    engine, _ = new_network(states={"hospital": MemoryStates(), "bank": FullDisk()})
    state, rows = _run(engine, start)
    reason = "OSError 28 (No space left on device); see its site's log"
    assert rows[1]["failures"] == [
        {"client": name, "reason": reason} for name in ("client_1", "client_2")
    ]
    assert rows[2]["failures"] == []
    alone, local = start, LocalEngine(new_clients())
    for drawn in (NAMES, ["client_0"], NAMES):
        alone, _ = STRATEGIES["firm"](alone, drawn, local, FirmConfig())
    assert same(state.adapter, alone.adapter)


def test_too_few_sites_stop_the_run_and_are_named(new_network, start):
    engine, channel = new_network()
    channel.spoil = lambda site, answer: None if site == "bank" else answer
    with pytest.raises(RoundFailed, match="its site bank is lost: no answer within 5 s"):
        _run(engine, start, 1, cfg=FirmConfig(quorum=2))


def test_a_site_hears_nothing_of_other_sites_clients(new_network, start):
    cfg = FirmConfig(preferences={"client_0": (0.9, 0.1), "client_2": (0.2, 0.8)})
    engine, channel = new_network(cfg=cfg)
    _run(engine, start, 2, cfg=cfg)
    for site, message in channel.asked:
        others = [name for name in NAMES if name not in PLACES[site]]
        assert not any(name.encode() in message for name in others)


def test_only_what_the_policy_names_leaves_a_site(new_network, start):
    engine, channel = new_network(SitePolicy(metrics=("cosines",)))
    _run(engine, start, 1)
    for _, answer in channel.answered:
        for reply in unpack(answer)["replies"]:
            assert reply["content"]["metrics"].keys() == {"cosines"}


def test_a_metric_that_may_not_leave_stays_unless_the_policy_names_it(monkeypatch):
    kept = replace(QUANTITIES["client", "cosines"], may_leave=False)
    monkeypatch.setitem(QUANTITIES, ("client", "cosines"), kept)
    own = {"cosines": [[0.5]], "num_steps": 1}
    metrics = {**own, "by_objective": {"left": own}}
    released = {"num_steps": 1, "by_objective": {"left": {"num_steps": 1}}}
    assert SitePolicy().released(metrics) == released
    noisy, exact = {"kl": 1.3, "clipped": 0.2}, {"kl": 1.0, "clipped": 0.2, "update_norm": 2.0}
    assert SitePolicy(metrics=("kl",)).released(noisy) == noisy  # the server knows them by it
    assert SitePolicy(metrics=("kl", "clipped")).released(exact) == {"kl": 1.0}
    named = SitePolicy(metrics=("cosines", "by_objective")).released(metrics)
    only = {"cosines": [[0.5]]}
    assert named == {**only, "by_objective": {"left": only}}


def test_no_metric_may_leave_and_the_run_goes_on(new_network, new_clients, start, same):
    state, _ = _run(new_network(SitePolicy(metrics=()))[0], start)
    alone, _ = _run(LocalEngine(new_clients()), start)
    assert same(state.adapter, alone.adapter)


def test_a_task_that_the_policy_does_not_name_is_refused(new_network, start):
    engine, _ = new_network(SitePolicy())
    with pytest.raises(RoundFailed, match="policy does not allow the task 'share_jacobian'"):
        _run(engine, start, 1, strategy="fedcmoo", cfg=FedCmooConfig(communication="one_way"))


def test_a_policy_names_tasks_and_metrics_that_exist():
    with pytest.raises(ValueError, match=r"tasks.0 must be one of .*local_training.* got 'copy'"):
        SitePolicy(tasks=("copy",))
    with pytest.raises(ValueError, match=r"metrics must be among .*weights.* got \['prompts'\]"):
        SitePolicy(metrics=("prompts",))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00" * 8,
        pack({"do": "map"}),
        pack({"do": "run", "number": 1}),
        pack({"do": "map", "number": 1, "task": "local_training", "clients": ["client_9"]}),
        pack({"do": "map", "number": 1, "task": "os.system", "clients": [], "request": {}}),
        pack([]),
    ],
)
def test_a_site_answers_whatever_comes_with_a_problem(new_network, message):
    _, channel = new_network()
    answer = unpack(channel.sites["hospital"].answer(message))
    assert answer["problem"]
    assert "replies" not in answer


def test_sites_that_run_the_same_can_begin(new_network):
    assert new_network(meets=False)[0].meet(FINGERPRINT, {}) == []


def test_a_site_trains_for_no_server_that_it_has_not_met(new_network, start):
    engine, _ = new_network(meets=False)
    with pytest.raises(RoundFailed, match="has not met the server yet"):
        _run(engine, start, 1)


def test_a_site_whose_process_died_between_requests_is_met_again(new_network, start):
    states = {site: MemoryStates() for site in PLACES}
    engine, channel = new_network(states=states)
    _, fresh = new_network(states=states, meets=False)

    def before(number):
        if number == 2:
            channel.sites["bank"] = fresh.sites["bank"]

    _, rows = _run(engine, start, 3, before=before)
    assert [row["clients"] for row in rows] == [NAMES, ["client_0"], NAMES]
    assert "has not met the server yet" in rows[1]["failures"][0]["reason"]


def test_a_run_may_go_on_without_a_site_that_differs(new_network, start):
    engine, channel = new_network(meets=False)
    _, other = new_network(fingerprint={**FINGERPRINT, "version": "2"}, meets=False)
    channel.sites["bank"] = other.sites["bank"]
    assert len(engine.meet(FINGERPRINT, {})) == 1
    _, rows = _run(engine, start, 1)
    assert rows[0]["clients"] == ["client_0"]
    assert "version" in rows[0]["failures"][0]["reason"]


def test_clients_are_built_from_what_the_server_tells(new_clients):
    told = []

    def build(setup):
        told.append(setup)
        return LocalEngine(new_clients()[:1])

    agreement = _agreement(NAMES[:1])
    site = Site(build, NAMES[:1], fingerprint=FINGERPRINT, agreement=agreement, policy=POLICY)
    engine = SitesEngine(MemoryChannel({"a": site}), {"a": NAMES[:1]}, NAMES[:1], timeout=1.0)
    setup = {"calibrations": {"helpful": {"mean": 0.5}}}
    assert engine.meet(FINGERPRINT, setup) == []
    assert engine.meet(FINGERPRINT, setup) == []
    assert told == [setup]


def test_a_site_that_differs_is_told_and_named(new_network, caplog):
    engine, _ = new_network(fingerprint={**FINGERPRINT, "version": "2"}, meets=False)
    problems = engine.meet(FINGERPRINT, {})
    assert problems[0] == "hospital: its version is '2', the server's '1'"
    assert len(problems) == 2
    assert "this site cannot participate: its version is '2'" in caplog.text


def test_a_site_that_is_away_or_has_other_clients_is_named(new_network):
    engine, channel = new_network(
        places={"hospital": ["client_0", "client_1"], "bank": ["client_2"]}, meets=False
    )
    channel.spoil = lambda site, answer: None if site == "bank" else answer
    assert engine.meet(FINGERPRINT, {}) == [
        "hospital: it has the clients ['client_0'], not ['client_0', 'client_1']",
        "bank: no answer within 5 s",
    ]


def test_every_client_needs_one_site(new_network):
    for places in ({"a": ["client_0"]}, {"a": NAMES, "b": ["client_0"]}):
        with pytest.raises(ValueError, match="Every client needs one site"):
            SitesEngine(MemoryChannel({}), places, NAMES, timeout=1.0)


def test_a_server_that_starts_again_goes_on_from_its_checkpoint(
    new_network, new_clients, start, same
):
    states = {site: MemoryStates() for site in PLACES}
    engine, _ = new_network(states=states)
    state, _ = _run(engine, start, 2)
    saved = engine.client_states(state.accepted)
    lost, _ = _run(engine, state, 1)  # a round that the server finished and did not save
    assert lost.round == 3

    class Kept(MemoryStates):
        """Round 0 is there again when a site starts; what it had stays."""

        def __init__(self, before):
            self._states = before._states

    again, _ = new_network(states={site: Kept(states[site]) for site in PLACES})
    again.restore_client_states(saved)
    resumed, _ = _run(again, state, 2)
    alone, _ = _run(LocalEngine(new_clients()), start, 4)
    assert same(resumed.adapter, alone.adapter)


def test_a_checkpoint_holds_rounds_and_no_states(new_network, start):
    engine, _ = new_network()
    state, _ = _run(engine, start, 2)
    assert engine.client_states(state.accepted) == {name: {"round": 2} for name in NAMES}
    with pytest.raises(ValueError, match="this run has"):
        engine.restore_client_states({"client_0": {"round": 2}})


def test_a_site_that_lost_its_states_is_named_and_the_others_go_on(new_network, start, request_of):
    engine, _ = new_network()
    state, _ = _run(engine, start, 2)
    fresh, _ = new_network()
    request = replace(
        request_of(3, {"client_0": 2}),
        adapter=state.adapter,
        **FirmConfig().local_training(state.objectives),
    )
    replies, failures = fresh.map(request, NAMES)
    assert [reply.client for reply in replies] == ["client_1", "client_2"]
    assert failures[0].client == "client_0"
    assert "states of rounds [0], not of round 2" in failures[0].reason


def test_progress_is_told_as_by_one_process(new_network, new_clients, start):
    told = []

    def listen(name, **info):
        told.append((name, info["client"], info["round"], info.get("reason")))

    _, channel = new_network()
    listening = SitesEngine(channel, PLACES, NAMES, timeout=5.0, on_event=listen)
    _run(listening, start, 1)
    assert sorted(told) == sorted(
        [("client_started", name, 1, None) for name in NAMES]
        + [("client_finished", name, 1, None) for name in NAMES]
    )


@pytest.mark.slow
def test_ten_thousand_damaged_answers_spoil_no_round(new_client, start):
    """In every round forty sites' answers arrive damaged, two clients' arrive whole."""
    spoiled = {f"hospital_{index}": [f"patient_{index}"] for index in range(40)}
    places = {**spoiled, "bank": ["client_1", "client_2"]}
    names = [name for there in places.values() for name in there]
    targets = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    sites = {
        site: Site(
            lambda setup, there=there: LocalEngine([new_client(name, targets) for name in there]),
            there,
            fingerprint=FINGERPRINT,
            agreement=_agreement(there),
            policy=POLICY,
        )
        for site, there in places.items()
    }
    channel = MemoryChannel(sites)
    engine = SitesEngine(channel, places, names, timeout=5.0, meeting_timeout=1.0)
    assert engine.meet(FINGERPRINT, {}) == []
    channel.answered = []
    STRATEGIES["firm"](start, names, engine, FirmConfig())
    whole = {site: unpack(answer) for site, answer in channel.answered}
    for site in places:
        channel.sites[site].answer = lambda message, site=site: pack(
            {**whole[site], "number": unpack(message)["number"]}
        )
    rng = random.Random(0)
    channel.spoil = lambda site, answer: _damaged(answer, rng) if site in spoiled else answer
    num_accepted, reasons = 0, []
    for _ in range(10_000 // len(spoiled)):
        state, row = STRATEGIES["firm"](start, names, engine, FirmConfig())
        accepted = row["round"]["clients"]
        assert {"client_1", "client_2"} <= set(accepted)
        assert all(parameter.isfinite().all() for parameter in state.adapter.values())
        num_accepted += len(accepted) - 2
        reasons += [failure["reason"] for failure in row["round"]["failures"]]
    assert num_accepted > 100
    assert num_accepted + len(reasons) == 10_000
    assert sum("cannot be read" in reason for reason in reasons) > 5_000
    assert any("its answer is refused: adapter" in reason for reason in reasons)


def _damaged(whole: bytes, rng: random.Random) -> bytes:
    """Bytes changed, lost, added or swapped for others that look right."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.randrange(1, 30)]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))
        else:
            digits = [i for i, value in enumerate(data) if 48 <= value <= 57]
            data[rng.choice(digits)] = rng.randrange(48, 58)
    return bytes(data)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Human: what I told nobody"), "ValueError"),
        (
            FileNotFoundError(2, "no such file", "Human: what I told nobody.cache"),
            "FileNotFoundErr",
        ),
        (OSError("Human: what I told nobody"), "OSError; "),
        (TimeoutError("Human: what I told nobody"), "TimeoutError; "),
        (MemoryError("Human: what I told nobody"), "MemoryError; "),
        (KeyError("Human: what I told nobody"), "KeyError; "),
    ],
)
@pytest.mark.parametrize("place", ["step", "state", "build"])
def test_the_words_of_an_error_stay_at_the_site_wherever_it_arises(
    new_network, new_clients, start, error, kind, place
):
    engine, channel = new_network(meets=False)
    clients = new_clients()

    def fail(*arguments):
        raise error

    class FailingStates(MemoryStates):
        read = write = fail

    def build(setup):
        if place == "build":
            fail()
        if place == "step":
            clients[0].step = fail
        engine = LocalEngine(clients[:1])
        if place == "state":
            engine._states = FailingStates()
        return engine

    agreement = _agreement(NAMES[:1])
    channel.sites["hospital"] = Site(
        build, NAMES[:1], fingerprint=FINGERPRINT, agreement=agreement, policy=POLICY
    )
    problems = engine.meet(FINGERPRINT, {})
    told = list(problems)
    if not problems:
        _, rows = _run(engine, start, 1)
        told = [failure["reason"] for failure in rows[0]["failures"]]
    assert any(kind.rstrip("; ") in reason for reason in told)
    assert not any(b"what I told" in answer for _, answer in channel.answered)
