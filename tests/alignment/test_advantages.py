import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.alignment import KLConfig
from firm.alignment.advantages import (
    KLPenalty,
    adapted_kl_coefficient,
    gae,
    kl_penalty,
    masked_mean,
    shaped_rewards,
    whiten,
    whiten_together,
)
from tests.draws import draw_mask, draw_normal

seeds = st.integers(0, 2**32)
sizes = st.tuples(st.integers(1, 4), st.integers(2, 7))  # B, T
fractions = st.floats(0, 1)
examples = settings(max_examples=30, derandomize=True)

ADAPTIVE = KLConfig(controller="adaptive", target=0.03, horizon=10_000)


@examples
@given(seeds, sizes)
def test_masked_mean_is_the_mean_of_what_the_mask_keeps(seed, size):
    values, mask = draw_normal(seed, *size), draw_mask(seed, *size, least=2)
    torch.testing.assert_close(masked_mean(values, mask), values[mask].mean())


@examples
@given(seeds, sizes)
def test_whitened_values_have_mean_zero_and_variance_one_over_the_mask(seed, size):
    values, mask = 3 * draw_normal(seed, *size) + 5, draw_mask(seed, *size, least=2)
    values[0, :2] = torch.tensor([4.0, 6.0])  # so that the spread is never near the guard of 1e-8
    whitened = whiten(values, mask)[mask]
    assert abs(whitened.mean()) < 1e-9
    assert abs(whitened.var(unbiased=True) - 1) < 1e-7


@examples
@given(seeds, sizes)
def test_whitening_without_shift_has_variance_one_and_keeps_the_mean(seed, size):
    values, mask = 3 * draw_normal(seed, *size) + 5, draw_mask(seed, *size, least=2)
    values[0, :2] = torch.tensor([4.0, 6.0])
    whitened = whiten(values, mask, shift_mean=False)[mask]
    torch.testing.assert_close(whitened.mean(), values[mask].mean())
    assert abs(whitened.var(unbiased=True) - 1) < 1e-7


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_does_not_look_outside_the_mask(shift_mean):
    values, mask = draw_normal(0, 4, 6), draw_mask(1, 4, 6, least=2)
    assert not mask.all()
    other = torch.where(mask, values, torch.full_like(values, 1e6))
    first = whiten(values, mask, shift_mean=shift_mean)[mask]
    assert torch.equal(first, whiten(other, mask, shift_mean=shift_mean)[mask])


def test_whitening_forgets_scale_and_shift():
    values, mask = draw_normal(0, 4, 6), draw_mask(1, 4, 6, least=2)
    torch.testing.assert_close(whiten(7 * values - 3, mask), whiten(values, mask))


def test_whitening_by_hand():
    values = torch.tensor([[0.0, 2.0], [4.0, 6.0]])
    mask = torch.tensor([[True, True], [True, False]])
    # mean (0 + 2 + 4) / 3 = 2, unbiased variance (4 + 0 + 4) / 2 = 4; 6 is transformed alike
    torch.testing.assert_close(whiten(values, mask), torch.tensor([[-1.0, 0.0], [1.0, 2.0]]))
    unshifted = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.testing.assert_close(whiten(values, mask, shift_mean=False), unshifted)


