"""What holds for a round of every strategy."""

import json
from dataclasses import replace
from itertools import permutations
from typing import get_type_hints

import pytest
import torch

from firm.federation import LocalEngine, RoundFailed, ServerState
from firm.federation.client import LazyClients
from firm.federation.serialization import pack, unpack
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy_configs import (
    AflConfig,
    ConstrainedConfig,
    FamoConfig,
    FedAvgConfig,
    FedCmooConfig,
    FedCmooPrefConfig,
    FedMgdaConfig,
    FirmConfig,
    FsmgdaConfig,
    QFedAvgConfig,
    TchebycheffConfig,
)
from firm.run.states import RunStates

TARGETS = {"left": [1.0, 0.0, 2.0], "right": [0.0, 3.0, 1.0], "far": [-4.0, 5.0, 3.0]}
SAMPLED = {"clients_per_round": 2}
EXACT = {"compressor": "none", "communication": "one_way"}
CASES = {
    "firm": FirmConfig(**SAMPLED, num_local_steps=2),
    "fedavg": FedAvgConfig(**SAMPLED, num_local_steps=2),
    "constrained": ConstrainedConfig(**SAMPLED, num_local_steps=2),  # see test_constrained.py
    "tchebycheff": TchebycheffConfig(**SAMPLED, num_local_steps=2),  # see test_by_reward.py
    "famo": FamoConfig(**SAMPLED, num_local_steps=2),
    "qfedavg": QFedAvgConfig(**SAMPLED),
    "afl": AflConfig(**SAMPLED, weights_learning_rate=0.01),
    "afl, averaged": AflConfig(**SAMPLED, weights_learning_rate=0.01, average_iterates=True),
    "fedmgda": FedMgdaConfig(**SAMPLED, num_local_steps=2),
    "fsmgda": FsmgdaConfig(**SAMPLED, num_local_steps=2),
    "fedcmoo, exact": FedCmooConfig(**SAMPLED, **EXACT, solver="exact", num_local_steps=2),
    "fedcmoo, low rank": FedCmooConfig(**SAMPLED, upload_budget=4.0),
    "fedcmoo, quantised": FedCmooConfig(
        **SAMPLED, upload_budget=4.0, compressor="quantizing", communication="one_way"
    ),
    "fedcmoo, theory": FedCmooConfig(
        **SAMPLED,
        upload_budget=4.0,
        compressor="quantizing",
        communication="two_sample",
        num_steps=1,
        step_size=0.05,
        normalize_gram=False,
    ),
    "fedcmoo_pref": FedCmooPrefConfig(**SAMPLED, **EXACT, min_weight=0.0),
}


def _clients(new_client, names="abcd", **options):
    generator = torch.Generator().manual_seed(2)
    options = {"rewarded": ("left", "right"), **options}
    return [new_client(name, torch.randn(2, 3, generator=generator), **options) for name in names]


def test_every_strategy_is_found_by_its_configurations_name_and_is_among_the_cases():
    for strategy in STRATEGIES.values():
        assert STRATEGIES[get_type_hints(strategy)["cfg"]().name] is strategy
    assert {cfg.name for cfg in CASES.values()} == STRATEGIES.keys()


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(
    new_client, start, run_rounds, same, case, tmp_path
):
    cfg, names = CASES[case], list("abcd")

    def new_engine():  # whose clients are built for each round, with their states on the disk
        def build(name):
            return _clients(new_client)[names.index(name)]

        return LocalEngine(LazyClients(names, build), states=RunStates(tmp_path))

    strategy = STRATEGIES[cfg.name]
    whole, _ = run_rounds(strategy, _clients(new_client), start, cfg, num_rounds=4)
    engine, state = new_engine(), start
    for _ in range(2):
        state, _ = strategy(state, names, engine, cfg)
        saved = pack([state.to_state(), engine.client_states(state.accepted)])
    server, clients = unpack(saved)
    assert clients.keys() == state.accepted.keys()
    engine, state = new_engine(), ServerState.from_state(server)
    engine.restore_client_states(clients)
    for _ in range(2):
        state, _ = strategy(state, names, engine, cfg)
    assert same(vars(state), vars(whole))


# AFL has a weight for every client of the federation, whether it comes or not.
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("afl")])
def test_a_client_that_fails_at_first_is_as_if_not_sampled(
    new_client, start, run_rounds, same, case
):
    class Speechless(type(new_client())):
        def gradients(self, minibatch):
            raise ArithmeticError("no gradients today")

    cfg = replace(CASES[case], clients_per_round=None)
    a, b, c = _clients(new_client, "abc")
    broken = Speechless("broken", torch.zeros(2, 3))
    strategy = STRATEGIES[cfg.name]
    state, rows = run_rounds(strategy, [a, b, broken, c], start, cfg)
    without, expected = run_rounds(strategy, _clients(new_client, "abc"), start, cfg)
    assert same(vars(state), vars(without))
    assert rows[0]["round"].get("weights") == expected[0]["round"].get("weights")
    for failure in rows[0]["round"]["failures"]:  # one for every time that it was asked
        assert failure == {"client": "broken", "reason": "ArithmeticError: no gradients today"}
    assert rows[0]["round"]["failures"]
    assert json.dumps(rows)


@pytest.mark.parametrize("case", ["fsmgda", "fedcmoo, exact"])
def test_a_client_without_objectives_is_a_failure_with_its_reason(
    new_client, start, run_rounds, case
):
    cfg, idle = replace(CASES[case], clients_per_round=None), new_client("idle", served=())
    strategy = STRATEGIES[cfg.name]
    state, rows = run_rounds(strategy, [new_client("a"), idle], start, cfg)
    assert state.accepted == {"a": 1}
    (failure,) = rows[0]["round"]["failures"]
    assert "idle must serve some of the objectives 0 to 1, got ()" in failure["reason"]
    with pytest.raises(RoundFailed, match="idle must serve some of the objectives"):
        run_rounds(strategy, [idle], start, cfg)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_order_of_the_objectives_does_not_matter(
    name, exact_config, new_client, start, run_rounds, point
):
    strategy, cfg = STRATEGIES[name], exact_config(name, num_local_steps=2)

    def model(objectives):
        targets = torch.tensor([TARGETS[objective] for objective in objectives])
        options = {"objectives": objectives, "noise": 0.1, "uneven_draws": True}
        options["rewarded"] = objectives
        clients = [
            new_client("a", targets, **options),
            new_client("b", targets - 1.0, served=(objectives.index("far"),), **options),
            new_client("c", targets * 2.0, **options),
        ]
        state = replace(start, objectives=objectives)
        return point(run_rounds(strategy, clients, state, cfg, num_rounds=4)[0])

    first, *others = permutations(TARGETS)
    expected = model(first)
    assert not torch.allclose(expected, torch.zeros(3))
    for objectives in others:
        torch.testing.assert_close(model(objectives), expected, rtol=1e-5, atol=1e-5)
