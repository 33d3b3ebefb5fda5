"""The stages of a local step on a shared policy, called by clients.

Reward functions receive *texts*, so that every reward model can use its own tokenizer. Dropout of
the base model is disabled, as in TRL; the adapter's is active in updates. Actor and critic have
separate optimizers and learning rates, which may belong to a client. The model is not wrapped for
data parallelism: gradients of different clients must not be averaged.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedTokenizerBase, TrainerState

from firm.alignment.adapters.forward import forward_of
from firm.alignment.estimator_config import EstimatorConfig
from firm.alignment.estimators.estimator import Estimator, Policy
from firm.alignment.evaluation import Replies, sample_replies
from firm.alignment.pair_tokens import (
    EncodedPair,
    PairBatch,
    collate,
    encode_pairs,
    fingerprint,
    with_references,
)
from firm.alignment.pairs import Pair
from firm.alignment.policy import adapter_parameters, set_mode
from firm.alignment.prompts import Prompt, PromptFormat
from firm.alignment.rewards import Judges, RewardFn, Scored, ScoringRequest, filled, scored
from firm.alignment.rollout import Sampler, begin_sampling, encode_prompts, sample, with_logprobs
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import RolloutEngine
from firm.alignment.sequences import (
    SINGLE_PROCESS,
    Examples,
    Queries,
    Rollouts,
    SampledSequences,
    may_pass_prompts_once,
)
from firm.base.devices import memory_advice
from firm.base.state import State
from firm.federation.client import Gradients
from firm.federation.processes import Team
from firm.gradients.jacobian import combine

ADAM = partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True)
"""Default optimizer of TRL."""


@dataclass(frozen=True)
class ScoredReplies:
    """Scores and rewards of B replies."""

    scores: torch.Tensor
    """Raw scores, [M, B]; NaN where a reward does not apply, and for objectives without one."""
    rewards: torch.Tensor
    """Calibrated scores minus the penalty of unfinished replies, [M, B]."""
    truncated: dict[str, list[bool]]
    """Replies of this process that the reward model truncated, as flags, by objective."""


@dataclass(eq=False)
class Learner:
    """An estimator with its parameters, and the adapter's optimizer.

    The optimizer is bound to the adapter slot of the shared model, but has its own moments: each
    client copies its adapter into the slot and passes its learner to the trainer's stages.
    """

    estimator: Estimator
    actor_optimizer: torch.optim.Optimizer
    num_steps: int = 0
    """Optimizer steps since the learner was created or restored."""

    def state(self) -> dict[str, Any]:
        """Returns a deep copy of everything that training changes."""
        optimizer = self.actor_optimizer.state_dict()
        return copy_of_state({"estimator": self.estimator.state(), "actor_optimizer": optimizer})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state()`, without modifying it."""
        state = copy_of_state(dict(state))
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.estimator.restore(state["estimator"])
        self.num_steps = 0


def copy_of_state(state: State) -> State:
    """Returns a deep copy of a state, whose tensors `copy.deepcopy` would copy slowly."""
    leaves, structure = tree_flatten(state)
    copies = [
        leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
        for leaf in leaves
    ]
    return tree_unflatten(copies, structure)


