import json
from dataclasses import replace

import pytest
import torch

from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fsmgda import fsmgda
from firm.federation.strategy_configs import FedAvgConfig, FsmgdaConfig
from firm.solvers import min_norm_weights

LEFT, RIGHT = [4.0, 0.0, 0.0], [0.0, 2.0, 0.0]


def test_one_round_of_two_clients_by_hand(new_plain_client, origin, run_rounds, point):
    clients = [
        new_plain_client("a", [[8.0, 0.0, 0.0], [0.0, 4.0, 0.0]]),
        new_plain_client("b", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ]
    # updates of left (4, 0, 0) and 0, of right (0, 2, 0) and 0: means (2, 0, 0) and (0, 1, 0),
    # whose min-norm point is at λ = (1/5, 4/5)
    cfg = FsmgdaConfig(server_learning_rate=2.0)
    state, rows = run_rounds(fsmgda, clients, origin, cfg)
    row = rows[0]["round"]
    assert row["weights"] == pytest.approx({"left": 0.2, "right": 0.8})
    assert point(state).tolist() == pytest.approx([0.8, 1.6, 0.0])
    # under these weights a goes to (0.8, 1.6, 0) and b nowhere: each is half of the step from their
    # mean, and the server's step is twice as long as its own part
    assert row["drift"] == pytest.approx(0.5)
    assert json.dumps(rows)


def test_local_steps_follow_one_objective_only(new_plain_client, origin, run_rounds, point):
    client = new_plain_client("a", [LEFT, RIGHT])
    state, rows = run_rounds(fsmgda, [client], origin, FsmgdaConfig(num_local_steps=2))
    # updates (3, 0, 0) and (0, 1.5, 0)
    assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.2, "right": 0.8})
    assert point(state).tolist() == pytest.approx([0.6, 1.2, 0.0])
    assert rows[0]["clients"][0]["num_steps"] == 4


@pytest.mark.parametrize("aggregation", ["uniform", "by_examples"])
def test_with_one_objective_it_is_fedavg_bit_for_bit(
    new_client, start, run_rounds, same, aggregation
):
    start = replace(start, objectives=("only",))

    def clients():
        return [
            new_client(name, torch.eye(3)[:1] * size, objectives=("only",), num_examples=size)
            for name, size in (("a", 1), ("b", 5), ("c", 7))
        ]

    options = {"num_local_steps": 3, "aggregation": aggregation}
    state, _ = run_rounds(fsmgda, clients(), start, FsmgdaConfig(**options), num_rounds=3)
    expected, _ = run_rounds(fedavg, clients(), start, FedAvgConfig(**options), num_rounds=3)
    assert same(vars(state), vars(expected))


@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["MGD", "SMGD"])
@pytest.mark.parametrize("server_learning_rate", [1.0, 0.4])
def test_one_client_and_one_step_is_centralised_multiple_gradient_descent(
    new_plain_client, start, run_rounds, point, noise, server_learning_rate
):
    targets = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    names = ("left", "right", "far")

    def client():
        options = {"objectives": names, "lr": 0.1, "noise": noise}
        return new_plain_client("a", targets.tolist(), **options)

    cfg = FsmgdaConfig(server_learning_rate=server_learning_rate)
    state, _ = run_rounds(fsmgda, [client()], replace(start, objectives=names), cfg, num_rounds=5)
    model = point(start).double()
    for batch in client().batches(5):  # the noise alone; zero is the full batch
        gradients = model - targets.double() - batch.whole.double()  # [M, 3]
        weights = min_norm_weights(gradients @ gradients.T)
        model = model - server_learning_rate * 0.1 * weights @ gradients
    torch.testing.assert_close(point(state).double(), model, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("targets", [[[0.0] * 3] * 2, [LEFT] * 2], ids=["zero", "identical"])
def test_zero_and_identical_updates_have_equal_weights(
    new_plain_client, origin, run_rounds, point, targets
):
    clients = [new_plain_client(name, targets) for name in "ab"]
    state, rows = run_rounds(fsmgda, clients, origin, FsmgdaConfig())
    assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.5, "right": 0.5})
    assert point(state).tolist() == [target / 2 for target in targets[0]]


