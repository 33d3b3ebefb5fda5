"""Rehearses a local step on fake tensors, to estimate its memory and time.

Fake tensors of torch have shapes and devices, but no content, so that no weights are needed. The
rehearsal calls the trainers of a run, counts the bytes of all tensors that live at a time, and
lists the operations on them. If the policy's device is on this machine, operations and attention
kernels are those of the device; otherwise they are those of the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from firm.alignment.decoding import random_numbers, sampled_tokens
from firm.alignment.estimator_config import EstimatorConfig
from firm.alignment.live_bytes import LiveBytes
from firm.alignment.pair_tokens import PairBatch
from firm.alignment.policy import set_mode
from firm.alignment.prompts import Prompt
from firm.alignment.rollout import Sampler
from firm.alignment.rollout_config import RolloutConfig, TransformersConfig
from firm.alignment.roofline import Operation, OperationCounter
from firm.alignment.sequences import Queries, Rollouts, cached_pass, set_preferences
from firm.alignment.stacked.trainer import stacked_trainers
from firm.alignment.trainer import Learner, MultiObjectiveTrainer
from firm.federation.engines.stacked import MAX_ROWS
from firm.federation.lockstep import lockstep


@dataclass(frozen=True)
class Sampled:
    """A rollout's bytes, excluding parameters, and the operations of its passes."""

    cache: int
    """Keys and values."""
    token_peak: int
    """Peak of the pass that samples the last token."""
    scoring_peak: int
    """Peak of the pass that computes log-probabilities, which takes more than that over prompts."""
    whole: list[Operation]
    """A pass over whole rows that keeps their keys and values."""
    token: list[Operation]
    """The pass that samples the last token."""
    scoring: list[Operation]
    """The pass that computes log-probabilities."""

    @property
    def peak(self) -> int:
        """Peak of all passes."""
        return max(self.token_peak, self.scoring_peak)


@dataclass(frozen=True)
class UpdateCost:
    """Bytes of a minibatch's gradients, excluding parameters and learners, and the operations."""

    critic: int
    """A client's critics."""
    values: int
    """Peak of the advantages, with the critic's pass over a batch."""
    jacobian: int
    """The clients' Jacobians, and their running sums over micro-batches, if any."""
    saved: int
    """Bytes between forward and backward pass, excluding the Jacobian."""
    peak: int
    """Peak of both passes, excluding the Jacobian."""
    advantages: list[Operation]
    """The critic's pass over a batch, if any, and what else the advantages take."""
    num_passes: int
    """Parts of the minibatch that were rehearsed, each with a forward and backward pass."""
    operations: list[Operation]
    """Those of all these passes."""


