"""Chains visit states as often as they should, and critics find their fixed point."""

import numpy as np
import pytest

from recipes.theory import exact
from recipes.theory.client import ActorCriticConfig, TabularClient
from recipes.theory.critic import (
    CriticConfig,
    project_to_ball,
    sample_chain,
    td_critic,
    td_errors,
)


def chain(mdp, theta, num_steps, **options):
    probabilities = exact.policy(mdp, theta)
    generator = np.random.default_rng(5)
    return sample_chain(mdp, probabilities, 0, num_steps, generator=generator, **options)


def test_chains_visit_states_by_their_stationary_distributions(mdp, theta):
    theta = 3 * theta  # far from uniform, so that the two distributions differ
    stationary = exact.stationary_distribution(mdp, theta)
    visitation = exact.visitation(mdp, theta)
    assert np.abs(stationary - visitation).sum() > 0.05
    for survival, expected in ((1.0, stationary), (mdp.gamma, visitation)):
        visits = chain(mdp, theta, 40_000, survival=survival)
        shares = np.bincount(visits.states, minlength=mdp.num_states) / 40_000
        assert np.abs(shares - expected).sum() < 0.02


def test_actions_and_next_states_follow_the_policy_and_the_kernel(mdp, theta):
    visits = chain(mdp, theta, 40_000, survival=mdp.gamma)
    counts = np.zeros(mdp.kernel.shape)
    np.add.at(counts, (visits.states, visits.actions, visits.next_states), 1)
    shares = counts / counts.sum(axis=(1, 2), keepdims=True)
    expected = exact.policy(mdp, theta)[:, :, None] * mdp.kernel
    np.testing.assert_allclose(shares, expected, atol=0.02)


def test_without_restarts_every_transition_starts_where_the_last_one_ended(mdp, theta):
    visits = chain(mdp, theta, 50)
    assert np.array_equal(visits.states[1:], visits.next_states[:-1])
    assert visits.states[0] == 0
    assert visits.last == visits.next_states[-1]
    restarted = chain(mdp, theta, 50, survival=0.0)
    assert set(restarted.states.tolist()) == {0}  # ρ₀ is state 0
    assert restarted.last == 0


def test_td_errors_by_hand(mdp, theta):
    visits = chain(mdp, theta, 5)
    critic = np.random.default_rng(6).normal(size=(2, 4))
    errors = td_errors(mdp, critic, visits)
    for place in range(5):
        s, a, after = (x[place] for x in (visits.states, visits.actions, visits.next_states))
        for j in range(2):
            value, next_value = (critic[j] @ mdp.features[x] for x in (s, after))
            expected = mdp.rewards[j, s, a] + mdp.gamma * next_value - value
            assert errors[j, place] == pytest.approx(expected)


@pytest.mark.parametrize("features", ["tabular", "random"])
def test_td_learning_converges_to_its_fixed_point(new_mdp, theta, features):
    mdp = new_mdp(features=features, num_features=2)
    cfg = CriticConfig(num_iterations=300, batch_size=200, step_size=2.0)
    fixed_point = exact.td_fixed_point(mdp, theta)
    critic, _ = td_critic(
        mdp,
        exact.policy(mdp, theta),
        np.zeros_like(fixed_point),
        0,
        cfg=cfg,
        generator=np.random.default_rng(7),
    )
    assert np.linalg.norm(critic - fixed_point) < 0.05 * np.linalg.norm(fixed_point)


def test_critics_leave_their_chain_where_its_last_transition_ended(mdp, theta):
    probabilities, start = exact.policy(mdp, theta), np.zeros((2, 4))
    ends = []
    for seed in range(5):
        cfg, generator = CriticConfig(num_iterations=3, batch_size=4), np.random.default_rng(seed)
        critic, end = td_critic(mdp, probabilities, start, 0, cfg=cfg, generator=generator)
        generator = np.random.default_rng(seed)
        assert end == sample_chain(mdp, probabilities, 0, 12, generator=generator).last
        assert critic.any()
        ends.append(end)
    assert len(set(ends)) > 1
    assert not start.any()  # never changed


def test_projection_shortens_what_is_too_long_and_nothing_else():
    critic = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    projected = project_to_ball(critic, 2.0)
    np.testing.assert_allclose(projected, [[1.2, 1.6], [0.3, 0.4], [0.0, 0.0]])


def test_a_critic_that_diverges_stays_in_its_ball(mdp, theta):
    cfg = CriticConfig(num_iterations=50, batch_size=2, step_size=1e4)
    critic, _ = td_critic(
        mdp,
        exact.policy(mdp, theta),
        np.zeros((2, 4)),
        0,
        cfg=cfg,
        generator=np.random.default_rng(9),
    )
    radius = exact.critic_radius(mdp)
    assert np.linalg.norm(critic, axis=1).max() == pytest.approx(radius)


def test_exact_critics_are_at_their_fixed_point_and_move_no_chain(mdp):
    cfg = ActorCriticConfig(critic=CriticConfig(name="exact"))
    client = TabularClient("client", mdp, cfg, seed=10)
    before = client.state()
    next(client.batches(1))
    after = client.state()
    fixed_point = exact.td_fixed_point(mdp, np.zeros(mdp.num_parameters))
    np.testing.assert_array_equal(after["critic"], fixed_point)
    assert after["critic_state"] == before["critic_state"]
