"""Attacks on secure sums: each is what a party would do, and what stops it.

``test_one_update_is_not_opened_as_a_mean_of_two`` and
``test_a_round_that_is_repeated_without_a_client_does_not_tell_its_update`` read a client's update,
to 0 and to 5e-8, where all sites share one key.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from firm.federation import LocalEngine, RoundFailed
from firm.federation.aggregation import flat
from firm.federation.options.secure import KeyRing, MasksConfig
from firm.federation.options.secure.masking import from_bytes, mask, real_numbers
from firm.federation.options.secure.messages import (
    ConfirmMembers,
    MaskedTraining,
    Revealed,
    RevealShares,
    SendMasked,
    ShareKeys,
    transpose,
)
from firm.federation.options.secure.opening import opened_sum
from firm.federation.options.secure.protocol import (
    PrivateKeys,
    add_pair_mask,
    members_statement,
    plan_sum,
    unseal,
)
from firm.federation.options.secure.shamir import combine
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import FedAvgConfig
from firm.network.site_policy import SitePolicy
from tests.federation.options.secure.conftest import NAMES, key_rings

CFG = FedAvgConfig(secure="masks")
TWO_OF_THREE = replace(CFG, masks=MasksConfig(num_colluders=0))
SITES = {"hospital": ["a"], "bank": ["b"], "university": ["c"]}
SIZE = 4
TELLING = SitePolicy(reasons=True)


class Server:
    """A server that asks for what it likes, and keeps all that it gets."""

    def __init__(self, engine, start, cfg=CFG):
        self.engine, self.start, self.cfg = engine, start, cfg
        self.refusals = []

    def ask(self, kind, clients, *, round_number=1, **fields):
        envelope = {"round": round_number, "objectives": self.start.objectives}
        agreed = {
            name: value
            for name, value in self.cfg.requests(self.start.objectives)[kind].items()
            if value != "decided by the server"
        }
        adapter = self.start.adapter if kind is MaskedTraining else {}
        request = kind(**envelope, adapter=adapter, **{**agreed, **fields})
        replies, failures = self.engine.map(request, list(clients))
        self.refusals += [failure.reason for failure in failures]
        return {reply.client: reply.content for reply in replies}

    def train(self, clients, **options):
        trained = self.ask(MaskedTraining, clients, **options)
        return {name: answer.keys for name, answer in trained.items()}

    def share(self, keys, clients=None, **options):
        shared = self.ask(ShareKeys, clients or keys, keys=keys, **options)
        return transpose({name: answer.shares for name, answer in shared.items()})

    def masked(self, shares, clients=None, **options):
        fields = {"shares": shares, "num_numbers": SIZE, "num_bytes": 6}
        sent = self.ask(SendMasked, clients or shares, **fields, **options)
        return {name: answer.numbers for name, answer in sent.items()}

    def confirm(self, members, clients=None, **options):
        answers = self.ask(ConfirmMembers, clients or members, members=list(members), **options)
        return {name: answer.signature for name, answer in answers.items()}

    def reveal(self, members, signatures, clients=None, **options):
        fields = {"members": list(members), "signatures": signatures}
        return self.ask(RevealShares, clients or members, **fields, **options)


@pytest.fixture
def true_update(new_clients, start):
    """The update of client a in round 1, flat."""
    spy = []

    class Heard(LocalEngine):
        def map(self, request, clients):
            replies, failures = super().map(request, clients)
            spy.extend(replies)
            return replies, failures

    fedavg(start, NAMES, Heard(new_clients()), FedAvgConfig())
    return (flat(spy[0].content.adapter) - flat(start.adapter)).numpy()


def _refused(server, text):
    return [reason for reason in server.refusals if text in reason]


@pytest.fixture
def new_server(new_network, start):
    """Builds a server with sites in memory, which tell it in full why they refuse."""

    def build(cfg=CFG, names=NAMES, sites=SITES, **options):
        engine, channel = new_network(cfg, names, sites=sites, policy=TELLING, **options)
        return Server(engine, start, cfg), channel

    return build


# --- An outsider ----------------------------------------------------------------------------------


def test_who_steals_a_sites_kit_later_opens_no_recorded_sum(new_network, start, true_update):
    """Long-term keys sign, and seal nothing: those of all sites and all messages open no mask."""
    rings = key_rings(SITES)
    engine, _ = new_network(CFG, sites=SITES, rings=rings)
    heard = []
    ask = engine.map
    engine.map = lambda request, clients: (
        heard.append((request, ask(request, clients))) or heard[-1][1]
    )
    fedavg(start, NAMES, engine, CFG)
    requests = {type(request): request for request, _ in heard}
    keys = requests[ShareKeys].keys
    content = requests[SendMasked].shares["b"]["a"]
    plan = plan_sum(1, keys, num_colluders=1)
    with pytest.raises(ValueError, match="not those that a sealed for b"):
        unseal(PrivateKeys().sealing, keys["a"].sealing, plan.session, ("a", "b"), content)
    signing = rings["bank"]._own["b"].private_bytes_raw()
    assert signing.hex() not in (keys["b"].sealing, keys["b"].masking, keys["b"].signing)
    public = rings["bank"]._own["b"].public_key().public_bytes_raw().hex()
    assert public not in str(keys)


# --- The server -----------------------------------------------------------------------------------


def test_one_update_is_not_opened_as_a_mean_of_two(new_server, true_update):
    """The server has a train twice, and wants the sum of its two answers opened."""
    server, _ = new_server()
    first = server.train(NAMES)
    shares = server.share(first)
    one = server.masked(shares, ["a"])
    second = server.train(["a"])  # the same training again: new keys, and the first part is over
    assert server.share({**first, **second}, ["b", "c"]) == {}  # they have shared their keys
    two = server.masked(shares, ["a"])
    assert two == {}
    assert server.confirm(["a"], ["b", "c"]) == {}
    assert server.reveal(["a"], {"b": "0" * 128}, ["b", "c"]) == {}
    assert _refused(server, "does not share now")
    assert _refused(server, "next step is share")
    assert _refused(server, "next step is mask")
    assert np.abs(real_numbers(from_bytes(one["a"]), 6)[:-1] - true_update).max() > 100


AGAIN = r"clients answered confirm_members, 2 must .*sum of other clients from the same model"


@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["exact gradients", "noisy batches"])
@pytest.mark.parametrize("change", [0.0, 1e-7], ids=["same model", "model a little changed"])
def test_a_round_that_is_repeated_without_a_client_does_not_tell_its_update(
    noise, change, new_network, start
):
    """The server stops before its checkpoint, and repeats the round while the hospital is away.

    From 3 (θ¹ - θ⁰) - 2 (θ² - θ⁰) it would have the hospital's update.
    """
    options = {name: {"noise": noise} for name in NAMES}
    engine, channel = new_network(TWO_OF_THREE, sites=SITES, policy=TELLING, **options)
    fedavg(start, NAMES, engine, TWO_OF_THREE)
    channel.lose = {("masked_training", "a")}
    model = {name: value + change for name, value in start.adapter.items()}
    with pytest.raises(RoundFailed, match=AGAIN):
        fedavg(replace(start, adapter=model), NAMES, engine, TWO_OF_THREE)


def test_a_model_that_was_trained_in_another_run_counts_as_the_same(new_network, start, tmp_path):
    """The server has the run start over with other rounds, and one site fewer."""
    rings = key_rings(SITES)
    common = {"sites": SITES, "rings": rings, "ledgers": tmp_path, "policy": TELLING}
    engine, _ = new_network(TWO_OF_THREE, **common, run="first")
    fedavg(start, NAMES, engine, TWO_OF_THREE)
    engine, channel = new_network(TWO_OF_THREE, **common, run="second")
    channel.lose = {("masked_training", "a")}
    with pytest.raises(RoundFailed, match=AGAIN):
        fedavg(start, NAMES, engine, TWO_OF_THREE)


def test_sites_may_let_a_round_be_repeated_with_others_on_other_batches(
    new_network, start, true_update
):
    policy = replace(TELLING, repeats=True)
    options = {name: {"optimizer": torch.optim.SGD} for name in NAMES}
    engine, channel = new_network(TWO_OF_THREE, sites=SITES, policy=policy, **options)
    first, _ = fedavg(start, NAMES, engine, TWO_OF_THREE)
    channel.lose = {("masked_training", "a")}
    second, rows = fedavg(start, NAMES, engine, TWO_OF_THREE)
    assert rows["round"]["clients"] == ["b", "c"]
    moves = [flat(state.adapter) - flat(start.adapter) for state in (first, second)]
    told = (3 * moves[0] - 2 * moves[1]).numpy()
    assert np.abs(told - true_update).max() > 0.1 * np.abs(true_update).max()


def test_the_next_round_may_have_other_clients(new_network, start):
    engine, channel = new_network(TWO_OF_THREE, sites=SITES)
    state, _ = fedavg(start, NAMES, engine, TWO_OF_THREE)
    channel.lose = {("masked_training", "a")}
    _, rows = fedavg(state, NAMES, engine, TWO_OF_THREE)
    assert rows["round"]["clients"] == ["b", "c"]


def test_a_round_that_is_repeated_with_the_same_clients_goes_on(new_network, start):
    options = {name: {"noise": 0.0} for name in NAMES}
    engine, _ = new_network(CFG, sites=SITES, **options)
    first, _ = fedavg(start, NAMES, engine, CFG)
    second, _ = fedavg(start, NAMES, engine, CFG)
    assert torch.equal(flat(first.adapter), flat(second.adapter))


@pytest.mark.parametrize("restarts", ["server", "sites"])
def test_a_refusal_outlives_a_restart(restarts, new_network, start, tmp_path):
    rings = key_rings(SITES)

    def new():
        return new_network(TWO_OF_THREE, sites=SITES, ledgers=tmp_path, rings=rings, policy=TELLING)

    engine, channel = new()
    fedavg(start, NAMES, engine, TWO_OF_THREE)
    if restarts == "sites":
        engine, channel = new()
    channel.lose = {("masked_training", "a")}
    with pytest.raises(RoundFailed, match=AGAIN):
        fedavg(start, NAMES, engine, TWO_OF_THREE)
    rows = [json.loads(line) for line in (tmp_path / "bank.jsonl").read_text().splitlines()]
    assert [row["members"] for row in rows if row["kind"] == "sum"] == [NAMES]


def test_a_site_that_restarts_has_dropped_out_of_its_sum(new_server, tmp_path):
    rings = key_rings(SITES)
    server, _ = new_server(ledgers=tmp_path, rings=rings)
    keys = server.train(NAMES)
    masked = server.masked(server.share(keys))
    signatures = server.confirm(masked)
    again, _ = new_server(ledgers=tmp_path, rings=rings)
    assert again.reveal(masked, signatures) == {}
    assert len(_refused(again, "has no update in a sum of round 1")) == 3


def test_members_of_a_sum_cannot_change_after_they_were_confirmed(new_server):
    server, channel = new_server(TWO_OF_THREE)
    keys = server.train(NAMES)
    masked = server.masked(server.share(keys))
    signatures = server.confirm(["a", "b"], ["a", "b"])
    assert server.confirm(["a", "b", "c"], ["a", "b"]) == {}  # a second set
    others = server.confirm(["b", "c"], ["c"])
    assert server.reveal(["b", "c"], {**signatures, **others}, ["b", "c"]) == {}
    assert _refused(server, "does not confirm now")
    assert _refused(server, "has confirmed other members")
    assert _refused(server, "1 clients have confirmed the members of this sum, 2 must")
    assert server.reveal(["a", "b"], signatures, ["a", "b"]).keys() == {"a"}  # b's part is over
    ledgers = [site.ledger.sums for site in channel.sites.values()]
    assert [[row["members"] for row in rows] for rows in ledgers] == [[["a", "b"]], [], []]
    assert masked.keys() == set(NAMES)


def test_a_client_reveals_one_secret_of_each_peer_and_once(new_server, start):
    server, channel = new_server(TWO_OF_THREE)
    shares = server.share(server.train(NAMES))
    masked = server.masked({name: shares[name] for name in ("a", "b")}, ["a", "b"])
    signatures = server.confirm(masked)
    revealed = server.reveal(masked, signatures)
    for answer in revealed.values():
        assert set(answer.self_masks) == {"a", "b"}
        assert set(answer.masking_keys) == {"c"}
    assert server.reveal(masked, signatures) == {}
    row = channel.sites["hospital"].ledger.sums[0]
    assert (row["self_masks"], row["masking_keys"]) == (["b"], ["c"])


def test_a_sum_below_its_threshold_is_not_opened(new_server):
    server, _ = new_server()  # three of three
    keys = server.train(NAMES)
    masked = server.masked(server.share(keys))
    assert server.confirm(["a", "b"], ["a", "b"]) == {}
    assert (
        len(_refused(server, "a sum of 2 updates is not opened here, only one of at least 3")) == 2
    )
    assert masked.keys() == set(NAMES)


def test_a_site_may_ask_for_more_clients_in_a_sum(new_network, start):
    engine, _ = new_network(CFG, policy=SitePolicy(least_in_mean=4, reasons=True))
    with pytest.raises(RoundFailed, match="only one of at least 4"):
        fedavg(start, NAMES, engine, CFG)


def test_the_server_cannot_play_a_client(new_server):
    """Its own keys in the place of b's would let it read the shares, and b's mask."""
    server, _ = new_server()
    keys = server.train(NAMES)
    own = PrivateKeys()
    ring = KeyRing.generate(["b"])
    for forged in (
        own.public("b", "run", 1, ring),  # signed by a key of its own
        replace(own.public("b", "run", 1, ring), signature=keys["b"].signature),
    ):
        server.refusals.clear()
        assert server.share({**keys, "b": forged}, ["a"]) == {}
        assert _refused(server, "the keys of b are not signed by its site")
        keys |= server.train(["a"])


def test_the_server_cannot_add_a_client_of_its_own(new_server):
    """A stranger would raise the threshold's n, and count as one that must not collude."""
    server, _ = new_server()
    keys = server.train(NAMES)
    keys["d"] = PrivateKeys().public("d", "run", 1, KeyRing.generate(["d"]))
    assert server.share(keys, ["a"]) == {}
    assert _refused(server, "the keys of d are not signed by its site")


