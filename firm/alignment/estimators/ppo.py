"""PPO with a critic: one clipped loss per objective, on the objective's advantages.

`PPO` combines the pure functions below. With one objective, a value network and a fixed KL
coefficient it equals TRL's PPO bit for bit.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
)

from firm.alignment.advantages import (
    KLPenalty,
    gae,
    masked_mean,
    shaped_rewards,
    whiten,
    whiten_together,
)
from firm.alignment.estimator_config import PPOConfig
from firm.alignment.estimators.estimator import (
    Experience,
    MinibatchGradients,
    Policy,
    policy_metrics,
    reward_covariance,
    scored_rows,
)
from firm.alignment.policy import set_mode
from firm.alignment.sequences import (
    BY_OBJECTIVE,
    INVALID_LOGPROB,
    Rollouts,
    Sequences,
    by_chunks,
)
from firm.base.quantities import Quantity, register
from firm.base.schema import Share

register(
    Quantity("entropy", "Entropy of the policy", "nats per token", section="training"),
    Quantity("clip_fraction", "Clip fraction", "share of tokens", type=Share, section="training"),
    Quantity("value_loss", "Value loss, {}", "loss", by="objective", section="training"),
)


def new_critic(kind: str, policy: Any, num_objectives: int) -> torch.nn.Module:
    """Returns value heads, or a sequence classifier of the policy's architecture.

    Raises:
        ValueError: When transformers has no sequence classifier of the architecture.
    """
    if kind == "heads":
        return ValueHeads(policy.config.get_text_config().hidden_size, num_objectives)
    architecture: Any = copy.deepcopy(policy.get_base_model().config.get_text_config())
    if type(architecture) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            "estimator.critic must be heads for the policy's architecture "
            f"{architecture.model_type}, for which transformers has no sequence classifier, "
            f"got {kind}."
        )
    architecture.num_labels = num_objectives
    return AutoModelForSequenceClassification.from_config(architecture).eval()


class ValueHeads(torch.nn.Module):
    """One linear value head per objective on hidden states: [B, L, H] to [B, L, M].

    The heads are initialised to zero, so that M equal objectives stay equal and the first
    advantages equal the returns.
    """

    base_model_prefix = (
        "score"  # TRL's wrapper looks up the trunk of every value model by this name
    )

    def __init__(self, hidden_size: int, num_objectives: int) -> None:
        super().__init__()
        self.score = torch.nn.Linear(hidden_size, num_objectives)
        torch.nn.init.zeros_(self.score.weight)
        torch.nn.init.zeros_(self.score.bias)


@dataclass(frozen=True)
class PPOExperience(Experience):
    """A batch with its values and advantages."""

    values: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Value estimates at sampling time, [M, B, T]."""
    advantages: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Whitened, zero outside the response, [M, B, T]."""
    returns: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Targets of the critic, [M, B, T]."""
    kl: torch.Tensor
    """KL from the reference per token, [B, T]."""


