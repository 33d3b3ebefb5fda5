"""Seconds of a local step on a model with a real vocabulary, beside TRL's GRPO.

    python benchmarks/real_step.py --model SmolLM2-135M-Instruct   # a folder or a GGUF file
    python benchmarks/real_step.py --model SmolLM2-135M-Instruct --device cuda
    python benchmarks/real_step.py --vocabulary 128000             # random weights

PPO with value heads and the critic-free estimator on M objectives, as a client's step and as a
round of several stacked clients with as many replies in all; the critic-free one also with an
adapter that is conditioned on the preference of M = 2; TRL's GRPOTrainer, which has one
objective; and plain `generate` of the same prompts. All have the same numbers of prompts, replies,
tokens and minibatches, and rewards that take no time. Steps are interleaved; every figure is a
median, and the first step of each is left out. On the CPU, seconds are CPU seconds of one thread,
and with --memory each variant also runs in a process of its own, for the bytes that it has resident
at most. On an accelerator they are wall-clock seconds that wait for the device, and with --memory
the peaks are the bytes that torch allocated in the last step, weights and all variants' adapters
included.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import argparse
import contextlib
import io
import logging
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from benchmarks.local_step import STAGES, Stages, StepTimes, step_of
from benchmarks.measure import in_own_process, peak_resident, quiet
from benchmarks.random_models import LlamaForCausalLM, save_model
from firm.alignment import (
    AlignmentClient,
    EstimatorConfig,
    KLConfig,
    LoraSettings,
    MultiObjectiveTrainer,
    PolicyConfig,
    PPOConfig,
    Prompt,
    PromptFormat,
    RolloutConfig,
    build_trainer,
    copy_adapter,
    load_policy,
    load_tokenizer,
)
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.estimator_config import CriticFreeConfig
from firm.alignment.policy import move_, without_needless_warnings
from firm.alignment.stacked.trainer import stacked_trainers
from firm.base.devices import accelerate_on, peak_bytes, reset_peak_bytes, synchronize
from firm.federation import RandomStream, ServerState
from firm.federation.engines.stacked import StackedEngine
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from firm.run import print_table

GROUP = 4  # replies to a prompt, of the critic-free estimator and of TRL
ESTIMATORS: dict[str, Callable[..., EstimatorConfig]] = {
    "PPO": PPOConfig, "critic-free": partial(CriticFreeConfig, num_replies=GROUP),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, hub name or GGUF file; random weights by default")
    parser.add_argument("--vocabulary", type=int, default=128_000, help="of random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator such as cuda")
    parser.add_argument("--objectives", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--replies", type=int, default=16, help="in a step or round")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--rows", type=int, help="of a pass with gradients; a minibatch by default")
    parser.add_argument("--clients", type=int, default=4, help="of a stacked round")
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="after one that warms up")
    parser.add_argument("--memory", action="store_true", help="measure the peaks, too")
    options = parser.parse_args(arguments)
    quiet()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = random_model(options.vocabulary, Path(folder))
        compare(options)


def random_model(vocabulary: int, folder: Path) -> str:
    """Writes a model of 12 layers and a large vocabulary; returns its folder."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    save_model(LlamaForCausalLM, config, folder / "policy", torch.device("cpu"))
    return str(folder / "policy")


def variants(options: Namespace) -> dict[str, Callable[[], Callable[[], Stages]]]:
    """Returns a function for each variant that loads it and returns its step."""
    found: dict[str, Callable[[], Callable[[], Stages]]] = {}
    for name in ESTIMATORS:
        for count in options.objectives:
            found[f"{name}, M = {count}"] = partial(local_step, options, name, count)
    for name in ESTIMATORS:
        for count in options.objectives:
            key = f"{name}, M = {count}, {options.clients} stacked"
            found[key] = partial(stacked_round, options, name, count)
    if 2 in options.objectives:
        name, end = "critic-free", ", conditioned"
        found[f"{name}, M = 2{end}"] = partial(local_step, options, name, 2, is_conditioned=True)
        key = f"{name}, M = 2, {options.clients} stacked{end}"
        found[key] = partial(stacked_round, options, name, 2, is_conditioned=True)
    found["TRL GRPO"] = partial(trl_step, options)
    found["sampling"] = partial(sampling, options)
    found["plain generate"] = partial(plain_generate, options)
    return found