def test_equal_values_whiten_to_zero():
    assert torch.equal(whiten(torch.full((2, 3), 7.0), torch.ones(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_whitening_fewer_than_two_tokens_is_an_error(num_tokens):
    mask = torch.arange(4).unsqueeze(0) < num_tokens
    with pytest.raises(ValueError, match=f"at least two response tokens, got {num_tokens}"):
        whiten(torch.ones(1, 4), mask)
    with pytest.raises(ValueError, match=f"at least two response tokens, got {num_tokens}"):
        whiten_together(torch.ones(2, 1, 4), mask)


@examples
@given(seeds, sizes)
def test_the_k3_penalty_is_never_negative_and_both_vanish_where_the_policies_agree(seed, size):
    logprobs, reference = -draw_normal(seed, *size).abs(), -draw_normal(seed + 1, *size).abs()
    assert (kl_penalty(logprobs, reference, form="k3") >= 0).all()
    for form in ("k1", "k3"):
        same = kl_penalty(logprobs, logprobs, form=form)
        assert torch.equal(same, torch.zeros_like(same))


@examples
@given(seeds, st.sampled_from(["k1", "k3"]))
def test_the_expected_penalty_under_the_policy_is_the_kl_divergence(seed, form):
    logprobs = draw_normal(seed, 5).log_softmax(0)
    reference = draw_normal(seed + 1, 5).log_softmax(0)
    expected = (logprobs.exp() * kl_penalty(logprobs, reference, form=form)).sum()
    divergence = torch.nn.functional.kl_div(reference, logprobs, log_target=True, reduction="sum")
    torch.testing.assert_close(expected, divergence, rtol=1e-10, atol=1e-12)


def test_penalties_by_hand():
    policy, reference = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    k1 = kl_penalty(policy, reference)
    torch.testing.assert_close(k1, torch.tensor([[0.6931472, -0.6931472]]))  # log 2, log 1/2
    k3 = kl_penalty(policy, reference, form="k3")  # 1/2 - 1 + log 2 and 2 - 1 - log 2
    torch.testing.assert_close(k3, torch.tensor([[0.1931472, 0.3068528]]))


def test_shaped_rewards_by_hand():
    scores = torch.tensor([[1.0, 2.0], [10.0, 20.0]])  # two objectives, two responses
    kl = torch.tensor([[0.5, 1.0, 0.0], [0.1, 0.2, 0.3]])
    rewards = shaped_rewards(scores, kl, kl_coefficient=0.2, reward_index=torch.tensor([1, 2]))
    expected = torch.tensor(
        [[[-0.1, 0.8, 0.0], [-0.02, -0.04, 1.94]], [[-0.1, 9.8, 0.0], [-0.02, -0.04, 19.94]]]
    )
    torch.testing.assert_close(rewards, expected)


@examples
@given(seeds, sizes, st.integers(1, 4))
def test_every_objective_gets_its_score_once_and_the_penalty_on_every_token(seed, size, num):
    scores, kl = draw_normal(seed, num, size[0]), draw_normal(seed + 1, *size)
    kl_before = kl.clone()
    reward_index = draw_mask(seed, *size, least=2).sum(1) - 1
    rewards = shaped_rewards(scores, kl, kl_coefficient=0.3, reward_index=reward_index)
    assert rewards.shape == (num, *size)
    torch.testing.assert_close(rewards.sum(-1), scores - 0.3 * kl.sum(-1))
    is_score = torch.arange(size[1]) == reward_index.unsqueeze(1)
    for row, score in zip(rewards, scores, strict=True):
        assert torch.equal(row[~is_score], -0.3 * kl[~is_score])
        torch.testing.assert_close(row[is_score], score - 0.3 * kl[is_score])
    assert torch.equal(kl, kl_before)


@examples
@given(seeds, sizes, st.integers(1, 4))
def test_a_combination_with_weights_that_sum_to_one_carries_the_penalty_once(seed, size, num):
    scores, kl = draw_normal(seed, num, size[0]), draw_normal(seed + 1, *size)
    weights = draw_normal(seed + 2, num).softmax(0)
    reward_index = draw_mask(seed, *size, least=2).sum(1) - 1
    arguments = {"kl_coefficient": 0.3, "reward_index": reward_index}
    combined = torch.einsum("m,mbt->bt", weights, shaped_rewards(scores, kl, **arguments))
    (alone,) = shaped_rewards((weights @ scores).unsqueeze(0), kl, **arguments)
    torch.testing.assert_close(combined, alone)


def brute_force_advantages(rewards, values, gamma, gae_lambda):
    """Eq. 16 of Schulman et al. (2016), the double sum as it is printed."""
    num_tokens = rewards.size(-1)
    after = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    deltas = rewards + gamma * after - values
    advantages = torch.zeros_like(rewards)
    for t in range(num_tokens):
        for k in range(num_tokens - t):
            advantages[..., t] += (gamma * gae_lambda) ** k * deltas[..., t + k]
    return advantages


@examples
@given(seeds, sizes, st.integers(1, 3), fractions, fractions)
def test_advantages_are_the_discounted_sum_of_temporal_differences(
    seed, size, num, gamma, gae_lambda
):
    rewards, values = draw_normal(seed, num, *size), draw_normal(seed + 1, num, *size)
    advantages, returns = gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    expected = brute_force_advantages(rewards, values, gamma, gae_lambda)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


@examples
@given(seeds, sizes, fractions)
def test_with_lambda_one_the_return_is_monte_carlo_whatever_the_values(seed, size, gamma):
    rewards, values = draw_normal(seed, *size), draw_normal(seed + 1, *size)
    _, returns = gae(rewards, values, gamma=gamma, gae_lambda=1.0)
    expected = torch.zeros(size[0], dtype=torch.float64)
    for t in reversed(range(size[1])):
        expected = rewards[:, t] + gamma * expected
        torch.testing.assert_close(returns[:, t], expected)


@examples
@given(seeds, sizes, fractions)
def test_with_lambda_zero_the_return_looks_one_token_ahead(seed, size, gamma):
    rewards, values = draw_normal(seed, *size), draw_normal(seed + 1, *size)
    _, returns = gae(rewards, values, gamma=gamma, gae_lambda=0.0)
    torch.testing.assert_close(returns[:, :-1], rewards[:, :-1] + gamma * values[:, 1:])
    torch.testing.assert_close(returns[:, -1], rewards[:, -1])


def test_values_that_are_right_leave_no_advantage():
    rewards = draw_normal(0, 2, 3, 5)
    _, values = gae(rewards, torch.zeros_like(rewards), gamma=0.9, gae_lambda=1.0)
    advantages, returns = gae(rewards, values, gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(advantages, torch.zeros_like(rewards))
    torch.testing.assert_close(returns, values)


def test_advantages_by_hand():
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    advantages, returns = gae(rewards, values, gamma=0.5, gae_lambda=0.5)
    # delta_1 = 2 - 4 = -2; delta_0 = 1 + 0.5 * 4 - 3 = 0; A_0 = 0 + 0.25 * -2 = -0.5
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, -2.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.5, 2.0]]))


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 5])
def test_an_objective_among_others_gets_bit_for_bit_what_it_would_get_alone(num_objectives):
    scores, kl = draw_normal(0, num_objectives, 8).float(), draw_normal(1, 8, 11).float()
    values = draw_normal(2, num_objectives, 8, 11).float()
    arguments = {"kl_coefficient": 0.2, "reward_index": torch.arange(8)}
    rewards = shaped_rewards(scores, kl, **arguments)
    advantages, returns = gae(rewards, values, gamma=0.99, gae_lambda=0.95)
    for j in range(num_objectives):
        row = slice(j, j + 1)
        alone = shaped_rewards(scores[row], kl, **arguments)
        assert torch.equal(rewards[row], alone)
        own_advantages, own_returns = gae(alone, values[row], gamma=0.99, gae_lambda=0.95)
        assert torch.equal(advantages[row], own_advantages)
        assert torch.equal(returns[row], own_returns)