@pytest.mark.parametrize("what", ["round", "client", "run"])
def test_signed_keys_hold_in_their_own_run_and_round_for_their_client(what, new_server):
    server, _ = new_server()
    old = server.train(NAMES)
    if what == "run":
        ring = key_rings(SITES)
        server, _ = new_server(rings=ring)
        own = PrivateKeys().public("b", "another run", 1, ring["bank"])
        keys = {**server.train(NAMES), "b": own}
        number = 1
    elif what == "round":
        number = 2
        keys = {**server.train(["a", "c"], round_number=2), "b": old["b"]}
    else:
        number = 1
        keys = {"a": old["a"], "b": old["c"], "c": old["b"]}
    assert server.share(keys, ["a"], round_number=number) == {}
    assert _refused(server, "are not signed by its site")


def test_two_clients_cannot_have_the_same_keys(new_server):
    server, _ = new_server(sites={"hospital": ["a"], "bank": ["b", "c"]})
    keys = server.train(NAMES)
    assert server.share({**keys, "c": keys["b"]}, ["a"]) == {}
    assert server.refusals  # signed for b, and not for c


def test_shares_of_another_sum_or_sender_are_not_taken(new_server):
    server, _ = new_server()
    old = server.share(server.train(NAMES))
    new = server.share(server.train(NAMES))
    assert server.masked({"a": {"b": old["a"]["b"], "c": new["a"]["c"]}}, ["a"]) == {}
    assert server.masked({"b": {"a": new["b"]["c"], "c": new["b"]["a"]}}, ["b"]) == {}
    assert len(_refused(server, "the shares are not those that")) == 2


