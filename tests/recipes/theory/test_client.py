"""T-FIRM's client: Eq. 10 is the gradient, steps ascend along averaged weights, state is whole."""

import json

import numpy as np
import pytest
import torch

from firm.federation import LocalEngine, ServerState, derive_seed
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from firm.gradients import gram_matrix
from firm.solvers import firm_weights
from recipes.theory import exact
from recipes.theory.client import ActorCriticConfig, TabularClient, policy_gradients
from recipes.theory.critic import CriticConfig, sample_chain, td_errors

EXACT = CriticConfig(name="exact")
FIRM = FirmConfig(num_local_steps=3, beta=0.1, normalize=False)


def client_of(mdp, name="client_0", **options):
    return TabularClient(name, mdp, ActorCriticConfig(**options), seed=0)


def adapter_of(theta):
    return {"theta": torch.from_numpy(theta)}


def test_with_the_true_critic_eq_10_is_unbiased(mdp, theta):
    client = client_of(mdp, batch_size=400, critic=EXACT)
    client.load(adapter_of(theta))
    draws = np.stack(
        [
            -client.gradients(batch.whole).jacobian.numpy()
            for batch in client.batches(200)  # no step is taken: all at one policy
        ]
    )
    truth = exact.return_gradients(mdp, theta)
    ses = draws.std(axis=0, ddof=1) / len(draws) ** 0.5
    assert (np.abs(draws.mean(axis=0) - truth) < 4 * ses).all()
    assert np.linalg.norm(truth) > 20 * np.linalg.norm(ses)  # or it would say nothing


def test_eq_10_is_the_gradient_of_the_weighted_log_probabilities(mdp, theta):
    generator = np.random.default_rng(0)
    batch = sample_chain(mdp, exact.policy(mdp, theta), 0, 20, generator=generator)
    errors = td_errors(mdp, generator.normal(size=(2, 4)), batch)
    gradients = policy_gradients(mdp, theta, batch, errors)
    logits = torch.tensor(theta, requires_grad=True)
    log_policy = logits.reshape(mdp.num_states, mdp.num_actions).log_softmax(dim=1)
    chosen = log_policy[batch.states, batch.actions]
    for row, error in zip(gradients, torch.from_numpy(errors), strict=True):
        (expected,) = torch.autograd.grad((error * chosen).mean(), logits, retain_graph=True)
        np.testing.assert_allclose(row, expected, atol=1e-15)


def test_the_actors_chain_goes_on_from_step_to_step_and_round_to_round(mdp, theta):
    client = client_of(mdp, batch_size=3)
    chains = []
    for _ in range(3):
        client.load(adapter_of(theta))
        chains += [batch.whole for batch in client.batches(4)]
    starts = [chain.states[0] for chain in chains]
    assert starts[1:] == [chain.last for chain in chains[:-1]]
    assert len(set(starts)) > 1


def test_losses_are_minus_the_mean_rewards(mdp, theta):
    client = client_of(mdp, batch_size=7)
    client.load(adapter_of(theta))
    (batch,) = client.batches(1)
    (minibatch,) = batch.minibatches()
    rewards = mdp.rewards[:, minibatch.states, minibatch.actions]
    np.testing.assert_allclose(client.gradients(minibatch).losses, -rewards.mean(axis=1))
    assert len(minibatch.states) == 7


