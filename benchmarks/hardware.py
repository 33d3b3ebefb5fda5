"""What the paper's run needs in memory, by the size of the policy: figures of --plan, not measured.

    python benchmarks/hardware.py
    python benchmarks/hardware.py --models Qwen2.5-0.5B --engine stacked

Runs of configs/hh_tinyllama.yaml (PPO) and configs/hh_tinyllama_critic_free.yaml: eight clients in
one process, batches of 16 replies, minibatches of 8, 384 + 128 tokens, bfloat16, two reward models
of GPT-2 large's size on the same device. Of a model only its architecture is needed.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from benchmarks.random_models import GPT2_LARGE, TINYLLAMA
from firm.federation import Processes
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan import make_plan
from firm.report import formats
from firm.run import compose, print_table

MODELS: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "TinyLlama-1.1B": TINYLLAMA,
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": LlamaConfig(
        vocab_size=128_256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Architectures as their hub pages give them."""
CONFIGS = {"PPO": "hh_tinyllama", "critic-free": "hh_tinyllama_critic_free"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engine", default="local", help="where clients run")
    options = parser.parse_args(arguments)
    header = ["policy", "parameters", "adapter", "estimator", "gradient checkpointing", "memory"]
    print_table(
        f"Memory at the worst moment, engine {options.engine}, by --plan",
        header,
        [row for name in options.models for row in rows(name, options.engine)],
    )


def rows(name: str, engine: str) -> list[list[str]]:
    """Returns the rows of a policy: both estimators, without and with gradient checkpointing."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        policy, reward = Path(folder) / name, Path(folder) / "reward"
        MODELS[name].save_pretrained(policy)
        GPT2_LARGE.save_pretrained(reward)
        for estimator, config in CONFIGS.items():
            for is_saving in (False, True):
                cfg = compose(
                    AlignmentConfig,
                    [config],
                    [
                        ("policy.path", str(policy)),
                        ("policy.gradient_checkpointing", is_saving),
                        ("policy.prompt.name", "hh"),  # there is no tokenizer, hence no template
                        ("rewards.helpful.path", str(reward)),
                        ("rewards.harmless.path", str(reward)),
                        ("engine", engine),
                    ],
                )
                plan = make_plan(cfg, client_names(cfg), Processes())
                assert plan.policy is not None
                rows.append(
                    [
                        name,
                        f"{plan.policy.num_parameters / 1e9:.2f} billion",
                        formats.size(plan.policy.adapter_bytes),
                        estimator,
                        "yes" if is_saving else "no",
                        formats.size(sum(plan.memory_by_device().values())),
                    ]
                )
    return rows


if __name__ == "__main__":
    main()
