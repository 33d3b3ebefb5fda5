"""TRL's `PPOTrainer`, with `train()` replaced by the stages of `MultiObjectiveTrainer`.

This is the only module that imports `trl.experimental.ppo`, which TRL removed in 1.13. TRL provides
the set-up of model and accelerator, saving, the model card and the callbacks. With one objective, a
value network and a fixed KL coefficient, `train()` equals TRL's bit for bit on the CPU.

Departures from TRL:

- reward functions receive *texts*, so that every reward model can use its own tokenizer;
- adapter dropout is active in updates if configured (TRL sets it to 0);
- a minibatch is one optimizer step regardless of accumulation (TRL merges accumulated minibatches);
- actor and critic have separate optimizers and learning rates, which may belong to a client;
- a reply ends at every end token of the model's generation config (TRL sets it to the tokenizer's
  EOS token);
- the model is not wrapped for data parallelism, which would average gradients of clients.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase
from trl.experimental.ppo import PPOConfig as TrlPPOConfig
from trl.experimental.ppo import PPOTrainer

from firm.alignment.estimator_config import PPOConfig
from firm.alignment.estimators.estimator import Experience
from firm.alignment.policy import without_needless_warnings
from firm.alignment.prompts import Prompt
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.sequences import Queries
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.devices import accelerate_on
from firm.gradients.jacobian import gram_matrix
from firm.solvers.regularised import firm_weights


class MultiObjectivePPOTrainer(PPOTrainer):
    """TRL's trainer around the stages of a local step.

    Args:
        config: PPO's hyperparameters.
        train_dataset: Tokenised prompts ("input_ids"), for `train()` only.
        solver: Maps a Gram matrix [M, M] to weights [M]; for `train()` only.
        callbacks: Callbacks of Hugging Face's trainer, called by `train()` only.
        trl_arguments: Other fields of TRL's `PPOConfig`, such as `seed` or `output_dir`.
        **arguments: Arguments of `MultiObjectiveTrainer`; `train()` takes `num_rounds` local steps.

    Attributes:
        stages: The stages on the same policy.
        learner: The learner that `train()` trains.
    """

    # TRL's unions cover every modality and trainer; here each attribute has a single type
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
        train_dataset: Dataset | None = None,
        solver: Callable[[torch.Tensor], torch.Tensor] = firm_weights,
        callbacks: list[Any] | None = None,
        trl_arguments: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.solver = solver
        device = arguments["policy"].device
        with (
            tempfile.TemporaryDirectory() as folder,
            without_needless_warnings(),
            accelerate_on(device),
        ):
            self.args = _trl_config(
                config,
                arguments["rollout_config"],
                arguments["num_rounds"],
                use_cpu=device.type == "cpu",
                # TRL creates its output folder immediately, so use a temporary one by default
                **{"output_dir": folder, **(trl_arguments or {})},
            )
            adam, options = PPOTrainer.get_optimizer_cls_and_kwargs(self.args)
            options = {**options, "weight_decay": self.args.weight_decay}
            self.stages = MultiObjectiveTrainer(config, **arguments, adam=partial(adam, **options))
            self.learner, self.stages.trl = self.stages.new_learner(), self
            with _undo_set_up(self.stages.policy_model, self.stages.critic):
                super().__init__(
                    args=self.args,
                    processing_class=self.stages.tokenizer,
                    model=self.stages.policy_model,
                    ref_model=None,
                    reward_model=torch.nn.Identity(),  # type: ignore[arg-type]  # rewards see texts
                    train_dataset=train_dataset or Dataset.from_dict({"input_ids": [[0]]}),
                    value_model=self.stages.critic,  # type: ignore[arg-type]
                    callbacks=callbacks,
                )

    def leave_training_to_clients_(self) -> None:
        """Frees what `train` alone needs: the learner, and the critic's memory on an accelerator.

        The critic is then only copied to the clients' learners.
        """
        del self.learner
        if self.stages.critic is not None:
            self.stages.critic.to("cpu")

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Exposes the learner's optimizer to the callbacks; called by TRL."""
        self.optimizer = self.learner.actor_optimizer
        self.lr_scheduler = LambdaLR(self.optimizer, self.stages.rate_factor)

    def train(self) -> None:  # type: ignore[override]  # TRL's returns nothing either
        """Trains centrally on `train_dataset`, without a federation."""
        args, state, stages, learner = self.args, self.state, self.stages, self.learner
        num_prompts = stages.config.num_prompts
        if self.train_dataset_len < num_prompts:
            raise ValueError(
                f"train() needs at least one batch of prompts ({num_prompts}), got "
                f"{self.train_dataset_len}: pass a larger train_dataset."
            )
        state.max_steps, state.num_train_epochs = args.num_total_batches, args.num_train_epochs
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        batches = itertools.chain.from_iterable(itertools.repeat(self.dataloader))
        for batch in batches:
            query_ids, lengths = batch["input_ids"], batch["attention_mask"].sum(1)
            texts = self.processing_class.batch_decode(query_ids, skip_special_tokens=True)
            queries = Queries([Prompt(text) for text in texts], query_ids, lengths)
            sampled = stages.sample(queries)
            scoring = stages.begin_scoring(sampled, rounds_done=state.global_step)
            rollouts, scored = stages.with_logprobs(sampled), scoring()
            experience = learner.estimator.experience(rollouts, scored.scores, scored.rewards)
            stages.set_learning_rates(learner, state.global_step)
            minibatches = []
            for index in stages.minibatch_indices():
                gradients = stages.gradients(learner, experience.rows(index))
                weights = self.solver(gram_matrix(gradients.jacobian))
                stages.step(learner, gradients, weights)
                minibatches.append({"policy_loss": gradients.losses, **gradients.aux.metrics})
            state.episode += args.batch_size
            state.global_step += 1
            state.epoch = state.episode / self.train_dataset_len
            self.log(self._trl_metrics(experience, minibatches))
            learner.estimator.end_batch(experience)  # adapts the KL coefficient
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
        """Returns metrics of a batch under TRL's names, with one reward per objective."""
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
                for name, row in zip(self.stages.objectives, experience.rewards, strict=True)
            },
            **mean,
            "val/num_eos_tokens": int(is_eos.sum()),
            "lr": float(self.learner.actor_optimizer.param_groups[0]["lr"]),
            "episode": self.state.episode,
        }


