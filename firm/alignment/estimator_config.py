"""Configurations of all estimators, each of which is in the module of its name in `estimators`.

They are read without torch, so that methods import what computes with it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Interval

from firm.base.fields import (
    NOT_IN_PAPER,
    BoundedInt,
    Fraction,
    NonNegativeFloat,
    Paper,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.base.registry import Registry

if TYPE_CHECKING:
    import torch

    from firm.alignment.estimators.estimator import Estimator, Policy

MAX_KL_ERROR = 0.2
"""Limit of the adaptive controller on the KL's relative deviation from its target."""


@configuration
class KLConfig:
    """KL penalty, which limits the policy's deviation from the reference."""

    controller: Annotated[Literal["fixed", "adaptive"], Paper("A.1")] = "adaptive"
    """Fixed coefficient, or the proportional controller of Ziegler et al. (2019), Section 2.2."""
    coefficient: Annotated[NonNegativeFloat, NOT_IN_PAPER] = 0.2
    """Coefficient of the KL penalty; the initial one if adaptive."""
    target: Annotated[PositiveFloat, Paper("A.1"), NOT_IN_PAPER] = 0.03
    """Target KL of the adaptive controller, in nats per response, summed over tokens. That it is
    per response is not in the paper."""
    horizon: Annotated[PositiveFloat, NOT_IN_PAPER] = 10_000
    """Horizon of the adaptive controller in responses: a local step changes the coefficient by at
    most a fifth of batch size / horizon. 10,000, TRL's former default, exceeds the paper's run: 16
    rounds of four local steps of 16 responses change the coefficient by at most 2 %."""
    form: Annotated[Literal["k1", "k3"], NOT_IN_PAPER] = "k1"
    """KL estimator. k1: the log-ratio; k3: lower variance, non-negative."""