class Rehearsal:
    """Trainers of a run whose policy and critic have no content.

    Their parameters are fake tensors, and so is all that is computed from them. Token ids, masks
    and rewards are small real tensors, since shapes depend on their content.

    Args:
        model: The policy on the meta device, whose parameters are replaced.
        estimator: The run's estimator.
        rollout: Its sampling of replies.
        objectives: Names of the objectives.
        device: Device of the policy.
        num_stacked: Number of clients with joint passes; 0 if clients are trained one by one.
        max_rows: Maximum number of rows of a joint pass.
        is_conditioned: Whether the policy takes preferences.
    """

    def __init__(
        self,
        model: Any,
        estimator: EstimatorConfig,
        rollout: RolloutConfig,
        objectives: tuple[str, ...],
        *,
        device: torch.device,
        num_stacked: int = 0,
        max_rows: int | None = None,
        is_conditioned: bool = False,
    ) -> None:
        self._config, self._rollout, self._objectives = estimator, rollout, objectives
        self._device, self._max_rows, self._is_conditioned = device, max_rows, is_conditioned
        self._mode = OperationCounter(allow_non_fake_inputs=True)
        with_fake_parameters(model, self._mode, device)
        self._model = model
        self.alone = MultiObjectiveTrainer(
            estimator,
            rollout_config=replace(rollout, engine=TransformersConfig()),
            policy=model,
            tokenizer=None,  # type: ignore[arg-type]  # there are no texts
            reward_fns=dict.fromkeys(objectives, _no_reward),
            objectives=objectives,
            num_rounds=1,
            value_model=self._critic(),
        )
        """Trainer of evaluations, and of clients in turn."""
        self.trainers = [self.alone]
        """Trainers of clients whose passes are joint."""
        if num_stacked:
            new_trainer = stacked_trainers(self.alone)
            self.trainers = [new_trainer() for _ in range(num_stacked)]
        self._learners = [self._learner(trainer) for trainer in self.trainers]

    def _learner(self, trainer: MultiObjectiveTrainer) -> Learner:
        """Returns a learner whose critic is not a copy of the trainer's, which has no content."""
        policy, sgd = trainer._policy, torch.optim.SGD
        estimator = self._config.estimator(policy, critic=self._critic(), optimizer=sgd)
        return Learner(estimator, sgd(policy.parameters))

    def _critic(self) -> torch.nn.Module | None:
        with torch.device("meta"):
            critic = self._config.new_critic(self._model, len(self._objectives))
        if critic is not None:
            with_fake_parameters(critic, self._mode, self._device)
        return critic

    @property
    def samplers(self) -> list[Sampler]:
        """Samplers of clients whose passes are joint."""
        return [trainer._sampler for trainer in self.trainers]

    @property
    def evaluator(self) -> Sampler:
        """Sampler of evaluations, in which every reply passes its own prompt."""
        return replace(self.alone._sampler, prompts_once=False)

    def sampling(self, samplers: Sequence[Sampler], num_rows: int) -> Sampled:
        """Rehearses a rollout.

        Args:
            samplers: Samplers whose passes are joint.
            num_rows: Rows of each.
        """
        set_mode(self._model, is_training=False)
        rollout, total = self._rollout, num_rows * len(samplers)
        set_preferences(self._model, self._rollouts(total).queries.preferences)
        with torch.no_grad():
            with self._count_bytes() as last:
                num_before = rollout.max_prompt_tokens + rollout.max_new_tokens - 1
                cache = self._sample_token(total, num_before)
                whole = self._mode.take()
                last.peak = cache_size = last.now  # excluding this pass, which no rollout has
                self._sample_token(total, num_before + 1, cache)
                token = self._mode.take()
            del cache
            with self._count_bytes() as scoring:
                rows = [self._rollouts(num_rows) for _ in samplers]
                self._together(lambda s, r: s.logprobs(r, of_reference=False), samplers, rows)
        return Sampled(cache_size, last.peak, scoring.peak, whole, token, self._mode.take())

    def _sample_token(self, num_rows: int, num_tokens: int, cache: Any = None) -> Any:
        """Samples a token after `num_tokens` others, and returns the keys and values.

        Makes the tensors that `generate` makes: the logits in float32, the tempered ones, the
        probabilities, and what chooses a token by them.
        """
        model, rollout = self._model, self._rollout
        mask = torch.ones(num_rows, num_tokens, dtype=torch.long, device=self._device)
        mask[0, 0] = 0
        ids = mask if cache is None else mask[:, -1:]
        positions = (mask.cumsum(1) - 1)[:, -ids.size(1) :]
        output = cached_pass(model, ids, mask, positions, cache)
        logits = output.logits[:, -1].to(torch.float32, copy=True)
        numbers = random_numbers(*logits.shape, device=logits.device)
        sampled_tokens(logits / rollout.temperature, numbers)
        return output.past_key_values

    def update(self, num_rows: int, num_preferences: int | None) -> UpdateCost:
        """Rehearses a minibatch's gradients.

        Args:
            num_rows: Rows of each client's minibatch.
            num_preferences: Preferences with separate gradients; None if there are none.
        """
        config, rollout = self._config, self._rollout
        part = min(config.micro_batch_size or num_rows, num_rows)
        num_rows = min(num_rows, 2 * part)  # further parts take as much as the second
        size = max(num_rows, min(rollout.forward_batch_size, config.batch_size))
        size += -size % config.replies_per_prompt
        marks: list[int] = []

        def clock() -> float:  # read where a stage begins or ends
            marks.append(live.now)
            return 0.0

        self._mode.take()  # the learners' beginnings, which no step repeats
        with self._count_bytes() as live:
            experiences = self._experiences(size, num_preferences or 1)
            advantages = self._mode.take()
            values, live.peak = live.peak, live.now
            minibatches = [experience.rows(slice(num_rows)) for experience in experiences]
            for trainer in self.trainers:
                trainer._clock = clock  # type: ignore[method-assign]
            gradients = self._together(
                lambda trainer, learner, minibatch: trainer.gradients(
                    learner, minibatch, by_preference=num_preferences is not None
                ),
                self.trainers,
                self._learners,
                minibatches,
            )
        critic = self._critic()
        jacobian = sum(each.jacobian.nbytes for each in gradients)
        sums = jacobian if num_rows > part else 0
        return UpdateCost(
            sum(parameter.nbytes for parameter in critic.parameters()) if critic else 0,
            values,
            jacobian + sums,
            max(marks) - sums,
            live.peak - jacobian - sums,
            advantages,
            num_passes=-(-num_rows // part),
            operations=self._mode.take(),
        )

    def _experiences(self, num_rows: int, num_preferences: int) -> list[Any]:
        """Returns the clients' batches with the inputs of their losses."""
        config = self._config  # a minibatch has some of the replies to each prompt
        share = config.replies_per_prompt * config.minibatch_size / config.batch_size
        num_replies = max(1, round(share))
        batches = [
            self._rollouts(num_rows, num_preferences, num_replies=num_replies)
            for _ in self.trainers
        ]
        rewards = torch.arange(num_rows, dtype=torch.float32, device=self._device)
        rewards = rewards.expand(len(self._objectives), -1)
        return self._together(
            lambda learner, rows: learner.estimator.experience(rows, rewards, rewards),
            self._learners,
            batches,
        )

    def _count_bytes(self) -> LiveBytes:
        states = [learner.estimator.state() for learner in self._learners]
        critics = [each for each in tree_leaves(states) if isinstance(each, torch.Tensor)]
        adapters = [p for each in self.trainers for p in each.adapter_parameters.values()]
        return LiveBytes(self._model, *critics, *adapters)

    def _together(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Calls a function for each client in lockstep, as the engine does."""
        calls = [partial(function, *own) for own in zip(*arguments, strict=True)]
        return lockstep(calls, max_size=self._max_rows or MAX_ROWS)

    def _rollouts(
        self, num_rows: int, num_preferences: int = 1, *, num_replies: int | None = None
    ) -> Rollouts:
        """Returns rollouts with prompts and replies of maximum length, one prompt padded.

        Each prompt has as many replies as the estimator compares, by default.
        """
        number = torch.arange(num_rows, device=self._device)  # of each row's prompt
        number //= num_replies or self._config.replies_per_prompt
        rollout, num_objectives = self._rollout, len(self._objectives)
        num_prompt, num_new = rollout.max_prompt_tokens, rollout.max_new_tokens
        ids = torch.ones(num_rows, num_prompt + num_new, dtype=torch.long, device=self._device)
        ids[:, 0] += number
        lengths = torch.full((num_rows,), num_prompt, device=self._device)
        lengths[number == 0] -= int(num_prompt > 1)
        preferences = None
        if self._is_conditioned:
            preferences = torch.ones(num_rows, num_objectives, device=self._device)
            # not scaled to sum 1, which takes no memory
            preferences[:, 0] += number % num_preferences
        logprobs = torch.zeros(num_rows, num_new, device=self._device)
        return Rollouts(
            Queries([Prompt("")] * num_rows, ids[:, :num_prompt], lengths, preferences),
            ids,
            torch.full((num_rows,), num_new, device=self._device),
            completions=[""] * num_rows,
            logprobs=logprobs,
            reference_logprobs=logprobs,
            ended=torch.ones(num_rows, dtype=torch.bool, device=self._device),
        )


class PairRehearsal(Rehearsal):
    """Trainers of a run on pairs, which samples no replies."""

    @property
    def evaluator(self) -> Sampler:
        """Sampler of evaluations, whose pairs share their prompts as others do."""
        return self.alone._sampler

    def sampling(self, samplers: Sequence[Sampler], num_rows: int) -> Sampled:
        """Rehearses the passes over pairs without gradients; there are no others."""
        set_mode(self._model, is_training=False)
        with torch.no_grad(), self._count_bytes() as scoring:
            rows = self._rollouts(num_rows, num_replies=2)
            set_preferences(self._model, rows.queries.preferences)
            self.alone._sampler.logprobs(rows, of_reference=False)
        return Sampled(0, 0, scoring.peak, [], [], self._mode.take())

    def _experiences(self, num_rows: int, num_preferences: int) -> list[Any]:
        """Returns the clients' batches of pairs with prompts and replies of maximum length."""
        objectives = torch.arange(num_rows, device=self._device) % len(self._objectives)
        numbers = torch.arange(len(self._objectives), device=self._device)[:, None]

        def batch() -> PairBatch:
            rows = self._rollouts(num_rows, num_preferences)
            return PairBatch(
                rows.queries,
                rows.responses[:, None].expand(-1, 2, -1),
                rows.num_tokens[:, None].expand(-1, 2),
                torch.zeros(num_rows, 2, device=self._device),
                objectives == numbers,
                torch.zeros(num_rows, 3, dtype=torch.bool, device=self._device),
            )

        return [batch() for _ in self.trainers]


REHEARSALS = {"prompts": Rehearsal, "pairs": PairRehearsal}
"""Rehearsals by the value of `EstimatorConfig.learns_from`."""


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("a rehearsal has no texts to score")


def with_fake_parameters(module: Any, mode: OperationCounter, device: torch.device) -> None:
    """Replaces meta tensors by fake ones on a device, and runs the passes in the fake mode.

    Tied parameters stay tied.
    """
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in fakes:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, tensor.requires_grad)
                    fakes[tensor] = fake
                tensors[name] = fakes[tensor]
    # also the trunk, which the critic's pass calls
    for model in {module, getattr(module, module.base_model_prefix, module)}:
        model.forward = _within(mode, model.forward)


def _within(mode: OperationCounter, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*arguments: Any, **options: Any) -> Any:
        arguments, options = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, options))
        with mode:
            return forward(*arguments, **options)

    return call
