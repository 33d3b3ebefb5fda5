"""Estimates the memory and time of a process by rehearsing a local step on fake tensors.

Fake tensors of torch have shapes and devices, but no content, so that no weights are needed. The
rehearsal calls the trainers of a run, counts the bytes of all tensors that live at a time, and
lists the operations on them. If the policy's device is on this machine, operations and attention
kernels are those of the device; otherwise they are those of the CPU.

On an accelerator the estimate stands for the bytes that torch allocates; whole runs are compared
with it in `benchmarks/plan_memory.py`. On a CPU the resident set grows by more, as the allocator
holds freed blocks: a run of "49k, PPO" there took 2.0 times the estimate with glibc's malloc.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, PretrainedConfig

from firm.alignment.decoding import random_numbers, sampled_tokens
from firm.alignment.live_bytes import LiveBytes
from firm.alignment.pair_tokens import PairBatch
from firm.alignment.policy import add_adapter, set_mode
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rollout import Sampler
from firm.alignment.rollout_config import TransformersConfig
from firm.alignment.roofline import Operation, OperationCounter
from firm.alignment.sequences import Queries, Rollouts, cached_pass, set_preferences
from firm.alignment.stacked.trainer import stacked_trainers
from firm.alignment.trainer import Learner, MultiObjectiveTrainer
from firm.federation.engines.stacked import MAX_ROWS
from firm.federation.lockstep import lockstep
from firm.federation.objective_training import ObjectiveTraining
from firm.federation.traffic import Traffic
from firm.jobs.alignment_config import AlignmentConfig, solves_at_preferences
from firm.jobs.plan.passes import minibatch_share, preferences_of_minibatch, rollouts, updates
from firm.jobs.plan.record import Memory, PolicyFigures

EVALUATION_BATCH = 64
"""Maximum number of replies in a batch of `firm.alignment.evaluate`."""


@dataclass(frozen=True)
class Sampled:
    """A rollout's bytes, excluding parameters, and the operations of its passes."""

    cache: int
    """Keys and values."""
    peak: int
    """Peak of the pass that samples the last token, or of the pass that computes the replies'
    log-probabilities, which takes more than the one over the prompts."""
    whole: list[Operation]
    """A pass over whole rows that keeps their keys and values."""
    token: list[Operation]
    """The pass that samples the last token."""
    scoring: list[Operation]
    """The pass that computes log-probabilities."""


@dataclass(frozen=True)
class Update:
    """Bytes of a minibatch's gradients, excluding parameters and learners, and the operations."""

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


@dataclass(frozen=True)
class Rehearsed:
    """Figures of a rehearsal."""

    memory: Memory
    rollout: Sampled
    evaluation: Sampled
    """A rollout in evaluations and calibration."""
    update: Update


