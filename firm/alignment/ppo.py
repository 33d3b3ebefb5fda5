"""Stage 5 of a round: the clipped PPO losses, one per objective, and the KL controller.

Pure functions that know no trainer. `PPOConfig` holds the hyperparameters of a local step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch

from firm.alignment.advantages import masked_mean

MAX_KL_ERROR = 0.2
"""Largest relative deviation of the KL from its target that the adaptive controller counts."""
INERT_KL_CHANGE = 0.05
"""A controller that cannot change the KL coefficient by this share of it is said to do nothing."""


@dataclass(frozen=True)
class KLConfig:
    """How far the policy may move from the reference."""

    controller: Literal["fixed", "adaptive"] = "adaptive"
    """Fixed coefficient, or the proportional controller of Ziegler et al. (2019), section 2.2
    (A.1: adaptive)."""
    coefficient: float = 0.2
    """Coefficient of the KL penalty, at the start when adaptive. Not in the paper."""
    target: float = 0.03
    """KL per response (nats, summed over tokens) that the adaptive controller aims at (A.1; that
    it is counted per response is not in the paper)."""
    horizon: float = 10_000
    """Responses over which the adaptive controller corrects a deviation: a step changes the
    coefficient by at most a fifth of batch size / horizon. 10,000, as TRL had it, is more than the
    paper's run has: 16 rounds of 16 responses, with four local steps each, change it by 2 % at
    most. Not in the paper."""
    estimator: Literal["k1", "k3"] = "k1"
    """k1: log ratio; k3: lower variance, never negative. Not in the paper."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ValueError(f"kl.coefficient must be non-negative, got {self.coefficient}.")
        if not (self.target > 0 and self.horizon > 0):
            raise ValueError(
                f"kl.target and kl.horizon must be positive, got {self.target} and {self.horizon}."
            )


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters of one local step. Defaults are Appendix A.1 where it gives a value."""

    batch_size: int = 16
    """Responses per local step, each to a fresh prompt (A.1: 16)."""
    minibatch_size: int = 8
    """Responses per optimizer step; divides the batch (A.1: 8)."""
    micro_batch_size: int | None = None
    """Responses per forward and backward pass; the minibatch's gradients are their sum, so that a
    minibatch is one optimizer step however it is divided. By default the whole minibatch. Bounds
    memory. Not in the paper."""
    num_epochs: int = 3
    """PPO epochs over a batch (A.1: 3)."""
    actor_learning_rate: float = 6e-5
    """Learning rate of the adapter (A.1)."""
    critic_learning_rate: float = 1e-4
    """Learning rate of the value heads (A.1)."""
    actor_optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or the plain gradient step of Algorithm 1. Which one the experiments used is not in
    the paper."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """Constant, or linear decay to zero over the run's rounds, whoever takes part in them. Not in
    the paper."""
    critic: Literal["heads", "network"] = "heads"
    """One linear value head per objective on the policy's last hidden state, detached, or a
    separate value network with one output per objective. Not in the paper (T-FIRM's critic is
    linear)."""
    clip_range: float = 0.2
    """The probability ratio is clipped to 1 ± this. Not in the paper."""
    value_clip_range: float = 0.2
    """New values are clipped to the old ones ± this. Not in the paper."""
    gamma: float = 1.0
    """Discount per token. Not in the paper."""
    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimate. Not in the paper."""
    whiten_rewards: bool = False
    """Scale the rewards per token to unit variance. Not in the paper."""
    advantage_scale: Literal["by_objective", "shared"] = "by_objective"
    """Whether each objective's advantages are whitened by themselves, so that all gradients count
    alike (with fixed weights that is GDPO's normalise, then sum, arXiv:2601.05242), or all are
    scaled by one factor, which keeps the rewards' own spreads (with fixed weights: linear
    scalarisation). Not in the paper."""
    missing_end_penalty: float = 0.0
    """Subtracted from every score of a response that did not end by itself. Not in the paper."""
    max_gradient_norm: float | None = None
    """Clip the combined gradient to this norm. Not in the paper."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty and its controller."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.minibatch_size < 1 or self.batch_size % self.minibatch_size:
            raise ValueError(
                f"ppo.batch_size must be a multiple of ppo.minibatch_size, got {self.batch_size} "
                f"and {self.minibatch_size}."
            )
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(
                f"ppo.micro_batch_size must be at least 1 or null, got {self.micro_batch_size}."
            )
        if self.num_epochs < 1:
            raise ValueError(f"ppo.num_epochs must be at least 1, got {self.num_epochs}.")
        for name in ("actor_learning_rate", "critic_learning_rate", "clip_range"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"ppo.{name} must be positive, got {getattr(self, name)}.")
        for name in ("value_clip_range", "missing_end_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"ppo.{name} must be non-negative, got {getattr(self, name)}.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"ppo.{name} must be in [0, 1], got {getattr(self, name)}.")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise ValueError(
                f"ppo.max_gradient_norm must be positive or null, got {self.max_gradient_norm}."
            )
        if self.kl.horizon <= MAX_KL_ERROR * self.batch_size:
            raise ValueError(
                f"ppo.kl.horizon must exceed a fifth of ppo.batch_size ({self.batch_size}), got "
                f"{self.kl.horizon}: one step of the controller could turn the penalty's sign."
            )


def policy_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate loss of every objective (Schulman et al., 2017, Eq. 7, negated).

    Args:
        logprobs: Log-probabilities under the current policy, shape [B, T]; carries the graph.
        old_logprobs: Log-probabilities at sampling time, shape [B, T].
        advantages: One advantage per objective and token, shape [M, B, T].
        mask: Response tokens, shape [B, T].
        clip_range: The ratio is clipped to [1 - clip_range, 1 + clip_range].

    Returns:
        Losses [M] and, detached, the share of tokens whose ratio the clip holds back [M].
    """
    ratio = torch.exp(logprobs - old_logprobs)  # [B, T]
    clipped_ratio = torch.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range)
    losses, clip_fractions = [], []
    for advantage in advantages:
        loss, clipped = -advantage * ratio, -advantage * clipped_ratio
        losses.append(masked_mean(torch.max(loss, clipped), mask))
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
    """Clipped squared error of every objective's value estimate, shape [M].

    Args:
        values: Current estimates, shape [M, B, T]; carries the graph.
        old_values: Estimates at sampling time, shape [M, B, T].
        returns: Targets, shape [M, B, T].
        mask: Tokens that have a value, shape [B, T].
        clip_range: Values are clipped to the old ones ± this; the larger error counts.
    """
    losses = []
    for value, old, target in zip(values, old_values, returns, strict=True):
        clipped = torch.clamp(value, old - clip_range, old + clip_range)
        error = torch.max(torch.square(value - target), torch.square(clipped - target))
        losses.append(0.5 * masked_mean(error, mask))
    return torch.stack(losses)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of every token's distribution: logits [B, T, V] to [B, T]."""
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)


