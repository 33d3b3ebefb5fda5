"""Direct preference optimisation (arXiv:2305.18290) on pairs that people ranked, by objective.

The loss of a pair depends on the parameters through the log-probabilities of its two replies. Its
gradient is Σ_s ∂loss/∂ℓ_s ∇ℓ_s, with one number per reply; for DPO's own loss ∓β σ(-β Δ). The
gradient of objective j sums the pairs that it ranks, so that all M gradients take one backward pass
(`PerSequenceGradients`). MODPO (arXiv:2310.03708) instead trains on one weighted sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from annotated_types import Interval
from torch.nn.functional import logsigmoid

from firm.alignment.adapters.conditioned import weighted_by_preference
from firm.alignment.advantages import KLConfig
from firm.alignment.estimators.estimator import (
    EstimatorConfig,
    MinibatchGradients,
    Policy,
    register_estimator,
)
from firm.alignment.pair_tokens import PairBatch
from firm.alignment.policy import set_mode
from firm.base.fields import NOT_IN_PAPER, BoundedInt, PositiveFloat, configuration
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
        section="training",
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
        section="training",
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

LossType = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
]


@register_estimator
@configuration(source=NOT_IN_PAPER)
class DPOConfig(EstimatorConfig):
    """Hyperparameters of direct preference optimisation; names and defaults follow TRL's."""

    learns_from: ClassVar[str] = "pairs"
    needs_independent_rows: ClassVar[bool] = True
    shares_prompts: ClassVar[bool] = True

    name: Literal["dpo"] = "dpo"
    """Estimator."""
    batch_size: BoundedInt = 16
    """Pairs per local step, divided evenly among the objectives that a client has pairs of."""
    minibatch_size: BoundedInt = 16
    """Pairs per optimizer step; must divide batch_size."""
    num_epochs: BoundedInt = 1
    """Epochs over each batch."""
    loss_type: LossType = "sigmoid"
    """Loss of a pair, by its name in TRL. sigmoid: DPO; sigmoid_norm: DPO with log-probabilities
    per token; hinge: SLiC (arXiv:2305.10425); ipo: IPO, per token (arXiv:2310.12036); robust: DPO
    corrected for labels that are flipped with probability `label_smoothing` (arXiv:2403.00409);
    exo_pair (arXiv:2402.00856); nca_pair (arXiv:2402.05369); sppo_hard (arXiv:2405.00675);
    apo_zero and apo_down (arXiv:2408.06266)."""
    beta: PositiveFloat = 0.1
    """β: larger values keep the policy closer to the reference; the regularisation τ of ipo."""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """Probability of a flipped label; for robust and exo_pair only."""
    kl: KLConfig = field(default_factory=lambda: KLConfig(controller="fixed"))
    """Not used: `beta` keeps the policy near the reference."""
    reference_free: bool = False
    """Use a uniform reference: the loss depends on the policy's log-probabilities alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        smooths = self.loss_type in ("robust", "exo_pair")
        if self.label_smoothing and not smooths:
            raise ValueError(
                f"label_smoothing must be 0 with loss_type {self.loss_type}, got "
                f"{self.label_smoothing:g}; choose robust, or leave it out."
            )
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError(
                "label_smoothing must be positive with loss_type exo_pair, got 0; set it to 0.001, "
                "for example."
            )
        unused = {
            "kl": KLConfig(controller="fixed"),
            "missing_end_penalty": 0.0,
            "max_approx_kl": EstimatorConfig.max_approx_kl,
        }
        for name, default in unused.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be left out with estimator dpo, which samples no replies, got "
                    f"{getattr(self, name)}; beta keeps the policy near the reference."
                )

    @property
    def compares_replies(self) -> bool:
        """True: the two replies of a pair are compared with each other."""
        return True

    def estimator(
        self,
        policy: Policy,
        *,
        critic: torch.nn.Module | None,
        optimizer: Callable[..., torch.optim.Optimizer],
    ) -> "DPO":
        """Returns a fresh estimator; see `EstimatorConfig`."""
        return DPO(self, policy)


class DPO:
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
        set_mode(policy.model, is_training=True)
        with policy.per_sequence(weights) as per_sequence:
            expand = per_sequence.expand
            with policy.timed("forward"):
                scores = policy.token_scores(policy.forward(sequences, expand=expand), sequences)
                replies = scores.logprobs.masked_fill(~sequences.mask, 0).sum(1)  # [2 b]
            reference = 0 * part.reference if config.reference_free else part.reference
            losses, slopes, margins = pair_losses(
                replies.detach().view(-1, 2), reference, part.num_tokens, config
            )
            preferred = (replies.detach().view(-1, 2) - part.reference)[:, 0]
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
                "preferred_log_ratio": preferred.sum() / minibatch.num_rows,
            },
        )

    def step(self, own: torch.Tensor | None) -> None:
        """Stage 9: does nothing, since only the adapter is trained."""

    def end_batch(self, experience: PairBatch) -> None:
        """Does nothing, since no state is kept."""

    def set_learning_rate(self, factor: float) -> None:
        """Does nothing, since only the adapter has a learning rate."""

    def metrics(self, experience: PairBatch) -> dict[str, Any]:
        """Returns nothing: accuracy and margin belong to minibatches."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns nothing: no state is kept."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing, since no state is kept."""


def pair_losses(
    logprobs: torch.Tensor, reference: torch.Tensor, num_tokens: torch.Tensor, config: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the losses of pairs, their derivatives, and the margins of the implicit rewards.

    Args:
        logprobs: Log-probabilities of the preferred and the other reply, shape [B, 2].
        reference: The same under the reference, shape [B, 2].
        num_tokens: Tokens of the replies, shape [B, 2].
        config: Form of the loss.

    Returns:
        Losses [B]; their derivatives in `logprobs`, [B, 2]; and margins β Δ, [B].
    """
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        ratios = leaf - reference
        losses = _LOSSES[config.loss_type](ratios, num_tokens.clamp(min=1), config)
        (slopes,) = torch.autograd.grad(losses.sum(), leaf)
    ratios = ratios.detach()
    return losses.detach(), slopes, config.beta * (ratios[:, 0] - ratios[:, 1])


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