class Rehearsal:
    """Trainers of a run whose policy and critic have no content.

    Their parameters are fake tensors, and so is all that is computed from them. Token ids, masks
    and rewards are small real tensors, since shapes depend on their content.

    Args:
        model: The policy on the meta device, whose parameters are replaced.
        cfg: The run.
        num_clients: Clients whose rows share a pass of the update.
        device: Device of the policy.
    """

    def __init__(
        self, model: Any, cfg: AlignmentConfig, *, num_clients: int, device: torch.device
    ) -> None:
        self._cfg, self._device = cfg, device
        self._mode = OperationCounter(allow_non_fake_inputs=True)
        with_fake_parameters(model, self._mode, device)
        self._model = model
        self.alone = MultiObjectiveTrainer(
            cfg.estimator,
            rollout_config=replace(cfg.rollout, engine=TransformersConfig()),
            policy=model,
            tokenizer=None,  # type: ignore[arg-type]  # there are no texts
            reward_fns=dict.fromkeys(cfg.rewards, _no_reward),
            objectives=cfg.objectives,
            num_rounds=1,
            value_model=self._critic(),
        )
        """Trainer of evaluations, and of clients in turn."""
        self.trainers = [self.alone]
        """Trainers of clients whose passes are joint."""
        if cfg.engine == "stacked":
            new_trainer = stacked_trainers(self.alone)
            self.trainers = [new_trainer() for _ in range(num_clients)]
        self._learners = [self._learner(trainer) for trainer in self.trainers]

    def _learner(self, trainer: MultiObjectiveTrainer) -> Learner:
        """Returns a learner whose critic is not a copy of the trainer's, which has no content."""
        policy, sgd = trainer._policy, torch.optim.SGD
        estimator = self._cfg.estimator.estimator(policy, critic=self._critic(), optimizer=sgd)
        return Learner(estimator, sgd(policy.parameters))

    def learner_bytes(self, adapter_bytes: int) -> tuple[int, int]:
        """Returns the bytes of a client's critics, and of its critics and optimizer moments."""
        cfg, module = self._cfg, self._critic()
        critic = sum(parameter.nbytes for parameter in module.parameters()) if module else 0
        moments = 2 * adapter_bytes if cfg.estimator.actor_optimizer == "adam" else 0
        learner = 3 * critic + moments  # Adam trains all parameters outside the adapter
        if ObjectiveTraining in cfg.strategy.requests(cfg.objectives):
            # the common learner never steps: no moments
            return critic, len(cfg.objectives) * learner + critic
        return critic, learner

    def _critic(self) -> torch.nn.Module | None:
        with torch.device("meta"):
            critic = self._cfg.estimator.new_critic(self._model, len(self._cfg.objectives))
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
        rollout, total = self._cfg.rollout, num_rows * len(samplers)
        set_preferences(self._model, self._rollouts(total).queries.preferences)
        with torch.no_grad():
            with self._counted() as last:
                num_before = rollout.max_prompt_tokens + rollout.max_new_tokens - 1
                cache = self._sampled_token(total, num_before)
                whole = self._mode.take()
                last.peak = cache_size = last.now  # excluding this pass, which no rollout has
                self._sampled_token(total, num_before + 1, cache)
                token = self._mode.take()
            del cache
            with self._counted() as scoring:
                rows = [self._rollouts(num_rows) for _ in samplers]
                self._together(lambda s, r: s.logprobs(r, of_reference=False), samplers, rows)
        peak = max(last.peak, scoring.peak)
        return Sampled(cache_size, peak, whole, token, self._mode.take())

    def _sampled_token(self, num_rows: int, num_tokens: int, cache: Any = None) -> Any:
        """Samples a token after `num_tokens` others, and returns the keys and values.

        Makes the tensors that `generate` makes: the logits in float32, the tempered ones, the
        probabilities, and what chooses a token by them.
        """
        model, rollout = self._model, self._cfg.rollout
        mask = torch.ones(num_rows, num_tokens, dtype=torch.long, device=self._device)
        mask[0, 0] = 0
        ids = mask if cache is None else mask[:, -1:]
        positions = (mask.cumsum(1) - 1)[:, -ids.size(1) :]
        output = cached_pass(model, ids, mask, positions, cache)
        logits = output.logits[:, -1].to(torch.float32, copy=True)
        numbers = random_numbers(*logits.shape, device=logits.device)
        sampled_tokens(logits / rollout.temperature, numbers)
        return output.past_key_values

    def update(self, num_rows: int, num_preferences: int | None) -> Update:
        """Rehearses a minibatch's gradients.

        Args:
            num_rows: Rows of each client's minibatch.
            num_preferences: Preferences with separate gradients; None if there are none.
        """
        config, rollout = self._cfg.estimator, self._cfg.rollout
        part = min(config.micro_batch_size or num_rows, num_rows)
        num_rows = min(num_rows, 2 * part)  # further parts take as much as the second
        size = max(num_rows, min(rollout.forward_batch_size, config.batch_size))
        size += -size % config.replies_per_prompt
        marks: list[int] = []

        def clock() -> float:  # read where a stage begins or ends
            marks.append(live.now)
            return 0.0

        self._mode.take()  # the learners' beginnings, which no step repeats
        with self._counted() as live:
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
        jacobian = sum(each.jacobian.nbytes for each in gradients)
        sums = jacobian if num_rows > part else 0
        return Update(
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
        config = self._cfg.estimator  # a minibatch has some of the replies to each prompt
        share = config.replies_per_prompt * config.minibatch_size / config.batch_size
        num_replies = max(1, round(share))
        batches = [
            self._rollouts(num_rows, num_preferences, num_replies=num_replies)
            for _ in self.trainers
        ]
        rewards = torch.arange(num_rows, dtype=torch.float32, device=self._device)
        rewards = rewards.expand(len(self._cfg.objectives), -1)
        return self._together(
            lambda learner, rows: learner.estimator.experience(rows, rewards, rewards),
            self._learners,
            batches,
        )

    def _counted(self) -> LiveBytes:
        states = [learner.estimator.state() for learner in self._learners]
        critics = [each for each in tree_leaves(states) if isinstance(each, torch.Tensor)]
        adapters = [p for each in self.trainers for p in each.adapter_parameters.values()]
        return LiveBytes(self._model, *critics, *adapters)

    def _together(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Calls a function for each client in lockstep, as the engine does."""
        calls = [partial(function, *own) for own in zip(*arguments, strict=True)]
        return lockstep(calls, max_size=self._cfg.max_rows or MAX_ROWS)

    def _rollouts(
        self, num_rows: int, num_preferences: int = 1, *, num_replies: int | None = None
    ) -> Rollouts:
        """Returns rollouts with prompts and replies of maximum length, one prompt padded.

        Each prompt has as many replies as the estimator compares, by default.
        """
        number = torch.arange(num_rows, device=self._device)  # of each row's prompt
        number //= num_replies or self._cfg.estimator.replies_per_prompt
        rollout, num_objectives = self._cfg.rollout, len(self._cfg.objectives)
        num_prompt, num_new = rollout.max_prompt_tokens, rollout.max_new_tokens
        ids = torch.ones(num_rows, num_prompt + num_new, dtype=torch.long, device=self._device)
        ids[:, 0] += number
        lengths = torch.full((num_rows,), num_prompt, device=self._device)
        lengths[number == 0] -= int(num_prompt > 1)
        preferences = None
        if self._cfg.policy.conditioning.kind != "none":
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
        with torch.no_grad(), self._counted() as scoring:
            rows = self._rollouts(num_rows, num_replies=2)
            set_preferences(self._model, rows.queries.preferences)
            self.alone._sampler.logprobs(rows, of_reference=False)
        return Sampled(0, scoring.peak, [], [], self._mode.take())

    def _experiences(self, num_rows: int, num_preferences: int) -> list[Any]:
        """Returns the clients' batches of pairs with prompts and replies of maximum length."""
        objectives = torch.arange(num_rows, device=self._device) % len(self._cfg.objectives)
        numbers = torch.arange(len(self._cfg.objectives), device=self._device)[:, None]

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


def policy_without_storage(
    architecture: PretrainedConfig, config: PolicyConfig, num_objectives: int
) -> Any:
    """Builds the policy on the meta device, as `load_policy` does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=getattr(torch, config.dtype))
        return add_adapter(model, config, num_objectives=num_objectives)


def rehearsed(
    model: Any,
    policy: PolicyFigures,
    cfg: AlignmentConfig,
    traffic: Traffic,
    num_clients: int,
    device: torch.device,
) -> Rehearsed:
    """Rehearses a process that trains `num_clients` clients in a round.

    Args:
        model: The policy on the meta device; its parameters are replaced.
        policy: Sizes of the policy.
        cfg: The run.
        traffic: Traffic of one round.
        num_clients: Number of clients.
        device: Device of the policy, which must be on this machine.
    """
    joint, sampled = updates(cfg, traffic, num_clients), rollouts(cfg, traffic, num_clients)
    is_stacked = cfg.engine == "stacked"
    num_preferences = preferences_of_minibatch(cfg) if solves_at_preferences(cfg) else None
    most = max(joint.clients, sampled.clients)
    kind = REHEARSALS[cfg.estimator.learns_from]
    rehearsal = kind(model, cfg, num_clients=most, device=device)
    update = rehearsal.update(minibatch_share(cfg, traffic), num_preferences)
    own_rows = -(-sampled.rows // sampled.clients // cfg.processes_per_client)
    samplers, evaluator = rehearsal.samplers[: sampled.clients], rehearsal.evaluator
    evaluation = rollout = rehearsal.sampling(samplers, own_rows)
    if samplers != [evaluator] or own_rows != evaluated_rows(cfg):
        evaluation = rehearsal.sampling([evaluator], evaluated_rows(cfg))
    critic, learner = rehearsal.learner_bytes(policy.adapter_bytes)
    # the state before the first round has no moments
    oldest = critic if cfg.rounds == 1 else learner
    own_adapter = policy.adapter_bytes if is_stacked else 0
    frozen_bytes = sum(policy.bytes_by_dtype.values()) - policy.bytes_by_dtype["buffers"]
    memory = Memory(
        training=learner + oldest + own_adapter,
        waiting=2 * learner + oldest + own_adapter,
        num_training=num_clients if is_stacked else 1,
        jacobian=update.jacobian,
        update=update.peak,
        saved=update.saved,
        values=update.values,
        cache=rollout.cache,
        rollout=rollout.peak,
        evaluation=evaluation.peak,
        engine=cfg.rollout.engine.num_bytes(frozen_bytes, policy.adapter_bytes),
        engine_devices=cfg.rollout.engine.own_devices,
    )
    return Rehearsed(memory, rollout, evaluation, update)


def evaluated_rows(cfg: AlignmentConfig) -> int:
    """Returns the maximum rows of a pass in evaluations and calibration."""
    evaluation = cfg.evaluation
    num_prompts = max(evaluation.num_validation_prompts, evaluation.num_test_prompts)
    replies = min(EVALUATION_BATCH, num_prompts * evaluation.num_samples)
    return min(cfg.rollout.forward_batch_size, max(evaluation.num_calibration_prompts, replies))
