from dataclasses import replace

import pytest
import torch

from firm.federation.strategies.afl import afl
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import AflConfig, FedAvgConfig


def test_two_rounds_of_two_clients_by_hand(two_clients, origin, run_rounds, point):
    cfg = AflConfig(weights_learning_rate=0.05, server_learning_rate=0.5)
    state, rows = run_rounds(afl, two_clients(), origin, cfg)
    # λ = (1/2, 1/2) takes updates (2, 0, 0) and (0, 1, 0); then losses 8 and 2 raise it to
    # (0.9, 0.6), which projects to (0.65, 0.35)
    assert rows[0]["round"]["weights"] == {"a": 0.5, "b": 0.5}
    assert point(state).tolist() == pytest.approx([0.5, 0.25, 0.0])
    assert state.memory["client_weights"] == pytest.approx({"a": 0.65, "b": 0.35})
    engine_clients = two_clients()
    state, rows = run_rounds(afl, engine_clients, replace(state, accepted={}), cfg)
    assert rows[0]["round"]["weights"] == pytest.approx({"a": 0.65, "b": 0.35})
    # updates (1.75, -0.125, 0) and (-0.25, 0.875, 0)
    assert point(state).tolist() == pytest.approx(
        [0.5 + 0.5 * (0.65 * 1.75 - 0.35 * 0.25), 0.25 + 0.5 * (0.35 * 0.875 - 0.65 * 0.125), 0.0]
    )


def test_weights_that_do_not_climb_are_fedavg(new_client, start, run_rounds, point):
    def clients():
        return [new_client(name, torch.eye(3)[:2] * size) for name, size in (("a", 1), ("b", 5))]

    cfg = AflConfig(weights_learning_rate=0.0, num_local_steps=2)
    state, _ = run_rounds(afl, clients(), start, cfg, num_rounds=2)
    expected, _ = run_rounds(
        fedavg, clients(), start, FedAvgConfig(num_local_steps=2), num_rounds=2
    )
    torch.testing.assert_close(point(state), point(expected))


def test_the_worst_loss_ends_lower_than_with_fedavg(new_plain_client, origin, run_rounds, point):
    def worst(strategy, cfg):
        clients = [
            new_plain_client(name, [[target, 0.0, 0.0]] * 2, lr=0.1)
            for name, target in (("a", 0.0), ("b", 0.0), ("c", 4.0))
        ]
        state, _ = run_rounds(strategy, clients, origin, cfg, num_rounds=60)
        return max((point(state)[0].item() - target) ** 2 / 2 for target in (0.0, 4.0))

    assert worst(fedavg, FedAvgConfig()) > 3.0
    assert worst(afl, AflConfig(weights_learning_rate=0.02)) < 2.5  # the best is 2


def test_a_bias_draws_all_weight_to_the_attacker(two_clients, origin, run_rounds):
    clients = two_clients(bias=100.0)
    state, _ = run_rounds(afl, clients, origin, AflConfig())
    assert state.memory["client_weights"] == {"a": 0.0, "b": 1.0}


def test_weights_of_absent_clients_are_kept_but_do_not_climb(new_plain_client, origin, run_rounds):
    clients = [new_plain_client(name, [[4.0, 0.0, 0.0]] * 2) for name in "abc"]
    cfg = AflConfig(clients_per_round=1, weights_learning_rate=0.02)
    state, rows = run_rounds(afl, clients, origin, cfg)
    (present,) = rows[0]["round"]["clients"]
    assert rows[0]["round"]["weights"] == {present: 1.0}
    weights = dict(state.memory["client_weights"])
    # 1/3 + 0.16 for the one, and all less a third of 0.16
    assert weights.pop(present) == pytest.approx(1 / 3 + 0.32 / 3)
    assert list(weights.values()) == pytest.approx([1 / 3 - 0.16 / 3] * 2)


def test_clients_without_any_weight_count_alike(two_clients, new_plain_client, origin, run_rounds):
    memory = {"client_weights": {"a": 0.0, "b": 0.0, "gone": 1.0}}
    state = replace(origin, memory=memory)
    clients = [*two_clients(), new_plain_client("gone", [[0.0] * 3] * 2, fails_in=(1,))]
    _, rows = run_rounds(afl, clients, state, AflConfig())
    assert rows[0]["round"]["weights"] == {"a": 0.5, "b": 0.5}


def test_the_mean_of_the_iterates_is_the_model_and_training_goes_on_from_the_last(
    two_clients, origin, run_rounds, same, point
):
    cfg = AflConfig(weights_learning_rate=0.01, num_local_steps=2)
    averaging, iterates, start = replace(cfg, average_iterates=True), [], replace(origin, seed=5)
    for count in (1, 2, 3):
        last, _ = run_rounds(afl, two_clients(), start, cfg, num_rounds=count)
        mean, _ = run_rounds(afl, two_clients(), start, averaging, num_rounds=count)
        iterates.append(point(last))
        assert same(mean.memory["iterate"], last.adapter)
        assert mean.memory["client_weights"] == last.memory["client_weights"]
        torch.testing.assert_close(point(mean), torch.stack(iterates).mean(dim=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_learning_rate": -0.1}, "weights_learning_rate must be non-negative"),
        ({"aggregation": "by_examples"}, "aggregation must be uniform"),
    ],
)
def test_configurations_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AflConfig(**options)
