import pytest
import torch

from firm.federation import LocalEngine
from firm.federation.strategies import STRATEGIES, FedAvgConfig, fedavg


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


def test_the_strategy_is_found_by_its_configurations_name():
    assert STRATEGIES[FedAvgConfig().name] is fedavg


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