def adapted_kl_coefficient(
    coefficient: float, kl: float, *, num_responses: int, config: KLConfig
) -> float:
    """The KL coefficient of the next local step (Ziegler et al., 2019, section 2.2).

    Args:
        coefficient: The coefficient in force.
        kl: Mean KL per response just measured, nats.
        num_responses: Responses in the batch. The relative deviation counts up to 20 %, so a
            horizon's worth of responses changes the coefficient by a fifth or so at most.
        config: Controller and its constants; a fixed controller returns `coefficient`.
    """
    if config.controller == "fixed":
        return coefficient
    error = min(max(kl / config.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1.0 + error * num_responses / config.horizon)


def kl_alarm(config: PPOConfig, *, num_steps: int) -> str | None:
    """Returns what to tell the user whose adaptive KL controller cannot act; None otherwise.

    With the largest deviation in each of n local steps the coefficient c ends at c (1 ± 0.2 B / H)ⁿ
    for batches of B responses and horizon H. Told when even that is a change of less than 5 %, with
    the longest horizon that allows it, and of a coefficient of 0, which any factor leaves at 0.

    Args:
        config: Hyperparameters of a local step.
        num_steps: Local steps of a client in the whole run; with 0 there is nothing to tell.
    """
    kl = config.kl
    if kl.controller == "fixed" or num_steps == 0:
        return None
    if kl.coefficient == 0:
        return (
            "the adaptive KL controller is inert: it multiplies ppo.kl.coefficient, which is 0; "
            "start from a positive one, or set ppo.kl.controller to fixed."
        )
    most = MAX_KL_ERROR * config.batch_size
    low, high = ((1 + sign * most / kl.horizon) ** num_steps for sign in (-1, 1))
    if high - 1 >= INERT_KL_CHANGE:
        return None
    horizon = most / ((1 + INERT_KL_CHANGE) ** (1 / num_steps) - 1)
    return (
        f"the adaptive KL controller is inert: with ppo.kl.horizon {kl.horizon:,g} the run's "
        f"{num_steps:,} local steps of {config.batch_size:,} responses take its coefficient from "
        f"{kl.coefficient:g} to {low * kl.coefficient:.4g} or {high * kl.coefficient:.4g} at most; "
        f"a horizon of about {float(f'{horizon:.2g}'):,g} would allow {INERT_KL_CHANGE:.0%}."
    )


LARGE_MISMATCH = 0.1
"""Share of the KL from which on rounding in log-probabilities is not small beside it."""


def mismatch_alarm(
    rows: Sequence[Mapping[str, Any]], config: KLConfig, *, rounds: int = 3
) -> str | None:
    """What to tell the user whose KL is in good part rounding; None while there is nothing.

    Log-probabilities of cached generation and those of a forward pass differ by rounding alone. In
    the KL, whose other half comes from a forward pass, that is noise of mean zero. Told once: in
    the first round where the controller aims at a KL, else after some rounds, by their last KL.

    Args:
        rows: Rows of the log so far, those of the round that just ended included. Of each client
            row "kl" and "logprob_mismatch_per_reply" are read, both in nats per reply.
        config: The KL controller.
        rounds: Rounds to wait for a KL to compare with, where there is no target.
    """
    clients = [row for row in rows if row.get("kind") == "client" and row.get("kl") is not None]
    mismatches = (row.get("logprob_mismatch_per_reply") for row in clients)
    found = [mismatch for mismatch in mismatches if mismatch is not None]
    number = max((row["round"] for row in clients), default=0)
    is_aimed_at = config.controller == "adaptive"
    if not found or number != (1 if is_aimed_at else rounds):
        return None
    kl = config.target
    if not is_aimed_at:
        kl = abs(fmean(row["kl"] for row in clients if row["round"] == number))
    mismatch = fmean(found)
    if mismatch < LARGE_MISMATCH * kl:
        return None
    return (
        f"log-probabilities at generation and in a forward pass differ by {mismatch:.2g} nats per "
        f"reply (root mean square), which is not small beside the KL of {kl:.2g}: set "
        "rollout.logprobs to forward, or policy.dtype to float32."
    )
