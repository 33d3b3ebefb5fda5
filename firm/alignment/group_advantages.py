"""Stage 4 without a critic: advantages of replies relative to those of their group, [M, B].

The G replies to a prompt are adjacent. Each objective has advantages of its own, or a batch has
those of the objectives' weighted sum.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from firm.alignment.estimator_config import CriticFreeConfig
from firm.base.devices import widened
from firm.base.user_code import user_code


def in_groups(values: torch.Tensor, num_replies: int) -> torch.Tensor:
    """Groups values of replies [M, B] by prompt, to [M, B / G, G]."""
    return values.unflatten(1, (-1, num_replies))


def is_flat(groups: torch.Tensor) -> torch.Tensor:
    """Returns a mask of groups [M, B / G, G] with equal values, [M, B / G, 1]; ignores NaN."""
    largest = groups.nan_to_num(nan=-math.inf).amax(2, keepdim=True)
    return largest == groups.nan_to_num(nan=math.inf).amin(2, keepdim=True)


def counted(rewards: torch.Tensor, config: CriticFreeConfig) -> torch.Tensor:
    """Returns a mask of rewards [M, B] that count: not NaN nor, if left out, of a flat group."""
    is_counted = ~rewards.isnan()
    if config.zero_variance == "leave_out":
        groups = in_groups(rewards, config.num_replies)
        is_counted &= ~is_flat(groups).expand_as(groups).flatten(1)
    return is_counted


def group_advantages(
    rewards: torch.Tensor,
    penalty: torch.Tensor,
    config: CriticFreeConfig,
    left_out: torch.Tensor | None = None,
    scored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns group-relative advantages of replies, shape [M, B].

    For the rewards r of the G replies of a group that are not left out, and the standard deviation
    s (unbiased) selected by `config.scale`, the advantage is (r - mean of r) / (s +
    `config.std_floor`); with the leave-one-out baseline it is multiplied by G / (G - 1). It is zero
    in a group with equal rewards.

    Args:
        rewards: Rewards of the replies, with replies to the same prompt adjacent, shape [M, B].
        penalty: KL penalty of each reply, shape [B].
        config: Baseline, normalisation, and where the penalty is subtracted.
        left_out: Replies without an advantage, which count neither in means and deviations nor in
            the mean of the loss, bool [M, B].
        scored: Indices of the objectives that share a scale; None: all.
    """
    in_reward = config.kl_in == "reward"
    groups = in_groups(widened(rewards - penalty if in_reward else rewards), config.num_replies)
    counts = torch.ones_like(rewards) if left_out is None else ~left_out
    counts = in_groups(widened(counts), config.num_replies)  # [M, P, G]
    size = counts.sum(2, keepdim=True)  # [M, P, 1]
    centred = (groups - (groups * counts).sum(2, keepdim=True) / size.clamp(min=1)) * counts
    centred = centred.masked_fill(is_flat(groups), 0)
    spread = centred
    if config.advantage_scale == "shared":
        rows = slice(None) if scored is None else scored
        spread, counts = centred[rows].mean(0, keepdim=True), counts[rows].amax(0, keepdim=True)
    dims = 2 if config.scale == "group_std" else (1, 2)
    degrees = (counts.sum(dims, keepdim=True) - 1).clamp(min=1)
    variance = spread.square().sum(dims, keepdim=True) / degrees
    advantages = centred
    if config.baseline == "leave_one_out":
        advantages = centred * (size / (size - 1).clamp(min=1))
    if config.scale != "none":
        deviation = variance.sqrt() + config.std_floor
        advantages = advantages / deviation.clamp(min=torch.finfo(deviation.dtype).tiny)
    advantages = advantages.flatten(1)
    if not in_reward:
        advantages = advantages - centred_penalty(penalty, config)
    if left_out is not None:
        num_counted = (~left_out).sum(1, keepdim=True).clamp(min=1)
        advantages = advantages.masked_fill(left_out, 0) * (rewards.size(1) / num_counted)
    return advantages.to(rewards.dtype)


def centred_penalty(penalty: torch.Tensor, config: CriticFreeConfig) -> torch.Tensor:
    """Returns KL penalties [B] minus the mean of the others in their group, float64 [1, B]."""
    groups = in_groups(widened(penalty)[None], config.num_replies)
    bessel = config.num_replies / (config.num_replies - 1)
    return ((groups - groups.mean(2, keepdim=True)) * bessel).flatten(1)


