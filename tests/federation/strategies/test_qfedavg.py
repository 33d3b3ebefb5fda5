import pytest
import torch

from firm.federation import RoundFailed
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.qfedavg import qfedavg
from firm.federation.strategy_configs import FedAvgConfig, QFedAvgConfig


def test_one_round_of_two_clients_by_hand(two_clients, origin, run_rounds, point):
    cfg = QFedAvgConfig(q=2.0, lipschitz=3.0)
    state, rows = run_rounds(qfedavg, two_clients(), origin, cfg)
    # losses 8 and 2, updates (2, 0, 0) and (0, 1, 0), Δw 6 and 3 long:
    # h = 2 * 8 * 36 + 3 * 64 = 768 and 2 * 2 * 9 + 3 * 4 = 48
    assert point(state).tolist() == pytest.approx([64 * 6 / 816, 4 * 3 / 816, 0.0])
    assert rows[0]["round"]["weights"] == pytest.approx({"a": 192 / 816, "b": 12 / 816})


def test_total_losses_count_a_clients_examples(new_plain_client, origin, run_rounds):
    clients = [
        new_plain_client("a", [[4.0, 0.0, 0.0]] * 2, num_examples=2),
        new_plain_client("b", [[0.0, 2.0, 0.0]] * 2, num_examples=20),
    ]
    cfg = QFedAvgConfig(losses="total")
    _, rows = run_rounds(qfedavg, clients, origin, cfg)
    # losses 2 * 8 and 20 * 2, updates 2 and 1 long: h = 4 + 16 and 1 + 40
    assert rows[0]["round"]["weights"] == pytest.approx({"a": 16 / 61, "b": 40 / 61})
    with pytest.raises(ValueError, match="losses must be one of mean, total, got 'sum'"):
        QFedAvgConfig(losses="sum")


@pytest.mark.parametrize("lipschitz", [0.1, 10.0])
def test_q_zero_is_fedavg(new_client, start, run_rounds, point, lipschitz):
    def clients():
        return [new_client(name, torch.eye(3)[:2] * size) for name, size in (("a", 1), ("b", 5))]

    cfg = QFedAvgConfig(q=0.0, lipschitz=lipschitz, num_local_steps=3)
    state, _ = run_rounds(qfedavg, clients(), start, cfg, num_rounds=2)
    expected, _ = run_rounds(
        fedavg, clients(), start, FedAvgConfig(num_local_steps=3), num_rounds=2
    )
    torch.testing.assert_close(point(state), point(expected))


def test_a_bias_draws_the_model_to_the_attacker(two_clients, origin, run_rounds):
    shares = []
    for bias in (0.0, 1e4):
        clients = two_clients(bias=bias)
        _, rows = run_rounds(qfedavg, clients, origin, QFedAvgConfig(q=5.0))
        weights = rows[0]["round"]["weights"]
        shares.append(weights["b"] / sum(weights.values()))
    assert shares[0] < 0.01
    assert shares[1] > 0.999


def test_huge_powers_of_huge_losses_stay_finite(two_clients, origin, run_rounds, point):
    clients = two_clients(bias=1e29)
    state, _ = run_rounds(qfedavg, clients, origin, QFedAvgConfig(q=20.0))
    assert point(state)[1] == pytest.approx(1.0)


def test_normalised_updates_have_length_one(
    two_clients, new_plain_client, origin, run_rounds, point
):
    clients = [*two_clients(), new_plain_client("still", [[0.0, 0.0, 0.0]] * 2)]
    cfg = QFedAvgConfig(q=1.0, normalize_updates=True)
    state, rows = run_rounds(qfedavg, clients, origin, cfg)
    # losses 8, 2 and 0 (1e-10): h = 1 + 8, 1 + 2 and 1e-10
    assert point(state).tolist() == pytest.approx([8 / 12, 2 / 12, 0.0])
    assert rows[0]["round"]["zero_updates"] == ["still"]


def test_the_loss_is_the_weighted_sum_of_the_objectives(new_plain_client, origin, run_rounds):
    clients = [
        new_plain_client("a", [[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        new_plain_client("b", [[0.0, 0.0, 0.0], [0.0, 4.0, 0.0]]),
    ]
    _, rows = run_rounds(qfedavg, clients, origin, QFedAvgConfig(weights=(3.0, 1.0)))
    weights = rows[0]["round"]["weights"]
    assert weights["a"] / weights["b"] == pytest.approx(3.0)


@pytest.mark.parametrize("bias", [-100.0, float("nan"), float("inf")])
def test_a_client_with_an_unusable_loss_is_left_out(two_clients, origin, run_rounds, point, bias):
    state, rows = run_rounds(qfedavg, two_clients(bias=bias), origin, QFedAvgConfig(q=0.0))
    (failure,) = rows[0]["round"]["failures"]
    assert failure["client"] == "b"
    assert "loss of left must be" in failure["reason"] or "not finite" in failure["reason"]
    assert point(state).tolist() == [2.0, 0.0, 0.0]
    with pytest.raises(RoundFailed, match=r"loss of left must be|not finite"):
        run_rounds(qfedavg, two_clients(bias=bias)[1:], origin, QFedAvgConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": -1.0}, "q must be non-negative, got -1.0"),
        ({"lipschitz": 0.0}, "lipschitz must be positive, got 0.0"),
        ({"aggregation": "by_examples"}, "aggregation must be uniform"),
    ],
)
def test_configurations_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QFedAvgConfig(**options)
