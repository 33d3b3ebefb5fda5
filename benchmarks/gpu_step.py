"""Seconds and peak memory of one local step by stage, at the paper's shape, with random weights.

    python benchmarks/gpu_step.py                     # TinyLlama-1.1B, two GPT-2-large, on a GPU
    python benchmarks/gpu_step.py --shape tiny --device cpu

Policy and reward models are random checkpoints in a temporary folder (4 GB at the paper's shape),
loaded as real ones are. Replies run to full length but for a rare EOS. The first step warms up and
is left out. Memory is what torch allocated, and beside it what `--plan` expects; on the CPU torch
does not count it.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from firm.alignment import (
    MultiObjectiveTrainer,
    PolicyConfig,
    PPOConfig,
    RolloutConfig,
    build_trainer,
    load_policy,
    load_tokenizer,
)
from firm.alignment.sequences import Queries
from firm.federation import Processes, RandomStream
from firm.gradients import gram_matrix
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.plan import make_plan
from firm.run import print_table
from firm.solvers import firm_weights
from reward_models import RewardModelConfig, load_reward_model

STEPS = 2  # local steps per variant, of which the first warms up
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Shape:
    """What is run: sizes of the models, of the texts and of the batches."""

    policy: LlamaConfig
    reward: GPT2Config
    rollout: RolloutConfig
    estimator: PPOConfig


SHAPES = {
    "tinyllama": Shape(
        LlamaConfig(
            vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
            num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
        ),
        GPT2Config(vocab_size=50_257, n_embd=1280, n_layer=36, n_head=20),
        RolloutConfig(max_new_tokens=128, max_prompt_tokens=256, stop_strings=[]),
        PPOConfig(batch_size=16, minibatch_size=8),
    ),
    "tiny": Shape(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        ),
        GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        ),
        RolloutConfig(max_new_tokens=8, max_prompt_tokens=16, stop_strings=[]),
        PPOConfig(batch_size=4, minibatch_size=2, num_epochs=2),
    ),
}  # fmt: skip


class Stages:
    """Seconds and peak bytes by stage, over all that is done in it.

    Args:
        device: What is waited for before and after, so that a stage has its own work.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int] = {}
        self._is_cuda = device.type == "cuda"

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        if self._is_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self.peak[name] = max(self.peak.get(name, 0), peak)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; give --device cpu, and --shape tiny with it.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    shape, device = SHAPES[options.shape], torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        save_random(LlamaForCausalLM, shape.policy, Path(folder, "policy"), device)
        save_random(GPT2ForSequenceClassification, shape.reward, Path(folder, "reward"), device)
        for checkpointing in (False, True):
            cfg = configuration(shape, Path(folder), device)
            policy = replace(cfg.policy, gradient_checkpointing=checkpointing)
            report(replace(cfg, policy=policy), device)


def save_random(
    model_class: type[PreTrainedModel],
    config: transformers.PretrainedConfig,
    folder: Path,
    device: torch.device,
) -> None:
    """Writes a random bfloat16 checkpoint with a tokenizer of as many words as it has ids."""
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(config.vocab_size - len(SPECIAL)))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    config.num_labels = 1  # of the classifier
    with device:  # seconds on a GPU, a minute on a CPU
        model = model_class(config)
    model.bfloat16().save_pretrained(folder)


def configuration(shape: Shape, folder: Path, device: torch.device) -> AlignmentConfig:
    """Returns the run of which a local step is measured: bfloat16, LoRA of rank 16, two rewards."""
    reward = RewardModelConfig(
        path=str(folder / "reward"), format="plain", dtype="bfloat16", device=device.type
    )
    return AlignmentConfig(
        policy=PolicyConfig(str(folder / "policy"), dtype="bfloat16"),
        rewards={"first": reward, "second": reward},
        num_clients=1,
        rollout=shape.rollout,
        estimator=shape.estimator,
    )


def report(cfg: AlignmentConfig, device: torch.device) -> None:
    """Runs the local steps and prints what the last one took."""
    gc.collect()  # the trainer of the other variant is in reference cycles
    trainer = build_trainer(
        cfg.estimator,
        rollout_config=cfg.rollout,
        policy=load_policy(cfg.policy, stream=RandomStream(0, "adapter")),
        tokenizer=load_tokenizer(cfg.policy),
        reward_fns={name: load_reward_model(c, name) for name, c in cfg.rewards.items()},
        num_rounds=STEPS,
        use_cpu=device.type == "cpu",
    )
    for _ in range(STEPS - 1):
        local_step(trainer, Stages(device))
    stages = Stages(device)
    local_step(trainer, stages)
    how = "on" if cfg.policy.gradient_checkpointing else "off"
    rows = [
        (name, seconds, _gigabytes(stages.peak.get(name)))
        for name, seconds in stages.seconds.items()
    ]
    whole = max(stages.peak.values(), default=None)
    rows.append(("step", sum(stages.seconds.values()), _gigabytes(whole)))
    print_table(f"gradient checkpointing {how}", ("stage", "seconds", "peak GB"), rows)
    expected = make_plan(cfg, ["client_0"], Processes()).memory_by_device()
    total = " + ".join(f"{_gigabytes(size)} GB on {place}" for place, size in expected.items())
    print(f"planned: {total}\n")


def local_step(trainer: MultiObjectiveTrainer, stages: Stages) -> None:
    """Takes a local step on random prompts of full length, as a client does."""
    tokenizer, rollout, estimator = trainer.tokenizer, trainer.rollout_config, trainer.config
    size = (estimator.batch_size, rollout.max_prompt_tokens)
    query_ids = torch.randint(len(SPECIAL), len(tokenizer), size)
    prompts = tokenizer.batch_decode(query_ids)
    with stages.of("rollout and reference"):
        rollouts = trainer.sample(Queries(prompts, query_ids))
    with stages.of("rewards, values, advantages"):
        experience = trainer.experience(rollouts)
    for index in trainer.minibatch_indices():
        with stages.of("forward and backward"):
            gradients = trainer.gradients(experience.rows(index))
        with stages.of("Gram matrix and weights"):
            weights = firm_weights(gram_matrix(gradients.jacobian).cpu())
        with stages.of("optimizer step"):
            trainer.step(gradients, weights)
    trainer.finish_batch(experience)


def _gigabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.3g}"


if __name__ == "__main__":
    main()