@configuration
class EstimatorConfig(ABC):
    """Hyperparameters of a local step common to all estimators; defaults follow Appendix A.1.

    Subclasses set the default of `name`, by which configurations select them.
    """

    learns_from: ClassVar[str] = "prompts"
    """Examples of a batch: prompts, to which the policy replies, or pairs of ranked replies."""
    needs_independent_rows: ClassVar[bool] = False
    """True if gradients come from products per row, which rows that interact would falsify."""
    shares_prompts: ClassVar[bool] = False
    """True if batches have several replies to a prompt, and gradients allow for passes that take
    the prompt once: they give `Policy.forward` the `expand` of `Policy.per_sequence`, and that the
    weights."""

    name: str = ""
    """Estimator."""
    batch_size: Annotated[BoundedInt, Paper("A.1", (16,))] = 16
    """Responses per local step, each to a fresh prompt unless the estimator compares several
    responses to the same prompt."""
    minibatch_size: Annotated[BoundedInt, Paper("A.1", (8,))] = 8
    """Responses per optimizer step; must divide batch_size."""
    micro_batch_size: Annotated[PositiveInt | None, NOT_IN_PAPER] = None
    """Responses per forward and backward pass, to limit memory and padding: those of similar length
    share a pass. By default the whole minibatch. Gradients are accumulated over the minibatch,
    which remains one optimizer step."""
    num_epochs: Annotated[BoundedInt, Paper("A.1", (3,))] = 3
    """Epochs over each batch."""
    actor_learning_rate: Annotated[PositiveFloat, Paper("A.1")] = 6e-5
    """Learning rate of the adapter."""
    actor_optimizer: Annotated[Literal["adam", "sgd"], NOT_IN_PAPER] = "adam"
    """Adam, or plain SGD as in Algorithm 1; the paper does not state which of them its experiments
    used."""
    learning_rate_schedule: Annotated[Literal["constant", "linear"], NOT_IN_PAPER] = "constant"
    """Constant, or linear decay to zero over the rounds of the run, independent of a client's
    participation."""
    missing_end_penalty: Annotated[NonNegativeFloat, NOT_IN_PAPER] = 0.0
    """Penalty subtracted from every reward of a response without an end token or stop string."""
    max_gradient_norm: Annotated[PositiveFloat | None, NOT_IN_PAPER] = None
    """Maximum norm of the combined gradient, which is clipped to it."""
    max_approx_kl: Annotated[PositiveFloat | None, NOT_IN_PAPER] = 2.0
    """KL of the update, in nats per token, above which a client skips the rest of its round: the
    policy no longer resembles the one that sampled the batch. null: no limit."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty and its controller."""

    def __post_init__(self) -> None:
        if self.batch_size % self.minibatch_size:
            raise ValueError(
                f"batch_size must be a multiple of minibatch_size, got {self.batch_size} "
                f"and {self.minibatch_size}."
            )
        if self.batch_size % self.replies_per_prompt:
            raise ValueError(
                f"batch_size must be a multiple of the {self.replies_per_prompt} replies to a "
                f"prompt, got {self.batch_size}."
            )
        if self.kl.horizon <= MAX_KL_ERROR * self.batch_size:
            raise ValueError(
                f"kl.horizon must exceed a fifth of batch_size ({self.batch_size}), got "
                f"{self.kl.horizon}: otherwise one step of the controller could flip the penalty's "
                "sign."
            )

    @classmethod
    def forms(cls) -> list[type["EstimatorConfig"]]:
        """Returns the registered configurations of this kind, distinguished by `name`."""
        return [form for _, form in sorted(ESTIMATORS.items()) if issubclass(form, cls)]

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the estimator on model cards."""
        return (self.name.replace("_", "-"),)

    @property
    def sums_rewards(self) -> bool:
        """True if a batch has one advantage, of the weighted sum of the objectives' rewards."""
        return False

    @property
    def replies_per_prompt(self) -> int:
        """Number of replies to a prompt that the estimator compares."""
        return 1

    @property
    def compares_replies(self) -> bool:
        """True if a reply is compared with others to the same prompt, not with a common value."""
        return self.replies_per_prompt > 1

    @property
    def num_prompts(self) -> int:
        """Fresh prompts, or pairs, per local step."""
        return self.batch_size // self.replies_per_prompt

    def new_critic(self, policy: Any, num_objectives: int) -> "torch.nn.Module | None":
        """Returns a new critic, trained by Adam, or None if the estimator has none.

        The policy, with its adapter, may be on the meta device.
        """
        return None

    @abstractmethod
    def estimator(
        self,
        policy: "Policy",
        *,
        critic: "torch.nn.Module | None",
        optimizer: "Callable[..., torch.optim.Optimizer]",
    ) -> "Estimator":
        """Returns a new estimator on the shared policy.

        Args:
            policy: The policy.
            critic: The estimator's own copy of the critic from `new_critic`.
            optimizer: Adam factory, called with parameters and `lr`.
        """


ESTIMATORS: Registry[str, type[EstimatorConfig]] = Registry("estimator")
"""Configurations of all estimators, by name."""

Config = TypeVar("Config", bound=type[EstimatorConfig])


def register_estimator(config: Config) -> Config:
    """Registers an estimator by its configuration; a class decorator.

    Raises:
        ValueError: When the name is taken or missing.
    """
    return ESTIMATORS.add(config.__dataclass_fields__["name"].default, config)