def test_objectives_are_averaged_over_the_clients_that_serve_them(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client("a", [LEFT, RIGHT]),
        new_plain_client("b", [LEFT, RIGHT], served=(0,)),
        new_plain_client("c", [LEFT, RIGHT], served=(0,)),
    ]
    state, rows = run_rounds(fsmgda, clients, origin, FsmgdaConfig())
    # right's mean update is (0, 1, 0), a's alone, not a third of it
    assert rows[0]["round"]["weights"] == pytest.approx({"left": 0.2, "right": 0.8})
    assert point(state).tolist() == pytest.approx([0.4, 0.8, 0.0])


def test_an_objective_that_nobody_serves_has_no_weight(new_plain_client, origin, run_rounds, point):
    clients = [new_plain_client("a", [LEFT, RIGHT], served=(1,))]
    state, rows = run_rounds(fsmgda, clients, origin, FsmgdaConfig())
    assert rows[0]["round"]["weights"] == {"left": 0.0, "right": 1.0}
    assert point(state).tolist() == [0.0, 1.0, 0.0]


def test_shared_columns_alone_decide_on_the_weights(new_plain_client, origin, run_rounds):
    def weights(columns):
        client = new_plain_client("a", [[4.0, 0.0, 0.0], [0.0, 4.0, 9.0]], sums=True)
        _, rows = run_rounds(fsmgda, [client], origin, FsmgdaConfig(gram_columns=columns))
        return rows[0]["round"]["weights"]

    assert weights("shared") == pytest.approx({"left": 0.5, "right": 0.5})
    assert weights("all") == pytest.approx({"left": 97 / 113, "right": 16 / 113})


def test_the_upload_grows_with_the_objectives(start, run_rounds, new_client):
    def upload(count):
        names = tuple("abcdefgh"[:count])
        client = new_client(targets=torch.eye(3)[[0] * count], objectives=names)
        state = replace(start, objectives=names)
        return run_rounds(fsmgda, [client], state, FsmgdaConfig())[1][0]["round"]["bytes_up"]

    assert upload(8) - upload(4) > 3 * (upload(3) - upload(2))


def test_a_failing_client_is_as_if_not_sampled(new_client, start, run_rounds, same):
    def clients(*broken):
        return [new_client("a"), *broken, new_client("c")]

    cfg = FsmgdaConfig()
    broken = [
        new_client("b", fails_in=(2,)),
        new_client("d", diverges_in=(2,), num_minibatches=1),
    ]
    state, rows = run_rounds(fsmgda, clients(*broken), start, cfg)
    without, _ = run_rounds(fsmgda, clients(), start, cfg)
    assert same(vars(state), vars(without))
    failures = {failure["client"]: failure["reason"] for failure in rows[0]["round"]["failures"]}
    assert failures["b"] == "ArithmeticError: the quadratic has no bottom"
    assert failures["d"] == "its answer is refused: updates.right.second is not finite"


BROKEN = {
    "no dictionary": (lambda content: 3, "the message must be of type ObjectiveUpdates, got 3"),
    "no updates": (lambda content: {}, "the message lacks the field 'updates'"),
    "a stranger": (
        lambda content: {**content, "updates": {"up": content["updates"]["left"]}},
        "updates must be a mapping with names among left, right",
    ),
    "nothing": (
        lambda content: {**content, "updates": {}},
        "updates must have at least one of left, right",
    ),
    "columns": (
        lambda content: {**content, "num_shared": 4},
        "num_shared must be from 1 to 3",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_reply_is_a_failure_with_its_reason(new_client, start, meddled_engine, case):
    change, reason = BROKEN[case]

    clients = [new_client("a"), new_client("b")]
    engine = meddled_engine(clients, "objective_training", "b", change)
    _, rows = fsmgda(start, ["a", "b"], engine, FsmgdaConfig())
    (failure,) = rows["round"]["failures"]
    assert failure["client"] == "b"
    assert reason in failure["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_learning_rate": 0.0}, "server_learning_rate must be positive"),
        ({"gram_columns": "heads"}, "gram_columns must be one of shared, all, got 'heads'"),
        ({"share_gram": True}, "does not support share_gram"),
    ],
)
def test_configurations_that_cannot_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FsmgdaConfig(**options)
