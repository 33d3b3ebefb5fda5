"""A round of FIRM on quadratic objectives: the statements that hold for every client."""

import json
from dataclasses import replace

import pytest
import torch

from firm.federation import LocalEngine
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from firm.gradients import gram_matrix
from firm.solvers import firm_weights


def _run(clients, state, cfg, num_rounds=3):
    """Returns the server's state after some rounds, and the rows of each."""
    engine, names, rows = LocalEngine(clients), [client.name for client in clients], []
    for _ in range(num_rounds):
        state, metrics = firm_round(state, names, engine, cfg)
        rows.append(metrics)
    return state, rows


def test_a_federation_of_one_equals_local_training_bit_for_bit(new_client, start, same):
    cfg = FirmConfig(beta=0.2, num_local_steps=4)
    state, _ = _run([new_client()], start, cfg)

    client = new_client()
    client.load(start.adapter)
    for batch in client.batches(3 * 4):
        for minibatch in batch.minibatches():
            gradients = client.gradients(minibatch)
            gram = gram_matrix(gradients.jacobian)
            client.step(gradients, firm_weights(gram, beta=0.2))
    assert same(state.adapter, client.adapter())
    assert state.round == 3


@pytest.mark.parametrize("num_clients", [2, 3, 4])
def test_identical_clients_equal_one(new_client, start, same, num_clients):
    cfg = FirmConfig(num_local_steps=3)
    twins = [new_client(f"client_{i}", stream_name="twin") for i in range(num_clients)]
    state, rows = _run(twins, start, cfg)
    alone, _ = _run([new_client(stream_name="twin")], start, cfg)
    assert same(state.adapter, alone.adapter)
    assert rows[-1]["round"]["weights_spread"] == {"left": 0.0, "right": 0.0}
    assert rows[-1]["round"]["drift"] == 0.0


def test_clients_of_other_streams_do_differ(new_client, start, same):
    one, _ = _run([new_client(stream_name="a")], start, FirmConfig())
    two, _ = _run([new_client(stream_name="b")], start, FirmConfig())
    assert not same(one.adapter, two.adapter)


def test_one_step_of_two_clients_by_hand(new_client, start):
    clients = [
        new_client(
            name,
            torch.tensor(targets),
            optimizer=torch.optim.SGD,
            lr=0.5,
            noise=0.0,
            num_minibatches=1,
        )
        for name, targets in (
            ("a", [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]),
            ("b", [[0.0, 0.0, 4.0], [0.0, 0.0, -2.0]]),
        )
    ]
    adapter = {"first": torch.zeros(2), "second": torch.zeros(1)}
    state, rows = _run(clients, replace(start, adapter=adapter), FirmConfig(), num_rounds=1)
    # a: equal orthogonal gradients (-2, 0, 0), (0, -2, 0): λ = (1/2, 1/2) for every β, and its
    #    step is to (0.5, 0.5, 0)
    # b: opposed gradients -4 and 2 along the last axis, G = [[16, -8], [-8, 4]], trace mean 10:
    #    Q = [[1.605, -0.8], [-0.8, 0.405]], λ1 = 1.205/3.61, g = 2 - 6 λ1, its step is to -g/2
    share = 1.205 / 3.61
    assert rows[0]["clients"][0]["weights"][0] == pytest.approx([0.5, 0.5])
    assert rows[0]["clients"][1]["weights"][0] == pytest.approx([share, 1 - share])
    assert state.adapter["first"].tolist() == pytest.approx([0.25, 0.25])
    assert state.adapter["second"].item() == pytest.approx(-(2 - 6 * share) / 4, abs=1e-7)


def test_large_beta_gives_uniform_weights_in_every_solve(new_client, start):
    clients = [new_client(f"client_{i}") for i in range(3)]
    _, rows = _run(clients, start, FirmConfig(beta=1e12, num_local_steps=2))
    weights = [row["weights"] for round_rows in rows for row in round_rows["clients"]]
    torch.testing.assert_close(torch.tensor(weights), torch.full((9, 4, 2), 0.5))
    _, rows = _run(clients, start, FirmConfig(num_local_steps=2))
    assert abs(rows[0]["clients"][0]["weights"][0][0] - 0.5) > 0.05


def test_duplicated_objectives_equal_one(new_client, start):
    cfg = FirmConfig(num_local_steps=3)
    target = torch.tensor([[1.0, -2.0, 0.5]])
    alone, _ = _run(
        [new_client(targets=target, objectives=("only",))],
        replace(start, objectives=("only",)),
        cfg,
    )
    for count in (2, 3):
        names = tuple(f"copy_{index}" for index in range(count))
        copies, rows = _run(
            [new_client(targets=target.expand(count, 3), objectives=names)],
            replace(start, objectives=names),
            cfg,
        )
        for name, parameter in alone.adapter.items():
            torch.testing.assert_close(copies.adapter[name], parameter)
        assert rows[0]["clients"][0]["weights"][0] == pytest.approx([1 / count] * count)


