"""A federated client: a private shard and its own learner on the shared policy."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from firm.alignment.adapters.conditioned import PreferenceStream, check_estimator
from firm.alignment.batches import SOURCES, Begun
from firm.alignment.client_config import CAPABILITIES
from firm.alignment.estimators.estimator import APPROX_KL, LOG_RATIO
from firm.alignment.policy import copy_adapter, load_adapter_
from firm.alignment.rewards import Judges
from firm.alignment.sequences import Examples
from firm.alignment.trainer import Learner, MultiObjectiveTrainer
from firm.base.quantities import QUANTITIES, Quantity, register
from firm.base.randomness import RandomStream
from firm.base.schema import ByObjective, Finite
from firm.federation.client import Adapter, Client, Gradients
from firm.federation.serialization import pack

register(Quantity("policy_loss", type=ByObjective[Finite | None]))


@dataclass(frozen=True)
class ExperienceBatch:
    """A local step's experience and the minibatches of all its epochs."""

    experience: Examples
    indices: list[np.ndarray]
    """Row indices of each minibatch."""
    truncated: dict[str, list[bool]]
    """Replies that the reward model truncated, as a flag per reply, by objective."""
    is_over: Callable[[], bool] = lambda: False
    """Returns whether the remaining minibatches are skipped."""

    @property
    def whole(self) -> Examples:
        """All rows of the batch, for weights that are solved per batch."""
        return self.experience

    def minibatches(self) -> Iterator[Examples]:
        """Yields the minibatches for `gradients`, in order of use."""
        for index in self.indices:
            if self.is_over():
                return
            yield self.experience.rows(index)


@dataclass(frozen=True)
class _FirstBatch:
    """The first batch drawn after `load`, for tasks that return to the same state."""

    round: int
    adapter: Adapter
    """The adapter that was loaded."""
    state: dict[str, Any]
    """The random streams before the draw."""
    batch: ExperienceBatch
    learner: tuple[Learner, int]
    """The learner that computed the batch's values, and its number of steps since it was
    restored."""
    streams: dict[str, Any]
    """The random streams after the draw."""
    seconds: dict[str, float]
    """Seconds that the draw took, by stage."""


