"""An estimator of another package: REINFORCE on groups of replies, without a critic.

The loss of objective j is Σ_b c_jb ℓ_b with ℓ_b the negative log-probability of reply b, so that
one backward pass gives all M gradients.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from firm.alignment.estimators import (
    Estimator,
    EstimatorConfig,
    Experience,
    MinibatchGradients,
    register_estimator,
)
from firm.alignment.sequences import BY_OBJECTIVE
from firm.base.fields import configuration


@register_estimator
@configuration
class ReinforceConfig(EstimatorConfig):
    """Hyperparameters of REINFORCE."""

    name: Literal["reinforce"] = "reinforce"
    group_size: Annotated[int, Ge(2)] = 4
    """Replies to each prompt, whose mean reward is the baseline."""

    @property
    def replies_per_prompt(self) -> int:
        return self.group_size

    def estimator(self, policy, *, critic, optimizer) -> "Reinforce":
        assert critic is None
        return Reinforce(self, policy)


@dataclass(frozen=True)
class ReinforceExperience(Experience):
    coefficients: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """c, the reward over its group's mean, [M, B]."""


class Reinforce(Estimator):
    """One learner's REINFORCE, which has nothing to learn beside the adapter."""

    def __init__(self, config: ReinforceConfig, policy) -> None:
        self._config, self._policy = config, policy

    def experience(self, rollouts, scores, rewards) -> ReinforceExperience:
        groups = rewards.unflatten(1, (-1, self._config.group_size))  # [M, prompts, G]
        advantages = (groups - groups.mean(2, keepdim=True)).flatten(1)
        return ReinforceExperience(rollouts, scores, rewards, advantages)

    def gradients(self, part, minibatch, weights=None) -> MinibatchGradients:
        policy, rollouts = self._policy, part.rollouts
        coefficients = part.coefficients / minibatch.num_rows
        with policy.per_sequence() as per_sequence:
            logprobs = policy.token_scores(policy.forward(rollouts), rollouts).logprobs
            reply_losses = -(logprobs * rollouts.mask).sum(1)  # [b]
            mixed = coefficients if weights is None else weights[None] @ coefficients
            jacobian = per_sequence.jacobian(reply_losses, mixed)
        reply_losses = reply_losses.detach()
        return MinibatchGradients(
            jacobian,
            coefficients @ reply_losses,
            {"reply_loss": reply_losses.sum() / minibatch.num_rows},
        )