def test_clients_that_are_told_of_different_clients_share_no_secrets(new_server):
    """The server shows a the keys of {a, b}, and b and c those of all three."""
    server, _ = new_server(TWO_OF_THREE)
    keys = server.train(NAMES)
    pair = {name: keys[name] for name in ("a", "b")}
    few = server.ask(ShareKeys, ["a"], keys=pair)["a"].shares
    all_three = server.ask(ShareKeys, ["b", "c"], keys=keys)
    shares = transpose({"a": few, **{name: each.shares for name, each in all_three.items()}})
    assert server.masked(shares, ["b"]) == {}
    assert _refused(server, "the shares are not those that a sealed for b in this sum")


# --- The server with sites ------------------------------------------------------------------------


def test_as_many_colluders_as_assumed_do_not_learn_another_clients_secrets(new_server):
    """Seven clients, f = 2: the server has all that f and g hold or hear, and lies to the others.

    Two groups of them are told that a is in the sum, and that it is not.
    """
    names = list("abcdefg")
    cfg = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=2))
    sites = {name: [name] for name in names}
    server, channel = new_server(cfg, names, sites)
    keys = server.train(names)
    server.masked(server.share(keys))
    plan = plan_sum(1, keys, num_colluders=2)
    assert (plan.threshold, plan.num_honest) == (5, 3)
    parts = {name: channel.sites[name]._engine._parts[name] for name in names}
    stolen = [parts[name]._shares["a"] for name in ("f", "g")]
    with_a, without_a = list("abcfg"), list("bcdefg")
    seeds = {plan.numbers[name]: share[0] for name, share in zip("fg", stolen, strict=True)}
    masking = {plan.numbers[name]: share[1] for name, share in zip("fg", stolen, strict=True)}
    for members, group in ((with_a, ["b", "c"]), (without_a, ["d", "e"])):
        signatures = server.confirm(members, group)
        # the colluders sign whatever is of use
        for name in ("f", "g"):
            private = parts[name]._private.signing
            signatures[name] = private.sign(members_statement(plan.session, members)).hex()
        for name, answer in server.reveal(members, signatures, group).items():
            number = plan.numbers[name]
            seeds |= {number: bytes.fromhex(answer.self_masks["a"])} if "a" in members else {}
            masking |= {} if "a" in members else {number: bytes.fromhex(answer.masking_keys["a"])}
    assert len(seeds) < plan.share_threshold
    assert len(masking) < plan.share_threshold
    assert len(_refused(server, "have confirmed the members of this sum, 5 must")) == 4


