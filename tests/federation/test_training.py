import math
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from firm.federation import Client, local_training
from firm.federation.training import LocalTraining
from firm.gradients import gram_matrix
from firm.solvers import firm_weights

OBJECTIVES = ("left", "right")


def _request(start, **changes):
    fields = {"num_local_steps": 3, "weighting": "firm", "weighting_options": {"beta": 0.1}}
    return LocalTraining(
        round=1, adapter=start.adapter, **{"objectives": OBJECTIVES, **fields, **changes}
    )


def test_training_equals_the_loop_by_hand_bit_for_bit(new_client, start, same):
    update = local_training(new_client(), _request(start))

    client = new_client()
    client.load(start.adapter)
    weights_by_hand = []
    for batch in client.batches(3):
        for minibatch in batch.minibatches():
            gradients = client.gradients(minibatch)
            weights = firm_weights(gram_matrix(gradients.jacobian), beta=0.1)
            client.step(gradients, weights)
            weights_by_hand.append(weights.tolist())
    assert same(update.adapter, client.adapter())
    assert update.metrics["weights"] == weights_by_hand


def test_weights_per_batch_come_from_the_whole_batch_and_hold_in_its_minibatches(
    new_client, start, same
):
    update = local_training(new_client(), _request(start, solve_per="batch"))

    client = new_client()
    client.load(start.adapter)
    weights_by_hand = []
    for batch in client.batches(3):
        weights = firm_weights(gram_matrix(client.gradients(batch.whole).jacobian), beta=0.1)
        weights_by_hand.append(weights.tolist())
        for minibatch in batch.minibatches():
            client.step(client.gradients(minibatch), weights)
    assert same(update.adapter, client.adapter())
    assert update.metrics["weights"] == weights_by_hand


@pytest.mark.parametrize(("solve_per", "num_solves"), [("minibatch", 6), ("batch", 3)])
def test_metrics_tell_of_every_solve_beside_what_the_client_tells(
    new_client, start, solve_per, num_solves
):
    objectives = ("a", "b", "c")
    targets = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    client = new_client(targets=targets, objectives=objectives, num_examples=5)
    request = _request(start, objectives=objectives, solve_per=solve_per)
    update = local_training(client, request)
    metrics = update.metrics
    assert (update.client, update.num_examples) == ("client_0", 5)
    assert metrics["num_steps"] == 3
    assert len(metrics["step_losses"]) == 6
    for key, width in (("weights", 3), ("gradient_norms", 3), ("cosines", 3)):
        assert [len(row) for row in metrics[key]] == [width] * num_solves
    assert len(metrics["beta_effect"]) == num_solves
    assert all(0 <= effect <= 1 for effect in metrics["beta_effect"])
    assert max(metrics["beta_effect"]) > 0
    two = local_training(new_client(targets=targets, objectives=objectives, served=(0, 2)), request)
    assert 0 < max(two.metrics["beta_effect"]) <= 1
    one = local_training(new_client(targets=targets, objectives=objectives, served=(1,)), request)
    assert "beta_effect" not in one.metrics
    elsewhere = {"preference": [0.2, 0.3, 0.5]}, {"norm_power": 1.0}
    for options in elsewhere:  # β does not act, or not towards uniform weights
        other = replace(request, weighting_options={"beta": 0.1, **options})
        own = new_client(targets=targets, objectives=objectives)
        assert "beta_effect" not in local_training(own, other).metrics
    assert sum(metrics["step_share"].values()) == pytest.approx(1)
    assert set(metrics["seconds"]) == {"step", "gram", "solve"}
    assert all(seconds >= 0 for seconds in metrics["seconds"].values())