class PPO:
    """One learner's PPO; implements `Estimator`."""

    def __init__(
        self,
        config: PPOConfig,
        policy: Policy,
        critic: torch.nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
    ) -> None:
        self.config = config
        self.critic = critic
        self.critic_optimizer = optimizer(critic.parameters(), lr=config.critic_learning_rate)
        self.kl = KLPenalty(config.kl)
        self._policy = policy

    @torch.no_grad()
    def experience(
        self, rollouts: Rollouts, scores: torch.Tensor, rewards: torch.Tensor
    ) -> PPOExperience:
        """Stage 4: returns the batch with values and advantages of the KL-penalised rewards."""
        config, policy = self.config, self._policy
        set_mode(policy.model, is_training=False)
        with policy.timed("values"):
            size = policy.config.forward_batch_size
            values = by_chunks(self._values, rollouts, size=size, team=policy.team, dim=1)
            values = values.masked_fill(~rollouts.value_mask, 0)  # [M, B, T]
        with policy.timed("advantages"):
            kl = self.kl.per_token(rollouts)
            coefficient, index = self.kl.coefficient, rollouts.reward_index
            per_token = shaped_rewards(rewards, kl, kl_coefficient=coefficient, reward_index=index)
            if config.whiten_rewards:
                mask = rollouts.value_mask
                per_token = torch.stack(
                    [whiten(r, mask, shift_mean=False).masked_fill(~mask, 0) for r in per_token]
                )
            advantages, returns = gae(
                per_token, values, gamma=config.gamma, gae_lambda=config.gae_lambda
            )
            mask = rollouts.mask
            if config.advantage_scale == "shared":
                scored = scored_rows(~scores.isnan()).to(advantages.device)
                advantages = whiten_together(advantages, mask, scored)
            else:
                advantages = torch.stack([whiten(a, mask) for a in advantages])
            advantages = advantages.masked_fill(~mask, 0)
        return PPOExperience(rollouts, scores, rewards, values, advantages, returns, kl)

    def gradients(
        self, part: PPOExperience, minibatch: PPOExperience, weights: torch.Tensor | None = None
    ) -> MinibatchGradients:
        """Stages 5 and 6: M clipped losses of some rows, their Jacobian and the critic's gradient.

        Losses are means over the minibatch's tokens, to which the part contributes its share. The
        Jacobian takes M backward passes, the gradient of a weighted sum one.
        """
        config, policy, rollouts = self.config, self._policy, part.rollouts
        mask, value_mask = rollouts.mask, rollouts.value_mask
        # 1.0 if the part is the whole minibatch
        share = mask.sum() / minibatch.rollouts.mask.sum().clamp(min=1)
        value_share = value_mask.sum() / minibatch.rollouts.value_mask.sum()
        with policy.timed("forward"):
            output = policy.forward(rollouts)
            scores = policy.token_scores(output, rollouts)
            logprobs = scores.logprobs.masked_fill(~mask, INVALID_LOGPROB)
            losses, clip_fractions = policy_losses(
                logprobs,
                rollouts.logprobs,
                part.advantages,
                mask,
                clip_range=config.clip_range,
                importance=policy.importance_weights(rollouts),
            )
            critic_losses = value_losses(
                self._values(rollouts, output).masked_fill(~value_mask, 0),
                part.values,
                part.returns,
                value_mask,
                clip_range=config.value_clip_range,
            )
        scored = scored_rows(minibatch.is_judged).to(clip_fractions.device)
        losses, critic_losses = losses * share, critic_losses * value_share
        of_replies = minibatch.advantages.sum(2) / minibatch.rollouts.num_tokens.clamp(min=1)
        with policy.timed("critic"):
            critic_gradients = torch.autograd.grad(
                critic_losses.sum(), list(self.critic.parameters())
            )
        with policy.timed("backward"):
            jacobian = policy.jacobian(losses if weights is None else (weights @ losses)[None])
        return MinibatchGradients(
            jacobian,
            losses.detach(),
            {
                "value_loss": critic_losses.detach(),
                "clip_fraction": clip_fractions[scored].mean() * share,
                **policy_metrics(scores.entropies(), logprobs, rollouts, share),
                "advantage_covariance": reward_covariance(part, minibatch, of_replies, weights),
            },
            own=torch.cat([gradient.flatten() for gradient in critic_gradients]),
        )

    def step(self, own: torch.Tensor | None) -> None:
        """Stage 9: steps the critic along its own gradient."""
        assert own is not None
        parameters = list(self.critic.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, gradient in zip(parameters, own.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()

    def end_batch(self, experience: PPOExperience) -> None:
        """Ends a local step: the KL controller adapts."""
        self.kl.adapt(experience.kl)

    def set_learning_rate(self, factor: float) -> None:
        """Sets the critic's learning rate."""
        for group in self.critic_optimizer.param_groups:
            group["lr"] = self.config.critic_learning_rate * factor

    def metrics(self, experience: PPOExperience) -> dict[str, float]:
        """Returns the KL of a batch and its coefficient."""
        return self.kl.metrics(experience.kl)

    def state(self) -> dict[str, Any]:
        """Returns the critic, its optimizer's moments and the KL coefficient."""
        return {
            "critic": self.critic.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "kl_coefficient": self.kl.coefficient,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state`."""
        self.critic.load_state_dict(state["critic"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.kl.coefficient = state["kl_coefficient"]

    def _values(self, rows: Sequences, output: Any = None) -> torch.Tensor:
        """Returns the values [M, b, T] of b rows, from the policy's output if given."""
        critic: Any = self.critic
        if self.config.critic == "network":
            trunk = getattr(critic, critic.base_model_prefix)
            hidden = self._policy.forward(rows, trunk).hidden_states[-1]
        else:
            output = output or self._policy.forward(rows)
            hidden = output.hidden_states[-1].detach().to(critic.score.weight)  # float32
        values = critic.score(hidden)[:, rows.context_length - 1 : -1]  # [b, T, M]
        return torch.stack([values[..., j] for j in range(values.size(-1))])


def policy_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each objective's clipped surrogate loss (Schulman et al., 2017, Eq. 7, negated).

    Args:
        logprobs: Log-probabilities under the current policy, shape [B, T]; carries the graph.
        old_logprobs: Log-probabilities at sampling time, shape [B, T].
        advantages: One advantage per objective and token, shape [M, B, T].
        mask: Response tokens, shape [B, T].
        clip_range: The ratio is clipped to [1 - clip_range, 1 + clip_range].
        importance: Weights of the tokens' losses, shape [B, T]; None: all 1.

    Returns:
        Losses [M] and, detached, the share of tokens with a clipped ratio [M].
    """
    ratio = torch.exp(logprobs - old_logprobs)  # [B, T]
    clipped_ratio = torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)
    losses, clip_fractions = [], []
    for advantage in advantages:
        loss, clipped = -advantage * ratio, -advantage * clipped_ratio
        largest = torch.max(loss, clipped)
        losses.append(masked_mean(largest if importance is None else largest * importance, mask))
        clip_fractions.append(masked_mean((clipped > loss).float(), mask))
    return torch.stack(losses), torch.stack(clip_fractions).detach()


def value_losses(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float,
) -> torch.Tensor:
    """Returns the clipped squared error of every objective's value estimate, shape [M].

    Args:
        values: Current estimates, shape [M, B, T]; carries the graph.
        old_values: Estimates at sampling time, shape [M, B, T].
        returns: Targets, shape [M, B, T].
        mask: Tokens with a value, shape [B, T].
        clip_range: Values are clipped to the old ones ± this; the larger error is used.
    """
    losses = []
    for value, old, target in zip(values, old_values, returns, strict=True):
        clipped = torch.clamp(value, old - clip_range, old + clip_range)
        error = torch.max(torch.square(value - target), torch.square(clipped - target))
        losses.append(0.5 * masked_mean(error, mask))
    return torch.stack(losses)
