"""A round of FedMGDA+, where every client is an objective."""

from dataclasses import replace

import pytest
import torch

from firm.federation import LocalEngine, Reply, ServerState, Update
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedmgda import fedmgda
from firm.federation.strategy_configs import FedAvgConfig, FedMgdaConfig

FEDMGDA = FedMgdaConfig(normalize_updates=False)


def _clients(new_client, count=3, **options):
    generator = torch.Generator().manual_seed(3)
    return [
        new_client(
            f"client_{index}", torch.randn(2, 3, generator=generator), num_examples=index + 1
        )
        for index in range(count)
    ]


def test_one_round_of_two_clients_by_hand(two_clients, origin, run_rounds, point):
    clients = two_clients()
    # updates (2, 0, 0) and (0, 1, 0): the min-norm point is at λ = (1/5, 4/5)
    state, rows = run_rounds(fedmgda, clients, origin, FEDMGDA)
    assert rows[0]["round"]["weights"] == pytest.approx({"a": 0.2, "b": 0.8})
    assert point(state).tolist() == pytest.approx([0.4, 0.8, 0.0])
    # of unit length they count alike
    state, rows = run_rounds(fedmgda, clients, origin, FedMgdaConfig(server_learning_rate=3.0))
    assert rows[0]["round"]["weights"] == pytest.approx({"a": 0.5, "b": 0.5})
    assert point(state).tolist() == pytest.approx([1.5, 1.5, 0.0])


def test_the_direction_lowers_every_participants_loss(new_plain_client, start, run_rounds):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(3, 1, 3, generator=generator).expand(3, 2, 3)
    clients = [new_plain_client(f"{i}", row.tolist()) for i, row in enumerate(targets)]

    def losses(state):
        for client in clients:
            client.load(state.adapter)
        return torch.stack([client.losses().sum() for client in clients])

    state, _ = run_rounds(fedmgda, clients, start, replace(FEDMGDA, server_learning_rate=0.1))
    assert (losses(state) < losses(start)).all()


@pytest.mark.parametrize("aggregation", ["uniform", "by_examples"])
@pytest.mark.parametrize("normalize", [False, True])
def test_epsilon_zero_is_fedavg_bit_for_bit(
    new_client, start, run_rounds, same, aggregation, normalize
):
    options = {
        "aggregation": aggregation,
        "normalize_updates": normalize,
        "num_local_steps": 3,
        "proximal": 0.1,
    }
    cfg = FedMgdaConfig(epsilon=0.0, **options)
    state, rows = run_rounds(fedmgda, _clients(new_client), start, cfg, num_rounds=3)
    expected, _ = run_rounds(
        fedavg, _clients(new_client), start, FedAvgConfig(**options), num_rounds=3
    )
    assert same(state.adapter, expected.adapter)
    shares = [1 / 3] * 3 if aggregation == "uniform" else [1 / 6, 2 / 6, 3 / 6]
    assert list(rows[0]["round"]["weights"].values()) == pytest.approx(shares)


def test_epsilon_zero_is_fedavg_to_the_last_bit_of_double_precision():
    generator = torch.Generator().manual_seed(0)
    names = [f"client_{index}" for index in range(7)]
    adapters = torch.randn(7, 500, generator=generator, dtype=torch.float64)

    class Echo(LocalEngine):
        def map(self, request, clients):
            updates = [Update(n, {"all": a}, 3, {}) for n, a in zip(names, adapters, strict=True)]
            return [Reply(update.client, update, 0, 0) for update in updates], []

    state = ServerState({"all": torch.zeros(500, dtype=torch.float64)}, ("only",), seed=0)
    ends = [
        strategy(state, names, Echo([]), cfg)[0].adapter["all"]
        for strategy, cfg in (
            (fedmgda, FedMgdaConfig(epsilon=0.0, normalize_updates=False)),
            (fedavg, FedAvgConfig()),
        )
    ]
    assert torch.equal(*ends)