@register_estimator
@configuration
class PPOConfig(EstimatorConfig):
    """Hyperparameters of PPO; defaults follow Appendix A.1."""

    name: Literal["ppo"] = "ppo"
    """Estimator."""
    critic_learning_rate: Annotated[PositiveFloat, Paper("A.1")] = 1e-4
    """Learning rate of the critic."""
    critic: Annotated[Literal["heads", "network"], NOT_IN_PAPER] = "heads"
    """Critic. heads: one linear value head per objective on the policy's last hidden state,
    detached, as T-FIRM's linear critic; network: a separate value network with one output per
    objective."""
    clip_range: Annotated[PositiveFloat, NOT_IN_PAPER] = 0.2
    """Clip range of the probability ratio, 1 ± this."""
    value_clip_range: Annotated[NonNegativeFloat, NOT_IN_PAPER] = 0.2
    """Clip range of new values around the old ones."""
    gamma: Annotated[Fraction, NOT_IN_PAPER] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[Fraction, NOT_IN_PAPER] = 0.95
    """λ of generalised advantage estimation."""
    whiten_rewards: Annotated[bool, NOT_IN_PAPER] = False
    """Scale per-token rewards to unit variance."""
    advantage_scale: Annotated[Literal["by_objective", "shared"], NOT_IN_PAPER] = "by_objective"
    """Scaling of advantages. by_objective: each objective's are whitened separately; shared: all
    are scaled by a common factor, which preserves the relative spread of the rewards (with fixed
    weights: linear scalarisation)."""

    def new_critic(self, policy: Any, num_objectives: int) -> "torch.nn.Module":
        """Returns value heads, or a sequence classifier of the policy's architecture.

        Raises:
            ValueError: When transformers has no sequence classifier of the architecture.
        """
        from firm.alignment.estimators.ppo import new_critic

        return new_critic(self.critic, policy, num_objectives)

    def estimator(
        self,
        policy: "Policy",
        *,
        critic: "torch.nn.Module | None",
        optimizer: "Callable[..., torch.optim.Optimizer]",
    ) -> "Estimator":
        """Returns a fresh estimator; see `EstimatorConfig`."""
        from firm.alignment.estimators.ppo import PPO

        assert critic is not None
        return PPO(self, policy, critic, optimizer)