def test_logged_norms_and_cosines_are_the_gradients_own(new_client, start):
    client = new_client(noise=0.0, num_minibatches=1)
    update = local_training(client, _request(start, num_local_steps=1))
    point = torch.tensor([0.1, 0.2, 0.3])
    left, right = point - torch.tensor([1.0, 0.0, 2.0]), point - torch.tensor([0.0, 3.0, 1.0])
    assert update.metrics["gradient_norms"][0] == pytest.approx(
        [left.norm().item(), right.norm().item()]
    )
    cosine = (left @ right) / (left.norm() * right.norm())
    assert update.metrics["cosines"][0] == pytest.approx([cosine.item()])
    share = update.metrics["step_share"]
    weight = update.metrics["weights"][0][0]
    direction = weight * left + (1 - weight) * right
    expected = weight * (left @ direction) / (direction @ direction)
    assert share == pytest.approx({"left": expected.item(), "right": 1 - expected.item()}, rel=1e-5)


def test_batches_are_drawn_by_the_model_after_the_step_before(new_client, start):
    """An on-policy client must not be asked for its second batch before its first step."""
    client, events = new_client(), []
    draw, step = client.batches, client.step

    def batches(num_steps):
        for batch in draw(num_steps):
            events.append("batch")
            yield batch

    def recorded_step(gradients, weights):
        events.append("step")
        step(gradients, weights)

    client.batches, client.step = batches, recorded_step
    local_training(client, _request(start, num_local_steps=2))
    assert events == ["batch", "step", "step", "batch", "step", "step"]


def test_a_minibatchs_jacobian_is_freed_before_the_next_is_computed(new_client, start):
    client, freed = new_client(), []
    compute, before = client.gradients, lambda: None

    def gradients(minibatch):
        nonlocal before
        freed.append(before() is None)
        found = compute(minibatch)
        before = weakref.ref(found.jacobian)
        return found

    client.gradients = gradients
    local_training(client, _request(start, num_local_steps=2))
    assert freed == [True] * 4


def test_a_gradient_that_is_not_finite_stops_the_training_before_its_step(new_client, start):
    client = new_client(targets=torch.tensor([[1.0, 0.0, 0.0], [0.0, math.nan, 0.0]]))
    with pytest.raises(ValueError, match="loss of objective 1 is not finite"):
        local_training(client, _request(start))
    assert torch.equal(client.adapter()["first"], start.adapter["first"])


@pytest.mark.parametrize("solve_per", ["minibatch", "batch"])
def test_a_client_sends_the_gram_matrix_at_the_servers_model_only_when_asked(
    new_client, start, solve_per
):
    assert "gram" not in local_training(new_client(), _request(start)).metrics
    update = local_training(new_client(), _request(start, solve_per=solve_per, share_gram=True))
    client = new_client()
    client.load(start.adapter)
    (batch,) = client.batches(1)
    first = next(batch.minibatches()) if solve_per == "minibatch" else batch.whole
    gram = gram_matrix(client.gradients(first).jacobian)
    assert update.metrics["gram"] == gram.tolist()
    assert update.metrics["weights"][0] == firm_weights(gram, beta=0.1).tolist()


def _fixed(start, weights, **changes):
    options = {"weighting": "fixed", "weighting_options": {"weights": weights}}
    return _request(start, **{**options, **changes})


def test_a_proximal_term_pulls_back_to_the_start_by_hand(new_plain_client, origin):
    client = new_plain_client("a", [[4.0, 0.0, 0.0], [4.0, 0.0, 0.0]], lr=0.5)
    request = _fixed(origin, (1.0, 1.0), num_local_steps=2, proximal=0.5)
    # from 0 to 2; there the gradient is 2 - 4 = -2, and the pull 0.5 * 2 = 1: 2 + 0.5 = 2.5
    assert local_training(client, request).adapter["first"].tolist() == [2.5, 0.0]
    assert local_training(client, replace(request, proximal=0.0)).adapter["first"][0] == 3.0


def test_losses_are_those_at_the_servers_model(new_client, start):
    client = new_client()
    update = local_training(client, _request(start, share_losses=True))
    client.load(start.adapter)
    assert update.metrics["start_losses"] == client.losses().tolist()
    assert "start_losses" not in local_training(client, _request(start)).metrics


