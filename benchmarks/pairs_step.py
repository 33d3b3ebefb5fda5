"""Time of DPO's gradients of four objectives, relative to that of one, on the same pairs.

    python benchmarks/pairs_step.py [--model FOLDER] [--pairs 8] [--parts 2] [--repeats 7]

The pairs have random prompts and replies of the miniature's words, of various lengths. With M
objectives each ranks an equal part of them. Measured are a minibatch's forward pass, its M
gradients from one backward pass, the Gram matrix, the weights and the step; the loop takes one
backward pass per objective instead. Parts are of pairs of similar length (`micro_batch_size`), with
less padding. Methods are interleaved; times are medians of CPU milliseconds.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measure import interleaved, quiet
from firm.alignment import LoraSettings, PolicyConfig, RolloutConfig, load_policy, load_tokenizer
from firm.alignment.estimator_config import DPOConfig
from firm.alignment.pair_tokens import encode_pairs
from firm.alignment.pairs import Pair
from firm.alignment.prompts import Prompt
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.federation import RandomStream
from firm.gradients import gram_matrix
from firm.miniature import checkpoint_path
from firm.run import print_table
from firm.solvers import firm_weights

NUM_OBJECTIVES = (1, 2, 4)
NUM_WORDS = 5, 40
"""Fewest and most words of a prompt or reply."""
WORDS = ("take", "a", "fresh", "cup", "keep", "it", "warm", "while", "one", "dries", "in", "sun")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(checkpoint_path("policy")))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--parts", type=int, default=2, help="pairs per pass")
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    quiet()
    methods: dict[str, Callable[[], object]] = {}
    config = PolicyConfig(asked.model, lora=LoraSettings(dropout=0.0))
    policy, tokenizer = (
        load_policy(config, stream=RandomStream(0, "adapter")),
        load_tokenizer(config),
    )
    sizes: list[tuple[int, int | None]] = [(count, None) for count in NUM_OBJECTIVES]
    for count, part in [*sizes, (NUM_OBJECTIVES[-1], asked.parts)]:
        trainer = MultiObjectiveTrainer(
            DPOConfig(batch_size=asked.pairs, minibatch_size=asked.pairs, micro_batch_size=part),
            rollout_config=RolloutConfig(max_prompt_tokens=64, max_new_tokens=64),
            policy=policy,
            tokenizer=tokenizer,
            reward_fns={},
            objectives=[f"objective {j}" for j in range(count)],
            num_rounds=1,
        )
        batch = minibatch(trainer, asked.pairs)
        if part is not None:
            methods[f"parts of {part} pairs, M = {count}"] = partial(step, trainer, batch)
            continue
        methods[f"one backward pass, M = {count}"] = partial(step, trainer, batch)
        if count > 1:
            methods[f"loop, M = {count}"] = partial(loop, trainer, batch)
    seconds = {n: median(s) for n, s in interleaved(methods, repeats=asked.repeats).items()}
    unit = seconds["one backward pass, M = 1"]
    print_table(
        f"{asked.model}: {asked.pairs} pairs, texts of {NUM_WORDS[0]} to {NUM_WORDS[1]} words",
        ["", "ms", "ratio"],
        [[name, f"{1e3 * s:.1f}", f"{s / unit:.2f}"] for name, s in seconds.items()],
    )


def minibatch(trainer: MultiObjectiveTrainer, num_pairs: int) -> Any:
    """Returns pairs of random words, of the objectives in turn."""
    generator = random.Random(0)

    def text() -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(*NUM_WORDS)))

    names = trainer.objectives
    pairs = [Pair(Prompt(text()), text(), text(), names[n % len(names)]) for n in range(num_pairs)]
    encoded = encode_pairs(
        pairs,
        names,
        trainer.tokenizer,
        prompt_format=trainer.prompt_format,
        end_ids=trainer._sampler.end_ids,
        max_prompt_tokens=64,
        max_reply_tokens=64,
    )
    return trainer.collated(encoded)


def step(trainer: MultiObjectiveTrainer, batch: Any) -> None:
    """Takes one optimizer step along the weighted gradients, with a fresh learner."""
    learner = trainer.new_learner()
    gradients = trainer.gradients(learner, batch)
    weights = firm_weights(gram_matrix(gradients.jacobian))
    trainer.step(learner, gradients, torch.as_tensor(weights))


def loop(trainer: MultiObjectiveTrainer, batch: Any) -> None:
    """Computes the gradients of one objective after the other, without the step."""
    learner, rows = trainer.new_learner(), []
    for j in range(len(trainer.objectives)):
        weights = torch.zeros(len(trainer.objectives))
        weights[j] = 1.0
        rows.append(trainer.gradients(learner, batch, weights).jacobian)
    gram_matrix(torch.cat(rows))


if __name__ == "__main__":
    main()
