import json

import pytest
import torch

from firm.federation import LocalEngine
from firm.federation.aggregation import flat, update_length
from firm.federation.attackers import Attacker, common_direction
from firm.federation.serialization import pack
from firm.federation.sharing import shared_columns
from firm.federation.strategies.afl import afl
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.firm import firm_round
from firm.federation.strategies.fsmgda import fsmgda
from firm.federation.strategy_configs import (
    AflConfig,
    FedAvgConfig,
    FedCmooConfig,
    FirmConfig,
    FsmgdaConfig,
)
from firm.federation.training import LocalTraining, local_training, served_objectives

FIRM = {"weighting": "firm", "weighting_options": {"beta": 0.1}}


def _update(client, start, **changes):
    fields = {"round": 1, "objectives": client.objectives, "num_local_steps": 2, **FIRM}
    return local_training(client, LocalTraining(adapter=start, **{**fields, **changes}))


@pytest.mark.parametrize(("kind", "scale"), [("sign_flip", 3.0), ("sign_flip", 1), ("scaling", 4)])
def test_what_is_sent_is_the_honest_update_times_a_factor(kind, scale, new_client, start):
    honest = _update(new_client(), start.adapter)
    sent = _update(Attacker(new_client(), kind, scale=scale), start.adapter)
    factor = -scale if kind == "sign_flip" else scale
    for name, origin in start.adapter.items():
        expected = origin + factor * (honest.adapter[name] - origin)
        torch.testing.assert_close(sent.adapter[name], expected)
    assert (sent.client, sent.num_examples) == ("client_0", 10)
    for update in (honest, sent):  # the times of solving differ
        update.metrics.pop("seconds")
    assert sent.metrics == honest.metrics


def test_scaling_by_one_is_honest_bit_for_bit(new_client, start, same):
    honest = _update(new_client(), start.adapter)
    assert same(_update(Attacker(new_client(), "scaling"), start.adapter).adapter, honest.adapter)


def test_colluders_go_into_one_direction_each_as_far_as_its_own_update(new_client, start):
    def steps(adapter, seed=0):
        clients = [
            Attacker(new_client(name), "collusion", scale=2.0, seed=seed) for name in ("a", "b")
        ]
        return [flat(_update(client, adapter).adapter) - flat(adapter) for client in clients]

    lengths = [
        update_length(start.adapter, _update(new_client(name), start.adapter).adapter)
        for name in ("a", "b")
    ]
    first, second = steps(start.adapter)
    assert lengths[0] != pytest.approx(lengths[1], rel=1e-3)
    assert first.norm().item() == pytest.approx(2 * lengths[0], rel=1e-5)
    assert second.norm().item() == pytest.approx(2 * lengths[1], rel=1e-5)
    torch.testing.assert_close(first / first.norm(), second / second.norm())
    # another round's adapter, or another run, has another direction
    moved = {name: value + 1 for name, value in start.adapter.items()}
    for other in (steps(moved)[0], steps(start.adapter, seed=1)[0]):
        assert torch.cosine_similarity(first, other, dim=0) < 0.999


def test_a_common_direction_has_length_one(start, same):
    direction = common_direction(start.adapter, seed=0)
    assert list(direction) == list(start.adapter)
    assert sum(part.square().sum() for part in direction.values()).item() == pytest.approx(1)
    assert same(common_direction(start.adapter, seed=0), direction)


@pytest.mark.parametrize("kind", ["sign_flip", "scaling", "collusion"])
def test_an_attacker_trains_as_the_client_within(kind, new_client, start, same):
    honest, within = new_client(), new_client()
    attacker = Attacker(within, kind, scale=5.0)
    for _ in range(2):
        # the pull back to θ_t asks for the adapter in the middle of the training
        _update(honest, start.adapter, proximal=0.5)
        sent = _update(attacker, start.adapter, proximal=0.5)
    assert same(attacker.state(), honest.state())
    assert same(within.adapter(), honest.adapter())
    assert not same(sent.adapter, honest.adapter())
    assert attacker.metrics() == honest.metrics()


def test_a_client_that_did_not_train_sends_what_it_was_sent(new_client, start, same):
    for kind in ("sign_flip", "scaling", "collusion"):
        attacker = Attacker(new_client(), kind, scale=5.0)
        attacker.load(start.adapter)
        assert same(attacker.adapter(), start.adapter)


def test_a_training_that_was_broken_off_leaves_no_trace(new_client, start):
    attacker = Attacker(new_client(fails_in=(1,)), "sign_flip")
    with pytest.raises(ArithmeticError):
        _update(attacker, start.adapter)
    attacker.load(start.adapter)
    attacker.step(attacker.gradients(torch.zeros(3)), torch.tensor([0.5, 0.5]))
    honest = flat(attacker._client.adapter()) - flat(start.adapter)
    torch.testing.assert_close(flat(attacker.adapter()) - flat(start.adapter), -honest)


def test_optional_methods_are_those_of_the_client_within(new_client, new_plain_client, start):
    summing = new_plain_client("a", [[1.0, 0.0, 0.0]] * 2, sums=True, served=(1,))
    attacker = Attacker(summing, "sign_flip")
    assert served_objectives(attacker) == (1,)
    assert shared_columns(attacker, start.adapter) == slice(0, 2)
    _update(attacker, start.adapter, weighting="fixed", weighting_options={"weights": [0.0, 1.0]})
    assert summing.num_sums == 2
    assert attacker.losses().tolist() == summing.losses().tolist()
    plain = Attacker(new_client(), "sign_flip")
    assert "weighted_gradients" not in plain.capabilities
    assert shared_columns(plain, start.adapter) == slice(0, 3)


@pytest.mark.parametrize(
    ("strategy", "cfg"),
    [
        (firm_round, FirmConfig()),
        (fedavg, FedAvgConfig(proximal=0.1)),
        (afl, AflConfig()),
        (fsmgda, FsmgdaConfig()),
        (fedcmoo, FedCmooConfig(communication="one_way", compressor="none")),
    ],
)
def test_every_strategy_meets_an_attacker_as_a_client(
    strategy, cfg, new_client, start, run_rounds, same
):
    def end(clients):
        state, rows = run_rounds(strategy, clients, start, cfg, num_rounds=2)
        assert not rows[-1]["round"]["failures"]
        assert json.dumps(rows[-1])
        return state.adapter

    def federation(kind=None, scale=1.0):
        others = [new_client("b"), new_client("c")]
        first = new_client("a")
        return [Attacker(first, kind, scale=scale) if kind else first, *others]

    honest = end(federation())
    assert same(end(federation("scaling")), honest)
    assert not same(end(federation("sign_flip")), honest)


def test_a_federation_with_attackers_resumes_as_if_it_had_not_stopped(
    new_client, start, run_rounds, same
):
    def clients():
        kinds = ("sign_flip", "collusion", "scaling")
        return [new_client("honest")] + [
            Attacker(new_client(kind), kind, scale=1.5) for kind in kinds
        ]

    cfg, names = FirmConfig(), [client.name for client in clients()]
    whole, _ = run_rounds(firm_round, clients(), start, cfg, num_rounds=3)
    engine = LocalEngine(clients())
    state, _ = firm_round(start, names, engine, cfg)
    saved = engine.client_states(state.accepted)
    assert pack(saved)
    engine = LocalEngine(clients())
    engine.restore_client_states(saved)
    for _ in range(2):
        state, _ = firm_round(state, names, engine, cfg)
    assert same(state.adapter, whole.adapter)