def test_epsilon_bounds_how_far_weights_are_from_the_aggregations(
    new_plain_client, origin, run_rounds
):
    clients = [
        new_plain_client("a", [[40.0, 0.0, 0.0]] * 2, num_examples=3),
        new_plain_client("b", [[0.0, 2.0, 0.0]] * 2, num_examples=1),
    ]
    for aggregation, weight in (("uniform", 0.4), ("by_examples", 0.65)):
        cfg = replace(FEDMGDA, epsilon=0.1, aggregation=aggregation)
        _, rows = run_rounds(fedmgda, clients, origin, cfg)
        assert rows[0]["round"]["weights"]["a"] == pytest.approx(weight)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_an_inflated_loss_moves_fedmgda_plus_nowhere(
    new_plain_client, origin, run_rounds, point, scale
):
    def end(strategy, cfg, **attack):
        clients = [
            new_plain_client("a", [[1.0, 0.5, 0.0]] * 2),
            new_plain_client("b", [[0.0, 2.0, 0.3]] * 2, **attack),
        ]
        return point(run_rounds(strategy, clients, origin, cfg)[0])

    cfg = FedMgdaConfig(server_learning_rate=0.1)
    honest = end(fedmgda, cfg)
    torch.testing.assert_close(end(fedmgda, cfg, scale=scale), honest)
    torch.testing.assert_close(end(fedmgda, cfg, bias=scale), honest, rtol=0.0, atol=0.0)
    assert not torch.allclose(
        end(fedavg, FedAvgConfig(), scale=scale), end(fedavg, FedAvgConfig()), rtol=1e-2
    )


def test_a_client_at_its_minimum_stops_the_round_and_is_named(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client("a", [[4.0, 0.0, 0.0]] * 2),
        new_plain_client("still", [[0.0, 0.0, 0.0]] * 2),
    ]
    state, rows = run_rounds(fedmgda, clients, origin, FedMgdaConfig())
    assert rows[0]["round"]["zero_updates"] == ["still"]
    assert rows[0]["round"]["weights"] == pytest.approx({"a": 0.0, "still": 1.0})
    assert point(state).tolist() == [0.0, 0.0, 0.0]
    # with bounded weights the others go on
    state, _ = run_rounds(fedmgda, clients, origin, FedMgdaConfig(epsilon=0.2))
    assert point(state).tolist() == pytest.approx([0.3, 0.0, 0.0])


@pytest.mark.parametrize("normalize", [False, True])
def test_a_round_of_zero_updates_leaves_the_model(
    new_plain_client, origin, run_rounds, same, normalize
):
    clients = [new_plain_client(name, [[0.0, 0.0, 0.0]] * 2) for name in "abc"]
    cfg = FedMgdaConfig(normalize_updates=normalize)
    state, rows = run_rounds(fedmgda, clients, origin, cfg)
    assert rows[0]["round"]["weights"] == pytest.approx(dict.fromkeys("abc", 1 / 3))
    assert same(state.adapter, origin.adapter)


def test_identical_clients_and_more_clients_than_dimensions_are_fine(
    new_client, new_plain_client, start, origin, run_rounds, point
):
    twins = [new_client(f"{index}", stream_name="twin") for index in range(5)]
    state, rows = run_rounds(fedmgda, twins, start, FEDMGDA)
    alone, _ = run_rounds(fedmgda, [new_client("0", stream_name="twin")], start, FEDMGDA)
    torch.testing.assert_close(point(state), point(alone))
    assert sum(rows[0]["round"]["weights"].values()) == pytest.approx(1.0)
    # targets all around the origin: no common descent, so the server stands still
    around = [
        new_plain_client(f"{axis}{sign}", [[sign * float(axis == i) for i in range(3)]] * 2)
        for axis in range(3)
        for sign in (-1.0, 1.0)
    ]
    state, _ = run_rounds(fedmgda, around, origin, FedMgdaConfig())
    assert point(state).tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, float("nan")])
def test_an_epsilon_outside_its_range_is_refused(epsilon):
    with pytest.raises(
        ValueError, match=f"epsilon must be at least 0 and at most 1, got {epsilon}"
    ):
        FedMgdaConfig(epsilon=epsilon)