class MultiObjectiveTrainer:
    """The stages of a local step on a policy; all training state is in the given `Learner`.

    The stages sample, score, compute the M gradients of an estimator and step along their weighted
    sum.

    Args:
        config: Estimator and hyperparameters of a local step.
        rollout_config: Sampling of responses, and where they end.
        prompt_format: Format of prompts in the policy's input.
        policy: A `PeftModel` with one adapter slot, on the device that it learns on.
        tokenizer: Tokenizer of the policy, as returned by `load_tokenizer`.
        reward_fns: Reward functions by objective, in the order of the Jacobian's rows.
        objectives: Names of the objectives, by default those of the reward functions.
        num_rounds: Rounds of the run, the length of the learning rate schedule.
        value_model: Critic of the estimator; a new one by default.
        team: Processes that share the rows of every batch. All hold the same adapter, take the same
            steps, and call the stages at the same time.
        rollout_engine: Engine that samples replies; a new one as configured by default.
        adam: Optimizer factory, called with parameters and `lr`.

    Attributes:
        seconds: Seconds spent in each stage since the trainer was created.
        prompts_once: Whether passes take equal prompts once (`forward_prompts_once`).
        trl: TRL's trainer around the stages, if used (`MultiObjectivePPOTrainer`).
    """

    trl: Any = None
    _scored: Callable[[ScoringRequest], Callable[[], Scored]] = staticmethod(scored)
    _clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        config: EstimatorConfig,
        *,
        rollout_config: RolloutConfig,
        prompt_format: PromptFormat | None = None,
        policy: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        reward_fns: Mapping[str, RewardFn],
        num_rounds: int,
        objectives: Sequence[str] | None = None,
        value_model: torch.nn.Module | None = None,
        team: Team = SINGLE_PROCESS,
        rollout_engine: RolloutEngine | None = None,
        adam: Callable[..., torch.optim.Optimizer] = ADAM,
    ) -> None:
        if config.minibatch_size < team.size:
            raise ValueError(
                f"estimator.minibatch_size must be at least the number of processes per client, "
                f"{team.size}, got {config.minibatch_size}."
            )
        self.config = config
        self.team = team
        self.rollout_config = rollout_config
        self.num_rounds = num_rounds
        self.prompt_format = prompt_format or PromptFormat()
        self.objectives = tuple(reward_fns if objectives is None else objectives)
        self.reward_fns = dict(reward_fns)
        self.seconds: dict[str, float] = defaultdict(float)
        self._adam = adam
        self.policy_model: Any = policy
        self.tokenizer = tokenizer
        self.adapter_parameters = self._adapter()
        self.prompts_once = config.shares_prompts and may_pass_prompts_once(policy)
        self._policy = self._new_policy(
            model=policy,
            parameters=list(self.adapter_parameters.values()),
            config=rollout_config,
            is_linear=forward_of(policy).kind.is_linear,
            timed=self.timed,
        )
        new_engine = rollout_config.engine.engine
        self.rollout_engine = rollout_engine or new_engine(policy, tokenizer, rollout_config)
        self._sampler = self._new_sampler(
            model=policy,
            tokenizer=tokenizer,
            config=rollout_config,
            reference=policy.disable_adapter,
            prompt_format=self.prompt_format,
            engine=self.rollout_engine,
        )
        self.critic = value_model or config.new_critic(policy, len(self.objectives))
        for model in filter(None, (policy, self.critic)):
            model.eval()  # `set_mode` switches the adapter's dropout on
        self.device = policy.device

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a sampled reply."""
        return self._sampler.end_ids

    def _adapter(self) -> dict[str, torch.nn.Parameter]:
        return adapter_parameters(self.policy_model)

    def _new_policy(self, **fields: Any) -> Policy:
        return Policy(**fields, team=self.team, prompts_once=self.prompts_once)

    def _new_sampler(self, **fields: Any) -> Sampler:
        return Sampler(**fields, team=self.team, prompts_once=self.prompts_once)

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of another trainer of the same policy, in one process."""
        return {
            "config": self.config,
            "rollout_config": self.rollout_config,
            "prompt_format": self.prompt_format,
            "policy": self.policy_model,
            "tokenizer": self.tokenizer,
            "reward_fns": self.reward_fns,
            "num_rounds": self.num_rounds,
            "objectives": self.objectives,
            "value_model": self.critic,
            "rollout_engine": self.rollout_engine,
            "adam": self._adam,
        }

    def new_learner(self) -> Learner:
        """Returns an untrained learner."""
        config, adam = self.config, self._adam
        critic = self.critic and copy.deepcopy(self.critic).to(self.device)
        actor_class = torch.optim.SGD if config.actor_optimizer == "sgd" else adam
        return Learner(
            config.estimator(self._policy, critic=critic, optimizer=adam),
            actor_class(self._policy.parameters, lr=config.actor_learning_rate),
        )

    def encode(self, prompts: Sequence[Prompt]) -> Queries:
        """Stage 1: encodes prompts for the policy, left-padded."""
        return encode_prompts(
            prompts,
            self.tokenizer,
            prompt_format=self.prompt_format,
            max_prompt_tokens=self.rollout_config.max_prompt_tokens,
        )

    def sample(self, queries: Queries) -> SampledSequences:
        """Stage 2: samples replies to prompts; replies to the same prompt are adjacent."""
        with self._sampling():
            return sample(self._sampler, self._each_reply(queries))

    def begin_sampling(self, queries: Queries) -> Callable[[], SampledSequences]:
        """Stage 2 ahead: begins to sample by the current adapter; returns a function that waits.

        The engine must be one that samples while this process trains.
        """
        with self._sampling():
            finish = begin_sampling(self._sampler, self._each_reply(queries))

        def wait() -> SampledSequences:
            with self._sampling():
                return finish()

        return wait

    def _each_reply(self, queries: Queries) -> Queries:
        """Returns a row for each reply, on the policy's device."""
        queries = queries.to(self.device)
        count = self.config.replies_per_prompt
        return queries.repeated(count) if count > 1 else queries

    def with_logprobs(
        self, sampled: SampledSequences, *, measures_mismatch: bool = False
    ) -> Rollouts:
        """Stage 2, ended: returns the replies with log-probabilities of policy and reference."""
        with self._sampling():
            return with_logprobs(self._sampler, sampled, measures_mismatch=measures_mismatch)

    def replies(
        self,
        prompts: Sequence[Prompt],
        *,
        preference: Sequence[float] | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> Replies:
        """Samples one reply to each prompt in this process alone, for evaluation.

        A conditioned policy replies at the preference, by default at equal shares. `on_progress` is
        called at each token with the number of replies so far.
        """
        set_mode(self.policy_model, is_training=False)
        with self.team.alone(), self._sampling_advice():
            return sample_replies(
                self.policy_model,
                prompts,
                tokenizer=self.tokenizer,
                prompt_format=self.prompt_format,
                config=self.rollout_config,
                reference=self.policy_model.disable_adapter,
                preference=preference,
                engine=self.rollout_engine,
                on_progress=on_progress,
            )

    def encode_pairs(
        self,
        pairs: Sequence[Pair],
        *,
        is_alone: bool = False,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[EncodedPair]:
        """Stage 1 of pairs: returns them in the policy's tokens, with the reference's values.

        Log-probabilities under the reference are read from the user's cache if they are there.
        Otherwise `on_progress` is called with the number of replies so far. `is_alone` as in
        `reply_logprobs`.
        """
        config = self.rollout_config
        encoded = encode_pairs(
            pairs,
            self.objectives,
            self.tokenizer,
            prompt_format=self.prompt_format,
            end_ids=self.end_ids,
            max_prompt_tokens=config.max_prompt_tokens,
            max_reply_tokens=config.max_new_tokens,
        )
        size, model = config.forward_batch_size, self.policy_model
        # the processes of a team must agree on whether to compute
        way = size, str(self.device), self.prompts_once
        key = fingerprint(model, *way) if self.team.size == 1 else None
        logprobs_of = partial(
            self.reply_logprobs, of_reference=True, is_alone=is_alone, on_progress=on_progress
        )
        return with_references(encoded, logprobs_of, key)

    @torch.no_grad()
    def reply_logprobs(
        self,
        pairs: Sequence[EncodedPair],
        *,
        of_reference: bool = False,
        preference: Sequence[float] | None = None,
        is_alone: bool = False,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> torch.Tensor:
        """Returns the log-probabilities of the replies of N pairs, float32 [N, 2] on the CPU.

        Equal pairs share passes with the same others under the policy and the reference, so that a
        policy that equals its reference gets equal values. A conditioned policy takes the
        preference, by default equal shares. If `is_alone`, this process computes all of them while
        the others of its team wait, as in an evaluation. `on_progress` is called with the number of
        replies so far.
        """
        set_mode(self.policy_model, is_training=False)
        config = replace(self.rollout_config, temperature=1.0)
        team = SINGLE_PROCESS if is_alone else self.team
        sampler = replace(self._sampler, config=config, team=team)
        with self.team.alone() if is_alone else nullcontext():
            return self._reply_logprobs(pairs, sampler, of_reference, preference, on_progress)

    def _reply_logprobs(
        self,
        pairs: Sequence[EncodedPair],
        sampler: Sampler,
        of_reference: bool,
        preference: Sequence[float] | None,
        on_progress: Callable[[int], None],
    ) -> torch.Tensor:
        lengths = [len(pair.prompt_ids) + max(map(len, pair.reply_ids)) for pair in pairs]
        order = sorted(range(len(pairs)), key=lengths.__getitem__)
        values, size = (
            torch.zeros(len(pairs), 2),
            max(1, self.rollout_config.forward_batch_size // 2),
        )
        for start in range(0, len(order), size):
            on_progress(2 * start)
            places = order[start : start + size]
            batch = self.collated([pairs[at] for at in places], preference)
            rows = batch.sequences
            with self._sampling_advice(), self.timed("reference" if of_reference else "pairs"):
                logprobs = sampler.logprobs(rows, of_reference=of_reference)
            sums = logprobs.masked_fill(~rows.mask, 0).sum(1)
            values[places] = sums.view(-1, 2).float().cpu()
        on_progress(2 * len(order))
        return values

    def collated(self, pairs: Sequence[EncodedPair], preference: Any = None) -> PairBatch:
        """Returns pairs as a batch on the policy's device, at a preference [M] or one each."""
        batch = collate(pairs, len(self.objectives), pad_id=self._sampler.pad_token_id)
        if preference is not None:
            shares = torch.as_tensor(preference, dtype=torch.float32)
            shares = (shares / shares.sum(-1, keepdim=True)).expand(len(pairs), -1)
            batch = replace(batch, queries=replace(batch.queries, preferences=shares))
        return batch.to(self.device)

    @torch.no_grad()
    def begin_scoring(
        self, sampled: SampledSequences, judges: Judges | None = None, *, rounds_done: float = 0.0
    ) -> Callable[[], ScoredReplies]:
        """Stage 3: begins to score replies, by default by all reward functions.

        Returns a function that waits for the replies' scores and rewards. Coroutine functions, such
        as remote judges, run meanwhile; all others are called at once. If a reward does not apply,
        the score is NaN, and the reward is neutral among the replies to the prompt; see `filled`.

        Raises:
            ValueError: When a reward function does not return B finite numbers or None; the
                returned function, too.
        """
        judges = judges or Judges(self.reward_fns)
        own = sampled.rows(self.team.share(sampled.num_rows))
        progress = TrainerState(
            epoch=rounds_done,
            global_step=int(rounds_done),
            max_steps=self.num_rounds,
            num_train_epochs=self.num_rounds,
        )
        prompts, completions, ids = own.queries.prompts, own.completions, own.completion_ids
        asked = ScoringRequest(judges, self.objectives, prompts, completions, ids, progress)
        with self._scoring():
            answer = self._scored(asked)

        def finish() -> ScoredReplies:
            with self._scoring():
                found = answer()
            with self.timed("reward"):
                scores = torch.cat(self.team.gather(found.scores), dim=1)  # [M, B]
                scores = judges.conditional(self.objectives, scores)
                rewards = judges.rewards(self.objectives, scores).to(sampled.device)
                rewards = filled(rewards, self.config.replies_per_prompt)
                rewards = rewards - self.config.missing_end_penalty * (~sampled.ended)
                known = judges.reward_fns
                scores[[name not in known for name in self.objectives]] = torch.nan
            return ScoredReplies(scores, rewards, found.truncated)

        return finish

    def score(self, sampled: SampledSequences, **options: Any) -> ScoredReplies:
        """Stage 3 at once: returns the replies' scores and rewards; see `begin_scoring`."""
        return self.begin_scoring(sampled, **options)()

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        advice = memory_advice("lower rewards.NAME.batch_size")
        with advice, self.timed("reward"), self.team.unanimous():
            yield

    def minibatch_indices(self) -> Iterator[np.ndarray]:
        """Yields the row indices of every minibatch: a fresh permutation in each epoch.

        Draws from numpy's global generator, as in TRL. Replies to a prompt are adjacent within a
        minibatch where their passes share the prompt.
        """
        size = self.config.minibatch_size
        for _ in range(self.config.num_epochs):
            permutation = np.random.permutation(self.config.batch_size)
            for start in range(0, len(permutation), size):
                rows = permutation[start : start + size]
                yield np.sort(rows) if self.prompts_once else rows

    def gradients(
        self,
        learner: Learner,
        minibatch: Examples,
        weights: torch.Tensor | None = None,
        *,
        by_preference: bool = False,
    ) -> Gradients:
        """Stages 5 and 6: returns the M losses of a minibatch and their Jacobian [M, d].

        With weights [M] the Jacobian has one row, the gradient of the weighted sum of losses. With
        `by_preference`, for a conditioned policy, it is [K M, d]; see `Gradients`. Each process of
        the team computes its share of the rows, `micro_batch_size` of similar length at a time, and
        the parts are summed, so that a minibatch is one optimizer step however it is split. `aux`
        is the `MinibatchGradients`. Takes no step.
        """
        own = minibatch.rows(self.team.share(minibatch.num_rows))
        first, *others = own.parts(self.config.micro_batch_size)
        preferences = minibatch.preferences if by_preference else None
        options = {} if preferences is None else {"preferences": preferences.unique(dim=0)}
        estimator: Any = learner.estimator
        size = self.config.micro_batch_size or f"{own.num_rows}, the whole minibatch"
        key = f"estimator.micro_batch_size, now {size}"

        def gradients_of(part: Examples) -> Any:
            # a joint pass of the stacked engine, in which this part waits, may end another client's
            # batch, which then samples
            set_mode(self.policy_model, is_training=True)
            return estimator.gradients(part, minibatch, weights, **options)

        with (
            self.team.unanimous(),
            memory_advice(f"lower {key}, or set policy.gradient_checkpointing"),
        ):
            gradients = gradients_of(first)
            for part in others:
                gradients.add_(gradients_of(part))
        with self.timed("reduce"):
            gradients = gradients.summed(self.team)
        return Gradients(gradients.jacobian, gradients.losses, gradients, **options)

    def step(self, learner: Learner, gradients: Gradients, weights: torch.Tensor) -> None:
        """Stage 9: steps the adapter along the weighted gradient, and the estimator itself."""
        with self.timed("step"):
            direction = combine(gradients.jacobian, weights)  # [d]
            if self.config.max_gradient_norm is not None:
                norm = direction.norm()
                direction = direction * (self.config.max_gradient_norm / norm).clamp(max=1.0)
            parameters = self._policy.parameters
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, part in zip(parameters, direction.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter)
            learner.actor_optimizer.step()
            learner.actor_optimizer.zero_grad()
            learner.estimator.step(gradients.aux.own)
            learner.num_steps += 1

    def set_learning_rates(
        self, learner: Learner, rounds_done: float, *, factor: float = 1.0
    ) -> None:
        """Sets the scheduled learning rates after `rounds_done` rounds, times a factor.

        The schedule follows the (fractional) round rather than a client's own steps, so that
        clients that are sampled occasionally have the same rates as the others.
        """
        factor *= self.rate_factor(rounds_done)
        for group in learner.actor_optimizer.param_groups:
            group["lr"] = self.config.actor_learning_rate * factor
        learner.estimator.set_learning_rate(factor)

    def rate_factor(self, rounds_done: float) -> float:
        """Returns the learning rates after `rounds_done` rounds, relative to the initial ones."""
        if self.config.learning_rate_schedule == "constant":
            return 1.0
        return max(0.0, self.num_rounds - rounds_done) / self.num_rounds

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        set_mode(self.policy_model, is_training=False)
        with self._sampling_advice(), self.timed("rollout"):
            yield

    def _sampling_advice(self) -> AbstractContextManager[None]:
        size = self.rollout_config.forward_batch_size
        return memory_advice(f"lower rollout.forward_batch_size, now {size}")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time spent inside the context to `seconds[stage]`."""
        start = self._clock()
        yield
        self.seconds[stage] += self._clock() - start
