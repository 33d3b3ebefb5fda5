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
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase
from trl.experimental.ppo import PPOConfig as TrlPPOConfig
from trl.experimental.ppo import PPOTrainer

from firm.alignment.estimators import EstimatorConfig, Experience, MinibatchGradients, Policy
from firm.alignment.evaluation import Replies, sample_replies
from firm.alignment.generation import RolloutConfig
from firm.alignment.learner import Learner
from firm.alignment.policy import adapter_parameters, set_adapter_dropout, without_needless_warnings
from firm.alignment.prompts import PromptFormat
from firm.alignment.rewards import Calibration, Judges, RewardFn
from firm.alignment.rollout import encode_dialogues, rollout
from firm.alignment.rows import ALONE
from firm.alignment.sequences import Queries, Rollouts
from firm.federation import Gradients, Team
from firm.gradients import combine, gram_matrix
from firm.solvers import firm_weights


class MultiObjectivePPOTrainer(PPOTrainer):
    """Samples, scores, takes the M gradients of an estimator apart and steps along their mixture.

    Args:
        config: The estimator and its hyperparameters of a local step.
        rollout_config: How responses are sampled and where they end.
        prompt_format: How the policy reads a dialogue.
        policy: A `PeftModel` with one adapter slot.
        tokenizer: The policy's, as `load_tokenizer` returns it.
        reward_fns: Name and reward function of every objective, in the order of the rows.
        calibrations: How raw scores become rewards; by default they are taken as they are.
        num_rounds: Rounds of the run, at whose end the learning rates' schedule ends; `train()`
            takes as many local steps.
        train_dataset: Tokenised prompts ("input_ids"), needed by `train()` alone.
        solver: Gram matrix [M, M] to weights [M], used by `train()` alone.
        value_model: What the estimator trains beside the adapter; by default a fresh one.
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
        config: EstimatorConfig,
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
                f"estimator.minibatch_size must have a row for each of the client's {team.size} "
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
        self._policy = Policy(
            policy,
            list(self.adapter_parameters.values()),
            pad_token_id=int(tokenizer.pad_token_id),  # type: ignore[arg-type]
            config=rollout_config,
            team=team,
            timed=self._timed,
        )
        self._critic = value_model or config.new_critic(policy, len(reward_fns))
        with tempfile.TemporaryDirectory() as folder, without_needless_warnings():
            # TRL makes its output folder at once: one that is gone afterwards, if none is given
            arguments = {"output_dir": folder, **trl_arguments}
            super().__init__(
                args=_trl_config(config, rollout_config, num_rounds, **arguments),
                processing_class=tokenizer,
                model=policy,  # type: ignore[arg-type]  # a PeftModel is what TRL makes of it
                ref_model=None,
                reward_model=torch.nn.Identity(),  # type: ignore[arg-type]  # rewards see texts
                train_dataset=train_dataset or Dataset.from_dict({"input_ids": [[0]]}),
                value_model=self._critic or _NoCritic(),  # type: ignore[arg-type]
                callbacks=callbacks,
            )
        lora: Any = policy.peft_config["default"]
        set_adapter_dropout(policy, lora.lora_dropout)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes the first learner, whose optimizer and schedule the callbacks see; TRL's hook."""
        self.learner = self.new_learner()
        self.optimizer = self.learner.actor_optimizer
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: self._rate_factor(step))

    def new_learner(self, judges: Judges | None = None) -> Learner:
        """Returns a learner that has learnt nothing yet; perhaps with judges of its own."""
        config = self.config
        optimizer_class, arguments = self.get_optimizer_cls_and_kwargs(self.args)
        arguments["weight_decay"] = self.args.weight_decay
        adam = partial(optimizer_class, **arguments)
        critic = self._critic and copy.deepcopy(self._critic).to(self.accelerator.device)
        actor_class = torch.optim.SGD if config.actor_optimizer == "sgd" else adam
        return Learner(
            config.estimator(self._policy, critic=critic, optimizer=adam),
            actor_class(self._policy.parameters, lr=config.actor_learning_rate),
            judges,
        )

    @property
    def judges(self) -> Judges:
        """Who scores the replies of the learner in charge."""
        return self.learner.judges or Judges(self.reward_fns, self.calibrations)

    def encode(self, prompts: Sequence[str]) -> Queries:
        """Stage 1: returns dialogues as the policy reads them, left-padded."""
        return encode_dialogues(
            prompts,
            self.processing_class,
            prompt_format=self.prompt_format,
            max_prompt_tokens=self.rollout_config.max_prompt_tokens,
        )

    def sample(self, queries: Queries, *, measures_mismatch: bool = False) -> Rollouts:
        """Stage 2: returns the policy's replies to prompts; those to one stand together."""
        queries = queries.to(self.accelerator.device)
        if self.config.replies_per_prompt > 1:
            queries = queries.repeated(self.config.replies_per_prompt)
        self.policy_model.eval()
        with self._timed("rollout"):
            return rollout(
                self.policy_model,
                queries,
                tokenizer=self.processing_class,
                config=self.rollout_config,
                reference=self.null_ref_context,
                team=self.team,
                measures_mismatch=measures_mismatch,
            )

    def replies(self, prompts: Sequence[str]) -> Replies:
        """Returns one sampled reply to each dialogue, by this process alone; for evaluation."""
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
    def experience(self, rollouts: Rollouts) -> Experience:
        """Stages 3 and 4: returns the replies with their rewards and what the estimator adds.

        Raises:
            ValueError: A reward function gave something else than B finite numbers.
        """
        with self._timed("reward"):
            scores = self._scores(rollouts)  # [M, B]
            rewards = self.judges.rewards(self.objectives, scores).to(rollouts.logprobs.device)
            rewards = rewards - self.config.missing_end_penalty * (~rollouts.ended)
        return self.learner.estimator.experience(rollouts, scores, rewards)

    def estimated_anew(self, experience: Experience) -> Experience:
        """Returns the same replies and rewards with what the present learner adds."""
        return self.learner.estimator.experience(
            experience.rollouts, experience.scores, experience.rewards
        )

    def minibatch_indices(self) -> Iterator[np.ndarray]:
        """Yields the row indices of every minibatch: a fresh permutation in each epoch.

        Drawn from numpy's global generator, as TRL does.
        """
        size = self.config.minibatch_size
        for _ in range(self.config.num_epochs):
            permutation = np.random.permutation(self.config.batch_size)
            for start in range(0, len(permutation), size):
                yield permutation[start : start + size]

    def gradients(self, minibatch: Experience, weights: torch.Tensor | None = None) -> Gradients:
        """Stages 5 and 6: returns the M losses of a minibatch and their Jacobian [M, d].

        With weights [M] the Jacobian has one row, the gradient of the losses' weighted sum.
        Rows are taken `micro_batch_size` at a time, each process of the team its share of them;
        losses and gradients are sums of the parts, so that a minibatch is one optimizer step
        however it is divided. `aux` is the `MinibatchGradients`; nothing is stepped.
        """
        own = minibatch.rows(self.team.share(minibatch.num_rows))
        parts = own.split(self.config.micro_batch_size)

        def summed_over_parts() -> MinibatchGradients:
            estimator = self.learner.estimator
            gradients = estimator.gradients(parts[0], minibatch, weights)
            for part in parts[1:]:
                gradients.add_(estimator.gradients(part, minibatch, weights))
            return gradients

        gradients = self.team.together(summed_over_parts)
        with self._timed("reduce"):
            gradients = gradients.summed(self.team)
        return Gradients(gradients.jacobian, gradients.losses, gradients)

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Stage 9: steps the adapter along the weighted gradient, and the estimator's own part."""
        learner = self.learner
        with self._timed("step"):
            direction = combine(gradients.jacobian, weights)  # [d]
            if self.config.max_gradient_norm is not None:
                norm = direction.norm()
                direction = direction * (self.config.max_gradient_norm / norm).clamp(max=1.0)
            parameters = self._policy.parameters
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, part in zip(parameters, direction.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
            learner.actor_optimizer.step()
            learner.actor_optimizer.zero_grad()
            learner.estimator.step(gradients.aux.own)
            learner.num_steps += 1

    def set_learning_rates(self, rounds_done: float) -> None:
        """Sets the learning rates as the schedule has them when so many rounds are done.

        It follows the round, with its fraction, and not a client's own steps: clients that are
        drawn now and then have the rates of those that always take part.
        """
        factor = self._rate_factor(rounds_done)
        for group in self.learner.actor_optimizer.param_groups:
            group["lr"] = self.config.actor_learning_rate * factor
        self.learner.estimator.set_learning_rate(factor)

    def _rate_factor(self, rounds_done: float) -> float:
        if self.config.learning_rate_schedule == "constant":
            return 1.0
        return max(0.0, self.num_rounds - rounds_done) / self.num_rounds

    def finish_batch(self, experience: Experience) -> None:
        """Ends a local step."""
        self.learner.estimator.end_batch(experience)

    def train(self) -> None:  # type: ignore[override]  # TRL's returns nothing either
        """Trains centrally on `train_dataset`: the stages above, without a federation."""
        args, state = self.args, self.state
        if self.train_dataset_len < self.config.num_prompts:
            raise ValueError(
                f"train() needs at least one batch of prompts ({self.config.num_prompts}), got "
                f"{self.train_dataset_len}: pass a larger train_dataset."
            )
        state.max_steps, state.num_train_epochs = args.num_total_batches, args.num_train_epochs
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        batches = itertools.chain.from_iterable(itertools.repeat(self.dataloader))
        for query_ids in (batch["input_ids"] for batch in batches):
            prompts = self.processing_class.batch_decode(query_ids, skip_special_tokens=True)
            experience = self.experience(self.sample(Queries(prompts, query_ids)))
            self.set_learning_rates(state.global_step)
            minibatches = []
            for index in self.minibatch_indices():
                gradients = self.gradients(experience.rows(index))
                with self._timed("gram"):
                    gram = gram_matrix(gradients.jacobian)
                with self._timed("solve"):
                    weights = self.solver(gram)
                self.step(gradients, weights)
                minibatches.append({"policy_loss": gradients.losses, **gradients.aux.metrics})
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
        """Returns figures of one batch under TRL's names, with one reward per objective."""
        mean = {
            trl_name: float(torch.stack([minibatch[name] for minibatch in minibatches]).mean())
            for name, trl_name in _TRL_NAMES.items()
            if name in minibatches[0]
        }
        rollouts, eos = experience.rollouts, self.processing_class.eos_token_id
        is_eos = torch.eq(rollouts.responses, eos)  # type: ignore[arg-type]
        figures = self.learner.estimator.metrics(experience)
        penalty = -figures["kl_coefficient"] * figures["kl"]
        return {
            "objective/kl": figures["kl"],
            "objective/entropy": -(rollouts.logprobs * rollouts.mask).sum(1).mean().item(),
            "objective/non_score_reward": penalty,
            "objective/rlhf_reward": penalty + experience.rewards.mean().item(),
            "objective/scores": experience.rewards.mean().item(),
            **{
                f"objective/scores/{name}": row.mean().item()
                for name, row in zip(self.objectives, experience.rewards, strict=True)
            },
            **mean,
            "val/num_eos_tokens": int(is_eos.sum()),
            "lr": float(self.learner.actor_optimizer.param_groups[0]["lr"]),
            "episode": self.state.episode,
        }

    def _scores(self, rollouts: Rollouts) -> torch.Tensor:
        """Returns the scores [M, B]; each process of the team asks for its share."""
        own = rollouts.rows(self.team.share(rollouts.num_rows))
        scores = self.team.together(
            lambda: self.judges.scores(self.objectives, own.queries.prompts, own.completions)
        )
        return torch.cat(self.team.gather(scores), dim=1)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds spent inside to `seconds[stage]`."""
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


_TRL_NAMES = {
    "clip_fraction": "policy/clipfrac_avg",
    "entropy": "policy/entropy_avg",
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
}


class _NoCritic(torch.nn.Module):
    """A value model for TRL, for estimators that have none."""

    base_model_prefix = "score"

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Identity()


def _trl_config(
    config: EstimatorConfig, rollout_config: RolloutConfig, num_rounds: int, **arguments: Any
) -> TrlPPOConfig:
    """Returns our frozen configs as TRL's mutable one, which its set-up and model card read."""
    return TrlPPOConfig(
        **{
            "total_episodes": num_rounds * config.num_prompts,
            "per_device_train_batch_size": config.num_prompts,
            "gradient_accumulation_steps": 1,
            "num_mini_batches": math.gcd(
                config.num_prompts, config.batch_size // config.minibatch_size
            ),
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
