"""A round of FedCMOO on quadratic objectives, with and without compression and preferences."""

import json
from dataclasses import replace

import pytest
import torch

from firm.federation import LocalEngine, RoundFailed
from firm.federation.client import Failure
from firm.federation.server import FailedAttempt
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.fedcmoo_pref import fedcmoo_pref
from firm.federation.strategy_configs import FedAvgConfig, FedCmooConfig, FedCmooPrefConfig
from firm.solvers import fedcmoo_pref_weights, fedcmoo_weights

LEFT, RIGHT = [4.0, 0.0, 0.0], [0.0, 2.0, 0.0]
EXACT = FedCmooConfig(compressor="none", communication="one_way", solver="exact")
THEORY = FedCmooConfig(
    compressor="none",
    communication="two_sample",
    num_steps=1,
    step_size=0.05,
    normalize_gram=False,
)
EXACT_PREF = FedCmooPrefConfig(compressor="none", communication="one_way", min_weight=0.0)
BUDGET = 4.0
"""Messages of three parameters are all overhead."""


def _clients(new_client, names="abcd", **options):
    generator = torch.Generator().manual_seed(2)
    return [
        new_client(name, torch.randn(2, 3, generator=generator), num_minibatches=1, **options)
        for name in names
    ]


def test_identical_clients_take_a_centralised_multiple_gradient_step(
    new_plain_client, start, run_rounds, point
):
    targets = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    clients = [new_plain_client(name, targets.tolist(), lr=0.1) for name in "abc"]
    state, rows = run_rounds(fedcmoo, clients, start, EXACT, num_rounds=3)
    model = point(start).double()
    for row in rows:
        left, right = model - targets.double()
        share = ((right - left) @ right / (right - left).square().sum()).clamp(0, 1).item()
        assert row["round"]["weights"]["left"] == pytest.approx(share, abs=1e-5)
        direction = share * left + (1 - share) * right
        assert row["round"]["stationarity"] == pytest.approx(
            direction.square().sum().item(), rel=1e-4
        )
        model = model - 0.1 * direction
    torch.testing.assert_close(point(state).double(), model, rtol=1e-5, atol=1e-6)


def test_the_gram_matrix_is_that_of_the_mean_by_hand(new_plain_client, origin, run_rounds, point):
    clients = [
        new_plain_client("a", [[8.0, 0.0, 0.0], [0.0, 4.0, 0.0]]),
        new_plain_client("b", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ]
    # mean gradients (-4, 0, 0) and (0, -2, 0): w = (1/5, 4/5); a goes to (0.8, 1.6, 0), b stays
    cfg = replace(EXACT, server_learning_rate=1.5)
    state, rows = run_rounds(fedcmoo, clients, origin, cfg)
    assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.2, "right": 0.8})
    assert rows[0]["round"]["stationarity"] == pytest.approx(0.04 * 16 + 0.64 * 4)
    assert point(state).tolist() == pytest.approx([0.6, 1.2, 0.0])
    assert rows[0]["clients"][0]["weights"] == [pytest.approx([0.2, 0.8])]
    assert json.dumps(rows)


def test_steps_begin_where_the_last_round_ended(new_plain_client, origin, run_rounds):
    cfg = replace(EXACT, solver="steps", step_size=0.01, num_steps=3, normalize_gram=False)
    clients = [new_plain_client("a", [LEFT, RIGHT], lr=1e-9)]  # stands still
    state, rows = run_rounds(fedcmoo, clients, origin, cfg, num_rounds=2)
    gram = torch.diag(torch.tensor([16.0, 4.0], dtype=torch.float64))
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for row in rows:
        weights = fedcmoo_weights(weights, gram, step_size=0.01, num_steps=3)
        assert list(row["round"]["weights"].values()) == pytest.approx(weights.tolist())
    assert state.memory["weights"] == pytest.approx(weights.tolist())
    normalised = replace(cfg, normalize_gram=True)
    _, rows = run_rounds(fedcmoo, [new_plain_client("a", [LEFT, RIGHT])], origin, normalised)
    weights = fedcmoo_weights(
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        gram,
        step_size=0.01,
        num_steps=3,
        normalize=True,
    )
    assert list(rows[0]["round"]["weights"].values()) == pytest.approx(weights.tolist())


