"""Examples of a local step, by what an estimator learns from: replies to prompts, or pairs.

A client has one source of its shard, `SOURCES[config.learns_from]`, and asks it for each batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch

from firm.alignment.advantages import masked_mean
from firm.alignment.estimators.estimator import Experience
from firm.alignment.pair_tokens import EncodedPair, PairBatch
from firm.alignment.prompts import Prompt
from firm.alignment.rewards import Judges, reward_diagnostics
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.sequences import Rollouts, SampledSequences
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.quantities import CENTERED, PERCENT, Quantity, register
from firm.base.randomness import RandomStream, ShuffledPasses
from firm.base.schema import ByObjective, ByPair, Correlation, Finite, Named, NonNegative, Share

_diagnostic = partial(Quantity, section="diagnostics", lines="means")
register(
    Quantity(
        "scores",
        "{}",
        "mean raw score",
        type=ByObjective[Finite | None],
        section="scores",
        evaluated="scores",
        axis={},
    ),
    Quantity("rewards", type=ByObjective[Finite | None]),
    _diagnostic(
        "scores_std",
        "Spread of the scores",
        "SD of raw score",
        "Replies with nearly equal scores give almost no learning signal.",
        type=ByObjective[NonNegative | None],
    ),
    _diagnostic(
        "saturated_share",
        "Replies with the largest score",
        "share",
        "Where most replies have the largest score of their batch, nothing is left to learn.",
        type=ByObjective[Share | None],
        axis=PERCENT,
    ),
    _diagnostic(
        "tail_share",
        "Replies in the upper tail of the base model's scores",
        "share",
        "A reward model is not calibrated for scores three standard deviations above the base "
        "model's mean: many of them are a sign of reward hacking.",
        type=ByObjective[Share | None],
        axis=PERCENT,
    ),
    _diagnostic(
        "score_correlation",
        "Score against score",
        "correlation",
        type=ByPair[Correlation | None],
        reference=0.0,
        axis=CENTERED,
    ),
    _diagnostic(
        "score_length_correlation",
        "Score against reply length",
        "correlation",
        "Scores that grow with the length of the reply encourage padding.",
        type=ByObjective[Correlation | None],
        reference=0.0,
        axis=CENTERED,
    ),
    _diagnostic(
        "cut_prompt_share",
        "Prompts cut to max_prompt_tokens",
        "share",
        "Truncated prompts have lost their oldest turns.",
        type=Share,
        axis=PERCENT,
    ),
    _diagnostic(
        "cut_reply_share",
        "Ranked replies cut to max_new_tokens",
        "share",
        "Truncated replies are compared without their last words.",
        type=Share,
        axis=PERCENT,
    ),
    _diagnostic(
        "truncated_share",
        "Texts cut short",
        "share",
        "Truncated texts were scored only in part.",
        type=Named[Share],
        by="objective",
        axis=PERCENT,
    ),
    Quantity(
        "response_length",
        "Reply length",
        "tokens",
        type=NonNegative,
        section="training",
        evaluated="length",
    ),
    Quantity(
        "end_share",
        "Replies that end by themselves",
        "share",
        type=Share,
        section="training",
        evaluated="end_share",
    ),
    _diagnostic(
        "staleness",
        "Age of the adapter that sampled",
        "local steps",
        "Replies of an older adapter than the one that trains have importance weights.",
        type=NonNegative,
        axis={},
    ),
    _diagnostic(
        "capped_weight_share",
        "Importance weights at their cap",
        "share of tokens",
        "Capped weights do not correct for all of the adapter's change since it sampled.",
        type=Share,
        axis=PERCENT,
    ),
    Quantity("logprob_mismatch", type=NonNegative),
    Quantity("logprob_mismatch_per_reply", type=NonNegative),
    Quantity("first_log_ratio", type=NonNegative),
)

Drawn = tuple[Any, dict[str, list[bool]]]
"""A batch, and its replies that the reward model truncated, as a flag per reply, by objective."""


class Begun(Protocol):
    """A batch whose examples are drawn, and to which replies may still be sampled."""

    def __call__(self, estimator: Any, *, round: int, rounds_done: float) -> Drawn:
        """Waits for the batch.

        Args:
            estimator: The learner's estimator.
            round: Round that the client trains in, from 1.
            rounds_done: Rounds before the batch, with the fraction of this one.
        """
        ...


class Source(Protocol):
    """Draws the batches of a client's shard.

    Attributes:
        served: Indices of the objectives that the client has losses for.
        streams: Streams by name, with `state` and `restore`; part of the client's state.
    """

    served: tuple[int, ...]
    streams: dict[str, Any]

    def begin(self, preferences: torch.Tensor | None, *, is_ahead: bool = False) -> Begun:
        """Draws the examples of the next batch, for the current policy.

        Args:
            preferences: Preferences of the examples for a conditioned policy.
            is_ahead: Whether the policy trains on another batch before it waits for this one.
        """
        ...

    def skip(self) -> None:
        """Skips the examples of the next batch."""
        ...

    def revalued(self, estimator: Any, batch: Any) -> Any:
        """Returns a batch as drawn for another estimator in the same state of the policy."""
        ...

    def minibatch_indices(self) -> Iterator[np.ndarray]:
        """Yields the row indices of every minibatch; draws from the global generators."""
        ...

    def metrics(self, batch: Any) -> dict[str, Any]:
        """Returns metrics of a batch: numbers, and lists with one entry per objective or pair."""
        ...


class PromptSource:
    """Fresh prompts, to which the current policy replies; the replies are scored.

    Args:
        prompts: The client's prompts.
        trainer: The stages.
        stream: Returns the client's random stream for a purpose.
        judges: Reward functions and calibrations; by default the trainer's functions.
        client: Name of the client, for messages.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        trainer: MultiObjectiveTrainer,
        stream: Callable[[str], RandomStream],
        *,
        judges: Judges | None,
        client: str,
    ) -> None:
        self._trainer = trainer
        self._judges = judges or Judges(trainer.reward_fns)
        self.served = tuple(
            j for j, name in enumerate(trainer.objectives) if name in self._judges.reward_fns
        )
        if not self.served:
            raise ValueError(f"{client} has no reward function of {', '.join(trainer.objectives)}.")
        self._prompts = ShuffledPasses(prompts, stream("prompts"))
        self._rollout = stream("rollout")
        self.streams = {"prompts": self._prompts, "rollout": self._rollout}

    def begin(self, preferences: torch.Tensor | None, *, is_ahead: bool = False) -> Begun:
        """Draws prompts and samples replies, or begins to if the policy trains meanwhile."""
        trainer = self._trainer
        queries = trainer.encode(self._prompts.draw(trainer.config.num_prompts))
        if preferences is not None:
            queries = replace(queries, preferences=preferences)
        with self._rollout:
            if is_ahead:
                return partial(self._finish, trainer.begin_sampling(queries))
            sampled = trainer.sample(queries)
        return partial(self._finish, lambda: sampled)

    def _finish(
        self,
        wait: Callable[[], SampledSequences],
        estimator: Any,
        *,
        round: int,
        rounds_done: float,
    ) -> Drawn:
        """Returns scored replies with the inputs of the estimator's losses; see `Begun`."""
        trainer, sampled = self._trainer, wait()
        scoring = trainer.begin_scoring(sampled, self._judges, rounds_done=rounds_done)
        rollouts = trainer.with_logprobs(sampled, measures_mismatch=round == 1)
        scored = scoring()
        return estimator.experience(rollouts, scored.scores, scored.rewards), scored.truncated

    def skip(self) -> None:
        """Skips the prompts of the next batch."""
        self._prompts.draw(self._trainer.config.num_prompts)

    def revalued(self, estimator: Any, batch: Experience) -> Experience:
        """Returns the experience with the values of another estimator's critic."""
        return estimator.experience(batch.rollouts, batch.scores, batch.rewards)

    def minibatch_indices(self) -> Iterator[np.ndarray]:
        """Yields the row indices of every minibatch: a fresh permutation in each epoch."""
        return self._trainer.minibatch_indices()

    def metrics(self, batch: Experience) -> dict[str, Any]:
        """Returns metrics of rollouts and their scores."""
        return {
            **_batch_metrics(batch),
            "tail_share": self._judges.tail_shares(self._trainer.objectives, batch.scores),
            **_mismatch(batch.rollouts),
            **_staleness(batch.rollouts, self._trainer.rollout_config),
        }