@contextmanager
def _undo_set_up(policy: Any, critic: torch.nn.Module | None) -> Iterator[None]:
    """Restores at the end what TRL's set-up changes on models: end tokens and dropout.

    TRL replaces the end tokens of the policy's generation config by the tokenizer's EOS token, and
    sets all dropout to 0, the adapter's too.
    """
    own = policy.generation_config.eos_token_id
    modules = [module for model in filter(None, (policy, critic)) for module in model.modules()]
    dropouts = [(each, each.p) for each in modules if isinstance(each, torch.nn.Dropout)]
    try:
        yield
    finally:
        policy.generation_config.eos_token_id = own
        for dropout, probability in dropouts:
            dropout.p = probability


_TRL_NAMES = {
    "clip_fraction": "policy/clipfrac_avg",
    "entropy": "policy/entropy_avg",
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
}


_CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrlPPOConfig.__dataclass_fields__
)
"""TRL's switch of gradient checkpointing, which newer releases of transformers have renamed."""


def _trl_config(
    config: PPOConfig, rollout_config: RolloutConfig, num_rounds: int, **arguments: Any
) -> TrlPPOConfig:
    """Converts our frozen configurations to TRL's, which its set-up and model card read."""
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
            _CHECKPOINTING: False,
            "bf16": False,
            "report_to": "none",
            "num_sample_generations": 0,
            "disable_tqdm": True,
            **arguments,
        }
    )