def test_steps_of_no_length_are_fedavg(new_client, start, run_rounds, same):
    cfg = replace(EXACT, solver="steps", step_size=1e-300, num_steps=1, num_local_steps=3)
    state, _ = run_rounds(fedcmoo, _clients(new_client), start, cfg, num_rounds=2)
    expected, _ = run_rounds(
        fedavg, _clients(new_client), start, FedAvgConfig(num_local_steps=3), num_rounds=2
    )
    assert same(state.adapter, expected.adapter)


def test_the_first_local_step_has_the_batch_of_the_jacobian(new_client, start, run_rounds, same):
    client = new_client(num_minibatches=1)
    state, rows = run_rounds(fedcmoo, [client], start, EXACT)
    alone = new_client(num_minibatches=1)
    alone.load(start.adapter)
    (batch,) = alone.batches(1)
    alone.step(alone.gradients(batch.whole), torch.tensor(rows[0]["clients"][0]["weights"][0]))
    assert same(state.adapter, alone.adapter())
    assert client.state()["num_batches"] == 1


@pytest.mark.parametrize(
    ("compressor", "communication"),
    [
        ("low_rank", "one_way"),
        ("low_rank", "two_way"),
        ("top_k", "one_way"),
        ("top_k", "two_way"),
        ("random_mask", "one_way"),
        ("quantizing", "one_way"),
        ("quantizing", "two_way"),
        ("count_sketch", "one_way"),
    ],
)
def test_with_budget_for_everything_compression_changes_little(
    new_client, start, run_rounds, compressor, communication
):
    cfg = replace(EXACT, compressor=compressor, communication=communication, upload_budget=BUDGET)
    _, rows = run_rounds(fedcmoo, _clients(new_client), start, cfg)
    _, expected = run_rounds(fedcmoo, _clients(new_client), start, EXACT)
    weights, exact = rows[0]["round"]["weights"], expected[0]["round"]["weights"]
    assert weights == pytest.approx(exact, abs=2e-2)


def test_two_ways_cost_another_download_and_two_small_matrices(new_client, start, run_rounds):
    def traffic(communication):
        cfg = replace(
            EXACT, compressor="low_rank", communication=communication, upload_budget=BUDGET
        )
        _, rows = run_rounds(fedcmoo, _clients(new_client), start, cfg)
        assert rows[0]["round"]["bytes_up"] == sum(row["bytes_up"] for row in rows[0]["clients"])
        return rows[0]["round"]

    one, two = traffic("one_way"), traffic("two_way")
    assert two["bytes_up"] - one["bytes_up"] > 4 * 2 * 2 * 2 * 8
    assert two["bytes_down"] > one["bytes_down"] + 4 * 3 * 4
    fedavg_up = run_rounds(fedavg, _clients(new_client), start, FedAvgConfig())[1]
    assert one["bytes_up"] > fedavg_up[0]["round"]["bytes_up"]


def test_objectives_are_averaged_over_the_clients_that_serve_them(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client("a", [LEFT, RIGHT]),
        new_plain_client("b", [LEFT, RIGHT], served=(0,)),
        new_plain_client("c", [LEFT, RIGHT], served=(0,)),
    ]
    for compressor in ("none", "random_mask"):
        cfg = replace(EXACT, compressor=compressor, upload_budget=BUDGET)
        state, rows = run_rounds(fedcmoo, clients, origin, cfg)
        assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.2, "right": 0.8})
        assert point(state).tolist() == pytest.approx([0.4, 0.8, 0.0])