class PairSource:
    """Pairs of ranked replies, drawn evenly by objective.

    The rows of a batch alternate between the objectives that the client has pairs of, so that every
    minibatch has pairs of each.

    Args:
        pairs: The client's pairs, with the reference's log-probabilities.
        trainer: The stages.
        stream: Returns the client's random stream for a purpose.
        judges: None: people have judged the pairs.
        client: Name of the client, for messages.

    Raises:
        ValueError: An objective has fewer pairs than a batch needs.
    """

    def __init__(
        self,
        pairs: Sequence[EncodedPair],
        trainer: MultiObjectiveTrainer,
        stream: Callable[[str], RandomStream],
        *,
        judges: Judges | None,
        client: str,
    ) -> None:
        config, names = trainer.config, trainer.objectives
        self._trainer = trainer
        self.served = tuple(sorted({pair.objective for pair in pairs}))
        if not self.served:
            raise ValueError(f"{client} has no pairs of {', '.join(names)}.")
        if config.minibatch_size < len(self.served):
            raise ValueError(
                "estimator.minibatch_size must be at least the number of objectives, "
                f"{len(self.served)} in {client}, got {config.minibatch_size}."
            )
        shares = {j: config.batch_size // len(self.served) for j in self.served}
        for j in self.served[: config.batch_size % len(self.served)]:
            shares[j] += 1
        self._shares, self._passes = shares, {}
        for j, share in shares.items():
            own = [pair for pair in pairs if pair.objective == j]
            if len(own) < share:
                raise ValueError(
                    f"{client} has {len(own)} pairs of {names[j]}, and a batch needs {share}: "
                    f"lower estimator.batch_size, now {config.batch_size}, or give the client more "
                    "pairs."
                )
            self._passes[j] = ShuffledPasses(own, stream(f"pairs {names[j]}"))
        self.streams = {f"pairs {names[j]}": passes for j, passes in self._passes.items()}

    def begin(self, preferences: torch.Tensor | None, *, is_ahead: bool = False) -> Begun:
        """Draws the next pairs; see `Source`."""
        rows = zip_longest(*self._drawn())
        pairs = [pair for row in rows for pair in row if pair is not None]
        batch = self._trainer.collated(pairs, preferences)
        return lambda estimator, **_: (estimator.experience(batch), {})

    def skip(self) -> None:
        """Skips the pairs of the next batch."""
        self._drawn()

    def revalued(self, estimator: Any, batch: PairBatch) -> PairBatch:
        """Returns the batch, which no estimator changes."""
        return batch

    def minibatch_indices(self) -> Iterator[np.ndarray]:
        """Yields the row indices of every minibatch: in each epoch, shuffled within objectives."""
        size, count = self._trainer.config.minibatch_size, len(self.served)
        for _ in range(self._trainer.config.num_epochs):
            order = np.arange(self._trainer.config.batch_size)
            for first in range(count):
                order[first::count] = np.random.permutation(order[first::count])
            for start in range(0, len(order), size):
                yield order[start : start + size]

    def metrics(self, batch: PairBatch) -> dict[str, Any]:
        """Returns the replies' mean length, and the shares of truncated prompts and replies."""
        return {
            "response_length": batch.num_tokens.float().mean().item(),
            "cut_prompt_share": batch.cut[:, 0].float().mean().item(),
            "cut_reply_share": batch.cut[:, 1:].float().mean().item(),
        }

    def _drawn(self) -> list[list[EncodedPair]]:
        return [self._passes[j].draw(share) for j, share in self._shares.items()]


SOURCES: Mapping[str, Callable[..., Source]] = {"prompts": PromptSource, "pairs": PairSource}
"""Sources by the value of `EstimatorConfig.learns_from`."""


def _batch_metrics(experience: Experience) -> dict[str, Any]:
    """Returns metrics of a batch of rollouts: numbers, and lists with one entry per objective."""
    rollouts = experience.rollouts
    has_score = ~experience.scores.isnan().to(experience.rewards.device)
    rewards = experience.rewards.where(has_score, torch.nan)  # excludes placeholders
    diagnostics = reward_diagnostics(experience.scores, rollouts.num_tokens)
    return {
        "scores": diagnostics["mean"].tolist(),
        "scores_std": diagnostics["spread"].tolist(),
        "saturated_share": diagnostics["saturated"].tolist(),
        "score_correlation": diagnostics["correlation"].tolist(),
        "score_length_correlation": diagnostics["length_correlation"].tolist(),
        "rewards": rewards.nanmean(1).tolist(),
        "response_length": rollouts.num_tokens.float().mean().item(),
        "end_share": rollouts.ended.float().mean().item(),
        "cut_prompt_share": float(np.mean(rollouts.queries.is_cut or [False])),
    }


def _mismatch(rollouts: Rollouts) -> dict[str, float]:
    """Returns the root mean square mismatch of log-probabilities per token and reply, in nats."""
    if rollouts.mismatch is None:
        return {}
    if rollouts.staleness:  # the difference of two adapters
        return {"logprob_mismatch": np.nan, "logprob_mismatch_per_reply": np.nan}
    per_token = masked_mean(rollouts.mismatch**2, rollouts.mask)
    per_reply = rollouts.mismatch.sum(1).square().mean()
    return {
        "logprob_mismatch": per_token.sqrt().item(),
        "logprob_mismatch_per_reply": per_reply.sqrt().item(),
    }


def _staleness(rollouts: Rollouts, config: RolloutConfig) -> dict[str, float]:
    """Returns the adapter's age in local steps, and the share of importance weights at the cap."""
    if not config.max_staleness or rollouts.mismatch is None:
        return {}
    weights = config.engine.importance_weights(-rollouts.mismatch)
    assert weights is not None  # as the configuration checks
    is_capped = weights < (-rollouts.mismatch).exp()
    capped = masked_mean(is_capped.float(), rollouts.mask)
    return {"staleness": float(rollouts.staleness), "capped_weight_share": capped.item()}
