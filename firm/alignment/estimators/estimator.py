"""The interface of estimators, which turn scored replies into M losses and their gradients.

Each file is one estimator: a configuration (``EstimatorConfig``) that builds it, and the estimator
itself (``Estimator``), with one instance per learner.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import torch

from firm.alignment.advantages import MAX_KL_ERROR, KLConfig, masked_mean
from firm.alignment.generation import RolloutConfig
from firm.alignment.sequences import (
    ALONE,
    BY_OBJECTIVE,
    Alone,
    Rollouts,
    Rows,
    Sequences,
    by_chunks,
    forward,
    response_logits,
    set_preferences,
)
from firm.federation.engines.processes import Team
from firm.fields import (
    NOT_IN_PAPER,
    BoundedInt,
    NonNegativeFloat,
    Paper,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.gradients.jacobian import jacobian
from firm.gradients.per_sequence import BackwardPasses, PerSequenceGradients
from firm.registry import Registry


@dataclass(frozen=True)
class Experience(Rows):
    """One batch of scored rollouts; estimators add the inputs of their losses."""

    rollouts: Rollouts
    scores: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """As the reward models gave them, [M, B]."""
    rewards: torch.Tensor = field(metadata=BY_OBJECTIVE)
    """Calibrated scores, less the penalty of replies without an end, [M, B]."""


@dataclass(frozen=True)
class MinibatchGradients:
    """Contribution of some rows to a minibatch's gradients; all parts sum to the minibatch's."""

    jacobian: torch.Tensor
    """Gradients of the M losses in the adapter's parameters, [M, d], or of their weighted sum,
    [1, d]."""
    losses: torch.Tensor
    """Detached, [M]."""
    metrics: Mapping[str, torch.Tensor]
    """Figures to log, scalars or [M]."""
    own: torch.Tensor | None = None
    """What the estimator's own step needs, such as the gradient of a critic."""

    def add_(self, other: "MinibatchGradients") -> None:
        """Adds another part's, in place."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.add_(theirs)

    def summed(self, team: Team | Alone) -> "MinibatchGradients":
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
"""Name of the figure of a minibatch that `mean_square_log_ratio` gives."""


@torch.no_grad()
def mean_square_log_ratio(logprobs: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
    """Returns the mean square over tokens of log-probabilities [B, T] less those at sampling time.

    As long as the policy is unchanged, it is zero up to rounding and the adapter's dropout.
    """
    return masked_mean((logprobs - rollouts.logprobs) ** 2, rollouts.mask)


@dataclass(frozen=True)
class Policy:
    """The policy as an estimator uses it: forward passes, and the parameters of its adapter."""

    model: Any
    """With its adapter."""
    parameters: Sequence[torch.nn.Parameter]
    """The adapter's, d entries together."""
    config: RolloutConfig
    """Temperature, and rows of a forward pass."""
    is_linear: bool = True
    """Whether the adapter's parameters are all matrices of linear layers."""
    team: Team | Alone = ALONE
    """Processes that divide the rows of a batch."""
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Opens a context whose seconds count for a stage."""

    def forward(self, rows: Sequences, model: Any = None) -> Any:
        """Returns the output of the policy, or of another model, with its hidden states."""
        set_preferences(self.model, rows.queries.preferences)
        return forward(model or self.model, rows.query_responses, rows.attention_mask)

    def logits(self, output: Any, rows: Sequences) -> torch.Tensor:
        """Returns the tempered logits of the responses, shape [b, T, V]."""
        return response_logits(output.logits, rows.context_length, self.config.temperature)

    def by_chunks(self, function: Callable[[Any], torch.Tensor], rows: Rows) -> torch.Tensor:
        """Returns a function's values for rows, shape [B, ...], in chunks that fit the memory."""
        return by_chunks(function, rows, size=self.config.forward_batch_size, team=self.team)

    def jacobian(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of M losses in the adapter's parameters, shape [M, d]."""
        return jacobian(losses, self.parameters)

    def per_sequence(self) -> PerSequenceGradients | BackwardPasses:
        """Returns a context for taking M gradients of one forward pass.

        One backward pass gives them all, unless the kind of adapter has parameters other than
        matrices.
        """
        if not self.is_linear:
            return BackwardPasses(self.parameters)
        return PerSequenceGradients(self.model, self.parameters)


class Estimator(Protocol):
    """Turns scored replies into M losses and their gradients, for one learner."""

    def experience(
        self, rollouts: Rollouts, scores: torch.Tensor, rewards: torch.Tensor
    ) -> Experience:
        """Stage 4: returns a batch with everything that its losses need.

        Of the B replies, those to one prompt are adjacent; scores and rewards are [M, B].
        """
        ...

    def gradients(
        self, part: Any, minibatch: Any, weights: torch.Tensor | None = None
    ) -> MinibatchGradients:
        """Stages 5 and 6: returns the contribution of some rows to a minibatch; takes no step.

        Losses are means over the whole minibatch; both are of the type that `experience` returns.
        With weights [M] the Jacobian has one row, the gradient of the losses' weighted sum.
        Estimators for conditioned policies also take `preferences` [K, M], to separate the rows by
        them (`weighted_by_preference`).
        """
        ...

    def step(self, own: torch.Tensor | None) -> None:
        """Stage 9: steps the parameters trained beside the adapter, by `MinibatchGradients.own`."""
        ...

    def end_batch(self, experience: Any) -> None:
        """Ends a local step."""
        ...

    def set_learning_rate(self, factor: float) -> None:
        """Sets the learning rate of further parameters, in multiples of the configured one."""
        ...

    def metrics(self, experience: Any) -> dict[str, float]:
        """Returns figures of a batch, registered as quantities."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns everything that training changes, for a checkpoint; it may share memory."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state, which this estimator owns from then on."""
        ...


@configuration
class EstimatorConfig(ABC):
    """Hyperparameters of a local step, whatever the estimator, with A.1's values where it has one.

    A subclass gives `name` a default, which is what configurations choose it by.
    """

    needs_independent_rows: ClassVar[bool] = False
    """Whether gradients come from products per row, which rows that interact would falsify."""

    name: str = ""
    """The estimator."""
    batch_size: Annotated[BoundedInt, Paper("A.1", (16,))] = 16
    """Responses per local step, each to a fresh prompt unless the estimator compares several to
    one."""
    minibatch_size: Annotated[BoundedInt, Paper("A.1", (8,))] = 8
    """Responses per optimizer step; divides the batch."""
    micro_batch_size: Annotated[PositiveInt | None, NOT_IN_PAPER] = None
    """Responses per forward and backward pass; the minibatch's gradients are their sum, so that a
    minibatch is one optimizer step however it is divided. By default the whole minibatch. Bounds
    memory."""
    num_epochs: Annotated[BoundedInt, Paper("A.1", (3,))] = 3
    """PPO epochs over a batch."""
    actor_learning_rate: Annotated[PositiveFloat, Paper("A.1")] = 6e-5
    """Learning rate of the adapter."""
    actor_optimizer: Annotated[Literal["adam", "sgd"], NOT_IN_PAPER] = "adam"
    """Adam, or the plain gradient step of Algorithm 1; the paper does not say which one its
    experiments used."""
    learning_rate_schedule: Annotated[Literal["constant", "linear"], NOT_IN_PAPER] = "constant"
    """Constant, or linear decay to zero over the run's rounds, whoever takes part in them."""
    missing_end_penalty: Annotated[NonNegativeFloat, NOT_IN_PAPER] = 0.0
    """Subtracted from every score of a response that did not end by itself."""
    max_gradient_norm: Annotated[PositiveFloat | None, NOT_IN_PAPER] = None
    """Clip the combined gradient to this norm."""
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
                f"{self.kl.horizon}: one step of the controller could turn the penalty's sign."
            )

    @classmethod
    def forms(cls) -> list[type["EstimatorConfig"]]:
        """Returns the registered configurations of this kind, distinguished by `name`."""
        return [form for _, form in sorted(ESTIMATORS.items()) if issubclass(form, cls)]

    @property
    def replies_per_prompt(self) -> int:
        """Replies to one prompt that the estimator compares; 1 unless it needs a group."""
        return 1

    @property
    def num_prompts(self) -> int:
        """Fresh prompts of a local step."""
        return self.batch_size // self.replies_per_prompt

    def new_critic(self, policy: Any, num_objectives: int) -> torch.nn.Module | None:
        """Returns a new module to train by Adam beside the adapter; None if there is none.

        The policy, with its adapter, may have no storage.
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
            critic: This estimator's own copy of the module from `new_critic`.
            optimizer: Adam factory, called with parameters and `lr`.
        """

    @abstractmethod
    def rehearsal(self, rollouts: Rollouts, num_objectives: int) -> Experience:
        """Returns a placeholder experience, for a plan's dry run of `gradients`."""


ESTIMATORS: Registry[str, type[EstimatorConfig]] = Registry("estimator")
"""The configurations of all estimators, by the name that chooses them."""

Config = TypeVar("Config", bound=type[EstimatorConfig])


def register_estimator(config: Config) -> Config:
    """Registers an estimator by its configuration; a decorator of the class.

    Raises:
        ValueError: The name is taken or missing.
    """
    return ESTIMATORS.add(config.__dataclass_fields__["name"].default, config)