def test_batches_without_losses_of_an_objective_have_no_part_in_its_mean_gradient(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client("a", [LEFT, RIGHT]),
        new_plain_client("b", [LEFT, RIGHT], scored=(0,)),
        new_plain_client("c", [LEFT, RIGHT], scored=(0,)),
    ]
    for compressor in ("none", "random_mask"):
        cfg = replace(EXACT, compressor=compressor, upload_budget=BUDGET)
        state, rows = run_rounds(fedcmoo, clients, origin, cfg)
        assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.2, "right": 0.8})
        # all serve both, so training is not scaled: right's gradient is there in one of three
        assert point(state).tolist() == pytest.approx([0.4, 0.8 / 3, 0.0])


def test_two_samples_leave_out_batches_without_losses_too(new_plain_client, origin, run_rounds):
    def weights(**options):
        clients = [
            new_plain_client("a", [LEFT, RIGHT]),
            new_plain_client("b", [LEFT, RIGHT], **options),
        ]
        _, rows = run_rounds(fedcmoo, clients, origin, THEORY)
        return rows[0]["round"]["weights"]

    assert weights(scored=(0,)) == pytest.approx(weights())


@pytest.mark.parametrize("communication", ["one_way", "two_sample"])
def test_a_round_without_any_loss_leaves_weights_and_model(
    new_plain_client, origin, run_rounds, point, communication
):
    client = new_plain_client("a", [LEFT, RIGHT], scored=())
    state = replace(origin, memory={"weights": [0.3, 0.7]})
    cfg = THEORY if communication == "two_sample" else EXACT
    state, rows = run_rounds(fedcmoo, [client], state, cfg)
    assert rows[0]["round"]["weights"] == {"left": 0.3, "right": 0.7}
    assert "stationarity" not in rows[0]["round"]
    assert point(state).tolist() == [0.0, 0.0, 0.0]


def test_an_objective_that_nobody_serves_keeps_its_weight_for_later(
    new_plain_client, origin, run_rounds, point
):
    client = new_plain_client("a", [LEFT, RIGHT], served=(1,))
    state = replace(origin, memory={"weights": [0.3, 0.7]})
    state, rows = run_rounds(fedcmoo, [client], state, replace(EXACT, solver="steps"))
    assert rows[0]["round"]["weights"] == {"left": 0.0, "right": 1.0}
    assert state.memory["weights"] == pytest.approx([0.3, 0.7])
    assert point(state).tolist() == [0.0, 1.0, 0.0]


def test_a_client_that_fails_in_the_second_phase_has_had_its_say_on_the_weights(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client("a", [[8.0, 0.0, 0.0], [0.0, 4.0, 0.0]], fails_in=(2,)),
        new_plain_client("b", [[0.0, 0.0, 0.0], [0.0, 0.0, 6.0]]),
    ]
    # mean gradients (-4, 0, 0) and (0, -2, -3): w = (13/29, 16/29)
    state, rows = run_rounds(fedcmoo, clients, origin, EXACT)
    assert rows[0]["round"]["weights"] == pytest.approx({"left": 13 / 29, "right": 16 / 29})
    assert state.accepted == {"b": 1}
    assert [failure["client"] for failure in rows[0]["round"]["failures"]] == ["a"]
    assert point(state).tolist() == pytest.approx([0.0, 0.0, 3 * 16 / 29])


def test_the_theorys_step_takes_the_asymmetric_product_by_hand(
    new_plain_client, origin, run_rounds
):
    clients = [
        new_plain_client("a", [[1.0, 1.0, 0.0], [0.0, 2.0, 0.0]]),
        new_plain_client("b", [[3.0, 0.0, 0.0], [0.0, 1.0, 1.0]]),
    ]
    _, rows = run_rounds(fedcmoo, clients, origin, THEORY)
    mean = torch.tensor([[2.0, 0.5, 0.0], [0.0, 1.5, 0.5]])
    step = torch.tensor([0.5, 0.5]) - 0.05 * (mean @ mean.T) @ torch.tensor([0.5, 0.5])
    step = step + (1 - step.sum()) / 2
    weights = rows[0]["round"]["weights"]
    assert list(weights.values()) == pytest.approx(step.tolist())
    assert "stationarity" not in rows[0]["round"]


