"""Exact quantities against their definitions: Bellman, finite differences, series, fixed points."""

from dataclasses import replace

import numpy as np
import pytest

from recipes.theory import exact
from recipes.theory.mdp import Mdp


def _lambda_a(mdp, theta):
    """λ_A of Assumption 2(c) at one policy, the largest that holds."""
    matrix = exact.td_matrix(mdp, theta)
    return -np.linalg.eigvalsh((matrix + matrix.swapaxes(-1, -2)) / 2)[..., -1]


def test_one_state_by_hand():
    rewards = np.array([[[0.2, 0.8]]])
    mdp = Mdp(np.ones((1, 2, 1)), rewards, np.ones((1, 1)), np.ones(1), gamma=0.75)
    theta = np.log([1.0, 3.0])  # π = 1/4, 3/4, mean reward 0.65
    assert exact.values(mdp, theta).item() == pytest.approx(0.65 * 4)
    assert exact.returns(mdp, theta).item() == pytest.approx(0.65)
    np.testing.assert_allclose(
        exact.return_gradients(mdp, theta), [[0.25 * (0.2 - 0.65), 0.75 * (0.8 - 0.65)]]
    )
    assert _lambda_a(mdp, theta) == pytest.approx(0.25)
    assert exact.uniform_lambda_a(mdp) == pytest.approx(0.25)
    assert exact.critic_radius(mdp) == pytest.approx(8)
    assert exact.gradient_bound(mdp) == pytest.approx(2**0.5 * (1 + 1.75 * 8))


def test_values_satisfy_bellmans_equation(mdp, theta):
    values = exact.values(mdp, theta)
    policy = exact.policy(mdp, theta)
    for state in range(mdp.num_states):
        backup = sum(
            policy[state, action]
            * (mdp.rewards[:, state, action] + mdp.gamma * values @ mdp.kernel[state, action])
            for action in range(mdp.num_actions)
        )
        np.testing.assert_allclose(values[:, state], backup)


def test_mean_of_action_values_is_the_value(mdp, theta):
    mean = (exact.policy(mdp, theta) * exact.action_values(mdp, theta)).sum(axis=-1)
    np.testing.assert_allclose(mean, exact.values(mdp, theta))


def test_gradients_agree_with_finite_differences(mdp, theta):
    gradients = exact.return_gradients(mdp, theta)
    for place in range(mdp.num_parameters):
        shift = 1e-5 * np.eye(mdp.num_parameters)[place]
        rise = exact.returns(mdp, theta + shift) - exact.returns(mdp, theta - shift)
        np.testing.assert_allclose(gradients[:, place], rise / 2e-5, atol=1e-9)


def test_visitation_is_the_discounted_series(mdp, theta):
    chain = exact.state_kernel(mdp, exact.policy(mdp, theta))
    series, state = np.zeros(mdp.num_states), mdp.start
    for step in range(400):
        series += (1 - mdp.gamma) * mdp.gamma**step * state
        state = state @ chain
    visits = exact.visitation(mdp, theta)
    np.testing.assert_allclose(visits, series)
    assert visits.sum() == pytest.approx(1)
    restart = mdp.gamma * chain + (1 - mdp.gamma) * mdp.start
    np.testing.assert_allclose(visits @ restart, visits)


def test_stationary_distribution_is_where_the_chain_stays(mdp, theta):
    stationary = exact.stationary_distribution(mdp, theta)
    chain = exact.state_kernel(mdp, exact.policy(mdp, theta))
    np.testing.assert_allclose(stationary @ chain, stationary)
    assert stationary.sum() == pytest.approx(1)


@pytest.mark.parametrize("features", ["tabular", "random"])
def test_the_mean_td_update_vanishes_at_the_fixed_point(new_mdp, theta, features):
    mdp = new_mdp(features=features, num_features=2)
    critic = exact.td_fixed_point(mdp, theta)
    visits = exact.stationary_distribution(mdp, theta)[:, None] * exact.policy(mdp, theta)
    values = critic @ mdp.features.T
    errors = mdp.rewards + mdp.gamma * np.einsum("sat,jt->jsa", mdp.kernel, values)
    update = np.einsum("sa,jsa,sf->jf", visits, errors - values[:, :, None], mdp.features)
    np.testing.assert_allclose(update, 0, atol=1e-14)
    assert (np.linalg.norm(critic, axis=1) <= exact.critic_radius(mdp)).all()


def test_a_critic_is_exact_with_one_feature_per_state_and_not_with_fewer(new_mdp, theta):
    tabular, few = new_mdp(), new_mdp(features="random", num_features=2)
    np.testing.assert_allclose(exact.td_fixed_point(tabular, theta), exact.values(tabular, theta))
    gap = exact.values(few, theta) - exact.td_fixed_point(few, theta) @ few.features.T
    by_objective = gap**2 @ exact.stationary_distribution(few, theta)
    assert by_objective.max() > 1e-4


@pytest.mark.parametrize("features", ["tabular", "random"])
def test_the_uniform_lambda_a_holds_for_every_policy(new_mdp, features):
    mdp = new_mdp(features=features)
    thetas = 5 * np.random.default_rng(2).normal(size=(50, mdp.num_parameters))
    at_policies = _lambda_a(mdp, thetas)
    assert 0 < exact.uniform_lambda_a(mdp) <= at_policies.min()
    matrix = exact.td_matrix(mdp, thetas[0])
    largest = np.linalg.eigvalsh(matrix + matrix.T)[-1]
    assert largest == pytest.approx(-2 * at_policies[0])


def test_td_matrix_is_the_mean_over_transitions(mdp, theta):
    policy, visits = exact.policy(mdp, theta), exact.stationary_distribution(mdp, theta)
    mean = np.zeros((mdp.num_states, mdp.num_states))
    for s, a, after in np.ndindex(mdp.kernel.shape):
        change = mdp.gamma * mdp.features[after] - mdp.features[s]
        chance = visits[s] * policy[s, a] * mdp.kernel[s, a, after]
        mean += chance * np.outer(change, mdp.features[s])
    np.testing.assert_allclose(exact.td_matrix(mdp, theta), mean)


def test_batches_are_their_members(mdp):
    thetas = np.random.default_rng(3).normal(size=(2, 3, mdp.num_parameters))
    for function in (
        exact.values,
        exact.returns,
        exact.visitation,
        exact.return_gradients,
        exact.stationary_distribution,
        exact.td_fixed_point,
    ):
        whole = function(mdp, thetas)
        np.testing.assert_allclose(whole[1, 2], function(mdp, thetas[1, 2]), atol=1e-14)


def test_scores_keep_their_bound(mdp):
    theta = 20 * np.random.default_rng(4).normal(size=mdp.num_parameters)
    for row in exact.policy(mdp, theta):
        scores = np.eye(mdp.num_actions) - row
        assert np.linalg.norm(scores, axis=1).max() <= exact.SCORE_BOUND


def test_returns_do_not_depend_on_the_features(mdp, theta):
    halved = replace(mdp, features=mdp.features / 2)
    np.testing.assert_array_equal(exact.returns(mdp, theta), exact.returns(halved, theta))
    np.testing.assert_allclose(
        exact.td_fixed_point(halved, theta), 2 * exact.td_fixed_point(mdp, theta)
    )
