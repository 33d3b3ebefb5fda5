"""Makes the runs of family E of docs/protocol.md: rates, small uploads, clients under privacy.

    python benchmarks/adapter_runs.py rates --seeds 198 199 --adapters "LoRA r = 16" "LoRA-XS r = 8"
    python benchmarks/adapter_runs.py uploads --seeds 200 201 202 203 204
    python benchmarks/adapter_runs.py privacy --seeds 200 201 202 \\
        --adapters "LoRA r = 16" "LoRA-XS r = 8"
    python benchmarks/private.py docs/results/data/protocol --kept 0.5 --bisect   # levels to add

Each seed of a part is one file, to which models that it lacks are added. The part rates measures
validation prompts alone, so that nothing else can choose `CHOSEN`; the other two measure test
prompts.
"""

import argparse
import json
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.measure import quiet
from benchmarks.privacy_budget import noise_for
from benchmarks.protocol_runs import COMMON, MINIATURE, Lab, World
from firm.base.inside import replace_text

CLIENTS = 8
"""Clients of each run; under privacy they represent more."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA r = 16": {"policy.lora.r": 16},
    "LoRA-XS r = 8": {"policy.adapter": "lora_xs", "policy.lora.r": 8},
}
RATE = "estimator.actor_learning_rate"
RATES = (0.001, 0.0025, 0.006)
CHOSEN = {"LoRA r = 16": 0.006, "LoRA-XS r = 8": 0.006}
"""Learning rates that the part rates has chosen."""
CLIP = {"LoRA r = 16": 2.2, "LoRA-XS r = 8": 0.23}
"""Clip norms: mean lengths of the updates in the sixth round of a run without noise. That of LoRA
is of configs/private.yaml, which has the same rate, and that of LoRA-XS of a run of seed 199."""
LEVELS: dict[str, tuple[float, ...]] = {
    "LoRA r = 16": (inf, 550, 640, 750),
    "LoRA-XS r = 8": (inf, 42, 55, 72, 82, 94, 160),
}
"""Clients that the noise is made for; infinite without noise."""
EPSILON, DELTA = 8.0, 1e-5
WHOLE, SMALL = "float32", "2 bits"
"""Uploads of the part uploads."""


Jobs = dict[str, dict[str, Any]]
"""Keys of runs, by the name of the model."""


def rates(adapter: str, seed: int) -> Jobs:
    """Returns the runs of an adapter at each learning rate."""
    return {f"{adapter}, rate {rate:g}": {RATE: rate} for rate in RATES}


def uploads(adapter: str, seed: int) -> Jobs:
    """Returns the runs of E1: whole uploads and uploads of two bits."""
    keys = {RATE: CHOSEN[adapter]}
    small = {**keys, "strategy.upload.bits": 2}
    return {f"{adapter}, {WHOLE}": keys, f"{adapter}, {SMALL}": small}


def privacy(adapter: str, seed: int) -> Jobs:
    """Returns the runs of an adapter under the noise of each level."""
    noise, jobs = noise_for(EPSILON, COMMON["rounds"], DELTA), Jobs()
    for clients in LEVELS[adapter]:
        level = "no noise" if clients == inf else f"{clients:g} clients"
        jobs[f"{adapter}, {level}"] = {
            RATE: CHOSEN[adapter],
            "strategy.privacy.clip_norm": CLIP[adapter],
            "strategy.privacy.noise_multiplier": CLIENTS * noise / clients,
            "strategy.privacy.noise_seed": seed,
        }
    return jobs


PARTS = {"rates": (rates, "validation"), "uploads": (uploads, "test"), "privacy": (privacy, "test")}
"""Runs of each part, and the prompts that they are measured on."""


def lab_of(adapter: str, seed: int, runs: Path) -> Lab:
    """Returns the lab of one kind of adapter."""
    keys = {"num_clients": CLIENTS, "strategy.name": "firm", **ADAPTERS[adapter]}
    return Lab(seed, runs, World(MINIATURE.base, {**COMMON, **keys}, MINIATURE.num_prompts))


def measured(jobs: Jobs, lab: Lab, split: str) -> dict[str, Any]:
    """Returns the figures of the base model and of each run, after training what is left."""
    folders = {name: name.replace(" ", "_").replace(",", "") for name in jobs}
    models = {name: lab.train(folders[name], keys) / "adapter" for name, keys in jobs.items()}
    return lab.measured(models, splits=[split])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=["LoRA r = 16"])
    parser.add_argument("--runs", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/data/protocol"))
    options = parser.parse_args(arguments)
    quiet()
    jobs_of, split = PARTS[options.part]
    for seed in options.seeds:
        path = options.out / f"{options.part}_{seed}.json"
        for adapter in options.adapters:
            known = json.loads(path.read_text()) if path.exists() else {}
            left = {k: v for k, v in jobs_of(adapter, seed).items() if k not in known}
            if left:
                figures = measured(left, lab_of(adapter, seed, options.runs), split)
                replace_text(path, json.dumps({**known, **figures}, indent=1) + "\n")
        print(path, flush=True)


if __name__ == "__main__":
    main()
