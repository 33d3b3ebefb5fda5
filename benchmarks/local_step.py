"""Seconds of a client's local step by stage, by estimator and number of objectives M.

    python benchmarks/local_step.py

PPO with a value network and with value heads, PPO whose weights are solved once per batch, and the
critic-free estimator, beside TRL's own PPOTrainer at M = 1 where TRL has one. All get the
miniature's policy, reward model and prompts, and as many replies, epochs and minibatches. TRL's
peer is the value network. Steps are interleaved, every one starts from the same state, every figure
is a median, and a first step of each is left out.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import contextlib
import io
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from benchmarks.measure import quiet
from firm.alignment import (
    AlignmentClient,
    EstimatorConfig,
    KLConfig,
    LoraSettings,
    PolicyConfig,
    PPOConfig,
    PromptsConfig,
    RolloutConfig,
    build_trainer,
    copy_adapter,
    load_policy,
    load_prompts,
    load_tokenizer,
)
from firm.alignment.build import has_trl_ppo
from firm.alignment.estimator_config import CriticFreeConfig
from firm.alignment.policy import without_needless_warnings
from firm.federation import RandomStream, local_training
from firm.federation.training import LocalTraining
from firm.miniature import checkpoint_path
from firm.run import print_table
from reward_models import SequenceClassifierReward, load_sequence_classifier

REPEATS = 9  # local steps of each variant, after one that warms up
OBJECTIVES = (1, 2, 4, 8)
SHAPE: dict[str, Any] = {
    "batch_size": 32, "minibatch_size": 16, "num_epochs": 2, "kl": KLConfig(controller="fixed"),
}  # fmt: skip
TOKENS = 40
VARIANTS: dict[str, tuple[EstimatorConfig, str]] = {
    "PPO, network": (PPOConfig(critic="network", **SHAPE), "minibatch"),
    "PPO, heads": (PPOConfig(**SHAPE), "minibatch"),
    "PPO, heads, solve_per batch": (PPOConfig(**SHAPE), "batch"),
    "critic-free": (CriticFreeConfig(**SHAPE), "minibatch"),
}
"""Estimator, and how often weights are solved."""
STAGES = (
    "rollout", "reward", "values", "advantages", "forward", "critic", "backward", "gram", "solve",
    "step",
)  # fmt: skip
SAMPLING = ("rollout", "reward")
"""Stages that no estimator changes."""

Stages = dict[str, float]
POLICY = PolicyConfig(str(checkpoint_path("policy")), lora=LoraSettings(dropout=0.0))


def main() -> None:
    quiet()
    logging.disable(logging.WARNING)
    source = PromptsConfig(str(checkpoint_path("policy").parent / "prompts_train.jsonl"))
    prompts = load_prompts(source)
    steps: dict[str, Callable[[], Stages]] = {
        f"{name}, M = {count}": local_step(*variant, prompts, num_objectives=count)
        for name, variant in VARIANTS.items()
        for count in OBJECTIVES
    }
    if has_trl_ppo():
        steps = {"TRL, M = 1": trl_step([prompt.transcript for prompt in prompts]), **steps}
    taken: dict[str, list[Stages]] = {name: [] for name in steps}
    for repeat in range(REPEATS + 1):
        for name, step in steps.items():
            stages = step()
            if repeat:
                taken[name].append(stages)
    rows = {name: medians(stages) for name, stages in taken.items()}
    print_table(
        f"median of {REPEATS} local steps, milliseconds; {SHAPE['batch_size']} replies, minibatch "
        f"{SHAPE['minibatch_size']}, {SHAPE['num_epochs']} epochs, {TOKENS} new tokens, 1 thread",
        ["", "whole", *STAGES],
        [
            [name, f"{row['whole']:.0f}", *(f"{row[s]:.1f}" if s in row else "" for s in STAGES)]
            for name, row in rows.items()
        ],
    )
    for label, excluded in (("whole step", ()), ("without rollout and rewards", SAMPLING)):
        cost = {n: r["whole"] - sum(r.get(s, 0.0) for s in excluded) for n, r in rows.items()}
        print_table(
            f"{label}, by M: milliseconds / those of PPO with heads / those of M = 1",
            ["", *(f"M = {count}" for count in OBJECTIVES)],
            [[name, *(ratios(cost, name, count) for count in OBJECTIVES)] for name in VARIANTS],
        )
    if "TRL, M = 1" in rows:
        ratio = rows["PPO, network, M = 1"]["whole"] / rows["TRL, M = 1"]["whole"]
        print(f"PPO, network, M = 1 / TRL, M = 1: {ratio:.3f}")


def medians(taken: list[Stages]) -> Stages:
    """Returns the medians by stage, in milliseconds."""
    return {stage: 1e3 * median(step[stage] for step in taken) for stage in taken[0]}


def ratios(cost: Stages, name: str, count: int) -> str:
    own = cost[f"{name}, M = {count}"]
    heads, one = cost[f"PPO, heads, M = {count}"], cost[f"{name}, M = 1"]
    return f"{own:.0f} / {own / heads:.2f} / {own / one:.2f}"


def local_step(
    config: EstimatorConfig, solve_per: Any, prompts: list[Any], *, num_objectives: int
) -> Callable[[], Stages]:
    """Returns a client's local step, always the same one, which tells its seconds by stage."""
    tokenizer = load_tokenizer(POLICY)
    reward = SequenceClassifierReward(
        *load_sequence_classifier(str(checkpoint_path("helpful")), dtype="float32", device="cpu"),
        name="helpful",
        format="plain",
        append_eos=True,
    )
    trainer = build_trainer(
        config,
        rollout_config=RolloutConfig(max_new_tokens=TOKENS, temperature=1.0, stop_strings=[]),
        policy=load_policy(POLICY, stream=RandomStream(0, "adapter")),
        tokenizer=tokenizer,
        reward_fns={f"objective_{j}": reward for j in range(num_objectives)},
        num_rounds=REPEATS,
    )
    client = AlignmentClient("client_0", prompts, trainer, seed=0)
    return step_of(client, trainer, solve_per=solve_per)


