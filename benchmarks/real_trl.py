"""The demo's run on SmolLM2 beside TRL's GRPOTrainer: rewards, KL, seconds and memory.

    firm fetch smollm2
    python benchmarks/real_trl.py --out runs/real_trl

Both sides sample 768 replies to the same questions in groups of four, take two optimizer steps per
64 replies at the same learning rate, and have the same LoRA, rewards and maps to [0, 1], which
FIRM's side measures. The KL coefficients are equal in number, not in weight: FIRM's is subtracted
from rewards in [0, 1] before they are normalised, TRL's stands beside advantages of unit variance.
FIRM has four clients that solve for their weights; TRL's trainer has all questions, and adds the
rewards up. What else differs is each library's default. Each side runs in a process of its own,
which measures its peak memory; then both adapters reply to the same 50 questions.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.measure import peak_resident, quiet
from benchmarks.protocol_runs import Lab, World
from firm.alignment import Calibration
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.report.record import read_record
from firm.run import compose, print_table
from firm.run.shipped import with_shipped_paths
from reward_models.registry import load_reward_models

BASE = Path("configs/smollm2.yaml")
KEYS = {
    "evaluation.num_test_prompts": 2,  # both sides are measured on more
    "evaluation.num_shown_samples": 0,
    "num_threads": 1,
}
SIDES = ("FIRM", "TRL")


def config(out: Path, seed: int, rounds: int) -> AlignmentConfig:
    """Returns the configuration of FIRM's side, from which TRL's side takes its settings."""
    keys = {**KEYS, "out": str(out), "seed": seed, "rounds": rounds}
    return with_shipped_paths(compose(AlignmentConfig, [BASE], list(keys.items())))


def maps(out: Path) -> dict[str, Calibration]:
    """Returns the maps to [0, 1] that FIRM's side has measured."""
    calibrations = read_record(out / "firm").header["calibration"]
    return {name: Calibration(**own) for name, own in calibrations.items()}


def train_firm(cfg: AlignmentConfig) -> dict[str, float]:
    """Trains FIRM's side; returns the seconds of its rounds."""
    result = align(cfg)
    assert result is not None
    return {"seconds": sum(row["seconds"] for row in read_record(result.path).rounds)}


def train_trl(cfg: AlignmentConfig, out: Path) -> dict[str, float]:
    """Trains TRL's side, and saves its adapter below `out`; returns its seconds."""
    torch.manual_seed(cfg.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(cfg.policy.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(cfg.policy.path, dtype=torch.bfloat16)
    calibrations = maps(out)
    fns, lora, own = load_reward_models(cfg.rewards), cfg.policy.lora, cfg.estimator
    lines = Path(str(cfg.data.train.source)).read_text(encoding="utf-8").splitlines()
    prompts = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    per_step = cfg.num_clients * own.batch_size // (own.batch_size // own.minibatch_size)

    def reward(name: str) -> Any:
        def calibrated(completions: list[Any], **columns: Any) -> list[float]:
            scores = torch.tensor(fns[name](completions=completions, **columns))
            return calibrations[name](scores).tolist()

        calibrated.__name__ = name
        return calibrated

    trainer: Any = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward(name) for name in cfg.rewards],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(
            r=lora.r,
            lora_alpha=int(lora.alpha),
            lora_dropout=0.0,
            target_modules=lora.target_modules,
        ),
        args=GRPOConfig(
            output_dir=str(out / "trl_trainer"),
            per_device_train_batch_size=per_step,
            steps_per_generation=own.batch_size // own.minibatch_size,
            num_generations=cfg.estimator.replies_per_prompt,
            max_completion_length=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature,
            learning_rate=own.actor_learning_rate,
            lr_scheduler_type="constant",
            beta=own.kl.coefficient,
            max_steps=cfg.rounds * (own.batch_size // own.minibatch_size),
            seed=cfg.seed,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        ),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.model.save_pretrained(str(out / "trl_adapter"))
    return {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder; what it has is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    out, sizes = options.out, ["--seed", str(options.seed), "--rounds", str(options.rounds)]
    quiet()
    cfg = config(out / "firm", options.seed, options.rounds)
    if options.side:
        found = train_firm(cfg) if options.side == "FIRM" else train_trl(cfg, out)
        found["memory"] = peak_resident()
        (out / f"{options.side}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    out.mkdir(parents=True, exist_ok=True)
    for side in SIDES:
        if (out / f"{side}.json").exists():
            continue
        call = [sys.executable, __file__, "--out", str(out), "--side", side, *sizes]
        subprocess.run(call, check=True)
    costs = {side: json.loads((out / f"{side}.json").read_text()) for side in SIDES}
    world = World(BASE, KEYS, {"test": 50}, num_samples=2, calibrations=maps(out))
    adapters = {"FIRM": out / "firm/adapter", "TRL": out / "trl_adapter"}
    figures = Lab(options.seed, out, world).measured(adapters, splits=["test"])
    num_replies = cfg.rounds * cfg.num_clients * cfg.estimator.batch_size
    tokens = num_replies * cfg.rollout.max_new_tokens
    keys = list(figures["base"]["test"])
    rows = []
    for side in ("base", *SIDES):
        cost = costs.get(side)
        row = [side, *(f"{figures[side]['test'][key]:.3f}" for key in keys)]
        row += (
            [f"{cost['seconds']:.0f}", f"{tokens / cost['seconds']:.0f}",
             f"{cost['memory'] / 1e9:.1f}"] if cost else [""] * 3
        )  # fmt: skip
        rows.append(row)
    title = f"{num_replies} replies of up to {cfg.rollout.max_new_tokens} tokens, 1 thread"
    print_table(title, ["", *keys, "seconds", "tokens/s", "peak GB"], rows)


if __name__ == "__main__":
    main()