@pytest.mark.parametrize("num_asked", [1, 2, 3])
def test_a_server_that_asks_colluders_and_one_other_opens_no_sum(num_asked, new_server):
    """Nine clients, f = 3 by default, whomever the server asks in a round."""
    names = list("abcdefghi")
    cfg = FedAvgConfig(secure="masks")
    server, _ = new_server(cfg, names, {name: [name] for name in names})
    asked = names[: 1 + num_asked]  # the victim and colluders
    assert server.share(server.train(asked)) == {}
    assert len(_refused(server, "hides nothing from 3 that collude")) == len(asked)


def test_one_colluder_more_than_assumed_is_what_it_takes(new_clients, start, true_update):
    """The converse: as many clients as the threshold hold what reads an update."""
    cfg = TWO_OF_THREE
    engine = cfg.around(LocalEngine(new_clients()), len(NAMES))
    server = Server(engine, start, cfg)
    keys = server.train(NAMES)
    masked = server.masked(server.share(keys))
    plan = plan_sum(1, keys, num_colluders=0)
    parts = engine._parts
    held = {plan.numbers[name]: parts[name]._shares["a"] for name in ("b", "c")}
    seed = combine({number: share[0] for number, share in held.items()}, plan.share_threshold)
    key = combine({number: share[1] for number, share in held.items()}, plan.share_threshold)
    assert key == parts["a"]._private.masking.private_bytes_raw()
    total = from_bytes(masked["a"]) - mask(seed, SIZE)
    private = X25519PrivateKey.from_private_bytes(key)
    for other in ("b", "c"):
        add_pair_mask(total, private, keys[other].masking, plan.session, (other, "a"))
    assert np.abs(real_numbers(total, 6)[:-1] - true_update).max() < 1e-7