def test_the_theorys_samples_and_the_training_see_different_batches(
    new_client, start, run_rounds, same
):
    client = new_client(num_minibatches=1)
    state, rows = run_rounds(fedcmoo, [client], start, THEORY)
    alone = new_client(num_minibatches=1)
    alone.load(start.adapter)
    first, second, third = (alone.gradients(batch.whole) for batch in alone.batches(3))
    product = first.jacobian.double() @ second.jacobian.double().T
    step = 0.5 - 0.05 * product.sum(dim=1) / 2
    step = step + (1 - step.sum()) / 2
    weights = list(rows[0]["round"]["weights"].values())
    assert weights == pytest.approx(step.tolist())
    alone.step(third, torch.tensor(weights))
    assert same(state.adapter, alone.adapter())
    assert client.state()["num_batches"] == 3


def test_clients_that_only_help_with_the_gram_matrix_go_on_where_they_ended(
    new_client, start, run_rounds
):
    cfg = replace(THEORY, clients_per_round=1, gram_clients=3)
    state, rows = run_rounds(fedcmoo, _clients(new_client), start, cfg)
    (trained,) = rows[0]["round"]["clients"]
    assert len(state.accepted) > 1
    assert set(state.accepted.values()) == {1}
    engine = LocalEngine(_clients(new_client))
    state, _ = fedcmoo(start, ["a", "b", "c", "d"], engine, cfg)
    counts = {
        name: saved["state"]["num_batches"]
        for name, saved in engine.client_states(state.accepted).items()
    }
    assert counts.pop(trained) == 3
    assert {counts[name] for name in state.accepted if name != trained} <= {1, 2}
    assert all(counts[name] == 0 for name in counts if name not in state.accepted)


def test_named_clients_are_in_every_sample_of_the_theory(new_client, start):
    asked = []

    class Listener(LocalEngine):
        def map(self, request, clients):
            asked.append(clients)
            return super().map(request, clients)

    cfg = replace(THEORY, clients_per_round=2, gram_clients=2, always=("c",))
    state, engine = start, Listener(_clients(new_client))
    for _ in range(4):
        state, _ = fedcmoo(state, ["a", "b", "c", "d"], engine, cfg)
    assert len(asked) == 4 * 3  # two samples for the matrix and one that trains
    assert all(len(clients) == 2 and "c" in clients for clients in asked)
    assert len(set(map(tuple, asked))) > 1


def test_a_second_attempt_of_the_theory_asks_others(new_client, start):
    asked = []

    class Lost(LocalEngine):
        def map(self, request, clients):
            asked.append(clients)
            return [], [Failure(name, "lost", 0, 0) for name in clients]

    cfg = replace(THEORY, clients_per_round=2, gram_clients=2)
    state = start
    for _ in range(2):
        with pytest.raises(RoundFailed) as failed:
            fedcmoo(state, ["a", "b", "c", "d"], Lost(_clients(new_client)), cfg)
        attempt = FailedAttempt(asked=failed.value.asked, failed=failed.value.failed)
        state = replace(state, attempts=(*state.attempts, attempt))
    assert len(asked) == 2
    assert not set(asked[0]) & set(asked[1])


def test_the_theory_is_for_clients_that_serve_everything(new_plain_client, origin, run_rounds):
    client = new_plain_client("a", [LEFT, RIGHT], served=(1,))
    with pytest.raises(RoundFailed, match="two_sample requires clients that serve all objectives"):
        run_rounds(fedcmoo, [client], origin, THEORY)


