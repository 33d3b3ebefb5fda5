"""TRL's `PPOTrainer` with M objectives, taken apart into the stages that a client drives.

The only module that knows TRL. It inherits the model and accelerator set-up, the adapter-off
reference, saving, the model card and the callbacks of `trl.experimental.ppo.PPOTrainer`, and
replaces its one long `train()` by stages. With one objective, a value network and a fixed KL
coefficient, `train()` equals TRL's bit for bit on the CPU.

Departures from TRL, each with its reason:

- rewards are given to *texts*, so that every reward model has its own tokenizer;
- adapter dropout is active in updates when asked for (TRL sets it to 0);
- a minibatch is one optimizer step, whatever the accumulation (TRL's accumulation merges them);
- actor and critic have optimizers and learning rates of their own, and a client may own them;
- the model is not wrapped for data parallelism: gradients of different clients must not be mixed.
"""

import copy
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)
from trl.experimental.ppo import PPOConfig as TrlPPOConfig
from trl.experimental.ppo import PPOTrainer

from firm.alignment.advantages import (
    gae,
    kl_penalty,
    masked_mean,
    shaped_rewards,
    whiten,
    whiten_together,
)
from firm.alignment.evaluation import Replies, sample_replies
from firm.alignment.policy import (
    adapter_parameters,
    set_adapter_dropout,
    without_needless_warnings,
)
from firm.alignment.ppo import (
    PPOConfig,
    adapted_kl_coefficient,
    entropy,
    policy_losses,
    value_losses,
)
from firm.alignment.prompts import PromptFormat
from firm.alignment.rewards import Calibration, Judges, RewardFn
from firm.alignment.rollout import (
    ALONE,
    INVALID_LOGPROB,
    RolloutConfig,
    Rollouts,
    by_rows,
    encode_dialogues,
    forward,
    response_logits,
    rollout,
    token_logprobs,
)
from firm.federation import Gradients, Team
from firm.gradients import combine, gram_matrix, jacobian
from firm.solvers import firm_weights


class ValueHeads(torch.nn.Module):
    """One linear value head per objective on hidden states: [B, L, H] to [B, L, M].

    The heads start at zero: M equal objectives stay equal, and the first advantages are the
    returns themselves.
    """

    base_model_prefix = "score"  # TRL's wrapper asks every value model for its trunk

    def __init__(self, hidden_size: int, num_objectives: int) -> None:
        super().__init__()
        self.score = torch.nn.Linear(hidden_size, num_objectives)
        torch.nn.init.zeros_(self.score.weight)
        torch.nn.init.zeros_(self.score.bias)


