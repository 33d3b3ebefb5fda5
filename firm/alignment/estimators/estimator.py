"""Interface of estimators, which compute M losses and their gradients from examples.

Each estimator has its own file, with a configuration (``EstimatorConfig``) that builds it and the
estimator itself (``Estimator``), of which every learner has an instance.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

import torch

from firm.alignment.advantages import MAX_KL_ERROR, KLConfig, masked_mean
from firm.alignment.generation import RolloutConfig
from firm.alignment.sequences import (
    BY_OBJECTIVE,
    SINGLE_PROCESS,
    Examples,
    Expand,
    Rollouts,
    Rows,
    Sequences,
    SingleProcess,
    TokenScores,
    by_chunks,
    forward,
    forward_prompts_once,
    set_preferences,
    token_scores,
)
from firm.base.fields import (
    NOT_IN_PAPER,
    BoundedInt,
    NonNegativeFloat,
    Paper,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.base.quantities import Quantity, register
from firm.base.registry import Registry
from firm.federation.engines.processes import Team
from firm.gradients.jacobian import jacobian
from firm.gradients.per_sequence import BackwardPasses, PerSequenceGradients, taken_rows


@dataclass(frozen=True)
class Experience(Examples):
    """A batch of scored rollouts; estimators add the inputs of their losses."""

    rollouts: Rollouts
    scores: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Raw scores of the reward functions, [M, B]."""
    rewards: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Calibrated scores minus the penalty of unfinished replies, [M, B]."""

    @property
    def is_judged(self) -> torch.Tensor:
        """True if the reply has a score, bool [M, B]."""
        return ~self.scores.isnan()

    @property
    def preferences(self) -> torch.Tensor | None:
        """Preferences at which the replies were sampled, [B, M]."""
        return self.rollouts.queries.preferences

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of the prompt and the longest reply to it, [B]."""
        queries, num_tokens = self.rollouts.queries, self.rollouts.num_tokens
        first, index = queries.distinct()
        longest = num_tokens.new_zeros(len(first)).scatter_reduce(0, index, num_tokens, "amax")
        return queries.lengths + longest[index]

    def trimmed(self) -> Self:
        """Returns the replies without columns that are padding in all prompts."""
        return replace(self, rollouts=self.rollouts.trimmed())