def test_advantages_on_a_shared_scale_keep_the_ratio_of_their_spreads():
    generator = torch.Generator().manual_seed(5)
    values = (
        torch.randn(3, 8, 6, generator=generator) * torch.tensor([1.0, 4.0, 0.5])[:, None, None]
    )
    values += torch.tensor([3.0, 0.0, -2.0])[:, None, None]
    mask = torch.rand(8, 6, generator=generator) < 0.7
    together = whiten_together(values, mask)
    for row, own in zip(together, values, strict=True):
        assert masked_mean(row, mask).item() == pytest.approx(0, abs=1e-6)
        assert row[mask].std() / together[0][mask].std() == pytest.approx(
            (own[mask].std() / values[0][mask].std()).item(), rel=1e-5
        )
    assert together[:, mask].var(dim=1).mean().item() == pytest.approx(1, rel=1e-5)
    values[1] = 0.0  # nobody scores it
    two = whiten_together(values, mask, torch.tensor([0, 2]))
    torch.testing.assert_close(two[[0, 2]], whiten_together(values[[0, 2]], mask))


def test_a_sum_on_a_shared_scale_is_the_advantage_of_the_summed_reward():
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(2, 8, 6, generator=generator) * torch.tensor([1.0, 4.0])[:, None, None]
    mask = torch.ones(8, 6, dtype=torch.bool)
    weights = torch.tensor([0.3, 0.7])[:, None, None]
    of_sum = whiten((weights * values).sum(0), mask)
    summed = (weights * whiten_together(values, mask)).sum(0)
    factors = (summed / of_sum).flatten()
    assert torch.allclose(factors, factors[0].expand_as(factors), rtol=1e-4)
    # where each is whitened by itself, the sum is another one
    apart = (weights * torch.stack([whiten(row, mask) for row in values])).sum(0)
    assert not torch.allclose(apart / of_sum, (apart / of_sum)[0, 0].expand(8, 6), rtol=1e-2)


def test_an_adapted_coefficient_by_hand():
    # error 0.033 / 0.03 - 1 = 0.1; 0.2 * (1 + 0.1 * 16 / 10_000)
    adapted = adapted_kl_coefficient(0.2, 0.033, num_responses=16, config=ADAPTIVE)
    assert adapted == pytest.approx(0.200032, rel=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.03, 5.0])
def test_a_fixed_coefficient_stays(kl):
    config = KLConfig(controller="fixed", target=0.03)
    assert adapted_kl_coefficient(0.2, kl, num_responses=16, config=config) == 0.2


def test_an_adaptive_coefficient_rises_above_the_target_falls_below_it_and_rests_on_it():
    def adapted(kl):
        return adapted_kl_coefficient(0.2, kl, num_responses=16, config=ADAPTIVE)

    assert adapted(0.029) < adapted(0.03) == 0.2 < adapted(0.031) < adapted(0.032)


@pytest.mark.parametrize(("kl", "factor"), [(0.036, 1.2), (3.0, 1.2), (0.024, 0.8), (-3.0, 0.8)])
def test_the_deviation_counts_for_at_most_a_fifth(kl, factor):
    config = dataclasses.replace(ADAPTIVE, horizon=16)
    adapted = adapted_kl_coefficient(0.2, kl, num_responses=16, config=config)
    assert adapted == pytest.approx(0.2 * factor)


def test_the_kl_at_a_preference_counts_replies_by_their_share():
    kl = torch.tensor([[1.0, 1.0], [3.0, 3.0]])  # 2 and 6 nats per reply
    preferences = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    own = KLPenalty(KLConfig()).metrics(kl, preferences)
    assert own["kl"] == pytest.approx(4.0)
    assert own["kl_by_preference"] == pytest.approx([3.0, 5.0])
    assert "kl_by_preference" not in KLPenalty(KLConfig()).metrics(kl)