class AlignmentClient(Client):
    """A client of the federation that aligns a language model.

    Clients share a trainer, hence a base model and an adapter slot, into which `load` copies an
    adapter. A client's training state (estimator, optimizer moments) is in its own learner; if
    objectives are trained separately, each has its own learner. All randomness of a client comes
    from its own streams for examples, rollout and update.

    Some strategies send several requests per round that start from the same state: for a Jacobian
    and then a training, or for one training per objective. These share their first batch, which is
    sampled once and kept until a joint training step, with which the client's round ends
    (`keep_first_batch`).

    Args:
        name: Unique name, such as "client_0".
        examples: The client's private shard, of what the estimator learns from: prompts, or encoded
            pairs.
        trainer: The shared trainer.
        seed: Seed of the run; the streams are derived from it and `stream_name`.
        judges: Reward functions and calibrations of sampled replies; by default the trainer's
            functions with raw scores as rewards. Gradients of objectives without a reward function
            are zero.
        preferences: Stream of preferences for a conditioned policy's examples; None for other
            policies.
        stream_name: Name of the random streams, by default `name`; use the same name for identical
            clients.
        on_event: Progress callback: `on_event("stage", stage=..., step=..., num_steps=...)`.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        name: str,
        examples: Sequence[Any],
        trainer: MultiObjectiveTrainer,
        *,
        seed: int,
        judges: Judges | None = None,
        preferences: PreferenceStream | None = None,
        stream_name: str | None = None,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        self.name = name
        self.objectives = trainer.objectives
        self.num_examples = len(examples)
        self._trainer = trainer
        if trainer.config.sums_rewards:  # known weights then weigh rewards, not gradients
            self.capabilities = frozenset({*CAPABILITIES, "weighted_gradients"})
        self._on_event = on_event or (lambda name, **info: None)
        self._common = self._learner = trainer.new_learner()
        self._alone: dict[str, Learner] = {}
        stream = partial(RandomStream, seed, stream_name or name)
        source = SOURCES[trainer.config.learns_from]
        self._source = source(examples, trainer, stream, judges=judges, client=name)
        self.served = self._source.served
        self._update = stream("update")
        self._streams = {**self._source.streams, "update": self._update}
        self._preferences = preferences
        self.is_conditioned = preferences is not None
        if preferences is not None:
            check_estimator(trainer.config.name, compares=trainer.config.compares_replies)
            self._streams["preferences"] = preferences
        self._batches: list[dict[str, Any]] = []
        self._minibatches: list[dict[str, torch.Tensor]] = []
        self._first: _FirstBatch | None = None
        self._keeps_first = False
        self._truncated: dict[str, list[bool]] = defaultdict(list)
        self._seconds: dict[str, float] = {}  # the trainer's totals at `load`
        self._num_drawn = 0

    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts local training from a copy of `adapter`."""
        self._round, self._adapter = round, adapter
        self._batches, self._minibatches, self._num_drawn = [], [], 0
        self._truncated = defaultdict(list)
        self._seconds = dict(self._trainer.seconds)
        load_adapter_(self._trainer.adapter_parameters, adapter)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches per pass over the shard, at least 1; the rest start the next pass."""
        return max(1, self.num_examples // self._trainer.config.num_prompts)

    def batches(self, num_steps: int) -> Iterator[ExperienceBatch]:
        """Yields one batch per local step, of fresh examples for the current policy.

        Minibatches and steps end early once the policy has left the one that sampled the batch
        (`EstimatorConfig.max_approx_kl`).
        """
        trainer, begun = self._trainer, None
        for step in range(1, num_steps + 1):
            if self._is_over():
                return
            self._on_event("stage", stage="rollout", step=step, num_steps=num_steps)
            rounds_done = self._round - 1 + (step - 1) / num_steps
            trainer.set_learning_rates(self._learner, rounds_done, factor=self.rate)
            if self._num_drawn == 0 and (self._keeps_first or self._first is not None):
                batch = self._first_batch(rounds_done)
            else:
                batch = self._finish(begun or self._begin(), rounds_done)
            for name, is_truncated in batch.truncated.items():
                self._truncated[name] += is_truncated
            own = self._learner.estimator.metrics(batch.experience)
            self._batches.append({**self._source.metrics(batch.experience), **own})
            self._on_event("stage", stage="update", step=step, num_steps=num_steps)
            num_steps_before = len(self._minibatches)
            begun = None
            if trainer.rollout_config.max_staleness and step < num_steps:
                begun = self._begin(is_ahead=True)
            yield batch
            if len(self._minibatches) > num_steps_before:  # none for a Jacobian request
                self._learner.estimator.end_batch(batch.experience)

    def _begin(self, *, is_ahead: bool = False) -> Begun:
        """Draws the examples of the next batch, and samples replies or begins to."""
        # before drawing, so that `skip_failed_batches` counts a failed draw too
        self._num_drawn += 1
        preferences = None
        if self._preferences is not None:
            preferences = self._preferences.draw(self._trainer.config.num_prompts)
        return self._source.begin(preferences, is_ahead=is_ahead)

    def _finish(self, begun: Begun, rounds_done: float) -> ExperienceBatch:
        """Returns a batch with the inputs of its losses, and its minibatches."""
        experience, truncated = begun(
            self._learner.estimator, round=self._round, rounds_done=rounds_done
        )
        with self._update:
            indices = list(self._source.minibatch_indices())
        return ExperienceBatch(experience, indices, truncated, self._is_over)

    def _first_batch(self, rounds_done: float) -> ExperienceBatch:
        """Returns the first batch since `load`, of a round whose tasks share it.

        An earlier task has kept it, or it is drawn and kept for later ones.
        """
        reused = self._reused_batch()
        if reused is not None:
            self._num_drawn += 1
            return reused
        if not self._keeps_first:
            return self._finish(self._begin(), rounds_done)
        streams, seconds = self._stream_states(), dict(self._trainer.seconds)
        batch = self._finish(self._begin(), rounds_done)
        self._first = _FirstBatch(
            round=self._round,
            adapter=self._adapter,
            state=streams,
            batch=batch,
            learner=(self._learner, self._learner.num_steps),
            streams=self._stream_states(),
            seconds={
                stage: total - seconds.get(stage, 0.0)
                for stage, total in self._trainer.seconds.items()
            },
        )
        return batch

    def _is_over(self) -> bool:
        """Returns whether the last minibatch's policy was too far from the batch's."""
        most = self._trainer.config.max_approx_kl
        if most is None or not self._minibatches or APPROX_KL not in self._minibatches[-1]:
            return False
        return bool(self._minibatches[-1][APPROX_KL] > most)

    def _reused_batch(self) -> ExperienceBatch | None:
        """Returns the kept first batch with this learner's values; None if the state differs."""
        first, adapter = self._first, self._adapter
        if (
            first is None
            or first.round != self._round
            or not all(torch.equal(values, adapter[name]) for name, values in first.adapter.items())
            or pack(first.state) != pack(self._stream_states())
        ):
            return None
        self._restore_streams(first.streams)
        for stage, seconds in first.seconds.items():  # count the draw as part of this training
            self._seconds[stage] = self._seconds.get(stage, 0.0) - seconds
        if first.learner == (self._learner, self._learner.num_steps):
            return first.batch
        valued = self._source.revalued(self._learner.estimator, first.batch.experience)
        return replace(first.batch, experience=valued)

    def gradients(self, minibatch: Examples) -> Gradients:
        """Returns the M losses of a minibatch and their Jacobian [M, d].

        Rows of objectives that are not served, or without a score in the minibatch, are zero: these
        objectives are excluded from the minibatch.
        """
        with self._randomness():
            gradients = self._trainer.gradients(self._learner, minibatch)
        return self._without_unserved(gradients, minibatch)

    def gradients_by_preference(self, minibatch: Examples) -> Gradients:
        """Returns the losses, and the gradients at each preference; see ``Client``."""
        with self._randomness():
            gradients = self._trainer.gradients(self._learner, minibatch, by_preference=True)
        return self._without_unserved(gradients, minibatch)

    def _without_unserved(self, gradients: Gradients, minibatch: Examples) -> Gradients:
        """Zeroes the rows of unserved objectives in gradients [M, d] or [K M, d]."""
        served = self._served_in(minibatch, gradients.preferences)
        rows = gradients.jacobian.unflatten(0, (-1, len(self.objectives)))
        for own_rows, own in zip(rows, served, strict=True):
            for j in set(range(len(self.objectives))).difference(own):
                own_rows[j] = 0.0
        return replace(gradients, served=served)

    def _served_in(
        self, minibatch: Examples, preferences: torch.Tensor | None = None
    ) -> list[list[int]]:
        """Returns the served objectives with at least one score, at each preference."""
        is_judged = minibatch.is_judged  # [M, b]
        parts, asked = [is_judged], minibatch.preferences
        if preferences is not None and asked is not None:
            parts = [is_judged[:, (asked == each).all(1).cpu()] for each in preferences]
        return [[j for j in self.served if part[j].any()] for part in parts]

    def weighted_gradients(self, minibatch: Examples, weights: torch.Tensor) -> Gradients:
        """Returns the gradient of Σⱼ wⱼ Lⱼ as a Jacobian of one row, from one backward pass.

        Weights w [M] of objectives that are not served, or without a score in the minibatch, are
        ignored; the latter count where the batch's rewards are summed before they are normalised.
        """
        factors = self.of_served(weights)
        if not self._trainer.config.sums_rewards:
            (served,) = self._served_in(minibatch)
            factors[[j for j in range(len(factors)) if j not in served]] = 0
        factors = factors.to(minibatch.device)
        with self._randomness():
            return self._trainer.gradients(self._learner, minibatch, factors)

    @contextmanager
    def _randomness(self) -> Iterator[None]:
        """Draws dropout masks from the client's stream, with different masks in each process."""
        team = self._trainer.team
        with self._update:
            if team.size == 1:
                yield
                return
            seed = int(
                torch.randint(2**62, ())
            )  # equal in all processes; the rank makes the masks differ
            with RandomStream(seed, "dropout", team.rank):
                yield

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Takes one optimizer step on the adapter and on the estimator's own parameters."""
        if self._learner is self._common:
            self._first = None
        self._trainer.step(self._learner, gradients, weights)
        metrics = {
            name: figure @ weights.to(figure) if figure.ndim == 2 else figure
            for name, figure in gradients.aux.metrics.items()
        }
        self._minibatches.append({"policy_loss": gradients.losses, **metrics})

    def adapter(self) -> Adapter:
        """Returns a copy of the current adapter, on the CPU."""
        return copy_adapter(self._trainer.adapter_parameters)

    def state(self) -> dict[str, Any]:
        """Returns a deep copy of the state kept between rounds, without the adapter."""
        return {
            "learner": self._common.state(),
            "alone": {name: learner.state() for name, learner in self._alone.items()},
            **self._stream_states(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state()`."""
        self._keeps_first = False
        self._learner = self._common
        self._common.restore(state["learner"])
        alone = state["alone"]
        self._alone = {name: self._alone.get(name) or self._trainer.new_learner() for name in alone}
        for name, learner in alone.items():
            self._alone[name].restore(learner)
        self._restore_streams(state)

    def alone(self, objective: str, state: dict[str, Any]) -> None:
        """Restores examples and random streams, and switches to the objective's learner."""
        if objective not in self._alone:
            self._alone[objective] = self._trainer.new_learner()
        self._learner = self._alone[objective]
        self.keep_first_batch()  # for the trainings of the other objectives
        self._restore_streams(state)

    def keep_first_batch(self) -> None:
        """Keeps the next batch for later tasks of the round; see `Client`."""
        self._keeps_first = True

    def skip_failed_batches(self) -> None:
        """Skips the batches of examples drawn since `load`."""
        for _ in range(self._num_drawn):
            self._source.skip()

    def _stream_states(self) -> dict[str, Any]:
        return {name: stream.state() for name, stream in self._streams.items()}

    def _restore_streams(self, state: dict[str, Any]) -> None:
        for name, stream in self._streams.items():
            stream.restore(state[name])

    def metrics(self) -> dict[str, Any]:
        """Returns metrics of local training since `load`, averaged over its minibatches."""
        batch = {
            key: torch.tensor([b[key] for b in self._batches], dtype=torch.float64)
            .nanmean(0)
            .numpy()
            for key in self._batches[0]
        }
        first = self._minibatches[0].get(LOG_RATIO)  # optional for estimators
        if (
            self._round == 1 and first is not None
        ):  # before any update, so it should be rounding only
            batch["first_log_ratio"] = first.sqrt().numpy(force=True)
        for key in self._minibatches[0]:
            if key == LOG_RATIO:
                continue
            values = torch.stack([m[key] for m in self._minibatches])
            shown = values.max() if key == APPROX_KL else values.mean(0)
            batch[key] = shown.numpy(force=True)
        return {
            "truncated_share": {n: np.mean(cut) for n, cut in self._truncated.items()},
            **{k: self._named(k, mean) if mean.ndim else float(mean) for k, mean in batch.items()},
            "seconds": {
                stage: total - self._seconds.get(stage, 0.0)
                for stage, total in self._trainer.seconds.items()
            },
        }

    def _named(self, key: str, row: Iterable[float]) -> dict[str, float | None]:
        """Returns a quantity's values by objective, or by pair of objectives."""
        quantity = QUANTITIES.get(("client", key))
        if quantity is not None and quantity.by == "pair":
            names = shown = list(map("-".join, combinations(self.objectives, 2)))
        else:
            names, shown = self.objectives, [self.objectives[j] for j in self.served]
        return {
            # JSON has no NaN
            name: float(value) if name in shown and not np.isnan(value) else None
            for name, value in zip(names, row, strict=True)
        }
