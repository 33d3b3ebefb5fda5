import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.alignment import KLConfig, PPOConfig
from firm.alignment.estimators.ppo import policy_losses, value_losses
from firm.alignment.sequences import entropy
from tests.draws import draw_mask, draw_normal

seeds = st.integers(0, 2**32)
examples = settings(max_examples=30, derandomize=True)


@examples
@given(seeds, st.integers(1, 3))
def test_where_the_policy_has_not_moved_the_gradient_is_the_plain_policy_gradient(seed, num):
    logits = draw_normal(seed, 4, 6, 5).requires_grad_()
    token_ids = draw_normal(seed + 2, 4, 6, 5).argmax(-1, keepdim=True)
    logprobs = logits.log_softmax(-1).gather(-1, token_ids).squeeze(-1)
    advantages, mask = draw_normal(seed + 1, num, 4, 6), draw_mask(seed, 4, 6)
    losses, clip_fractions = policy_losses(
        logprobs, logprobs.detach(), advantages, mask, clip_range=0.2
    )
    for loss, advantage in zip(losses, advantages, strict=True):
        plain = -(advantage * logprobs)[mask].mean()
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (expected,) = torch.autograd.grad(plain, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(loss, -advantage[mask].mean())
    assert torch.equal(clip_fractions, torch.zeros_like(clip_fractions))


def test_clipped_policy_loss_by_hand():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 9.0]])
    advantages = torch.tensor([[[2.0, -2.0, 2.0, -2.0, 7.0]]])
    mask = torch.tensor([[True, True, True, True, False]])
    logprobs = ratio.log().requires_grad_()
    losses, clip_fractions = policy_losses(
        logprobs, torch.zeros(1, 5), advantages, mask, clip_range=0.2
    )
    # -2 * 1.2 held, 2 * 1.5 free, -2 * 0.5 free, 2 * 0.8 held: (-2.4 + 3.0 - 1.0 + 1.6) / 4
    torch.testing.assert_close(losses, torch.tensor([0.3]))
    torch.testing.assert_close(clip_fractions, torch.tensor([0.5]))
    losses.sum().backward()
    # -advantage * ratio / 4 where free; nothing where held back or masked
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 0.75, -0.25, 0.0, 0.0]]))


@examples
@given(seeds, st.floats(0.05, 0.5))
def test_beyond_the_clip_range_a_better_ratio_gains_nothing(seed, clip_range):
    advantages, mask = draw_normal(seed, 1, 4, 6), draw_mask(seed, 4, 6)
    old = -draw_normal(seed + 1, 4, 6).abs()

    def loss(ratio_if_good, ratio_if_bad):
        ratio = torch.where(advantages[0] > 0, ratio_if_good, ratio_if_bad)
        return policy_losses(old + ratio.log(), old, advantages, mask, clip_range=clip_range)

    at_the_edge, _ = loss(torch.tensor(1 + clip_range), torch.tensor(1 - clip_range))
    far_beyond, clip_fractions = loss(torch.tensor(9.0), torch.tensor(0.01))
    torch.testing.assert_close(far_beyond, at_the_edge)
    assert clip_fractions.item() == pytest.approx(1)


def test_the_loss_is_an_upper_bound_of_the_unclipped_one():
    logprobs, old = -draw_normal(0, 4, 6).abs(), -draw_normal(1, 4, 6).abs()
    advantages, mask = draw_normal(2, 3, 4, 6), draw_mask(3, 4, 6)
    losses, _ = policy_losses(logprobs, old, advantages, mask, clip_range=0.2)
    unclipped, _ = policy_losses(logprobs, old, advantages, mask, clip_range=1e9)
    ratio = (logprobs - old).exp()
    expected = torch.stack([-(advantage * ratio)[mask].mean() for advantage in advantages])
    torch.testing.assert_close(unclipped, expected)
    assert (losses > unclipped).all()


def test_policy_loss_and_gradient_do_not_look_outside_the_mask():
    logprobs, old = -draw_normal(0, 4, 6).abs().requires_grad_(), -draw_normal(1, 4, 6).abs()
    advantages, mask = draw_normal(2, 2, 4, 6), draw_mask(3, 4, 6)
    assert not mask.all()
    losses, clip_fractions = policy_losses(logprobs, old, advantages, mask, clip_range=0.2)
    other = advantages.masked_fill(~mask, 1e3), old.masked_fill(~mask, -1.0)
    losses_2, clip_fractions_2 = policy_losses(logprobs, other[1], other[0], mask, clip_range=0.2)
    assert torch.equal(losses, losses_2)
    assert torch.equal(clip_fractions, clip_fractions_2)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))