@register_estimator
@configuration(source=NOT_IN_PAPER)
class CriticFreeConfig(EstimatorConfig):
    """Hyperparameters of critic-free policy gradients."""

    needs_independent_rows: ClassVar[bool] = True
    shares_prompts: ClassVar[bool] = True

    name: Literal["critic_free"] = "critic_free"
    """Estimator."""
    num_replies: Annotated[BoundedInt, Ge(2)] = 4
    """Group size G, the number of replies per prompt; must divide batch_size, which counts
    replies."""
    baseline: Literal["group", "leave_one_out"] = "group"
    """Baseline of a reply's reward: the mean of its group (GRPO, arXiv:2402.03300), or of the other
    replies in the group (RLOO, arXiv:2402.14740); with normalize_then_sum also the standard
    deviation is that of the others, as in NeMo-RL."""
    scale: Literal["group_std", "batch_std", "none"] = "batch_std"
    """Normalisation of advantages: by the standard deviation of the group's rewards (GRPO), by that
    of all advantages in the batch (with sum_then_normalize of all summed rewards, as in TRL), or
    none (RLOO; Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Literal["by_objective", "shared"] = "by_objective"
    """Standard deviation that normalises advantages. by_objective: each objective's own; shared:
    that of the objectives' mean (with equal fixed weights: GRPO on the summed reward)."""
    aggregation: Literal["by_objective", "normalize_then_sum", "sum_then_normalize"] = (
        "by_objective"
    )
    """Advantages under known weights, such as `strategy.weights` of fedavg. by_objective: each
    objective has its own. The other two are TRL's `multi_objective_aggregation` with
    `reward_weights` of sum 1. normalize_then_sum: GDPO (arXiv:2601.05242), each reward normalised
    in its group, their weighted sum, and that normalised over the batch; sum_then_normalize: GRPO
    on the weighted sum, by `scale`. Where firm solves weights per minibatch, each objective has the
    advantages that normalize_then_sum gives it alone."""
    whiten_over: Literal["replies", "tokens"] = "replies"
    """Units over which normalize_then_sum normalises the sum: replies, as in TRL and NeMo-RL, or
    their tokens, as in verl, where long replies count more."""
    zero_variance: Literal["keep", "leave_out"] = "keep"
    """Groups whose rewards of an objective are equal. keep: their replies teach the objective the
    KL penalty alone, and count in deviations and means; leave_out: they count as replies to which
    the reward does not apply, and a minibatch without other replies leaves the objective out of the
    weights, where its zero gradient would take nearly all. The share is logged either way."""
    advantages: str = ""
    """Function of yours that computes the advantages, as "module:function" or "file.py:function":
    called by keyword with rewards [M, B], NaN where they do not apply, and the advantages [M, B] by
    the settings here, it returns those to use, [M, B]. It may also take prompts, lengths [B] in
    tokens, penalty [B], the KL penalty, and num_replies, of each prompt, which are adjacent."""
    std_floor: NonNegativeFloat = 1e-4
    """Constant added to standard deviations. If rewards saturate, a larger value avoids amplifying
    tiny differences."""
    num_epochs: BoundedInt = 1
    """Epochs over each batch."""
    ratio: Literal["auto", "cispo", "ppo", "none"] = "auto"
    """Importance weighting of off-policy tokens. cispo: by the probability ratio, capped at
    `ratio_cap` and detached (CISPO, arXiv:2506.13585); ppo: the clipped surrogate, with a second
    backward pass; none: no weighting. auto: cispo in a single epoch, ppo in several, since nothing
    in cispo stops a policy that has left its batch, and long runs then run away."""
    ratio_level: Literal["token", "reply"] = "token"
    """Level of the ratios: per token, or per reply (RLOO)."""
    ratio_cap: PositiveFloat = 2.0
    """Largest probability ratio of CISPO."""
    clip_range: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    """Clip range of PPO's ratio, 1 ± this."""
    loss_mean: Literal["replies", "tokens", "constant"] = "tokens"
    """Reduction of the loss. replies: mean over replies of their means over tokens (GRPO); tokens:
    mean over all tokens of the minibatch (DAPO, arXiv:2503.14476); constant: sum over tokens
    divided by the number of replies and max_new_tokens (Dr. GRPO)."""
    kl_in: Literal["reward", "advantage"] = "reward"
    """Quantity from which the KL penalty is subtracted. reward: every reward, before advantages are
    computed and normalised; advantage: every advantage, with a leave-one-out baseline and
    unscaled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_gdpo, is_default = self.aggregation == "normalize_then_sum", not self.sums_rewards
        others = is_gdpo and self.baseline == "leave_one_out"
        for key, is_wrong, needed in (
            ("scale", is_gdpo and self.scale != "batch_std", "batch_std, its last normalisation,"),
            ("advantage_scale", not is_default and self.advantage_scale == "shared", "left out"),
            ("whiten_over", not is_gdpo and self.whiten_over == "tokens", "replies"),
            ("num_replies", others and self.num_replies < 3, "at least 3"),
            ("advantages", not is_default and self.advantages, "left out"),
        ):
            if is_wrong:
                why = " and baseline leave_one_out" if key == "num_replies" else ""
                raise ValueError(
                    f"{key} must be {needed} with aggregation {self.aggregation}{why}, got "
                    f"{getattr(self, key)}."
                )

    @property
    def sums_rewards(self) -> bool:
        """True unless each objective has its own advantages."""
        return self.aggregation != "by_objective"

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags on model cards: also that of the method whose baseline it has."""
        if self.aggregation == "normalize_then_sum":
            return (*super().tags, "gdpo")
        return (*super().tags, "grpo" if self.baseline == "group" else "rloo")

    @property
    def ratio_form(self) -> str:
        """The form of the ratio: that of `ratio`, with auto resolved."""
        if self.ratio != "auto":
            return self.ratio
        return "cispo" if self.num_epochs == 1 else "ppo"

    @property
    def replies_per_prompt(self) -> int:
        """Group size, G."""
        return self.num_replies

    def estimator(self, policy: "Policy", **_: Any) -> "Estimator":
        """Returns a fresh estimator; see `EstimatorConfig`."""
        from firm.alignment.estimators.critic_free import CriticFree

        return CriticFree(self, policy)


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

    def estimator(self, policy: "Policy", **_: Any) -> "Estimator":
        """Returns a fresh estimator; see `EstimatorConfig`."""
        from firm.alignment.estimators.dpo import DPO

        return DPO(self, policy)