# --- Sites with each other ------------------------------------------------------------------------


def test_sites_get_no_message_of_another_that_they_can_read(new_server):
    """Through a site come its own shares and public keys; no masked update but its own."""
    server, channel = new_server()
    keys = server.train(NAMES)
    shares = server.share(keys)
    masked = server.masked(shares)
    revealed = server.reveal(masked, server.confirm(masked))
    to_bank = b"".join(message for site, message in channel.asked if site == "bank")
    assert masked["a"].numpy().tobytes() not in to_bank
    for answer in revealed.values():
        assert not any(share.encode() in to_bank for share in answer.self_masks.values())
    assert shares["c"]["a"].encode() not in to_bank  # sealed for c


def test_a_site_with_wrong_shares_can_spoil_a_sum_and_read_none(new_server):
    server, _ = new_server()
    keys = server.train(NAMES)
    masked = server.masked(server.share(keys))
    revealed = server.reveal(masked, server.confirm(masked))
    plan = plan_sum(1, keys, num_colluders=1)
    wrong = {**revealed["b"].self_masks, "a": "00" * 33}
    with pytest.raises(
        ValueError, match=r"a client sent other numbers or shares|not of one secret"
    ):
        opened_sum(plan, keys, masked, [], {**revealed, "b": Revealed("b", wrong, {})})
    opened_sum(plan, keys, masked, [], revealed)


def test_a_client_answers_nothing_before_its_training(new_server):
    server, _ = new_server()
    assert server.masked({"a": {}}, ["a"]) == {}
    assert _refused(server, "a has no update in a sum of round 1")
