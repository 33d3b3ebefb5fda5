"""Critic-free policy gradients on groups of replies: GRPO, RLOO, Dr. GRPO, CISPO and variants.

The loss of objective j is Σ_b c_jb ℓ_b: one advantage per reply and objective, and a loss per reply
that all objectives share. All M gradients therefore take one backward pass
(`PerSequenceGradients`), or two with PPO's clip, which depends on the advantage's sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from firm.alignment.adapters.conditioned import weighted_by_preference
from firm.alignment.advantages import KLPenalty
from firm.alignment.estimator_config import CriticFreeConfig
from firm.alignment.estimators.estimator import (
    Estimator,
    Experience,
    MinibatchGradients,
    Policy,
    policy_metrics,
    reward_covariance,
    scored_rows,
)
from firm.alignment.group_advantages import (
    RewardSums,
    counted,
    group_advantages,
    in_groups,
    is_flat,
    own_advantages,
)
from firm.alignment.sequences import (
    BY_OBJECTIVE,
    INVALID_LOGPROB,
    Rollouts,
)
from firm.base.devices import widened
from firm.base.quantities import PERCENT, Quantity, register
from firm.base.schema import ByObjective, Share
from firm.base.user_code import function_named

register(
    Quantity(
        "zero_variance_share",
        "Groups with equal rewards, {}",
        "share of groups",
        "Groups of replies with equal rewards give no learning signal for the objective.",
        type=ByObjective[Share | None],
        section="training",
        axis=PERCENT,
    )
)


@dataclass(frozen=True)
class CriticFreeExperience(Experience):
    """A batch with one advantage per objective and reply."""

    advantages: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Advantages, [M, B]."""
    kl: torch.Tensor
    """Estimate of the KL from the reference, per token, [B, T]."""
    places: torch.Tensor
    """Positions of the replies in the whole batch, [B]."""
    counts: torch.Tensor | None = field(default=None, metadata=BY_OBJECTIVE)
    """Replies that count for the objective, bool [M, B]; None: all with a score."""
    whole: RewardSums | None = None
    """What advantages of weighted sums are computed from; None: objectives have their own."""

    @property
    def is_judged(self) -> torch.Tensor:
        """True if the reply counts for the objective, bool [M, B]."""
        return super().is_judged if self.counts is None else self.counts.cpu()

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns advantages [M, B] whose sum with weights [M] is that of the weighted rewards."""
        if self.whole is None:
            return self.advantages
        return self.whole.terms(weights)[:, self.places].to(self.advantages)


class CriticFree(Estimator):
    """One learner's estimator; its only state is the KL coefficient."""

    def __init__(self, config: CriticFreeConfig, policy: Policy) -> None:
        self.config = config
        self.kl = KLPenalty(config.kl)
        self._policy = policy
        own, key = config.advantages, "estimator.advantages"
        self._own_advantages = function_named(own, key) if own else None

    @torch.no_grad()
    def experience(
        self, rollouts: Rollouts, scores: torch.Tensor, rewards: torch.Tensor
    ) -> CriticFreeExperience:
        """Stage 4: returns the batch with advantages of the KL-penalised rewards."""
        with self._policy.timed("advantages"):
            kl = self.kl.per_token(rollouts)
            penalty = self.kl.coefficient * kl.sum(1)  # [B]
            applied = rewards.where(~scores.isnan().to(rewards.device), torch.nan)
            whole, counts = None, None
            if self.config.zero_variance == "leave_out":
                counts = counted(applied, self.config)
                applied = applied.where(counts, torch.nan)
            if self.config.sums_rewards:
                whole = RewardSums(applied, penalty, rollouts.num_tokens, self.config)
                advantages = whole.alone()
            else:
                left_out = None if counts is None else ~counts
                scored = scored_rows(~scores.isnan()).to(rewards.device)
                advantages = group_advantages(rewards, penalty, self.config, left_out, scored)
            if self._own_advantages is not None:
                advantages = own_advantages(
                    self._own_advantages,
                    self.config.advantages,
                    rewards=applied,
                    advantages=advantages,
                    prompts=rollouts.queries.prompts,
                    lengths=rollouts.num_tokens,
                    penalty=penalty,
                    num_replies=self.config.num_replies,
                )
            places = torch.arange(rewards.size(1), device=rewards.device)
        return CriticFreeExperience(
            rollouts, scores, rewards, advantages, kl, places, counts, whole
        )

    def gradients(
        self,
        part: CriticFreeExperience,
        minibatch: CriticFreeExperience,
        weights: torch.Tensor | None = None,
        *,
        preferences: torch.Tensor | None = None,
    ) -> MinibatchGradients:
        """Stages 5 and 6: M losses of some rows and their Jacobian, in one or two backward passes.

        Replies with preferences are weighted by them (`weighted_by_preference`).
        """
        policy, rollouts, config = self._policy, part.rollouts, self.config
        advantages = part.advantages if weights is None else part.weighted(weights)
        combined = None
        if weights is not None and config.sums_rewards:
            combined = weights[None].to(advantages) @ advantages  # [1, b]
        whole = units(minibatch.rollouts.mask, config)
        with policy.per_sequence(weights) as per_sequence:
            expand = per_sequence.expand
            with policy.timed("forward"):
                scores = policy.token_scores(policy.forward(rollouts, expand=expand), rollouts)
                logprobs = scores.logprobs.masked_fill(~rollouts.mask, INVALID_LOGPROB)
                terms, held = reply_losses(
                    logprobs,
                    rollouts.logprobs,
                    advantages,
                    rollouts.mask,
                    config,
                    policy.importance_weights(rollouts, by_reply=config.ratio_level == "reply"),
                    combined=combined,
                    scored=scored_rows(minibatch.is_judged).to(logprobs.device),
                )
            own = units(rollouts.mask, config)
            factors = reply_factors(own, whole, config, max_tokens=policy.config.max_new_tokens)
            terms = [(losses, (each * factors).to(losses)) for losses, each in terms]
            asked = rollouts.queries.preferences
            at_own = terms
            if asked is not None:
                at_own = [(losses, weighted_by_preference(each, asked)) for losses, each in terms]
                terms = [
                    (losses, weighted_by_preference(each, asked, preferences))
                    for losses, each in terms
                ]
            values = torch.stack([each @ losses for losses, each in at_own]).sum(0)
            signal = minibatch.advantages if weights is None else minibatch.weighted(weights)
            if (own_preferences := minibatch.preferences) is not None:
                signal = weighted_by_preference(signal, own_preferences, preferences)
            with policy.timed("backward"):
                if weights is not None:
                    jacobian = policy.jacobian((weights @ values)[None])
                else:
                    first, *others = terms
                    jacobian = per_sequence.jacobian(*first, retain_graph=bool(others))
                    for term in others:
                        jacobian += per_sequence.jacobian(*term)
        share = rollouts.mask.sum() / minibatch.rollouts.mask.sum().clamp(min=1)
        return MinibatchGradients(
            jacobian,
            values.detach(),
            {
                "clip_fraction": (held * own).sum() / whole.sum().clamp(min=1),
                **policy_metrics(scores.entropies(), logprobs, rollouts, share),
                "advantage_covariance": reward_covariance(part, minibatch, signal, weights),
            },
        )

    def end_batch(self, experience: CriticFreeExperience) -> None:
        """Ends a local step: the KL controller adapts."""
        self.kl.adapt(experience.kl)

    def metrics(self, experience: CriticFreeExperience) -> dict[str, Any]:
        """Returns KL, its coefficient, and the share of groups with equal rewards by objective."""
        groups = in_groups(experience.rewards, self.config.num_replies)
        shares = is_flat(groups).float().mean((1, 2))
        kl = self.kl.metrics(experience.kl, experience.preferences)
        return {**kl, "zero_variance_share": shares.tolist()}

    def state(self) -> dict[str, Any]:
        """Returns the KL coefficient."""
        return {"kl_coefficient": self.kl.coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state`."""
        self.kl.coefficient = state["kl_coefficient"]


def units(mask: torch.Tensor, config: CriticFreeConfig) -> torch.Tensor:
    """Returns a mask of units with a ratio: tokens [B, T], or non-empty replies [B, 1]."""
    return mask if config.ratio_level == "token" else mask.any(1, keepdim=True)


def reply_factors(
    own: torch.Tensor, whole: torch.Tensor, config: CriticFreeConfig, *, max_tokens: int
) -> torch.Tensor:
    """Returns the factor of each reply's sum in the loss of its minibatch, float64 [b].

    Args:
        own: The `units` of b replies.
        whole: The `units` of all replies of the minibatch.
        config: How losses are averaged.
        max_tokens: Maximum length of a reply.
    """
    counts = widened(own.sum(1))
    if config.loss_mean == "replies":
        return 1 / (counts.clamp(min=1) * len(whole))
    total = whole.sum().clamp(min=1) if config.loss_mean == "tokens" else len(whole) * max_tokens
    return torch.ones_like(counts) / total


def reply_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: CriticFreeConfig,
    importance: torch.Tensor | None = None,
    *,
    combined: torch.Tensor | None = None,
    scored: torch.Tensor | None = None,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Returns losses per reply, their coefficients by objective, and a mask of clipped ratios.

    The loss of objective j is the sum of its coefficients times the losses. With ρ the probability
    ratio, PPO's clipped surrogate is -A min(ρ, 1 + ε) for A > 0 and -A max(ρ, 1 - ε) for A < 0, so
    that two losses per reply suffice for any number of objectives.

    Args:
        logprobs: Log-probabilities under the current policy, shape [B, T]; carries the graph.
        old_logprobs: Log-probabilities at sampling time, shape [B, T].
        advantages: One per objective and reply, shape [M, B].
        mask: Response tokens, shape [B, T].
        config: Form of the ratio.
        importance: Weights of the `units`, from `Policy.importance_weights`; None: all 1.
        combined: Advantage of each reply by whose sign PPO clips, shape [1, B]; None: each
            objective's own.
        scored: Indices of the objectives whose clipped ratios count; None: all.

    Returns:
        Pairs of losses [B] and coefficients [M, B]; and, detached, the share of the objectives for
        which the ratio of each of the `units` is clipped.
    """
    if config.ratio_level == "reply":
        logprobs = (logprobs * mask).sum(1, keepdim=True)
        old_logprobs = (old_logprobs * mask).sum(1, keepdim=True)
        mask = units(mask, config)
    if importance is not None:
        mask = mask * importance
    ratio = torch.exp(logprobs - old_logprobs)
    if config.ratio_form == "ppo":
        low, high = 1 - config.clip_range, 1 + config.clip_range
        signs = advantages if combined is None else combined
        gains, costs = advantages.where(signs > 0, 0), advantages.where(signs < 0, 0)
        signs = signs if combined is not None or scored is None else signs[scored]
        held = (signs > 0).float().mean(0)[:, None] * (ratio > high)
        held = held + (signs < 0).float().mean(0)[:, None] * (ratio < low)
        upper = -(ratio.clamp(max=high) * mask).sum(1)
        lower = -(ratio.clamp(min=low) * mask).sum(1)
        return [(upper, gains), (lower, costs)], held.detach()
    cap = config.ratio_cap
    is_cispo = config.ratio_form == "cispo"
    weights = ratio.detach().clamp(max=cap) if is_cispo else torch.ones_like(ratio)
    held = (ratio > cap) & is_cispo
    return [(-(weights * logprobs * mask).sum(1), advantages)], held.float()