def test_a_preference_moves_the_model_towards_its_objective(new_client, start):
    def distances(preference):
        client = new_client(noise=0.0, num_minibatches=1, lr=0.3)
        state, _ = _run([client], start, FirmConfig(preference=preference, num_local_steps=20))
        point = torch.cat(list(state.adapter.values()))
        return (point - client._targets).norm(dim=1)

    towards_left, towards_right = distances((9, 1)), distances((1, 9))
    assert towards_left[0] < towards_right[0]
    assert towards_left[1] > towards_right[1]
    only_left = distances((1, 0))
    assert only_left[0] < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5},
        {"beta": 0.5, "normalize": False},
        {"preference": (3.0, 1.0)},
        {"preference": (3.0, 1.0), "preference_strength": 0.2},
    ],
)
def test_every_option_reaches_the_clients_weights(new_client, start, options):
    _, rows = _run([new_client()], start, FirmConfig(**options), num_rounds=1)
    row = rows[0]["clients"][0]
    norms = torch.tensor(row["gradient_norms"][0], dtype=torch.float64)
    cosine = torch.eye(2, dtype=torch.float64)
    cosine[0, 1] = cosine[1, 0] = row["cosines"][0][0]
    gram = norms[:, None] * cosine * norms
    assert row["weights"][0] == pytest.approx(firm_weights(gram, **options).tolist())


def test_weights_may_be_solved_once_per_batch(new_client, start):
    counts = {}
    for solve_per in ("minibatch", "batch"):
        cfg = FirmConfig(solve_per=solve_per, num_local_steps=3)
        _, rows = _run([new_client(num_minibatches=4)], start, cfg, num_rounds=1)
        counts[solve_per] = len(rows[0]["clients"][0]["weights"])
    assert counts == {"minibatch": 12, "batch": 3}


NUM_DRAWN = {"fails_in": 1, "diverges_in": 1}
"""Batches that were drawn when it was noticed."""


@pytest.mark.parametrize("fault", ["fails_in", "diverges_in"])
def test_a_client_that_fails_or_diverges_is_as_if_not_sampled_but_for_its_batches(
    new_client, start, same, fault
):
    cfg = FirmConfig(num_local_steps=2)
    clients = [new_client("a"), new_client("b", **{fault: (2,)})]
    engine = LocalEngine(clients)
    state, _ = firm_round(start, ["a", "b"], engine, cfg)
    state, metrics = firm_round(state, ["a", "b"], engine, cfg)
    assert state.accepted == {"a": 2, "b": 1}
    assert metrics["round"]["clients"] == ["a"]
    assert [failure["client"] for failure in metrics["round"]["failures"]] == ["b"]
    assert [row["client"] for row in metrics["clients"]] == ["a"]
    final, _ = firm_round(state, ["a", "b"], engine, cfg)

    honest = new_client("b")
    spared = LocalEngine([new_client("a"), honest])
    expected, _ = firm_round(start, ["a", "b"], spared, cfg)
    expected, _ = firm_round(expected, ["a"], spared, cfg)
    states = spared.client_states(expected.accepted)
    honest.restore(states["b"]["state"])
    list(honest.batches(NUM_DRAWN[fault]))
    states["b"]["state"] = honest.state()
    spared.restore_client_states(states)
    expected, _ = firm_round(expected, ["a", "b"], spared, cfg)
    assert same(final.adapter, expected.adapter)
    assert same(engine.client_states(final.accepted), spared.client_states(expected.accepted))


def test_a_round_that_nobody_finishes_raises_and_may_be_repeated(new_client, start):
    engine = LocalEngine([new_client("a", fails_in=(1,)), new_client("b", diverges_in=(1,))])
    with pytest.raises(
        RuntimeError, match=r"round 1, quorum 1 \(a: ArithmeticError: the quadratic"
    ):
        firm_round(start, ["a", "b"], engine, FirmConfig())
    state, _ = firm_round(start, ["a", "b"], engine, FirmConfig())
    assert state.accepted == {"a": 1, "b": 1}


def test_sampled_clients_depend_on_seed_and_round_alone(new_client, start):
    cfg = FirmConfig(clients_per_round=2)
    names = [f"client_{index}" for index in range(5)]

    def sampled(state):
        _, rows = _run([new_client(name) for name in names], state, cfg, num_rounds=6)
        return [row["round"]["clients"] for row in rows]

    assert sampled(start) == sampled(start)
    assert sampled(start) != sampled(replace(start, seed=1))
    assert len(set(map(tuple, sampled(start)))) > 1


def test_named_clients_take_part_in_every_round(new_client, start):
    names = [f"client_{index}" for index in range(5)]
    cfg = FirmConfig(clients_per_round=2, always=("client_3",))
    _, rows = _run([new_client(name) for name in names], start, cfg, num_rounds=6)
    drawn = [row["round"]["clients"] for row in rows]
    assert all(len(clients) == 2 and "client_3" in clients for clients in drawn)
    assert len(set(map(tuple, drawn))) > 1
    with pytest.raises(ValueError, match="unknown client 'phd'"):
        _run([new_client()], start, FirmConfig(always=("phd",)))


