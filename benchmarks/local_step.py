"""Seconds of a local step by stage at M = 1, 2 and 4, beside TRL's own PPOTrainer at M = 1.

    python benchmarks/local_step.py

Both trainers get the miniature's policy, reward model, prompts and sizes. The peer is matched by
`critic: network`, TRL's separate value network; `heads` is FIRM's default. Runs are interleaved,
every figure is the median over local steps, and the first step of each run is left out.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import contextlib
import io
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig as StockConfig
from trl.experimental.ppo import PPOTrainer as StockTrainer

from benchmarks.measure import quiet
from firm.alignment import (
    KLConfig,
    LoraSettings,
    MultiObjectivePPOTrainer,
    PolicyConfig,
    PPOConfig,
    PromptsConfig,
    RolloutConfig,
    load_policy,
    load_prompts,
    load_tokenizer,
)
from firm.alignment.policy import without_needless_warnings
from firm.federation import RandomStream
from firm.miniature import checkpoint_path
from firm.run import print_table
from reward_models import SequenceClassifierReward, load_sequence_classifier

REPEATS = 3
STEPS = 4  # local steps per repeat, of which the first warms up
BATCH, MINIBATCH, EPOCHS, TOKENS = 32, 16, 2, 40
STAGES = (
    "rollout", "reward", "values", "advantages", "forward", "critic", "backward", "gram", "solve",
    "step",
)  # fmt: skip


@dataclass
class StepTimes(TrainerCallback):
    """Notes when each local step ends; both trainers call it."""

    ends: list[float] = field(default_factory=list)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Duration of every step but the first."""
        return np.diff(self.ends).tolist()


def main() -> None:
    quiet()
    logging.disable(logging.WARNING)
    policy_config = PolicyConfig(str(checkpoint_path("policy")), lora=LoraSettings(dropout=0.0))
    tokenizer = load_tokenizer(policy_config)
    source = PromptsConfig(str(checkpoint_path("policy").parent / "prompts_train.jsonl"))
    texts = [prompt.text for prompt in load_prompts(source)]
    prompts = Dataset.from_dict({"input_ids": tokenizer(texts)["input_ids"]})
    variants = {"TRL, M = 1": lambda: stock(policy_config, tokenizer, prompts)}
    for critic in ("network", "heads"):
        for m in (1, 2, 4):
            variants[f"FIRM, {critic}, M = {m}"] = lambda m=m, critic=critic: ours(
                policy_config, tokenizer, prompts, num_objectives=m, critic=critic
            )
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    stages: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(REPEATS):
        for name, run in variants.items():
            with contextlib.redirect_stdout(io.StringIO()):
                times, by_stage = run()
            seconds[name] += times
            stages[name].append({stage: by_stage.get(stage, 0.0) / STEPS for stage in STAGES})
    rows, peer = [], median(seconds["TRL, M = 1"])
    for name, times in seconds.items():
        row = [median(run[stage] for run in stages[name]) for stage in STAGES]
        cells = [f"{1e3 * s:.2f}" if any(row) else "" for s in row]
        rows.append([name, f"{1e3 * median(times):.0f}", f"{median(times) / peer:.3f}", *cells])
    print_table(
        f"median of {REPEATS * (STEPS - 1)} local steps, milliseconds; batch {BATCH}, minibatch "
        f"{MINIBATCH}, {EPOCHS} epochs, {TOKENS} new tokens, 1 thread",
        ["", "step", "/ TRL", *STAGES],
        rows,
    )


def stock(
    config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, prompts: Dataset
) -> tuple[list[float], dict[str, float]]:
    """Runs TRL's trainer; returns the seconds of its steps, which have no stages of their own."""
    times = StepTimes()
    scorer = partial(
        AutoModelForSequenceClassification.from_pretrained,
        checkpoint_path("helpful"),
        dtype=torch.float32,
    )
    with without_needless_warnings():
        trainer = StockTrainer(
            args=StockConfig(
                output_dir="/tmp/firm-benchmark",
                per_device_train_batch_size=BATCH,
                num_mini_batches=BATCH // MINIBATCH,
                num_ppo_epochs=EPOCHS,
                total_episodes=BATCH * STEPS,
                response_length=TOKENS,
                temperature=1.0,
                stop_token="eos",
                bf16=False,
                use_cpu=True,
                activation_checkpointing=False,
                report_to="none",
                num_sample_generations=0,
                save_strategy="no",
                disable_tqdm=True,
            ),
            processing_class=tokenizer,
            model=AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32),
            ref_model=None,
            reward_model=scorer(),
            train_dataset=prompts,
            value_model=scorer(),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM",
                r=config.lora.r,
                lora_alpha=int(config.lora.alpha),
                target_modules=config.lora.target_modules,
            ),
            callbacks=[times],
        )
    trainer.train()
    return times.seconds, {}


def ours(
    config: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    *,
    num_objectives: int,
    critic: Any,
) -> tuple[list[float], dict[str, float]]:
    """Runs FIRM's trainer with M reward models; returns the seconds of its steps and stages."""
    times = StepTimes()
    rewards = {}
    for j in range(num_objectives):
        model, scorer_tokenizer = load_sequence_classifier(
            str(checkpoint_path("helpful")), dtype="float32", device="cpu"
        )
        rewards[f"objective_{j}"] = SequenceClassifierReward(
            model, scorer_tokenizer, name=f"objective_{j}", format="plain", append_eos=True
        )
    trainer = MultiObjectivePPOTrainer(
        PPOConfig(
            batch_size=BATCH,
            minibatch_size=MINIBATCH,
            num_epochs=EPOCHS,
            critic=critic,
            kl=KLConfig(controller="fixed"),
        ),
        rollout_config=RolloutConfig(max_new_tokens=TOKENS, temperature=1.0, stop_strings=[]),
        policy=load_policy(config, stream=RandomStream(0, "adapter")),
        tokenizer=tokenizer,
        reward_fns=rewards,
        num_rounds=STEPS,
        train_dataset=prompts,
        callbacks=[times],
        use_cpu=True,
        save_strategy="no",
    )
    trainer.train()
    return times.seconds, trainer.seconds


if __name__ == "__main__":
    main()