def sum_advantages(
    rewards: torch.Tensor,
    weights: torch.Tensor,
    config: CriticFreeConfig,
    *,
    num_tokens: torch.Tensor,
) -> torch.Tensor:
    """Returns terms a_jb of the advantages of a weighted sum, A_b = Σ_j w_j a_jb; shape [M, B].

    A missing reward adds nothing to its reply's sum. Replies without any reward of an objective
    with a weight above 0 are left out, as in TRL, and have no advantage.

    Args:
        rewards: Rewards with replies to the same prompt adjacent, NaN where missing, [M, B].
        weights: Weights of the objectives, non-negative, [M].
        config: Order of sum and normalisation, baseline and scale.
        num_tokens: Tokens of each reply, [B].
    """
    groups = in_groups(rewards, config.num_replies)  # [M, P, G]
    has_reward = ~groups.isnan()
    is_scored = (has_reward & (weights > 0)[:, None, None]).any(0)  # [P, G]
    if config.aggregation == "normalize_then_sum":
        terms = _normalized(groups, config).masked_fill(~is_scored, 0)
        units = widened(is_scored)
        if config.whiten_over == "tokens":
            units = units * num_tokens.to(units).view_as(units)
        count = units.sum()
        terms = terms - (terms * units).sum((1, 2), keepdim=True) / count
        total = torch.einsum("m,mpg->pg", weights, terms)
        variance = (total.square() * units).sum() / (count - 1)
    else:
        rows = groups.masked_fill(~has_reward, 0)
        units = widened(is_scored)
        count = units.sum(1, keepdim=True)  # [P, 1]
        terms = rows - (rows * units).sum(2, keepdim=True) / count
        total = torch.einsum("m,mpg->pg", weights, terms)
        if config.scale == "group_std":
            variance = (total.square() * units).sum(1, keepdim=True) / (count - 1)
        else:
            summed = torch.einsum("m,mpg->pg", weights, rows)
            mean = (summed * units).sum() / units.sum()
            variance = ((summed - mean).square() * units).sum() / (units.sum() - 1)
        if config.baseline == "leave_one_out":
            terms = terms * count / (count - 1)
        if config.scale == "none":
            variance = torch.ones_like(variance)
    deviation = variance.sqrt() + (0 if config.scale == "none" else config.std_floor)
    terms = terms / deviation.clamp(min=torch.finfo(deviation.dtype).tiny)
    # too few replies to compare have no deviation, and no advantage
    return terms.masked_fill(~is_scored, 0).nan_to_num(nan=0.0).flatten(1)


def _normalized(groups: torch.Tensor, config: CriticFreeConfig) -> torch.Tensor:
    """Returns rewards [M, P, G] normalised in their groups, 0 where they are missing."""
    has_reward = ~groups.isnan()
    rows = groups.masked_fill(~has_reward, 0)
    count = widened(has_reward.sum(2, keepdim=True))
    mean = rows.sum(2, keepdim=True) / count
    centred = (rows - mean).masked_fill(~has_reward | is_flat(groups), 0)
    squares = centred.square().sum(2, keepdim=True)
    if config.baseline == "leave_one_out":
        # the others' mean lies 1/(n - 1) of the reward's own deviation on the other side
        others = squares - centred.square() * count / (count - 1)
        spread = others.clamp(min=0) / (count - 2)
        spread = spread.masked_fill(spread <= 1e-12 * squares, 0)  # rounding errors of equal values
        centred = centred * count / (count - 1)
        # where the others are equal there is no deviation to divide by, as in NeMo-RL
        deviation = torch.where(spread > 0, spread.sqrt() + config.std_floor, 1.0)
    else:
        deviation = (squares / (count - 1)).sqrt() + config.std_floor
    deviation = deviation.clamp(min=torch.finfo(deviation.dtype).tiny)
    return (centred / deviation).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class RewardSums:
    """Rewards of a whole batch, of which advantages of any weighted sum are computed."""

    rewards: torch.Tensor
    """Rewards, NaN where they do not apply, [M, B]."""
    penalty: torch.Tensor
    """KL penalty of each reply, [B]."""
    num_tokens: torch.Tensor
    """Tokens of each reply, [B]."""
    config: CriticFreeConfig

    def terms(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns terms a_jb with Σ_j w_j a_jb = A_b, the advantages of the sum; [M, B]."""
        config, in_reward = self.config, self.config.kl_in == "reward"
        rewards = widened(self.rewards) - (self.penalty if in_reward else 0)
        terms = sum_advantages(rewards, weights.to(rewards), config, num_tokens=self.num_tokens)
        return terms if in_reward else terms - centred_penalty(self.penalty, config)

    def alone(self) -> torch.Tensor:
        """Returns the advantages of each objective by itself, [M, B]."""
        one = self.rewards.new_ones(1)
        rows = [replace(self, rewards=row[None]).terms(one) for row in self.rewards]
        return torch.cat(rows).to(self.rewards)


def own_advantages(
    function: Callable[..., Any],
    name: str,
    *,
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    """Returns the advantages that a user's function computes, [M, B].

    Args:
        function: Takes any of the other arguments by keyword.
        name: Its name in the configuration, for messages.
        rewards: Rewards, NaN where they do not apply, [M, B].
        advantages: Advantages by the estimator's settings, [M, B].
        others: Further arguments of the function.

    Raises:
        ValueError: The function fails, or does not return M rows of B finite numbers.
    """
    given = {"rewards": rewards, "advantages": advantages, **others}
    key, expected = f"estimator.advantages {name}", list(advantages.shape)
    with user_code(key):
        taken = inspect.signature(function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        own = {each: value for each, value in given.items() if takes_all or each in taken}
        result = torch.as_tensor(function(**own)).to(advantages)
    if list(result.shape) != expected:
        raise ValueError(
            f"{key} returned shape {list(result.shape)}: return a tensor of shape {expected}, an "
            "advantage of each objective and reply."
        )
    if not result.isfinite().all():
        j, b = (~result.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{key} returned {result[j, b].item()} for objective {j} and reply {b}: return finite "
            "numbers, and 0 where a reward is NaN."
        )
    return result