@dataclass(eq=False)
class Learner:
    """What one client trains beside the adapter: critic, optimizers, KL coefficient.

    The optimizers are bound to the one adapter in the model but hold moments of their own: a
    client is switched in by copying its adapter and handing its learner to the trainer.
    """

    critic: torch.nn.Module
    actor_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    kl_coefficient: float
    judges: Judges | None = None
    """Who scores this client's replies; None leaves it to the trainer's own reward functions."""
    num_steps: int = 0
    """Optimizer steps since it was made or restored."""

    def state(self) -> dict[str, Any]:
        """A deep copy of everything that training changes."""
        return _copied(
            {
                "critic": self.critic.state_dict(),
                "actor_optimizer": self.actor_optimizer.state_dict(),
                "critic_optimizer": self.critic_optimizer.state_dict(),
                "kl_coefficient": self.kl_coefficient,
            }
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state()` gave; the given state stays untouched."""
        state = _copied(state)
        self.critic.load_state_dict(state["critic"])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.kl_coefficient = state["kl_coefficient"]
        self.num_steps = 0


def _copied(tree: Any) -> Any:
    """A deep copy of nested mappings and sequences whose tensors are detached clones."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_copied(value) for value in tree]
    return tree


@dataclass(frozen=True)
class Experience:
    """One batch of rollouts with everything that its losses need: the outcome of stages 2 to 4."""

    rollouts: Rollouts
    raw_scores: torch.Tensor
    """Scores as the reward models gave them, [M, B]."""
    scores: torch.Tensor
    """Calibrated scores, [M, B]."""
    values: torch.Tensor
    """Value estimates at sampling time, [M, B, T]."""
    advantages: torch.Tensor
    """Whitened, zero outside the response, [M, B, T]."""
    returns: torch.Tensor
    """Targets of the critic, [M, B, T]."""
    kl: torch.Tensor
    """KL from the reference per token, [B, T]."""


@dataclass(frozen=True)
class MinibatchResult:
    """What a step needs beside the Jacobian (the critic's gradients), and figures to log."""

    critic_gradients: tuple[torch.Tensor, ...]
    metrics: dict[str, torch.Tensor]


class MultiObjectivePPOTrainer(PPOTrainer):
    """PPO with one loss per objective, whose gradients a solver weighs.

    Args:
        config: Hyperparameters of a local step.
        rollout_config: How responses are sampled and where they end.
        prompt_format: How the policy reads a dialogue.
        policy: A `PeftModel` with one adapter slot.
        tokenizer: The policy's, padding left, its pad token unlike EOS.
        reward_fns: Name and reward function of every objective, in the order of the rows.
        calibrations: How raw scores become rewards; by default they are taken as they are.
        num_rounds: Rounds of the run, at whose end the learning rates' schedule ends; `train()`
            takes as many local steps.
        train_dataset: Tokenised prompts ("input_ids"), needed by `train()` alone.
        solver: Gram matrix [M, M] to weights [M], used by `train()` alone: a federated client
            gets its weights from the strategy.
        value_model: The network of `critic: network`, with one output per objective; by default
            a fresh sequence classifier of the policy's architecture.
        callbacks: Hugging Face trainer callbacks, called by `train()` alone.
        team: Processes among which the rows of every batch are divided. All hold the same adapter,
            take the same steps, and call the stages at the same time.
        **trl_arguments: Further fields of TRL's `PPOConfig`, such as `seed` or `output_dir`.
    """

    # TRL types these for every modality and trainer; here they are one thing each
    args: Any
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: PreTrainedTokenizerBase  # type: ignore[assignment]

    def __init__(
        self,
        config: PPOConfig,
        *,
        rollout_config: RolloutConfig,
        prompt_format: PromptFormat | None = None,
        policy: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        reward_fns: Mapping[str, RewardFn],
        calibrations: Mapping[str, Calibration] | None = None,
        num_rounds: int,
        train_dataset: Dataset | None = None,
        solver: Callable[[torch.Tensor], torch.Tensor] = firm_weights,
        value_model: torch.nn.Module | None = None,
        callbacks: list[Any] | None = None,
        team: Team = ALONE,
        **trl_arguments: Any,
    ) -> None:
        if config.minibatch_size < team.size:
            raise ValueError(
                f"ppo.minibatch_size must have a row for each of the client's {team.size} "
                f"processes, got {config.minibatch_size}."
            )
        self.config = config
        self.team = team
        self.rollout_config = rollout_config
        self.num_rounds = num_rounds
        self.prompt_format = prompt_format or PromptFormat()
        self.objectives = tuple(reward_fns)
        self.reward_fns = dict(reward_fns)
        self.calibrations = calibrations
        self.solver = solver
        self.seconds: dict[str, float] = defaultdict(float)
        self.adapter_parameters = adapter_parameters(policy)
        if config.critic == "heads":
            value_model = ValueHeads(policy.config.hidden_size, len(reward_fns))
        elif value_model is None:
            architecture: Any = copy.deepcopy(policy.get_base_model().config)
            architecture.num_labels = len(reward_fns)
            value_model = AutoModelForSequenceClassification.from_config(architecture)
        with (
            _temporary_folder(trl_arguments.get("output_dir")) as output_dir,
            without_needless_warnings(),
        ):
            super().__init__(
                args=_trl_config(
                    config,
                    rollout_config,
                    num_rounds,
                    **{**trl_arguments, "output_dir": output_dir},
                ),
                processing_class=tokenizer,
                model=policy,  # type: ignore[arg-type]  # a PeftModel is what TRL makes of it
                ref_model=None,
                reward_model=torch.nn.Identity(),  # type: ignore[arg-type]  # rewards see texts
                train_dataset=train_dataset or Dataset.from_dict({"input_ids": [[0]]}),
                value_model=value_model,  # type: ignore[arg-type]
                callbacks=callbacks,
            )
        lora: Any = policy.peft_config["default"]
        set_adapter_dropout(policy, lora.lora_dropout)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """TRL's hook: the first learner, whose optimizer and schedule the callbacks see."""
        self.learner = self.new_learner()
        self.optimizer = self.learner.actor_optimizer
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: self._rate_factor(step))

    def new_learner(self, judges: Judges | None = None) -> Learner:
        """A fresh critic, fresh optimizers and the initial KL coefficient; perhaps own judges."""
        config = self.config
        critic = copy.deepcopy(self.value_model).to(self.accelerator.device)
        optimizer_class, arguments = self.get_optimizer_cls_and_kwargs(self.args)
        arguments["weight_decay"] = self.args.weight_decay
        adam = partial(optimizer_class, **arguments)
        actor_parameters = list(self.adapter_parameters.values())
        actor_class = torch.optim.SGD if config.actor_optimizer == "sgd" else adam
        actor_optimizer = actor_class(actor_parameters, lr=config.actor_learning_rate)
        critic_optimizer = adam(critic.parameters(), lr=config.critic_learning_rate)
        return Learner(critic, actor_optimizer, critic_optimizer, config.kl.coefficient, judges)

    @property
    def judges(self) -> Judges:
        """Who scores the replies of the learner in charge."""
        return self.learner.judges or Judges(self.reward_fns, self.calibrations)

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        """Stage 1: dialogues as the policy reads them, left-padded token ids [B, Q]."""
        return encode_dialogues(
            prompts,
            self.processing_class,
            prompt_format=self.prompt_format,
            max_prompt_tokens=self.rollout_config.max_prompt_tokens,
        )

    def rewards(self, raw_scores: torch.Tensor) -> torch.Tensor:
        """Raw scores [M, B] under the frozen calibrations; as they are without any."""
        return self.judges.rewards(self.objectives, raw_scores)

    def sample(self, query_ids: torch.Tensor, *, measures_mismatch: bool = False) -> Rollouts:
        """Stage 2: responses of the current policy to left-padded prompts [B, Q]; see `rollout`."""
        self.policy_model.eval()
        with self._timed("rollout"):
            return rollout(
                self.policy_model,
                query_ids.to(self.accelerator.device),
                tokenizer=self.processing_class,  # type: ignore[arg-type]
                config=self.rollout_config,
                reference=self.null_ref_context,
                team=self.team,
                measures_mismatch=measures_mismatch,
            )

    def replies(self, prompts: Sequence[str]) -> Replies:
        """One sampled reply to each dialogue, by this process alone; for evaluation."""
        self.policy_model.eval()
        return sample_replies(
            self.policy_model,
            prompts,
            tokenizer=self.processing_class,
            prompt_format=self.prompt_format,
            config=self.rollout_config,
            reference=self.null_ref_context,
        )

    @torch.no_grad()
    def experience(self, rollouts: Rollouts, prompts: Sequence[str]) -> Experience:
        """Stages 3 and 4: rewards on texts, values, KL-shaped rewards, advantages.

        Args:
            rollouts: What `sample` gave.
            prompts: The dialogues that the reward models are to see, length B.

        Raises:
            ValueError: A reward function gave something else than B finite numbers.
        """
        with self._timed("reward"):
            raw_scores = self._scores(prompts, rollouts.completions)  # [M, B]
            scores = self.rewards(raw_scores).to(rollouts.logprobs.device)
            scores = scores - self.config.missing_end_penalty * (~rollouts.ended)
        return self._valued(rollouts, raw_scores, scores)

    def valued(self, experience: Experience) -> Experience:
        """The same responses and scores, valued by the learner that is in charge now."""
        return self._valued(experience.rollouts, experience.raw_scores, experience.scores)

    @torch.no_grad()
    def _valued(
        self, rollouts: Rollouts, raw_scores: torch.Tensor, scores: torch.Tensor
    ) -> Experience:
        """Stage 4: values, KL-shaped rewards and advantages for scores [M, B]."""
        config = self.config
        self.policy_model.eval()
        with self._timed("values"):
            values = torch.cat(
                [
                    by_rows(self.team, lambda ids: self._values(ids, rollouts).transpose(0, 1), ids)
                    for ids in self._chunks(rollouts)
                ]
            )  # [B, M, T]
            values = values.transpose(0, 1).masked_fill(~rollouts.value_mask, 0)  # [M, B, T]
        with self._timed("advantages"):
            kl = kl_penalty(
                rollouts.logprobs, rollouts.reference_logprobs, estimator=config.kl.estimator
            )
            rewards = shaped_rewards(
                scores,
                kl,
                kl_coefficient=self.learner.kl_coefficient,
                score_index=rollouts.score_index,
            )
            if config.whiten_rewards:
                mask = rollouts.value_mask
                rewards = torch.stack(
                    [whiten(r, mask, shift_mean=False).masked_fill(~mask, 0) for r in rewards]
                )
            advantages, returns = gae(
                rewards, values, gamma=config.gamma, gae_lambda=config.gae_lambda
            )
            mask = rollouts.mask
            if config.advantage_scale == "shared":
                advantages = whiten_together(advantages, mask)
            else:
                advantages = torch.stack([whiten(a, mask) for a in advantages])
            advantages = advantages.masked_fill(~mask, 0)
        return Experience(rollouts, raw_scores, scores, values, advantages, returns, kl)

    def minibatch_indices(self) -> Iterator[np.ndarray]:
        """Row indices of every minibatch of a batch: a fresh permutation in each PPO epoch.

        Drawn from numpy's global generator, as TRL does.
        """
        size = self.config.minibatch_size
        for _ in range(self.config.num_epochs):
            permutation = np.random.permutation(self.config.batch_size)
            for start in range(0, len(permutation), size):
                yield permutation[start : start + size]

    def gradients(self, experience: Experience, index: np.ndarray | slice) -> Gradients:
        """Stages 5 and 6: the M policy losses of some rows and their Jacobian [M, d].

        Rows are taken `micro_batch_size` at a time, each process of the team its share of them;
        losses and gradients are sums of the parts, so that a minibatch is one optimizer step
        however it is divided. The critic's gradients come along in `aux`, a `MinibatchResult`;
        nothing is stepped.
        """
        rows = torch.arange(self.config.batch_size)[index]
        own = rows[self.team.share(len(rows))]
        parts = own.split(self.config.micro_batch_size or len(own))
        sums = self.team.together(
            lambda: _summed(self._part_gradients(experience, part, rows) for part in parts)
        )
        with self._timed("reduce"):
            sums = {name: self.team.sum(tensor) for name, tensor in sums.items()}
        sizes = [parameter.numel() for parameter in self.learner.critic.parameters()]
        critic_gradients = tuple(
            part.view_as(parameter)
            for part, parameter in zip(
                sums.pop("critic_gradient").split(sizes),
                self.learner.critic.parameters(),
                strict=True,
            )
        )
        rows_of_jacobian = sums.pop("jacobian")
        return Gradients(
            rows_of_jacobian, sums["policy_loss"], MinibatchResult(critic_gradients, sums)
        )

    def _part_gradients(
        self, experience: Experience, part: torch.Tensor, minibatch: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What some rows of a minibatch add to its losses, Jacobian, critic's gradient, figures."""
        config, rollouts = self.config, experience.rollouts
        token_ids = rollouts.query_responses[part]
        mask, value_mask = rollouts.mask[part], rollouts.value_mask[part]
        # of the minibatch's means over tokens, these rows are this share; 1.0 if they are all
        share = mask.sum() / rollouts.mask[minibatch].sum().clamp(min=1)
        value_share = value_mask.sum() / rollouts.value_mask[minibatch].sum()
        self.policy_model.train()
        with self._timed("forward"):
            output = forward(self.policy_model, token_ids, self._pad_token_id)
            logits = response_logits(
                output.logits, rollouts.context_length, self.rollout_config.temperature
            )
            logprobs = token_logprobs(logits, rollouts.responses[part])
            losses, clip_fractions = policy_losses(
                logprobs.masked_fill(~mask, INVALID_LOGPROB),
                rollouts.logprobs[part],
                experience.advantages[:, part],
                mask,
                clip_range=config.clip_range,
            )
            critic_losses = value_losses(
                self._values(token_ids, rollouts, output).masked_fill(~value_mask, 0),
                experience.values[:, part],
                experience.returns[:, part],
                value_mask,
                clip_range=config.value_clip_range,
            )
        losses, critic_losses = losses * share, critic_losses * value_share
        with self._timed("critic"):
            critic_gradients = torch.autograd.grad(
                critic_losses.sum(), list(self.learner.critic.parameters())
            )
        with self._timed("backward"):
            rows = jacobian(losses, list(self.adapter_parameters.values()))
        return {
            "jacobian": rows,
            "critic_gradient": torch.cat([gradient.flatten() for gradient in critic_gradients]),
            "policy_loss": losses.detach(),
            "value_loss": critic_losses.detach(),
            "clip_fraction": clip_fractions.mean() * share,
            "entropy": masked_mean(entropy(logits.detach()), mask) * share,
        }

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Stage 9: the adapter along the weighted gradient, the critic along its own."""
        with self._timed("step"):
            direction = combine(gradients.jacobian, weights)  # [d]
            if self.config.max_gradient_norm is not None:
                norm = direction.norm()
                direction = direction * (self.config.max_gradient_norm / norm).clamp(max=1.0)
            parameters = list(self.adapter_parameters.values())
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, part in zip(parameters, direction.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
            critic_parameters = self.learner.critic.parameters()
            for parameter, gradient in zip(
                critic_parameters, gradients.aux.critic_gradients, strict=True
            ):
                parameter.grad = gradient
            for optimizer in (self.learner.actor_optimizer, self.learner.critic_optimizer):
                optimizer.step()
                optimizer.zero_grad()
            self.learner.num_steps += 1

    def set_learning_rates(self, rounds_done: float) -> None:
        """Sets both learning rates as the schedule has them when so many rounds are done.

        It follows the round and not a client's own steps: clients that are drawn now and then have
        the rates of those that always take part.

        Args:
            rounds_done: At least 0; within a round a fraction counts.
        """
        factor = self._rate_factor(rounds_done)
        learner, config = self.learner, self.config
        for optimizer, rate in (
            (learner.actor_optimizer, config.actor_learning_rate),
            (learner.critic_optimizer, config.critic_learning_rate),
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    def _rate_factor(self, rounds_done: float) -> float:
        """What the schedule multiplies learning rates by."""
        if self.config.learning_rate_schedule == "constant":
            return 1.0
        return max(0.0, self.num_rounds - rounds_done) / self.num_rounds

    def finish_batch(self, experience: Experience) -> None:
        """Ends a local step: the KL controller adapts."""
        self.learner.kl_coefficient = adapted_kl_coefficient(
            self.learner.kl_coefficient,
            experience.kl.sum(1).mean().item(),
            num_responses=self.config.batch_size,
            config=self.config.kl,
        )

    def train(self) -> None:  # type: ignore[override]  # TRL's returns nothing either
        """Central multi-objective PPO over `train_dataset`: the stages above, no federation."""
        args, state = self.args, self.state
        if self.train_dataset_len < self.config.batch_size:
            raise ValueError(
                f"train() needs at least one batch of prompts ({self.config.batch_size}), got "
                f"{self.train_dataset_len}: pass a larger train_dataset."
            )
        state.max_steps, state.num_train_epochs = args.num_total_batches, args.num_train_epochs
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        batches = itertools.chain.from_iterable(itertools.repeat(self.dataloader))
        for query_ids in (batch["input_ids"] for batch in batches):
            prompts = self.processing_class.batch_decode(query_ids, skip_special_tokens=True)
            experience = self.experience(self.sample(query_ids), prompts)
            self.set_learning_rates(state.global_step)
            minibatches = []
            for index in self.minibatch_indices():
                gradients = self.gradients(experience, index)
                with self._timed("gram"):
                    gram = gram_matrix(gradients.jacobian)
                with self._timed("solve"):
                    weights = self.solver(gram)
                self.step(gradients, weights)
                minibatches.append(gradients.aux.metrics)
            state.episode += args.batch_size
            state.global_step += 1
            state.epoch = state.episode / self.train_dataset_len
            self.log(self._trl_metrics(experience, minibatches))
            self.finish_batch(experience)
            self.lr_scheduler.step()
            self.control = self.callback_handler.on_step_end(args, state, self.control)
            if self.control.should_save:
                self._save_checkpoint(self.model, trial=None)
                self.control = self.callback_handler.on_save(args, state, self.control)
            if state.global_step >= args.num_total_batches or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_train_end(args, state, self.control)

    def _trl_metrics(
        self, experience: Experience, minibatches: list[dict[str, torch.Tensor]]
    ) -> dict[str, float]:
        """Figures of one batch under TRL's names, with one score per objective."""
        mean = {
            key: float(torch.stack([minibatch[key] for minibatch in minibatches]).mean())
            for key in minibatches[0]
        }
        rollouts, eos = experience.rollouts, self.processing_class.eos_token_id
        is_eos = torch.eq(rollouts.responses, eos)  # type: ignore[arg-type]
        penalty = -self.learner.kl_coefficient * experience.kl.sum(1).mean().item()
        return {
            "objective/kl": experience.kl.sum(1).mean().item(),
            "objective/entropy": -(rollouts.logprobs * rollouts.mask).sum(1).mean().item(),
            "objective/non_score_reward": penalty,
            "objective/rlhf_reward": penalty + experience.scores.mean().item(),
            "objective/scores": experience.scores.mean().item(),
            **{
                f"objective/scores/{name}": row.mean().item()
                for name, row in zip(self.objectives, experience.scores, strict=True)
            },
            "policy/clipfrac_avg": mean["clip_fraction"],
            "policy/entropy_avg": mean["entropy"],
            "loss/policy_avg": mean["policy_loss"],
            "loss/value_avg": mean["value_loss"],
            "val/num_eos_tokens": int(is_eos.sum()),
            "lr": float(self.learner.actor_optimizer.param_groups[0]["lr"]),
            "episode": self.state.episode,
        }

    def _scores(self, prompts: Sequence[str], completions: Sequence[str]) -> torch.Tensor:
        """Raw scores [M, B], each process of the team asking for its share."""
        own = self.team.share(len(completions))
        scores = self.team.together(
            lambda: self.judges.raw_scores(self.objectives, prompts[own], completions[own])
        )
        return torch.cat(self.team.gather(scores), dim=1)

    def _values(
        self, token_ids: torch.Tensor, rollouts: Rollouts, policy_output: Any = None
    ) -> torch.Tensor:
        """Value of every response position and objective, [M, b, T], for rows [b, Q + T]."""
        critic: Any = self.learner.critic
        if self.config.critic == "network":
            trunk = getattr(critic, critic.base_model_prefix)
            hidden = forward(trunk, token_ids, self._pad_token_id).hidden_states[-1]
        else:
            policy_output = policy_output or forward(
                self.policy_model, token_ids, self._pad_token_id
            )
            hidden = policy_output.hidden_states[-1].detach().float()
        values = critic.score(hidden)[:, rollouts.context_length - 1 : -1]  # [b, T, M]
        return torch.stack([values[..., j] for j in range(values.size(-1))])

    def _chunks(self, rollouts: Rollouts) -> Iterable[torch.Tensor]:
        return rollouts.query_responses.split(self.rollout_config.forward_batch_size)

    @property
    def _pad_token_id(self) -> int:
        return int(self.processing_class.pad_token_id)  # type: ignore[union-attr]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds spent inside to `seconds[stage]`."""
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


def _trl_config(
    config: PPOConfig, rollout_config: RolloutConfig, num_rounds: int, **arguments: Any
) -> TrlPPOConfig:
    """Our frozen configs as TRL's mutable one: what its set-up, saving and model card read."""
    return TrlPPOConfig(
        **{
            "total_episodes": num_rounds * config.batch_size,
            "per_device_train_batch_size": config.batch_size,
            "gradient_accumulation_steps": 1,
            "num_mini_batches": config.batch_size // config.minibatch_size,
            "num_ppo_epochs": config.num_epochs,
            "learning_rate": config.actor_learning_rate,
            "lr_scheduler_type": config.learning_rate_schedule,
            "response_length": rollout_config.max_new_tokens,
            "temperature": rollout_config.temperature,
            "local_rollout_forward_batch_size": rollout_config.forward_batch_size,
            "stop_token": "eos",
            "activation_checkpointing": False,
            "bf16": False,
            "report_to": "none",
            "num_sample_generations": 0,
            "disable_tqdm": True,
            **arguments,
        }
    )


def _summed(parts: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sums of each entry; a single part as it is."""
    first, *others = parts
    for part in others:
        for name, tensor in part.items():
            first[name] += tensor
    return first


@contextmanager
def _temporary_folder(folder: str | None) -> Iterator[str]:
    """`folder`, or one that is gone afterwards: TRL makes its output folder at once."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield temporary
