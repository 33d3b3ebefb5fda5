"""Direct preference optimisation (arXiv:2305.18290) on pairs that people ranked, by objective.

The loss of a pair depends on the parameters through the log-probabilities of its two replies. Its
gradient is Σ_s ∂loss/∂ℓ_s ∇ℓ_s, with one number per reply; for DPO's own loss ∓β σ(-β Δ). The
gradient of objective j sums the pairs that it ranks, so that all M gradients take one backward pass
(`PerSequenceGradients`). MODPO (arXiv:2310.03708) instead trains on one weighted sum.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch
from torch.nn.functional import logsigmoid

from firm.alignment.adapters.conditioned import weighted_by_preference
from firm.alignment.estimator_config import DPOConfig, LossType
from firm.alignment.estimators.estimator import Estimator, MinibatchGradients, Policy
from firm.alignment.pair_tokens import PairBatch
from firm.base.quantities import PERCENT, Quantity, register
from firm.base.schema import ByObjective, Finite, Share

register(
    Quantity(
        "pair_accuracy",
        "Pairs ranked as by people, {}",
        "share of pairs",
        "Pairs whose preferred reply has the larger implicit reward, β log(π / π_ref): those of "
        "the clients' minibatches, and held-out ones.",
        type=ByObjective[Share | None],
        section="scores",
        evaluated="rewards",
        axis=PERCENT,
        reference=0.5,
    ),
    Quantity(
        "pair_margin",
        "Margin of the implicit rewards, {}",
        "β nats",
        "Implicit reward of the preferred reply minus that of the other one.",
        type=ByObjective[Finite | None],
        section="scores",
        evaluated="scores",
        axis={},
    ),
    Quantity(
        "preferred_log_ratio",
        "Preferred replies against the reference",
        "nats per reply",
        "log(π / π_ref) of the preferred replies. Far below zero, the policy has lost those, too.",
        section="training",
        axis={},
    ),
)


class DPO(Estimator):
    """One learner's estimator, without a state."""

    def __init__(self, config: DPOConfig, policy: Policy) -> None:
        self.config = config
        # people did not rank tempered replies
        self._policy = replace(policy, config=replace(policy.config, temperature=1.0))

    def experience(self, pairs: PairBatch) -> PairBatch:
        """Stages 1 to 4: returns the pairs, which are all that the losses need."""
        return pairs

    def gradients(
        self,
        part: PairBatch,
        minibatch: PairBatch,
        weights: torch.Tensor | None = None,
        *,
        preferences: torch.Tensor | None = None,
    ) -> MinibatchGradients:
        """Stages 5 and 6: M losses of some pairs and their Jacobian, in one backward pass.

        The loss of an objective is the mean over the minibatch's pairs that it ranks. Pairs with
        preferences are weighted by them (`weighted_by_preference`).
        """
        policy, config, sequences = self._policy, self.config, part.sequences
        counts = minibatch.ranked.sum(1, keepdim=True).clamp(min=1)
        with policy.per_sequence(weights) as per_sequence:
            expand = per_sequence.expand
            with policy.timed("forward"):
                scores = policy.token_scores(policy.forward(sequences, expand=expand), sequences)
                replies = scores.logprobs.masked_fill(~sequences.mask, 0).sum(1)  # [2 b]
            own = replies.detach().view(-1, 2)
            reference = 0 * part.reference if config.reference_free else part.reference
            losses, slopes = pair_losses(own, reference, part.num_tokens, config)
            ratios = own - part.reference
            margins = config.beta * _difference(ratios)
            at_own = wanted = shares = (part.ranked / counts).to(losses)  # [M, b]
            if (asked := part.preferences) is not None:
                at_own = weighted_by_preference(shares, asked)
                wanted = weighted_by_preference(shares, asked, preferences)
            values = at_own @ losses  # [M]
            of_replies = slopes.flatten() * replies  # with the slopes of their pairs' losses
            pair = torch.arange(len(losses), device=losses.device).repeat_interleave(2)
            with policy.timed("backward"):
                jacobian = (
                    per_sequence.jacobian(of_replies, wanted, groups=pair)
                    if weights is None
                    else policy.jacobian((weights @ at_own)[None, pair] @ of_replies)
                )
        return MinibatchGradients(
            jacobian,
            values,
            {
                "pair_accuracy": shares
                @ ((margins.sign() + 1) / 2).to(shares),  # a tie counts half
                "pair_margin": shares @ margins,
                "preferred_log_ratio": ratios[:, 0].sum() / minibatch.num_rows,
            },
        )


def pair_losses(
    logprobs: torch.Tensor, reference: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses of pairs, [B], and their derivatives in `logprobs`, [B, 2].

    Args:
        logprobs: Log-probabilities of the preferred and the other reply, shape [B, 2].
        reference: The same under the reference, shape [B, 2].
        num_tokens: Tokens of the replies, shape [B, 2].
        config: Form of the loss.
    """
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        ratios = leaf - reference
        losses = _LOSSES[config.loss_type](ratios, num_tokens.clamp(min=1), config)
        (slopes,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), slopes


def _difference(ratios: torch.Tensor) -> torch.Tensor:
    return ratios[:, 0] - ratios[:, 1]


def _sigmoid(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    """Eq. (7) of Rafailov et al. (2023), arXiv:2305.18290."""
    return -logsigmoid(config.beta * _difference(ratios))


def _sigmoid_norm(
    ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig
) -> torch.Tensor:
    return -logsigmoid(config.beta * _difference(ratios / num_tokens))


def _hinge(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    return torch.relu(1 - config.beta * _difference(ratios))


def _ipo(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    """Eq. (17) of Azar et al. (2023), arXiv:2310.12036; as in TRL, on means over tokens."""
    return (_difference(ratios / num_tokens) - 1 / (2 * config.beta)) ** 2


def _robust(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    margin, flipped = config.beta * _difference(ratios), config.label_smoothing
    mixed = (1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)
    return -mixed / (1 - 2 * flipped)


def _exo_pair(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    """Eq. (16) of Ji et al. (2024), arXiv:2402.00856."""
    signed = torch.stack((ratios[:, 0] - ratios[:, 1], ratios[:, 1] - ratios[:, 0]), dim=1)
    wanted = signed.new_tensor([1 - config.label_smoothing, config.label_smoothing])
    own = logsigmoid(config.beta * signed)
    return (own.exp() * (own - wanted.log())).sum(1)


def _nca_pair(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    rewards = config.beta * ratios
    return -logsigmoid(rewards[:, 0]) - 0.5 * logsigmoid(-rewards).sum(1)


def _sppo_hard(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    target = ratios.new_tensor([0.5, -0.5]) / config.beta
    return (ratios - target).square().sum(1)


def _apo_zero(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    chosen, rejected = torch.sigmoid(config.beta * ratios).unbind(1)
    return 1 - chosen + rejected


def _apo_down(ratios: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig) -> torch.Tensor:
    chosen = torch.sigmoid(config.beta * ratios[:, 0])
    return chosen + 1 - torch.sigmoid(config.beta * _difference(ratios))


_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, DPOConfig], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
assert set(_LOSSES) == set(get_args(LossType))
