"""Stage 4 of a round: rewards, values and KL penalties become one advantage tensor per objective.

Pure functions on tensors [M, B, T]: M objectives, B responses, T response tokens. Each objective
is treated on two-dimensional slices, so that objective j of M gets, bit for bit, the numbers that
it would get alone.
"""

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the entries where `mask` is true, a scalar; both of shape [B, T].

    0 if it is true nowhere, as in a part of a minibatch with only empty replies.
    """
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Returns `values` scaled to unit variance (unbiased) and, with `shift_mean`, to zero mean.

    Args:
        values: Shape [B, T].
        mask: Entries that count, shape [B, T]; others are transformed the same way and left to the
            caller to mask.
        shift_mean: False keeps the mean.

    Raises:
        ValueError: Fewer than two entries count, so that there is no variance.
    """
    count = mask.sum()
    if count < 2:
        raise ValueError(
            f"whitening needs at least two response tokens, got {int(count)}: "
            "use a larger batch or switch whitening off."
        )
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask) * (count / (count - 1))
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)  # 1e-8: TRL's guard, kept for parity
    return whitened if shift_mean else whitened + mean


def whiten_together(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns every objective's values at zero mean, and all scaled to a mean variance of one.

    A weighted sum of the rows is then, up to a factor, the advantage of the weighted sum of the
    rewards: linear scalarisation. With ``whiten`` for each row it is a sum of normalised ones.
    Shapes are [M, B, T] and, for the mask, [B, T]; entries outside it are the caller's to mask.
    """
    centred = torch.stack([row - masked_mean(row, mask) for row in values])
    count = mask.sum()
    variances = torch.stack([masked_mean(row**2, mask) for row in centred]) * (count / (count - 1))
    return centred * torch.rsqrt(variances.mean() + 1e-8)


def shaped_rewards(
    rewards: torch.Tensor, kl: torch.Tensor, *, kl_coefficient: float, reward_index: torch.Tensor
) -> torch.Tensor:
    """Returns the reward per token, [M, B, T]: the KL penalty everywhere, the reward at the end.

    The same penalty enters every objective; because the weights sum to one, their combination
    contains it exactly once. (The paper names an adaptive KL controller and leaves open where the
    penalty enters.)

    Args:
        rewards: One per objective and response, shape [M, B].
        kl: KL estimate per token, shape [B, T].
        kl_coefficient: Weight of the penalty.
        reward_index: Position of each response's reward, shape [B].
    """
    rows = torch.arange(kl.size(0), device=kl.device)
    shaped = (-kl_coefficient * kl).repeat(len(rewards), 1, 1)  # [M, B, T]
    for row, reward in zip(shaped, rewards, strict=True):
        row[rows, reward_index] += reward
    return shaped


def gae(
    rewards: torch.Tensor, values: torch.Tensor, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the generalised advantage estimates and the returns (Schulman et al., 2016, Eq. 16).

    Args:
        rewards: Shape [M, B, T] (or [B, T]).
        values: Value estimates of the same shape; the value after the last token is 0.
        gamma: Discount in [0, 1].
        gae_lambda: Bias-variance trade-off in [0, 1]; 1 gives Monte-Carlo returns.
    """
    num_tokens = rewards.size(-1)
    last = torch.zeros_like(rewards[..., 0])
    reversed_advantages = []
    for t in reversed(range(num_tokens)):
        next_value = values[..., t + 1] if t < num_tokens - 1 else 0.0
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        last = delta + gamma * gae_lambda * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=-1)
    return advantages, advantages + values