def test_steps_ascend_along_the_mean_of_all_weights_so_far(mdp, theta):
    client = client_of(mdp, step_size=2.0)
    client.load(adapter_of(theta))
    solved = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])]
    means = [[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]
    expected = torch.from_numpy(theta)
    for batch, weights, mean in zip(client.batches(3), solved, means, strict=True):
        gradients = client.gradients(batch.whole)
        client.step(gradients, weights)
        expected = expected - 2.0 * (torch.tensor(mean).double() @ gradients.jacobian)
        torch.testing.assert_close(client.adapter()["theta"], expected)
    np.testing.assert_allclose(client.metrics()["smoothed_weights"], means)


def test_the_average_of_the_weights_outlives_a_round(mdp, theta):
    client = client_of(mdp)
    for weights in ([1.0, 0.0], [0.0, 1.0]):
        client.load(adapter_of(theta))
        (batch,) = client.batches(1)
        client.step(client.gradients(batch.whole), torch.tensor(weights))
    assert client.metrics()["smoothed_weights"] == [[0.5, 0.5]]


def test_a_step_on_a_large_batch_improves_the_weighted_return(mdp, theta):
    client = client_of(mdp, batch_size=2000, critic=EXACT, step_size=1.0)
    client.load(adapter_of(theta))
    (batch,) = client.batches(1)
    client.step(client.gradients(batch.whole), torch.tensor([0.7, 0.3]))
    before, after = (
        exact.returns(mdp, point) @ [0.7, 0.3]
        for point in (theta, client.adapter()["theta"].numpy())
    )
    assert after > before + 1e-4


def train(client, theta, num_steps):
    """K steps by hand, as local training takes them."""
    client.load(adapter_of(theta))
    for batch in client.batches(num_steps):
        gradients = client.gradients(batch.whole)
        gram = gram_matrix(gradients.jacobian)
        client.step(gradients, firm_weights(gram, beta=0.1, normalize=False))
    return client.adapter()["theta"]


def test_a_restored_client_goes_on_bit_for_bit(mdp, theta):
    client, twin = client_of(mdp), client_of(mdp, name="client_1")
    train(client, theta, 2)
    state = client.state()
    first = train(client, theta, 3)
    record = client.metrics()
    for other in (client, twin):
        other.restore(state)
        assert torch.equal(train(other, theta, 3), first)
        assert other.metrics() == record
    assert not torch.equal(train(client, theta, 3), first)  # the stream has moved on


def test_a_state_is_a_copy(mdp, theta):
    client = client_of(mdp)
    state = client.state()
    kept = json.dumps(state, default=lambda tensor: tensor.tolist())
    train(client, theta, 2)
    assert json.dumps(state, default=lambda tensor: tensor.tolist()) == kept


def test_a_round_of_one_client_is_its_own_training(mdp, theta):
    start = ServerState(adapter=adapter_of(theta), objectives=("a", "b"), seed=0)
    engine = LocalEngine([client_of(mdp)])
    after, metrics = firm_round(start, ["client_0"], engine, FIRM)
    assert torch.equal(after.adapter["theta"], train(client_of(mdp), theta, 3))
    (row,) = metrics["clients"]
    assert np.array(row["theta"]).shape == (3, 12)
    assert np.array(row["jacobian"]).shape == (3, 2, 12)
    np.testing.assert_allclose(np.mean(row["weights"], axis=0), row["smoothed_weights"][-1])
    json.dumps(metrics)


def test_a_round_averages_the_clients(mdp, theta):
    start = ServerState(adapter=adapter_of(theta), objectives=("a", "b"), seed=0)
    names = ["client_0", "client_1"]
    engine = LocalEngine([client_of(mdp, name=name) for name in names])
    after, _ = firm_round(start, names, engine, FIRM)
    ends = [train(client_of(mdp, name=name), theta, 3) for name in names]
    assert not torch.equal(*ends)
    torch.testing.assert_close(after.adapter["theta"], sum(ends) / 2, rtol=0, atol=1e-15)


def test_clients_draw_from_streams_of_their_own_names(mdp):
    states = [client_of(mdp, name=name).state()["generator"] for name in ("a", "b")]
    assert states[0] != states[1]
    expected = np.random.default_rng(derive_seed(0, "client", "a"))
    expected.choice(4, size=2, p=mdp.start)
    assert states[0] == expected.bit_generator.state


@pytest.mark.parametrize(("key", "value"), [("batch_size", 0), ("step_size", -1.0)])
def test_configurations_name_the_key_at_fault(key, value):
    with pytest.raises(ValueError, match=key):
        ActorCriticConfig(**{key: value})
