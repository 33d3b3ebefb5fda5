from dataclasses import replace

import pytest
import torch

from firm.federation import LocalEngine
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import FedAvgConfig


def test_fixed_weights_equal_gradient_descent_on_the_weighted_sum(new_client, start):
    options = {"noise": 0.0, "num_minibatches": 1, "optimizer": torch.optim.SGD, "lr": 0.1}
    targets = {
        "a": torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]),
        "b": torch.tensor([[-1.0, 2.0, 0.0], [4.0, 1.0, 1.0]]),
    }
    engine = LocalEngine([new_client(name, target, **options) for name, target in targets.items()])
    state, cfg = start, FedAvgConfig(weights=(3.0, 1.0), num_local_steps=2)
    for _ in range(2):
        state, metrics = fedavg(state, ["a", "b"], engine, cfg)
    assert metrics["clients"][0]["weights"] == [[0.75, 0.25]] * 2

    point = torch.tensor([0.1, 0.2, 0.3])
    for _ in range(2):
        ends = []
        for target in targets.values():
            end = point.clone().requires_grad_()
            for _ in range(2):
                losses = (end - target).square().sum(dim=1) / 2
                (grad,) = torch.autograd.grad(0.75 * losses[0] + 0.25 * losses[1], end)
                end = (end - 0.1 * grad).detach().requires_grad_()
            ends.append(end.detach())
        point = (ends[0] + ends[1]) / 2
    torch.testing.assert_close(torch.cat(list(state.adapter.values())), point)


def test_weights_are_uniform_by_default(new_client, start):
    engine = LocalEngine([new_client()])
    _, metrics = fedavg(start, ["client_0"], engine, FedAvgConfig(num_local_steps=2))
    assert metrics["clients"][0]["weights"] == [[0.5, 0.5]] * 4


def test_aggregation_by_examples_weighs_the_clients(new_client, start):
    options = {"noise": 0.0, "num_minibatches": 1, "optimizer": torch.optim.SGD, "lr": 1.0}
    near, far = torch.zeros(2, 3), torch.full((2, 3), 8.0)  # one step lands on the target
    for by, point in (("uniform", 4.0), ("by_examples", 6.0)):
        engine = LocalEngine(
            [
                new_client("a", near, num_examples=1, **options),
                new_client("b", far, num_examples=3, **options),
            ]
        )
        state, _ = fedavg(start, ["a", "b"], engine, FedAvgConfig(aggregation=by))
        assert state.adapter["first"].tolist() == pytest.approx([point, point])


def test_clients_are_sampled_and_failures_told(new_client, start):
    engine = LocalEngine([new_client("a"), new_client("b", fails_in=(1,)), new_client("c")])
    state, metrics = fedavg(start, ["a", "b", "c"], engine, FedAvgConfig())
    assert state.accepted == {"a": 1, "c": 1}
    assert metrics["round"]["failures"][0]["client"] == "b"
    _, metrics = fedavg(state, ["a", "b", "c"], engine, FedAvgConfig(clients_per_round=1))
    assert len(metrics["round"]["clients"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1.0, -1.0)}, "weights must be finite, non-negative"),
        ({"weights": ()}, "one entry for each"),
        ({"num_local_steps": 0}, "num_local_steps"),
        ({"clients_per_round": -1}, "clients_per_round"),
    ],
)
def test_configurations_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedAvgConfig(**options)


def test_the_server_learning_rate_stretches_the_step_and_decays_every_hundred_rounds(
    new_plain_client, origin, run_rounds, point
):
    def step(cfg, finished):
        client = new_plain_client("a", [[4.0, 0.0, 0.0], [4.0, 0.0, 0.0]])  # its step is to 2
        state, _ = run_rounds(fedavg, [client], replace(origin, round=finished), cfg)
        return point(state)[0].item()

    cfg = FedAvgConfig(server_learning_rate=1.5, decay=0.5)
    steps = [step(cfg, finished) for finished in (0, 99, 100, 250)]
    assert steps == pytest.approx([3.0, 3.0, 1.5, 0.75])


def test_normalised_updates_count_by_their_direction_alone(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client("a", [[8.0, 0.0, 0.0]] * 2),
        new_plain_client("b", [[0.0, 0.1, 0.0]] * 2),
        new_plain_client("c", [[0.0, 0.0, 0.0]] * 2),  # at its minimum already
    ]
    state, rows = run_rounds(fedavg, clients, origin, FedAvgConfig(normalize_updates=True))
    assert point(state).tolist() == pytest.approx([1 / 3, 1 / 3, 0.0])
    assert rows[0]["round"]["zero_updates"] == ["c"]
    state, rows = run_rounds(fedavg, clients, origin, FedAvgConfig())
    assert point(state).tolist() == pytest.approx([4 / 3, 0.05 / 3, 0.0])
    assert "zero_updates" not in rows[0]["round"]


def test_a_proximal_term_reaches_the_clients(new_plain_client, origin, run_rounds, point):
    client = new_plain_client("a", [[4.0, 0.0, 0.0]] * 2)
    state, _ = run_rounds(fedavg, [client], origin, FedAvgConfig(num_local_steps=2, proximal=0.5))
    assert point(state)[0] == 2.5  # 2, then 2 + 0.5 * (2 - 0.5 * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proximal": -0.1}, "proximal must be non-negative, got -0.1"),
        ({"server_learning_rate": 0.0}, "server_learning_rate must be positive"),
        ({"decay": 0.0}, r"decay must be greater than 0 and at most 1, got 0.0"),
        ({"decay": 1.1}, r"decay must be greater than 0 and at most 1, got 1.1"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedAvgConfig(**options)
