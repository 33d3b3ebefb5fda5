"""Reward against KL of FIRM and TRL on SmolLM2: family L of docs/protocol.md.

    firm fetch smollm2
    python benchmarks/real_trl.py --seeds 840 841 842
    python benchmarks/real_trl.py --seeds 849 --split validation --rate 2e-3 --out runs/rates

Each of four methods samples the same number of replies to the same questions, four to a question
(with PPO one), takes two optimizer steps per 64 replies at the same learning rate without a KL
penalty, and has the same LoRA, rewards and maps to [0, 1]. FIRM has four clients that solve for
their weights; TRL's trainer has all questions, and adds the rewards up, before it normalises them
(GRPO) or after (GDPO). What else differs is each library's default. Each run has a process of its
own, which measures its CPU seconds and peak memory. Its adapters then reply to the same questions
at several points of its course. The file of a seed below --out grows by one method at a time.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.findings import METHODS, PROTOCOL
from benchmarks.measure import peak_resident, quiet
from benchmarks.protocol_runs import Lab, World
from firm.alignment import Calibration
from firm.base.inside import replace_text
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import compose
from firm.run.checkpoint import load_state
from firm.run.shipped import with_shipped_paths
from reward_models.registry import load_reward_models

ROUNDS, POINTS = 4, (2, 3, 4)
"""Rounds of 64 replies, and those after which a run is measured."""
RATE = 1e-3
WORLD = World(
    Path("configs/smollm2.yaml"),
    {
        "num_threads": 1,
        "rounds": ROUNDS,
        "policy.dtype": "bfloat16",
        "estimator.name": "critic_free",
        "estimator.kl.coefficient": 0.0,
        "data.test.source": "firm/questions/unseen.jsonl",
        "evaluation.num_test_prompts": 2,  # models are measured by `Lab`, on all questions
        "evaluation.num_shown_samples": 0,
        "checkpoints.keep_last": ROUNDS,
        "checkpoints.keep_best": False,
    },
    {"validation": 20, "test": 200},
    calibrations={  # measured on 64 replies of the base model
        "warm": Calibration("sigmoid", mean=0.321, scale=0.378),
        "plain": Calibration("sigmoid", mean=55.1, scale=21.3),
    },
    ratio="auto",
)
KEYS: dict[str, dict[str, Any]] = {
    "FIRM": {},
    "FIRM with PPO": {"estimator.name": "ppo"},
}
AGGREGATIONS = {"TRL's GRPO": "sum_then_normalize", "TRL's GDPO": "normalize_then_sum"}


def train_firm(lab: Lab, method: str, rate: float) -> dict[int, Path]:
    """Trains a run of FIRM; returns its adapters by round."""
    name = method.lower().replace(" ", "_")
    run = lab.train(name, {"estimator.actor_learning_rate": rate, **KEYS[method]})
    adapters = {}
    for point in POINTS:
        state = load_state(run / "checkpoints" / f"round_{point:04d}")["state"]
        adapters[point] = lab.write(f"{name}_{point}", run / "adapter", state["server"]["adapter"])
    return adapters


def train_trl(lab: Lab, method: str, rate: float) -> dict[int, Path]:
    """Trains a run of TRL; returns its adapters by round of 64 replies."""
    # Not imported by FIRM's runs, whose memory is measured.
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    world = lab.world
    cfg = with_shipped_paths(compose(AlignmentConfig, [world.base], list(world.common.items())))
    torch.manual_seed(lab.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(cfg.policy.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        cfg.policy.path, dtype=getattr(torch, cfg.policy.dtype)
    )
    fns, lora, own = load_reward_models(cfg.rewards), cfg.policy.lora, cfg.estimator
    lines = Path(str(cfg.data.train.source)).read_text(encoding="utf-8").splitlines()
    prompts = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    num_steps = own.batch_size // own.minibatch_size  # of the optimizer, in a round
    out = lab.folder / AGGREGATIONS[method]

    def reward(name: str) -> Any:
        def calibrated(completions: list[Any], **columns: Any) -> list[float]:
            scores = torch.tensor(fns[name](completions=completions, **columns))
            return world.calibrations[name](scores).tolist()

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
            output_dir=str(out),
            multi_objective_aggregation=AGGREGATIONS[method],
            per_device_train_batch_size=cfg.num_clients * own.batch_size // num_steps,
            steps_per_generation=num_steps,
            num_generations=own.replies_per_prompt,
            max_completion_length=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature,
            learning_rate=rate,
            lr_scheduler_type="constant",
            beta=own.kl.coefficient,
            max_steps=cfg.rounds * num_steps,
            seed=lab.seed,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="steps",
            save_steps=num_steps,
            save_only_model=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        ),
    )
    trainer.train()
    return {point: out / f"checkpoint-{num_steps * point}" for point in POINTS}


def in_own_process(options: argparse.Namespace, seed: int, method: str) -> dict[str, Any]:
    """Returns the adapters, CPU seconds and peak memory of a run, once it is trained."""
    path = options.runs / f"{options.rate:g}" / f"seed_{seed}-{method.replace(' ', '_')}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        call = [sys.executable, __file__, "--seeds", str(seed), "--rate", str(options.rate)]
        call += ["--runs", str(options.runs), "--method", method, "--trained", str(path)]
        subprocess.run(call, check=True)
    return json.loads(path.read_text(encoding="utf-8"))


def measure(options: argparse.Namespace, seed: int) -> Path:
    """Trains and measures what is left of a seed; returns the file of its figures."""
    path = options.out / f"real_trl_{seed}.json"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    lab = Lab(seed, options.runs / f"{options.rate:g}", WORLD)
    for method in options.methods:
        missing = [point for point in POINTS if f"{method} {point}" not in figures]
        if not missing:
            continue
        run = in_own_process(options, seed, method)
        adapters = {f"{method} {point}": Path(run["adapters"][str(point)]) for point in missing}
        figures |= lab.measured(adapters, splits=[options.split], has_base="base" not in figures)
        figures[f"{method} {POINTS[-1]}"]["cost"] = {k: run[k] for k in ("seconds", "memory")}
        replace_text(path, json.dumps(figures, indent=1) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--runs", type=Path, default=Path("runs/real_trl"))
    parser.add_argument("--out", type=Path, default=PROTOCOL, help="folder of the seeds' files")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--trained", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    quiet()
    if options.trained:  # the process of one run
        lab = Lab(options.seeds[0], options.runs / f"{options.rate:g}", WORLD)
        train = train_firm if options.method in KEYS else train_trl
        adapters = train(lab, options.method, options.rate)
        run = {"adapters": {k: str(v) for k, v in adapters.items()}}
        # CPU seconds, since others may share the machine; start and loading included
        run |= {"seconds": time.process_time(), "memory": peak_resident()}
        replace_text(options.trained, json.dumps(run))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        print(measure(options, seed), flush=True)


if __name__ == "__main__":
    main()