@pytest.mark.parametrize("preference", [(3.0, 1.0), (1.0, 3.0), None])
def test_preferred_weights_come_of_the_gram_matrix_and_the_mean_losses(
    new_plain_client, origin, run_rounds, preference
):
    clients = [
        new_plain_client("a", [[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]]),
        new_plain_client("b", [[1.0, 0.0, 0.0], [0.0, 0.0, 3.0]]),
    ]
    cfg = replace(EXACT_PREF, preference=preference)
    _, rows = run_rounds(fedcmoo_pref, clients, origin, cfg)
    row = rows[0]["round"]
    assert row["start_losses"] == pytest.approx({"left": (2.5 + 0.5) / 2, "right": (2.5 + 4.5) / 2})
    mean = torch.tensor([[1.5, 0.5, 0.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    expected = fedcmoo_pref_weights(
        mean @ mean.T, torch.tensor([1.5, 3.5]).double(), preference or (1.0, 1.0)
    )
    assert list(row["weights"].values()) == pytest.approx(expected.tolist())
    assert json.dumps(rows)


@pytest.mark.parametrize("options", [{"served": (1,)}, {"scored": ()}])
def test_without_an_objective_that_is_preferred_the_preference_is_the_weights(
    new_plain_client, origin, run_rounds, point, options
):
    client = new_plain_client("a", [LEFT, RIGHT], **options)
    cfg = replace(EXACT_PREF, preference=(3.0, 0.0))
    state, rows = run_rounds(fedcmoo_pref, [client], origin, cfg)
    assert rows[0]["round"]["weights"] == {"left": 1.0, "right": 0.0}
    assert "stationarity" not in rows[0]["round"]
    assert point(state).tolist() == [0.0, 0.0, 0.0]


def test_the_released_variant_mixes_the_printed_ones_weights(new_plain_client, origin, run_rounds):
    clients = [new_plain_client("a", [[2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])]
    weights = {}
    for variant, least in (("printed", 0.0), ("released", None)):
        cfg = replace(EXACT_PREF, preference=(3.0, 1.0), min_weight=least, variant=variant)
        _, rows = run_rounds(fedcmoo_pref, clients, origin, cfg)
        weights[variant] = torch.tensor(list(rows[0]["round"]["weights"].values()))
    torch.testing.assert_close(weights["released"], 0.8 * weights["printed"] + 0.1)


def test_wanted_ratios_of_the_losses_are_reached(new_plain_client, origin, run_rounds, point):
    def ratio(preference):
        clients = [
            new_plain_client(name, [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], lr=0.1) for name in "ab"
        ]
        cfg = replace(EXACT_PREF, preference=preference, threshold=1e-3)
        state, _ = run_rounds(fedcmoo_pref, clients, origin, cfg, num_rounds=20)
        left, right = (point(state)[0] - torch.tensor([1.0, -1.0])).square().tolist()
        return left / right

    # within a step or two of the ratio, as near as the threshold lets it come
    assert ratio((1.0, 1.0)) == pytest.approx(1.0, rel=0.15)
    assert ratio((4.0, 1.0)) == pytest.approx(0.25, rel=0.3)
    assert ratio((1.0, 4.0)) == pytest.approx(4.0, rel=0.3)


def test_a_least_weight_holds_by_default(new_plain_client, origin, run_rounds):
    def least(cfg):
        clients = [new_plain_client("a", [[0.01, 0.0, 0.0], [0.0, 5.0, 0.0]])]
        _, rows = run_rounds(fedcmoo_pref, clients, origin, cfg)
        return min(rows[0]["round"]["weights"].values())

    assert least(EXACT_PREF) < 0.05
    assert least(replace(EXACT_PREF, min_weight=None)) == pytest.approx(0.1)
    assert least(replace(EXACT_PREF, min_weight=0.2)) == pytest.approx(0.2)


@pytest.mark.parametrize("bias", [-100.0, float("nan")])
def test_a_client_with_unusable_losses_is_left_out(new_plain_client, origin, run_rounds, bias):
    clients = [
        new_plain_client("a", [LEFT, RIGHT]),
        new_plain_client("b", [LEFT, RIGHT], bias=bias),
    ]
    state, rows = run_rounds(fedcmoo_pref, clients, origin, EXACT_PREF)
    assert state.accepted == {"a": 1}
    assert rows[0]["round"]["failures"][0]["client"] == "b"


@pytest.mark.parametrize("budget", [0.1, 1.0])
def test_a_budget_without_a_rank_stops_the_run_with_its_reason(
    new_client, start, run_rounds, budget
):
    cfg = FedCmooConfig(upload_budget=budget)
    with pytest.raises(RoundFailed, match=r"less than one number|too small for rank 1"):
        run_rounds(fedcmoo, _clients(new_client), start, cfg)


def test_zero_gradients_leave_the_model_and_the_weights(new_plain_client, origin, run_rounds):
    for cfg in (EXACT, FedCmooConfig(upload_budget=BUDGET), EXACT_PREF):
        clients = [new_plain_client(name, [[0.0, 0.0, 0.0]] * 2) for name in "ab"]
        state, rows = run_rounds(STRATEGIES[cfg.name], clients, origin, cfg)
        assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.5, "right": 0.5})
        assert all(not value.any() for value in state.adapter.values())


def test_identical_objectives_share_the_weight(new_plain_client, origin, run_rounds, point):
    for cfg in (EXACT, FedCmooConfig(upload_budget=BUDGET), EXACT_PREF):
        clients = [new_plain_client(name, [LEFT] * 2) for name in "ab"]
        state, rows = run_rounds(STRATEGIES[cfg.name], clients, origin, cfg)
        assert sum(rows[0]["round"]["weights"].values()) == pytest.approx(1.0)
        assert point(state).tolist() == pytest.approx([2.0, 0.0, 0.0])


def test_a_loss_of_zero_leaves_its_objective_the_others(new_plain_client, origin, run_rounds):
    client = new_plain_client("a", [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    _, rows = run_rounds(fedcmoo_pref, [client], origin, EXACT_PREF)
    assert rows[0]["round"]["start_losses"] == {"left": 0.0, "right": 2.0}
    assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.0, "right": 1.0})


def _other_kind(content):
    message = {**content["message"], "kind": "top_k"}
    return {**content, "message": message}


def _narrower_sketch(content):
    message = content["message"]
    return {**content, "message": {**message, "sketch": message["sketch"][:, :1].clone()}}


BROKEN = {
    "no dictionary": (EXACT, lambda content: 3, "the message must be of type JacobianShare, got 3"),
    "served": (
        EXACT,
        lambda content: {**content, "served": [7]},
        "served must be some of the 2",
    ),
    "scored": (
        EXACT,
        lambda content: {**content, "served": [1], "scored": [0]},
        "scored must be some of the served [1], got [0]",
    ),
    "rows": (
        EXACT,
        lambda content: {**content, "jacobian": torch.zeros(3, 3)},
        "jacobian must be a matrix of 2 rows, got a tensor of shape [3, 3]",
    ),
    "nan": (
        EXACT,
        lambda content: {**content, "jacobian": content["jacobian"] * float("nan")},
        "jacobian is not finite",
    ),
    "nothing": (
        EXACT,
        lambda content: {**content, "jacobian": None},
        "either a jacobian or",
    ),
    "fields": (
        FedCmooConfig(communication="one_way", upload_budget=BUDGET),
        _other_kind,
        "message cannot be read",
    ),
    "sketch": (
        replace(EXACT, compressor="count_sketch", upload_budget=BUDGET),
        _narrower_sketch,
        "columns in a sketch of 1, the others' ",
    ),
    "seed": (
        replace(EXACT, compressor="count_sketch", upload_budget=BUDGET),
        lambda content: {**content, "message": {**content["message"], "shared_seed": 1}},
        "another round's seed",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_message_is_a_failure_with_its_reason(new_client, start, meddled_engine, case):
    cfg, change, reason = BROKEN[case]

    engine = meddled_engine(_clients(new_client, "abc"), "share_jacobian", "b", change)
    state, rows = fedcmoo(start, ["a", "b", "c"], engine, cfg)
    (failure,) = rows["round"]["failures"]
    assert failure["client"] == "b"
    assert reason in failure["reason"]
    assert state.accepted == {"a": 1, "c": 1}


@pytest.mark.parametrize("change", [{"correction": torch.zeros(3, 3)}, {"own_gram": None}])
def test_a_broken_correction_is_a_failure(new_client, start, meddled_engine, change):
    engine = meddled_engine(
        _clients(new_client, "ab"), "correct_gram", "a", lambda content: {**content, **change}
    )
    state, _ = fedcmoo(start, ["a", "b"], engine, FedCmooConfig(upload_budget=BUDGET))
    assert state.accepted == {"b": 1}


def test_a_client_without_correction_leaves_the_estimate_of_the_others(
    new_plain_client, start, meddled_engine, run_rounds
):
    def clients(*names):
        targets = {"a": [[90.0, -40.0, 70.0], [-80.0, 60.0, 50.0]], "b": [LEFT, RIGHT]}
        return [new_plain_client(name, targets[name]) for name in names]

    cfg = replace(EXACT, communication="two_way", compressor="random_mask", upload_budget=0.7)
    engine = meddled_engine(
        clients("a", "b"), "correct_gram", "a", lambda content: {**content, "own_gram": None}
    )
    _, rows = fedcmoo(start, ["a", "b"], engine, cfg)
    _, (expected,) = run_rounds(fedcmoo, clients("b"), start, EXACT)
    assert rows["round"]["weights"] == pytest.approx(expected["round"]["weights"])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (FedCmooConfig, {"compressor": "zip"}, "compressor must be one of none, low_rank"),
        (FedCmooConfig, {"upload_budget": 0.0}, "upload_budget must be positive"),
        (FedCmooConfig, {"aggregation": "by_examples"}, "aggregation must be uniform"),
        (FedCmooConfig, {"solver": "fast"}, "solver must be one of steps, exact, upgrad"),
        (FedCmooConfig, {"step_size": 0.0}, "step_size must be positive"),
        (FedCmooConfig, {"num_steps": 0}, "num_steps must be at least 1, got 0"),
        (FedCmooConfig, {"communication": "none"}, "one of one_way, two_way, two_sample"),
        (
            FedCmooConfig,
            {"compressor": "count_sketch"},
            "count_sketch supports one-way communication only",
        ),
        (FedCmooConfig, {"compressor": "none"}, "none supports one-way communication only"),
        (FedCmooConfig, {"gram_clients": 3}, "gram_clients requires communication two_sample"),
        (FedCmooConfig, {"share_gram": True}, "fedcmoo does not support share_gram"),
        (
            FedCmooConfig,
            {"communication": "two_sample", "gram_clients": 1, "always": ("a",)},
            "gram_clients must exceed the number of clients in always, 1, got 1",
        ),
        (
            FedCmooConfig,
            {"communication": "two_sample", "compressor": "top_k"},
            "needs an unbiased compressor, got top_k",
        ),
        (
            FedCmooConfig,
            {"communication": "two_sample", "compressor": "quantizing"},
            "normalize_gram false",
        ),
        (FedCmooPrefConfig, {"communication": "two_sample"}, "one of one_way, two_way, got"),
        (FedCmooPrefConfig, {"preference": (0.0, 0.0)}, "not all zero"),
        (
            FedCmooPrefConfig,
            {"preference": (1.0, 1.0), "min_weight": 0.6},
            "min_weight must be between",
        ),
        (FedCmooPrefConfig, {"threshold": -1.0}, "threshold must be non-negative"),
    ],
)
def test_configurations_that_cannot_run_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_a_preference_is_checked_against_the_objectives():
    cfg = FedCmooPrefConfig(preference=(1.0, 2.0))
    cfg.check(["a", "b"])
    with pytest.raises(ValueError, match="one entry for each of the 3 objectives"):
        cfg.check(["a", "b", "c"])