def test_the_server_learning_rate_stretches_the_step(new_client, start, point):
    def end(**options):
        clients = [new_client("a"), new_client("b", num_examples=30)]
        cfg = FirmConfig(num_local_steps=2, aggregation="by_examples", **options)
        return point(_run(clients, start, cfg, num_rounds=1)[0])

    expected = point(start) + 1.5 * (end() - point(start))
    torch.testing.assert_close(end(server_learning_rate=1.5), expected)


def test_aggregation_by_examples_weighs_the_clients(new_client, start):
    options = {"noise": 0.0, "num_minibatches": 1, "optimizer": torch.optim.SGD, "lr": 1.0}
    near, far = torch.zeros(2, 3), torch.full((2, 3), 8.0)  # one step lands on the target
    clients = [
        new_client("a", near, num_examples=1, **options),
        new_client("b", far, num_examples=3, **options),
    ]
    uniform, _ = _run(clients, start, FirmConfig(), num_rounds=1)
    by_examples, _ = _run(clients, start, FirmConfig(aggregation="by_examples"), num_rounds=1)
    assert uniform.adapter["first"].tolist() == pytest.approx([4.0, 4.0])
    assert by_examples.adapter["first"].tolist() == pytest.approx([6.0, 6.0])


def test_rows_are_json_and_count_bytes_of_all(new_client, start):
    _, rows = _run([new_client("a"), new_client("b")], start, FirmConfig(), num_rounds=1)
    round_row, client_rows = rows[0]["round"], rows[0]["clients"]
    assert json.loads(json.dumps(rows[0])) == rows[0]
    assert round_row["kind"] == "round"
    assert round_row["round"] == 1
    assert {row["kind"] for row in client_rows} == {"client"}
    assert round_row["bytes_up"] == sum(row["bytes_up"] for row in client_rows) > 24
    assert round_row["bytes_down"] == sum(row["bytes_down"] for row in client_rows) > 24
    assert round_row["seconds"] > 0
    assert set(round_row["weights_spread"]) == {"left", "right"}


def test_the_given_state_stays_as_it_was(new_client, start):
    before = {name: value.clone() for name, value in start.adapter.items()}
    _run([new_client()], start, FirmConfig(num_local_steps=2))
    assert all(torch.equal(start.adapter[name], value) for name, value in before.items())
    assert start.round == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -0.1}, r"beta must be non-negative, got -0\.1\."),
        ({"preference": (0.0, 0.0)}, "not all zero"),
        ({"preference": ()}, "one entry for each"),
        ({"preference": (1.0, 1.0), "preference_strength": -1.0}, "preference_strength"),
        ({"num_local_steps": 0}, "num_local_steps must be at least 1"),
        ({"clients_per_round": 0}, "clients_per_round must be at least 1"),
        (
            {"clients_per_round": 2, "always": ("a", "b")},
            "exceed the number of clients in always, 2",
        ),
        ({"always": ("a", "a")}, "always must name each client once"),
        ({"server_learning_rate": 0.0}, "server_learning_rate must be positive"),
        ({"server_learning_rate": float("nan")}, "a finite number, got nan"),
    ],
)
def test_configurations_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FirmConfig(**options)


def test_weights_of_a_round_keep_the_users_constraints(new_client, start):
    cfg = FirmConfig(solver="cvxpy", constraints=("left <= 0.4", "right <= 2 * left"))
    _, rows = _run([new_client()], start, cfg, num_rounds=2)
    weights = [solve for row in rows for solve in row["clients"][0]["weights"]]
    assert all(right / 2 - 1e-6 <= left <= 0.4 + 1e-6 for left, right in weights)
    _, free_rows = _run([new_client()], start, FirmConfig(), num_rounds=2)
    assert any(left > 0.4 for left, _ in free_rows[0]["clients"][0]["weights"])


def test_constraints_are_checked_against_the_objectives():
    cfg = FirmConfig(solver="cvxpy", constraints=("left >= 0.6",))
    cfg.check(["left", "right"])
    with pytest.raises(ValueError, match="names 'left', but the objectives are a, b"):
        cfg.check(["a", "b"])
    with pytest.raises(ValueError, match="constraints require solver cvxpy"):
        FirmConfig(constraints=("left >= 0.6",))


def test_norm_power_reaches_the_solve(new_client, start):
    _, plain = _run([new_client()], start, FirmConfig(beta=0.0), num_rounds=1)
    _, unit = _run([new_client()], start, FirmConfig(beta=0.0, norm_power=1.0), num_rounds=1)
    first, other = (rows[0]["clients"][0] for rows in (plain, unit))
    norms, weights = other["gradient_norms"][0], other["weights"][0]
    # at M = 2 unit gradients share alike
    assert weights[0] * norms[0] == pytest.approx(weights[1] * norms[1])
    assert first["weights"][0] != pytest.approx(weights)