def step_of(
    client: AlignmentClient,
    trainer: Any,
    *,
    solve_per: Any = "minibatch",
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], Stages]:
    """Returns a local step of FIRM, which starts from the same state each time."""
    start = client.state()
    request = LocalTraining(
        round=2,  # the first measures the mismatch of log-probabilities, too
        objectives=trainer.objectives,
        adapter=copy_adapter(trainer.adapter_parameters),
        num_local_steps=1,
        weighting="firm",
        weighting_options={"beta": 0.01},
        solve_per=solve_per,
    )

    def step() -> Stages:
        client.restore(start)
        begin = clock()
        update = local_training(client, request)
        return {"whole": clock() - begin, **update.metrics["seconds"]}

    return step


@dataclass
class StepTimes(TrainerCallback):
    """Notes when each local step of TRL's trainer ends."""

    clock: Callable[[], float] = time.perf_counter
    ends: list[float] = field(default_factory=list)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(self.clock())


def trl_step(texts: list[str]) -> Callable[[], Stages]:
    """Returns a local step of TRL's trainer, the second one of a new training each time."""
    from trl.experimental.ppo import PPOConfig as TrlConfig
    from trl.experimental.ppo import PPOTrainer as TrlTrainer

    tokenizer = load_tokenizer(POLICY)
    scorer = partial(
        AutoModelForSequenceClassification.from_pretrained,
        checkpoint_path("helpful"),
        dtype=torch.float32,
    )

    def step() -> Stages:
        times = StepTimes()
        with without_needless_warnings(), contextlib.redirect_stdout(io.StringIO()):
            trainer = TrlTrainer(
                args=TrlConfig(
                    output_dir="/tmp/firm-benchmark",
                    per_device_train_batch_size=SHAPE["batch_size"],
                    num_mini_batches=SHAPE["batch_size"] // SHAPE["minibatch_size"],
                    num_ppo_epochs=SHAPE["num_epochs"],
                    total_episodes=2 * SHAPE["batch_size"],
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
                model=AutoModelForCausalLM.from_pretrained(POLICY.path, dtype=torch.float32),
                ref_model=None,
                reward_model=scorer(),
                train_dataset=Dataset.from_dict({"input_ids": tokenizer(texts)["input_ids"]}),
                value_model=scorer(),
                peft_config=LoraConfig(
                    task_type="CAUSAL_LM",
                    r=POLICY.lora.r,
                    lora_alpha=int(POLICY.lora.alpha),
                    target_modules=POLICY.lora.target_modules,
                ),
                callbacks=[times],
            )
            trainer.train()
        return {"whole": float(np.diff(times.ends)[0])}

    return step


if __name__ == "__main__":
    main()
