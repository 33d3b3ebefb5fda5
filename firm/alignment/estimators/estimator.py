"""Interface of estimators, which compute M losses and their gradients from examples.

Each estimator has its own file, with a configuration (``EstimatorConfig``) that builds it and the
estimator itself (``Estimator``), of which every learner has an instance.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch

from firm.alignment.advantages import masked_mean
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.sequences import (
    BY_OBJECTIVE,
    SINGLE_PROCESS,
    Examples,
    Expand,
    Rollouts,
    Sequences,
    TokenScores,
    forward,
    forward_prompts_once,
    set_preferences,
    token_scores,
)
from firm.base.quantities import Quantity, register
from firm.base.schema import ByObjective, Finite
from firm.federation.processes import Team
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
    """Metrics to log: scalars, [M], or by rows of the Jacobian, which their weights sum, [M, R]."""
    own: torch.Tensor | None = None
    """Input of the estimator's own step, such as the critic's gradient."""

    def add_(self, other: "MinibatchGradients") -> None:
        """Adds another part in place."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.add_(theirs)

    def summed(self, team: Team) -> "MinibatchGradients":
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


LOG_RATIO, APPROX_KL = "log_ratio_mean_square", "approx_kl"
"""Names of two metrics that `policy_metrics` computes."""

register(
    Quantity(
        APPROX_KL,
        "KL of the update",
        "nats per token",
        "KL of the policy that sampled a batch from the one that it has become, at the minibatch "
        "where it was largest.",
        section="training",
        axis={},
    ),
    Quantity(
        "advantage_covariance",
        "Reward against the combined advantage",
        "covariance",
        "To first order a step changes an objective's mean reward in proportion to the covariance "
        "of its reward with the weighted advantage (arXiv:2602.06869): below zero, the objective "
        "is sacrificed to the others.",
        type=ByObjective[Finite | None],
        section="diagnostics",
        lines="means",
        reference=0.0,
        axis={},
    ),
)


@torch.no_grad()
def reward_covariance(
    part: Experience, minibatch: Experience, advantages: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Returns a part's share of the covariances of rewards with advantages over a minibatch.

    Args:
        part: Rows of the minibatch.
        minibatch: The minibatch; replies without a score of an objective do not count for it.
        advantages: Advantages of the minibatch's replies in the rows of the Jacobian, [R, b].
        weights: Weights of the rows, [R]; None if they are solved later.

    Returns:
        Covariances of each objective's reward with the weighted advantage, [M], or with each row's,
        [M, R]; 0 for an objective without a score.
    """
    is_judged = minibatch.is_judged.to(minibatch.rewards.device)
    rewards = minibatch.rewards.where(is_judged, torch.nan)
    centred = (rewards - rewards.nanmean(1, keepdim=True)).nan_to_num(nan=0.0)  # [M, b]
    covariances = centred @ advantages.to(centred).T / is_judged.sum(1).clamp(min=1)[:, None]
    share = part.num_rows / minibatch.num_rows
    return share * (covariances if weights is None else covariances @ weights.to(covariances))


def scored_rows(is_judged: torch.Tensor) -> torch.Tensor:
    """Returns the indices of the objectives with a score, from a mask [M, B]; all if none has."""
    has_score = is_judged.any(1)
    return (has_score if has_score.any() else ~has_score).nonzero().flatten()


@torch.no_grad()
def policy_metrics(
    entropies: torch.Tensor, logprobs: torch.Tensor, rollouts: Rollouts, share: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns means over the tokens of a part, times the part's share of its minibatch.

    The mean square log-ratio is zero before the first update, up to rounding and the adapter's
    dropout. KL(π_old ‖ π) per token is estimated by the mean negative log-ratio of tokens that
    π_old sampled; the mean square log-ratio, by which others estimate it, is large as soon as a
    single token has become very unlikely.

    Args:
        entropies: Entropy of π at each token, [B, T].
        logprobs: Log-probabilities of the tokens under π, [B, T].
        rollouts: The part's replies, sampled by π_old.
        share: Share of the minibatch's tokens, a scalar.
    """
    log_ratios = logprobs - rollouts.logprobs
    means = {"entropy": entropies, LOG_RATIO: log_ratios**2, APPROX_KL: -log_ratios}
    return {name: masked_mean(own, rollouts.mask) * share for name, own in means.items()}


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
    team: Team = SINGLE_PROCESS
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
        return self._per_sequence

    @cached_property
    def _per_sequence(self) -> PerSequenceGradients:
        # kept, since it checks the model once, and a graph once per shape of a step
        return PerSequenceGradients(self.model, self.parameters, checks_once=True)


class Estimator(Protocol):
    """Computes M losses and their gradients from examples, for one learner.

    A class that derives from it needs only `experience` and `gradients`: it then has no parameters
    or state besides the adapter, and logs nothing else.
    """

    @abstractmethod
    def experience(self, *args: Any, **kwargs: Any) -> Any:
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

    def end_batch(self, experience: Any) -> None:
        """Ends a local step."""

    def set_learning_rate(self, factor: float) -> None:
        """Sets the estimator's own learning rate, relative to the configured one."""

    def metrics(self, experience: Any) -> dict[str, float]:
        """Returns metrics of a batch, which are registered as quantities."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns all state that training changes, for a checkpoint; may share memory."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state, of which this estimator takes ownership."""