@pytest.mark.parametrize("num_objectives", [1, 2, 5])
def test_row_j_of_the_losses_is_bit_for_bit_that_of_objective_j_alone(num_objectives):
    logprobs, old = -draw_normal(0, 8, 11).abs().float(), -draw_normal(1, 8, 11).abs().float()
    advantages, mask = draw_normal(2, num_objectives, 8, 11).float(), draw_mask(3, 8, 11)
    values, old_values, returns = (
        draw_normal(seed, num_objectives, 8, 11).float() for seed in (4, 5, 6)
    )
    losses, clip_fractions = policy_losses(logprobs, old, advantages, mask, clip_range=0.2)
    critic_losses = value_losses(values, old_values, returns, mask, clip_range=0.2)
    assert losses.shape == clip_fractions.shape == critic_losses.shape == (num_objectives,)
    for j in range(num_objectives):
        row = slice(j, j + 1)
        alone, alone_fraction = policy_losses(logprobs, old, advantages[row], mask, clip_range=0.2)
        assert torch.equal(losses[row], alone)
        assert torch.equal(clip_fractions[row], alone_fraction)
        own = value_losses(values[row], old_values[row], returns[row], mask, clip_range=0.2)
        assert torch.equal(critic_losses[row], own)


def test_clipped_value_loss_by_hand():
    values = torch.tensor([[[0.5, -0.1, 0.5, 9.0]], [[1.0, 1.0, 1.0, 9.0]]], requires_grad=True)
    old_values = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[1.0, 1.0, 1.0, 0.0]]])
    returns = torch.tensor([[[1.0, 0.3, 0.1, 0.0]], [[1.0, 2.0, 4.0, 0.0]]])
    mask = torch.tensor([[True, True, True, False]])
    losses = value_losses(values, old_values, returns, mask, clip_range=0.2)
    # 0.5 is clipped to 0.2: (0.2 - 1)^2 = 0.64 beats 0.25; (-0.1 - 0.3)^2 = 0.16 within the range;
    # (0.5 - 0.1)^2 = 0.16 beats (0.2 - 0.1)^2. Second objective: 0, 1 and 9.
    torch.testing.assert_close(losses, torch.tensor([0.5 * 0.96 / 3, 0.5 * 10 / 3]))
    losses.sum().backward()
    # (value - return) / 3, and nothing where the clipped error counts or the mask is off
    expected = [[[0.0, -0.4 / 3, 0.4 / 3, 0.0]], [[0.0, -1 / 3, -1.0, 0.0]]]
    torch.testing.assert_close(values.grad, torch.tensor(expected))


def test_a_wide_value_clip_range_leaves_half_the_mean_squared_error():
    values, old_values, returns = (draw_normal(seed, 2, 4, 6) for seed in range(3))
    mask = draw_mask(3, 4, 6)
    losses = value_losses(values, old_values, returns, mask, clip_range=1e9)
    expected = [0.5 * (v - r)[mask].square().mean() for v, r in zip(values, returns, strict=True)]
    torch.testing.assert_close(losses, torch.stack(expected))


@pytest.mark.parametrize("size", [1, 2, 15, 1000])
def test_the_entropy_of_a_uniform_distribution_is_the_log_of_its_size(size):
    result = entropy(torch.full((2, 3, size), 4.2))
    torch.testing.assert_close(result, torch.full((2, 3), math.log(size)), atol=2e-6, rtol=0)


@examples
@given(seeds)
def test_entropy_is_that_of_the_categorical_distribution(seed):
    logits = 3 * draw_normal(seed, 2, 3, 7)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy(logits), expected)
    torch.testing.assert_close(entropy(logits + 50), expected)


def test_a_certain_token_has_no_entropy():
    logits = torch.tensor([[[1000.0, 0.0, -1000.0]]])
    assert torch.equal(entropy(logits), torch.zeros(1, 1))


def test_the_defaults_are_those_of_appendix_a1():
    config = PPOConfig()
    assert (config.batch_size, config.minibatch_size, config.num_epochs) == (16, 8, 3)
    assert (config.actor_learning_rate, config.critic_learning_rate) == (6e-5, 1e-4)
    assert (config.kl.controller, config.kl.target) == ("adaptive", 0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatch_size": 5}, r"multiple of minibatch_size, got 16 and 5"),
        ({"minibatch_size": 0}, r"minibatch_size must be at least 1, got 0"),
        ({"batch_size": 4}, r"multiple of minibatch_size, got 4 and 8"),
        ({"num_epochs": 0}, r"num_epochs must be at least 1, got 0"),
        ({"actor_learning_rate": 0.0}, r"actor_learning_rate must be positive, got 0.0"),
        ({"critic_learning_rate": -1.0}, r"critic_learning_rate must be positive, got -1.0"),
        ({"clip_range": 0.0}, r"clip_range must be positive, got 0.0"),
    ],
)
def test_a_ppo_config_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


@pytest.mark.parametrize("batch_size", [0, -8])
def test_a_batch_without_responses_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"batch_size"):
        PPOConfig(batch_size=batch_size)


def test_a_horizon_that_could_turn_the_penalty_into_a_reward_is_refused():
    with pytest.raises(ValueError, match="horizon"):
        PPOConfig(kl=KLConfig(horizon=2))


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 1.5},
        {"gae_lambda": -1.0},
        {"value_clip_range": -0.2},
        {"max_gradient_norm": -1.0},
        {"clip_range": float("nan")},
    ],
)
def test_out_of_range_hyperparameters_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        PPOConfig(**change)