@dataclass(frozen=True)
class MinibatchGradients:
    """Contribution of some rows to a minibatch's gradients; the parts sum to the minibatch's."""

    jacobian: torch.Tensor
    """Gradients of the M losses in the adapter's parameters, [M, d], or of their weighted sum,
    [1, d]."""
    losses: torch.Tensor
    """Losses, detached, [M]."""
    metrics: Mapping[str, torch.Tensor]
    """Metrics to log, scalars or [M]."""
    own: torch.Tensor | None = None
    """Input of the estimator's own step, such as the critic's gradient."""

    def add_(self, other: "MinibatchGradients") -> None:
        """Adds another part in place."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.add_(theirs)

    def summed(self, team: Team | SingleProcess) -> "MinibatchGradients":
        """Returns the sum over the members of a team."""
        return MinibatchGradients(
            team.sum(self.jacobian),
            team.sum(self.losses),
            {name: team.sum(figure) for name, figure in self.metrics.items()},
            None if self.own is None else team.sum(self.own),
        )

    def _tensors(self) -> list[torch.Tensor]:
        own = () if self.own is None else (self.own,)
        return [self.jacobian, self.losses, *self.metrics.values(), *own]


LOG_RATIO = "log_ratio_mean_square"
"""Name of the metric that `mean_square_log_ratio` computes."""
APPROX_KL = "approx_kl"
"""Name of the metric that `approx_kl` computes."""

register(
    Quantity(
        APPROX_KL,
        "KL of the update",
        "nats per token",
        "KL of the policy that sampled a batch from the one that it has become, at the minibatch "
        "where it was largest.",
        section="training",
        axis={},
    )
)


@torch.no_grad()
def mean_square_log_ratio(logprobs: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """Returns the mean square log-ratio over tokens, of log-probabilities [B, T].

    Before the first update it is zero up to rounding and the adapter's dropout.
    """
    return masked_mean((logprobs - rollouts.logprobs) ** 2, rollouts.mask)


@torch.no_grad()
def approx_kl(logprobs: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """Returns an estimate of KL(π_old ‖ π) per token, of log-probabilities [B, T] under π.

    It is the mean negative log-ratio of tokens that π_old sampled. The mean square log-ratio, by
    which others estimate it, is large as soon as a single token has become very unlikely.
    """
    return masked_mean(rollouts.logprobs - logprobs, rollouts.mask)


@dataclass(frozen=True)
class Policy:
    """The policy as used by estimators: forward passes, and the adapter's parameters."""

    model: Any
    """Language model with its adapter."""
    parameters: Sequence[torch.nn.Parameter]
    """The adapter's parameters, d entries in total."""
    config: RolloutConfig
    """Configuration with the temperature and the rows per forward pass."""
    is_linear: bool = True
    """True if the adapter's parameters are all matrices of linear layers."""
    team: Team | SingleProcess = SINGLE_PROCESS
    """Processes that share the rows of a batch."""
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Context manager that records the time spent in a stage."""
    prompts_once: bool = False
    """Pass equal prompts through the policy once (`forward_prompts_once`), in all passes: rounding
    in lower precision than float32 depends on the way, and ratios compare two passes."""

    def forward(self, rows: Sequences, model: Any = None, *, expand: Expand = taken_rows) -> Any:
        """Returns the output of the policy or another model, with its hidden states.

        `expand` copies what replies to equal prompts share, if they do.
        """
        if self.prompts_once and model is None:
            return forward_prompts_once(self.model, rows, expand)
        set_preferences(self.model, rows.queries.preferences)
        return forward(model or self.model, rows.query_responses, rows.attention_mask)

    def token_scores(self, output: Any, rows: Sequences) -> TokenScores:
        """Returns log-probabilities and entropies of the responses' tokens, each [b, T]."""
        return token_scores(output, rows, self.config.temperature)

    def importance_weights(
        self, rollouts: Rollouts, *, by_reply: bool = False
    ) -> torch.Tensor | None:
        """Returns weights by which to correct for sampling from a copy of the policy.

        They are [B, T], or by reply [B, 1]; None if the policy's own passes sampled, or the engine
        has no log-probabilities.
        """
        if rollouts.mismatch is None:
            return None
        log_ratios = -rollouts.mismatch  # 0 at padding
        if by_reply:
            log_ratios = log_ratios.sum(1, keepdim=True)
        return self.config.engine.importance_weights(log_ratios)

    def by_chunks(self, function: Callable[[Any], torch.Tensor], rows: Rows) -> torch.Tensor:
        """Applies a function to rows in chunks that fit into memory; returns values [B, ...]."""
        return by_chunks(function, rows, size=self.config.forward_batch_size, team=self.team)

    def jacobian(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of M losses in the adapter's parameters, shape [M, d]."""
        return jacobian(losses, self.parameters)

    def per_sequence(
        self, weights: torch.Tensor | None = None
    ) -> PerSequenceGradients | BackwardPasses:
        """Returns a context for computing M gradients of one forward pass.

        Takes a single backward pass, unless the adapter has parameters other than matrices. With
        weights, gradients are not separated by row, since `jacobian` of the weighted sum is wanted.
        """
        if not self.is_linear or weights is not None:
            return BackwardPasses(self.parameters)
        return PerSequenceGradients(self.model, self.parameters)


class Estimator(Protocol):
    """Computes M losses and their gradients from examples, for one learner.

    A class that derives from it needs only `experience` and `gradients`: it then has no parameters
    or state besides the adapter, and logs nothing else.
    """

    @property
    @abstractmethod
    def experience(self) -> Callable[..., Any]:
        """Stage 4: returns a batch with all inputs of its losses, a record of `Examples`.

        Estimators that learn from prompts receive rollouts, whose replies to the same prompt are
        adjacent, and their scores and rewards, each [M, B]; those that learn from pairs receive a
        `PairBatch`.
        """
        ...

    @abstractmethod
    def gradients(
        self, part: Any, minibatch: Any, weights: torch.Tensor | None = None
    ) -> MinibatchGradients:
        """Stages 5 and 6: returns the contribution of some rows to a minibatch's gradients.

        Losses are means over the whole minibatch; `part` and `minibatch` are results of
        `experience`. With weights [M] the Jacobian has one row, the gradient of the weighted sum of
        losses. Estimators that support conditioned policies also take `preferences` [K, M], by
        which the rows are separated (`weighted_by_preference`).
        """
        ...

    def step(self, own: torch.Tensor | None) -> None:
        """Stage 9: steps the estimator's own parameters along `MinibatchGradients.own`."""
        ...

    def end_batch(self, experience: Any) -> None:
        """Ends a local step."""
        ...

    def set_learning_rate(self, factor: float) -> None:
        """Sets the estimator's own learning rate, relative to the configured one."""
        ...

    def metrics(self, experience: Any) -> dict[str, float]:
        """Returns metrics of a batch, which are registered as quantities."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns all state that training changes, for a checkpoint; may share memory."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state, of which this estimator takes ownership."""
        ...


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

    def new_critic(self, policy: Any, num_objectives: int) -> torch.nn.Module | None:
        """Returns a new critic, trained by Adam, or None if the estimator has none.

        The policy, with its adapter, may be on the meta device.
        """
        return None

    @abstractmethod
    def estimator(
        self,
        policy: Policy,
        *,
        critic: torch.nn.Module | None,
        optimizer: Callable[..., torch.optim.Optimizer],
    ) -> Estimator:
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