def compare(options: Namespace) -> None:
    device = torch.device(options.device)
    steps = {name: build() for name, build in variants(options).items()}
    taken: dict[str, list[Stages]] = {name: [] for name in steps}
    peaks: dict[str, float] = {}
    for repeat in range(options.repeats + 1):
        for name, step in steps.items():
            reset_peak_bytes(device)
            stages = step()
            peaks[name] = peak_bytes(device) or 0
            if repeat:
                taken[name].append(stages)
    rows = {
        name: {stage: median(each.get(stage, 0.0) for each in found) for stage in found[0]}
        for name, found in taken.items()
    }
    del steps
    if options.memory and device.type == "cpu":
        peaks = {name: in_own_process(peak, options, name) for name in rows}
    where = "CPU seconds on one thread" if device.type == "cpu" else f"seconds on {options.device}"
    print_table(
        f"median of {options.repeats} steps, {where}: {options.replies} replies "
        f"of {options.new_tokens} tokens to prompts of {options.prompt_tokens}, "
        f"{options.minibatches} minibatches, {options.rows or 'all'} rows a pass, {options.dtype}",
        ["", "whole", "/ TRL", *STAGES, "peak, GB"],
        [
            [
                name,
                f"{row['whole']:.3f}",
                f"{row['whole'] / rows['TRL GRPO']['whole']:.2f}",
                *(f"{row[stage]:.3f}" if stage in row else "" for stage in STAGES),
                f"{peaks[name] / 1e9:.2f}" if options.memory else "",
            ]
            for name, row in rows.items()
        ],
    )
    num_tokens = options.replies * options.new_tokens
    speeds = {name: num_tokens / rows[name]["whole"] for name in ("sampling", "plain generate")}
    print("tokens per second:", ", ".join(f"{name} {each:.0f}" for name, each in speeds.items()))
    print(f"sampling / plain generate: {speeds['sampling'] / speeds['plain generate']:.2f}")
    least, most = (f"M = {count}" for count in (options.objectives[0], options.objectives[-1]))
    for end in ("", f", {options.clients} stacked"):
        for name in ESTIMATORS:
            own = [rows[f"{name}, {count}{end}"]["whole"] for count in (most, least)]
            print(f"{name}{end}: {most} / {least} is {own[0] / own[1]:.2f}")
    for name in rows:
        plain = name.removesuffix(", conditioned")
        if plain != name:
            print(f"{name}: {rows[name]['whole'] / rows[plain]['whole']:.2f} of {plain}")


def peak(options: Namespace, name: str) -> float:
    """Returns the most bytes that this process has resident with a variant alone."""
    quiet()
    logging.disable(logging.WARNING)
    variants(options)[name]()()
    return peak_resident()


def clock_of(options: Namespace) -> Callable[[], float]:
    """Returns a clock: CPU seconds of this process, or an accelerator's seconds."""
    if options.device == "cpu":
        return time.process_time

    def clock() -> float:
        synchronize(torch.device(options.device))
        return time.perf_counter()

    return clock


