"""Stage 4 of a local step: advantages of each objective from rewards, values and KL penalties.

Functions of tensors [M, B, T]: M objectives, B responses, T response tokens. Each objective is
treated on two-dimensional slices, so that objective j of M gets, bit for bit, the numbers that it
would get alone. The KL penalty is common to all objectives.
"""

from typing import Any

import torch

from firm.alignment.estimator_config import MAX_KL_ERROR, KLConfig
from firm.alignment.sequences import Rollouts
from firm.base.quantities import Quantity, register

register(
    Quantity(
        "kl",
        "KL from the base model",
        "nats per reply",
        "A diverging KL, a collapsing entropy and ever longer replies are signs of "
        "over-optimisation. It is estimated from sampled replies, and may lie below zero near the "
        "base model.",
        section="training",
        evaluated="kl",
    ),
    Quantity(
        "kl_by_preference",
        "KL, weighted by preference for {}",
        "nats per reply",
        "Replies of a conditioned policy count by the objective's share in their preference.",
        by="objective",
        section="training",
    ),
    Quantity("kl_coefficient", "KL coefficient", "coefficient", section="training"),
)


def kl_penalty(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, form: str = "k1"
) -> torch.Tensor:
    """Returns per-token estimates of the KL divergence from the reference, shape [B, T].

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, shape [B, T].
        reference_logprobs: Log-probabilities under the reference, shape [B, T].
        form: "k1" (the log-ratio: unbiased, may be negative) or "k3" (lower variance,
            non-negative), for tokens sampled from the policy.

    Raises:
        ValueError: When the form is unknown.
    """
    log_ratio = reference_logprobs - logprobs  # [B, T]
    if form == "k1":
        return -log_ratio
    if form == "k3":
        return (log_ratio.exp() - 1) - log_ratio  # non-negative: exp(x) ≥ 1 + x
    raise ValueError(f"unknown KL form {form!r}: choose k1 or k3.")


def adapted_kl_coefficient(
    coefficient: float, kl: float, *, num_responses: int, config: KLConfig
) -> float:
    """Returns the KL coefficient of the next local step (Ziegler et al., 2019, Section 2.2).

    The relative deviation of the KL (nats per response) from its target is clipped to ± 20 %, so
    that a horizon of responses changes the coefficient by about a fifth at most.
    """
    if config.controller == "fixed":
        return coefficient
    error = min(max(kl / config.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1.0 + error * num_responses / config.horizon)


class KLPenalty:
    """KL penalty of one learner, with its current ``coefficient``."""

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coefficient = config.coefficient

    def per_token(self, rollouts: Rollouts) -> torch.Tensor:
        """Returns per-token estimates of the KL from the reference, shape [B, T]."""
        return kl_penalty(rollouts.logprobs, rollouts.reference_logprobs, form=self._config.form)

    def adapt(self, kl: torch.Tensor) -> None:
        """Adapts the coefficient after a local step, given its KL per token, shape [B, T]."""
        self.coefficient = adapted_kl_coefficient(
            self.coefficient, _per_response(kl), num_responses=len(kl), config=self._config
        )

    def metrics(self, kl: torch.Tensor, preferences: torch.Tensor | None = None) -> dict[str, Any]:
        """Returns the mean KL of a batch per response, in nats, and the coefficient.

        With preferences [B, M] of a conditioned policy, also the mean KL by objective, in which
        responses count by the objective's share.
        """
        metrics: dict[str, Any] = {"kl": _per_response(kl), "kl_coefficient": self.coefficient}
        if preferences is not None:
            shares = preferences / preferences.sum(0)  # NaN for an objective that nobody asked for
            metrics["kl_by_preference"] = (kl.sum(1) @ shares.to(kl)).tolist()
        return metrics


def _per_response(kl: torch.Tensor) -> float:
    return kl.sum(1).mean().item()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the entries where `mask` is true, a scalar; both of shape [B, T].

    0 for an empty mask, as in a part of a minibatch with only empty replies.
    """
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Returns `values` scaled to unit variance (unbiased) and, with `shift_mean`, to zero mean.

    Args:
        values: Shape [B, T].
        mask: Entries that define mean and variance, shape [B, T]; the others are transformed too
            and must be masked by the caller.
        shift_mean: Whether to subtract the mean.

    Raises:
        ValueError: When the mask has fewer than two entries, so that there is no variance.
    """
    count = _num_tokens(mask)
    mean = masked_mean(values, mask)  # a scalar over all tokens of the batch
    variance = masked_mean((values - mean) ** 2, mask) * (count / (count - 1))
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)  # 1e-8: TRL's guard, kept for parity
    return whitened if shift_mean else whitened + mean


def whiten_together(
    values: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Centres each objective's values, and scales all of them to a mean variance of one.

    A weighted sum of the rows is then, up to a factor, the advantage of the weighted sum of the
    rewards (linear scalarisation); with ``whiten`` for each row it is a sum of normalised
    advantages. Shapes are [M, B, T] and, for the mask, [B, T]; entries outside it must be masked by
    the caller. The scale is that of the objectives with the indices `rows`, or of all.

    Raises:
        ValueError: As in `whiten`.
    """
    count = _num_tokens(mask)
    centred = torch.stack([row - masked_mean(row, mask) for row in values])  # [M, B, T]
    variances = torch.stack([masked_mean(row**2, mask) for row in centred]) * (count / (count - 1))
    # one factor for all, so that sums stay sums
    mean = variances.mean() if rows is None else variances[rows].mean()
    return centred * torch.rsqrt(mean + 1e-8)


def _num_tokens(mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum()
    if count < 2:
        raise ValueError(
            f"whitening needs at least two response tokens, got {int(count)}: "
            "use a larger batch or switch whitening off."
        )
    return count


def shaped_rewards(
    rewards: torch.Tensor, kl: torch.Tensor, *, kl_coefficient: float, reward_index: torch.Tensor
) -> torch.Tensor:
    """Returns rewards per token, [M, B, T]: the KL penalty at each token, the reward at the end.

    Every objective includes the same penalty; since the weights sum to one, their combination
    includes it exactly once. (The paper uses an adaptive KL controller, but does not state where
    the penalty enters.)

    Args:
        rewards: Rewards per objective and response, shape [M, B].
        kl: KL estimate per token, shape [B, T].
        kl_coefficient: Weight of the penalty.
        reward_index: Position of each response's reward, shape [B].
    """
    rows = torch.arange(kl.size(0), device=kl.device)
    shaped = (-kl_coefficient * kl).repeat(len(rewards), 1, 1)  # [M, B, T]
    for row, reward in zip(shaped, rewards, strict=True):
        row[rows, reward_index] += reward  # objective by objective, as for one alone
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
    reversed_advantages = []  # from the last token to the first
    for t in reversed(range(num_tokens)):
        next_value = values[..., t + 1] if t < num_tokens - 1 else 0.0
        delta = rewards[..., t] + gamma * next_value - values[..., t]  # temporal difference, [M, B]
        last = delta + gamma * gae_lambda * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=-1)  # [M, B, T]
    return advantages, advantages + values
