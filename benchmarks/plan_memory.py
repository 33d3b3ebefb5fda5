"""Peak memory of whole runs beside the estimate of --plan.

    python benchmarks/plan_memory.py
    python benchmarks/plan_memory.py --shapes "152k, PPO" --stages

Ten runs of two rounds with random weights: real-sized vocabularies on narrow policies, whose logits
take most of the memory, and deeper policies with few tokens, whose layers do. Every prompt and
reply has the maximum length. Without an accelerator the runs use the pretend one of the tests,
which counts allocated bytes exactly.
"""

import argparse
import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import quiet
from benchmarks.random_models import dialogues, save_model
from firm.alignment.rollout import Sampler
from firm.alignment.stacked.model import StackedModel
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.devices import named_device, peak_bytes, reset_peak_bytes
from firm.federation import Processes
from firm.jobs.alignment import main as align
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan import make_plan
from firm.report import formats
from firm.run import compose, print_table

REWARDS = ("brevity", "positivity", "politeness", "brevity")
"""Reward functions of the objectives; they take no memory."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a run."""

    vocabulary: int
    num_layers: int = 2
    width: int = 64
    """Size of the hidden state."""
    num_prompt_tokens: int = 24
    num_new_tokens: int = 16
    num_objectives: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the run's configuration."""


CRITIC_FREE = {"estimator.name": "critic_free", "estimator.num_replies": 4}
STACKED = {"engine": "stacked"}
CHECKPOINTED = {"policy.gradient_checkpointing": True}
BFLOAT16 = {"policy.dtype": "bfloat16"}
LAYERS: dict[str, Any] = {"num_layers": 8, "width": 256, "num_prompt_tokens": 96}
SHAPES = {
    "49k, PPO": Shape(49_152),
    "49k, critic-free, stacked": Shape(49_152, options={**CRITIC_FREE, **STACKED}),
    "49k, value network": Shape(49_152, width=128, options={"estimator.critic": "network"}),
    "128k, PPO, stacked, M = 4": Shape(128_256, num_objectives=4, options=STACKED),
    "128k, critic-free, bfloat16, M = 4": Shape(
        128_256, num_objectives=4, options={**CRITIC_FREE, **BFLOAT16}
    ),
    "152k, PPO, bfloat16, checkpointed": Shape(151_936, options={**BFLOAT16, **CHECKPOINTED}),
    "152k, conditioned, M = 4": Shape(
        151_936,
        num_objectives=4,
        options={
            **CRITIC_FREE,
            "policy.conditioning.kind": "preference",
            "strategy.name": "fedavg",
        },
    ),
    "layers, PPO, M = 1": Shape(512, num_objectives=1, **LAYERS),
    "layers, critic-free, checkpointed": Shape(
        512, **LAYERS, options={**CRITIC_FREE, **CHECKPOINTED}
    ),
    "layers, value network, stacked": Shape(
        512, **LAYERS, options={"estimator.critic": "network", **STACKED}
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--stages", action="store_true", help="also print the peak of each stage")
    options = parser.parse_args(arguments)
    quiet()
    datasets.disable_progress_bars()
    if not torch.accelerator.is_available():
        from tests.accelerator import device

        device.register()
    rows = []
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            result = measured(configuration(SHAPES[name], Path(folder)))
        sizes = map(formats.size, (result.peak, result.planned))
        rows.append([name, *sizes, f"{result.peak / result.planned:.2f}"])
        if options.stages:
            rows += [[f"  {s}", formats.size(size), "", ""] for s, size in result.stages.items()]
    print_table(
        f"Peak memory of two rounds on {named_device('auto')}",
        ["run", "measured", "planned", "measured / planned"],
        rows,
    )


def configuration(shape: Shape, folder: Path) -> AlignmentConfig:
    """Returns the run of a shape; writes its policy and prompts to the folder."""
    policy = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    save_model(LlamaForCausalLM, policy, folder / "policy", torch.device("cpu"))
    source = folder / "prompts.jsonl"
    # the words "Human:" and "Assistant:" are tokens as well
    texts = dialogues(shape.vocabulary, shape.num_prompt_tokens - 2, 64)
    datasets.Dataset.from_list([{"prompt": text} for text in texts]).to_json(source)
    rewards = {
        f"objective_{j}": {"name": name, "normalization": "none"}
        for j, name in enumerate(REWARDS[: shape.num_objectives])
    }
    settings = {
        "policy.path": str(folder / "policy"),
        "rewards": rewards,
        "data": {split: {"source": str(source)} for split in ("train", "validation", "test")},
        "rollout.max_prompt_tokens": shape.num_prompt_tokens,
        "rollout.max_new_tokens": shape.num_new_tokens,
        "rollout.stop_strings": [],
        "num_clients": 2,
        "rounds": 2,
        "estimator.batch_size": 8,
        "estimator.minibatch_size": 4,
        "estimator.num_epochs": 1,
        "strategy.num_local_steps": 1,
        "evaluation.num_calibration_prompts": 8,
        "evaluation.num_validation_prompts": 0,
        "evaluation.num_test_prompts": 4,
        "evaluation.num_samples": 2,
        "out": str(folder / "run"),
        **shape.options,
    }
    return compose(AlignmentConfig, [], list(settings.items()))


@dataclass(frozen=True)
class Measured:
    """Peak memory of a run in bytes."""

    peak: int
    planned: int
    stages: dict[str, int]
    """Measured, by stage."""


STAGES: dict[str, list[tuple[type, str]]] = {
    "generation": [(Sampler, "generate"), (StackedModel, "sample")],
    "log-probabilities": [(Sampler, "logprobs"), (StackedModel, "logprobs")],
    "gradients": [
        (MultiObjectiveTrainer, "gradients"),
        (StackedModel, "forward"),
        (StackedModel, "jacobian"),
        (StackedModel, "per_sequence_jacobian"),
    ],
    "step": [(MultiObjectiveTrainer, "step")],
}
"""Methods of each stage; in the stacked engine, clients take turns within those of a trainer."""


def measured(cfg: AlignmentConfig) -> Measured:
    """Plans and runs a configuration on the accelerator; returns both peaks."""
    device = named_device("auto")
    plan = make_plan(cfg, client_names(cfg), Processes())
    gc.collect()
    stages: dict[str, int] = defaultdict(int)
    running = ["other"]
    before = torch.get_device_module(device).memory_allocated(device)

    def note() -> None:
        stages[running[-1]] = max(stages[running[-1]], (peak_bytes(device) or 0) - before)
        reset_peak_bytes(device)

    def noted(stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note()
            running.append(stage)
            try:
                return method(*arguments, **options)
            finally:
                note()
                running.pop()

        return call

    reset_peak_bytes(device)
    with ExitStack() as patches:
        for stage, methods in STAGES.items():
            for owner, name in methods:
                if cfg.engine == "local" or owner is not MultiObjectiveTrainer:
                    method = noted(stage, getattr(owner, name))
                    patches.enter_context(mock.patch.object(owner, name, method))
        align(cfg)
        note()
    planned = plan.memory_by_device().get(plan.places[0].policy, 0)
    return Measured(max(stages.values()), planned, dict(stages))


if __name__ == "__main__":
    main()