def prompts_of(options: Namespace) -> list[Prompt]:
    """Returns prompts of random words, longer than `prompt_tokens`, to which they are cut."""
    tokenizer = load_tokenizer(PolicyConfig(options.model))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        1000, len(tokenizer), (options.replies, 2 * options.prompt_tokens), generator=generator
    )
    return [Prompt(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@cache
def policy_of(path: str, dtype: str, device: str, engine: str, is_conditioned: bool) -> Any:
    """Returns the policy of an engine; joint passes replace the forward of its layers."""
    config = _policy_config(path, dtype, is_conditioned=is_conditioned)
    policy = load_policy(config, stream=RandomStream(0, "adapter"), num_objectives=2)
    move_(policy, torch.device(device))
    return policy


def _policy_config(path: str, dtype: Any, *, is_conditioned: bool = False) -> PolicyConfig:
    conditioning = _conditioning(is_conditioned)
    return PolicyConfig(
        path, dtype=dtype, lora=LoraSettings(dropout=0.0), conditioning=conditioning
    )


def _conditioning(is_conditioned: bool) -> ConditioningConfig:
    return ConditioningConfig("preference" if is_conditioned else "none")


def client_of(
    name: str, prompts: list[Prompt], trainer: Any, seed: int, *, is_conditioned: bool
) -> AlignmentClient:
    """Returns a client, which draws preferences for a conditioned policy."""
    stream = RandomStream(seed, name, "preferences")
    preferences = _conditioning(is_conditioned).preferences(stream, 2)
    return AlignmentClient(name, prompts, trainer, seed=seed, preferences=preferences)


def trainer_of(
    options: Namespace,
    estimator: str,
    num_objectives: int,
    replies: int,
    engine: str = "local",
    *,
    is_conditioned: bool = False,
) -> MultiObjectiveTrainer:
    """Returns a trainer with rewards that take no time."""
    config = ESTIMATORS[estimator](
        batch_size=replies,
        minibatch_size=replies // options.minibatches,
        micro_batch_size=options.rows and min(options.rows, replies // options.minibatches),
        num_epochs=1,
        kl=KLConfig(controller="fixed"),
    )
    source = options.model, options.dtype
    policy = policy_of(*source, options.device, engine, is_conditioned)
    return build_trainer(
        config,
        rollout_config=RolloutConfig(
            max_new_tokens=options.new_tokens,
            max_prompt_tokens=options.prompt_tokens,
            temperature=1.0,
            stop_strings=[],
        ),
        prompt_format=PromptFormat("plain"),
        policy=policy,
        tokenizer=load_tokenizer(_policy_config(*source)),
        reward_fns={f"objective_{j}": partial(reward, number=j) for j in range(num_objectives)},
        num_rounds=10,
    )


def reward(prompts: Any, completions: Sequence[str], *, number: int, **_: Any) -> list[float]:
    """Returns the share of a letter in each reply."""
    return [text.count("etaoinsh"[number]) / (1 + len(text)) for text in completions]


def local_step(
    options: Namespace, estimator: str, num_objectives: int, *, is_conditioned: bool = False
) -> Callable[[], Stages]:
    """Returns a client's local step, always the same one."""
    trainer = trainer_of(
        options, estimator, num_objectives, options.replies, is_conditioned=is_conditioned
    )
    trainer._clock = clock = clock_of(options)
    client = client_of("client_0", prompts_of(options), trainer, 0, is_conditioned=is_conditioned)
    return step_of(client, trainer, clock=clock)


def stacked_round(
    options: Namespace, estimator: str, num_objectives: int, *, is_conditioned: bool = False
) -> Callable[[], Stages]:
    """Returns a round of stacked clients, always from the same adapter, without its stages."""
    replies = options.replies // options.clients
    own = {"is_conditioned": is_conditioned}
    trainer = trainer_of(options, estimator, num_objectives, replies, "stacked", **own)
    new_trainer, prompts = stacked_trainers(trainer), prompts_of(options)
    names = [f"client_{at}" for at in range(options.clients)]
    clients = [client_of(n, prompts[i:], new_trainer(), i, **own) for i, n in enumerate(names)]
    engine = StackedEngine(clients, max_rows=options.rows or options.replies)
    start = copy_adapter(trainer.adapter_parameters)
    # as in `local_step`, the second round: the first measures the mismatch of log-probabilities
    state = ServerState(start, objectives=trainer.objectives, seed=0, round=1)
    clock = clock_of(options)

    def step() -> Stages:
        begin = clock()
        firm_round(state, names, engine, FirmConfig(num_local_steps=1))
        return {"whole": clock() - begin}

    return step


def sampling(options: Namespace) -> Callable[[], Stages]:
    """Returns the sampling of a step's replies, without passes for log-probabilities."""
    trainer = trainer_of(options, "critic-free", 1, options.replies)
    queries = trainer.encode(prompts_of(options)[: options.replies // GROUP]).repeated(GROUP)
    clock = clock_of(options)

    def step() -> Stages:
        begin = clock()
        trainer._sampler.generate(queries)
        return {"whole": clock() - begin}

    return step


def plain_generate(options: Namespace) -> Callable[[], Stages]:
    """Returns the sampling of a step's replies by transformers alone."""
    trainer = trainer_of(options, "critic-free", 1, options.replies)
    queries = trainer.encode(prompts_of(options)[: options.replies // GROUP]).repeated(GROUP)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=options.new_tokens, pad_token_id=0
    )
    clock = clock_of(options)

    def step() -> Stages:
        begin = clock()
        trainer.policy_model.generate(
            input_ids=queries.token_ids.to(options.device),
            attention_mask=queries.mask.to(options.device),
            generation_config=config,
        )
        return {"whole": clock() - begin}

    return step


def trl_step(options: Namespace) -> Callable[[], Stages]:
    """Returns a step of TRL's GRPOTrainer, the second one of a new training each time."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = load_tokenizer(PolicyConfig(options.model))
    ids = [
        tokenizer(prompt.transcript)["input_ids"][-options.prompt_tokens :]
        for prompt in prompts_of(options)
    ]
    texts = tokenizer.batch_decode(ids)
    minibatch = options.replies // options.minibatches
    rows = options.rows or minibatch

    def step() -> Stages:
        times = StepTimes(clock_of(options))
        with (
            tempfile.TemporaryDirectory() as folder,
            accelerate_on(torch.device(options.device)),
            without_needless_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            trainer = GRPOTrainer(
                args=GRPOConfig(
                    output_dir=folder,
                    per_device_train_batch_size=rows,
                    gradient_accumulation_steps=minibatch // rows,
                    steps_per_generation=options.replies // rows,
                    num_generations=GROUP,
                    max_completion_length=options.new_tokens,
                    max_steps=2 * options.minibatches,
                    beta=0.05,
                    temperature=1.0,
                    bf16=False,
                    use_cpu=options.device == "cpu",
                    gradient_checkpointing=False,
                    report_to="none",
                    save_strategy="no",
                    logging_strategy="no",
                    disable_tqdm=True,
                ),
                processing_class=tokenizer,
                model=AutoModelForCausalLM.from_pretrained(
                    options.model, dtype=getattr(torch, options.dtype)
                ),
                reward_funcs=trl_reward,
                train_dataset=Dataset.from_dict({"prompt": texts}),
                peft_config=LoraConfig(
                    task_type="CAUSAL_LM",
                    r=LoraSettings().r,
                    target_modules=LoraSettings().target_modules,
                ),
                callbacks=[times],
            )
            trainer.train()
        half = options.minibatches
        return {"whole": times.ends[2 * half - 1] - times.ends[half - 1]}

    return step


def trl_reward(prompts: Any, completions: Any, **_: Any) -> Any:
    return reward(prompts, completions, number=0)


if __name__ == "__main__":
    main()