def test_losses_that_a_client_does_not_train_on_are_zero(new_client, start):
    client = new_client(served=(1,))
    update = local_training(client, _request(start, share_losses=True))
    client.load(start.adapter)
    assert update.metrics["start_losses"] == [0.0, client.losses()[1].item()]


def test_a_client_that_cannot_tell_its_losses_says_so(new_client, start):
    client = new_client()
    client.losses = partial(Client.losses, client)
    with pytest.raises(ValueError, match="needs losses on a client's whole shard, which client_0"):
        local_training(client, _request(start, share_losses=True))


def test_local_epochs_are_each_clients_own_number_of_steps(new_client, start, same):
    request = _request(start, num_local_steps=1, num_local_epochs=2)
    for count in (1, 4):
        client = new_client(batches_per_epoch=count)
        update = local_training(client, request)
        by_steps = local_training(new_client(), _request(start, num_local_steps=2 * count))
        assert update.metrics["num_steps"] == 2 * count
        assert same(update.adapter, by_steps.adapter)


def test_a_client_that_cannot_count_an_epoch_says_so(new_client, start):
    request = _request(start, num_local_steps=1, num_local_epochs=1)
    with pytest.raises(ValueError, match="which client_0 does not have; set num_local_steps"):
        local_training(new_client(), request)


def test_skipped_batches_are_drawn_and_not_used(new_client, start, same):
    client = new_client(num_minibatches=1)
    update = local_training(client, _fixed(start, None, skipped_batches=2, num_local_steps=1))

    client = new_client(num_minibatches=1)
    client.load(start.adapter)
    (minibatch,) = list(client.batches(3))[2].minibatches()
    client.step(client.gradients(minibatch), torch.tensor([0.5, 0.5]))
    assert same(update.adapter, client.adapter())


def test_fixed_weights_take_one_pass_where_a_client_offers_it(new_plain_client, start):
    targets = [[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]
    fast = new_plain_client("a", targets, sums=True)
    update = local_training(fast, _fixed(start, (3.0, 1.0)))
    slow = local_training(new_plain_client("a", targets), _fixed(start, (3.0, 1.0)))
    assert fast.num_sums == 3
    assert update.metrics["weights"] == [[0.75, 0.25]] * 3 == slow.metrics["weights"]
    for name, parameter in slow.adapter.items():
        torch.testing.assert_close(update.adapter[name], parameter)
    assert "gram" in local_training(fast, _fixed(start, None, share_gram=True)).metrics


@pytest.mark.parametrize("sums", [False, True])
def test_factors_multiply_the_fixed_weights_after_they_are_scaled(new_plain_client, origin, sums):
    client = new_plain_client("a", [[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]], sums=sums, lr=1.0)
    request = _fixed(origin, (3.0, 1.0), num_local_steps=1, factors=[0.5, 2.0])
    # 4 * 0.75 * 0.5 and 4 * 0.25 * 2
    assert local_training(client, request).adapter["first"].tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"preference": [0.3, 0.7]},
        {"solver": "cvxpy", "constraints": [[0.5, -1.0, -0.4]]},
    ],
)
def test_a_client_finds_the_weights_of_the_objectives_that_it_serves_alone(
    new_client, start, options
):
    update = local_training(new_client(served=(1,)), _request(start, weighting_options=options))
    alone = local_training(new_client(served=(1,)), _fixed(start, [0, 1]))
    assert all(weights == [0, 1] for weights in update.metrics["weights"])
    for name, parameter in update.adapter.items():
        assert torch.equal(parameter, alone.adapter[name])


def test_a_preference_of_a_clients_own_takes_the_place_of_the_one_for_all(new_client, start):
    own = {"beta": 0.1, "preference": [0.9, 0.1]}

    def weights(**changes):
        return local_training(new_client(), _request(start, **changes)).metrics["weights"]

    for_all = weights(weighting_options=own)
    assert weights(options_by_client={new_client().name: own}) == for_all
    assert weights(options_by_client={"somebody else": own}) == weights() != for_all
