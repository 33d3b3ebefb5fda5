"""Makes the runs of family E of docs/protocol.md: rates, small uploads, clients under privacy.

    python benchmarks/adapter_runs.py rates --seeds 198 199
    python benchmarks/adapter_runs.py uploads --seeds 200 201 202 203 204
    python benchmarks/adapter_runs.py privacy --seeds 200 201 202
    python benchmarks/private.py docs/results/data/protocol --kept 0.5 --bisect   # levels to add

Each seed of a part is one file, as in benchmarks/protocol_runs.py. The part rates measures
validation prompts alone, so that nothing else can choose `CHOSEN`; the other two measure test
prompts. A file of the part privacy is written anew when `LEVELS` has new levels; the runs that are
finished are kept.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.measure import quiet
from benchmarks.privacy_budget import noise_for
from benchmarks.protocol_runs import COMMON, MINIATURE, Adapters, Lab, World
from firm.run.files import replace_text

CLIENTS = 8
"""Clients of each run; under privacy they represent more."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA r = 16": {"policy.lora.r": 16},
    "LoRA-XS r = 8": {"policy.adapter": "lora_xs", "policy.lora.r": 8},
}
RATES = (0.001, 0.0025, 0.006)
CHOSEN: dict[str, float] = {}
"""Learning rates that the part rates has chosen."""
CLIP: dict[str, float] = {}
"""Mean length of the updates in the sixth round of a run at this rate, without noise."""
LEVELS: dict[str, tuple[float, ...]] = {
    "LoRA r = 16": (inf, 550, 750),
    "LoRA-XS r = 8": (inf, 42, 55),
}
"""Clients that the noise is made for; infinite without noise."""
EPSILON, DELTA = 8.0, 1e-5
WHOLE, SMALL = "float32", "2 bits"
"""Uploads of the part uploads."""


def lab_of(adapter: str, seed: int, runs: Path) -> Lab:
    """Returns the lab of one kind of adapter."""
    keys = {"num_clients": CLIENTS, "strategy.name": "firm", **ADAPTERS[adapter]}
    return Lab(seed, runs, World(MINIATURE.base, {**COMMON, **keys}, MINIATURE.num_prompts))


def rates(seed: int, runs: Path, make: Callable[[str, int, Path], Lab] = lab_of) -> dict[str, Any]:
    """Measures each adapter at each learning rate on validation prompts."""
    found = {}
    for adapter in ADAPTERS:
        lab = make(adapter, seed, runs)
        models = {
            f"{adapter}, rate {rate:g}": _train(lab, f"{adapter} rate {rate:g}", rate)
            for rate in RATES
        }
        found |= lab.measured(models, splits=["validation"])
    return found


def uploads(
    seed: int, runs: Path, make: Callable[[str, int, Path], Lab] = lab_of
) -> dict[str, Any]:
    """Measures E1: whole uploads and uploads of two bits."""
    adapter = "LoRA r = 16"
    lab = make(adapter, seed, runs)
    keys: dict[str, dict[str, Any]] = {WHOLE: {}, SMALL: {"strategy.upload.bits": 2}}
    models = {
        f"{adapter}, {name}": _train(lab, f"{adapter} {name}", CHOSEN[adapter], own)
        for name, own in keys.items()
    }
    return lab.measured(models, splits=["test"])


def privacy(
    seed: int, runs: Path, make: Callable[[str, int, Path], Lab] = lab_of
) -> dict[str, Any]:
    """Measures E2: each adapter under the noise of each level."""
    found, noise = {}, noise_for(EPSILON, COMMON["rounds"], DELTA)
    for adapter, levels in LEVELS.items():
        lab, models = make(adapter, seed, runs), Adapters()
        for clients in levels:
            keys = {
                "strategy.privacy.clip_norm": CLIP[adapter],
                "strategy.privacy.noise_multiplier": CLIENTS * noise / clients,
                "strategy.privacy.noise_seed": seed,
            }
            name = level_name(adapter, clients)
            models[name] = _train(lab, name, CHOSEN[adapter], keys)
        found |= lab.measured(models, splits=["test"])
    return found


def level_name(adapter: str, clients: float) -> str:
    """Returns the name of a model under the noise of so many clients."""
    return f"{adapter}, " + ("no noise" if clients == inf else f"{clients:g} clients")


def _train(lab: Lab, name: str, rate: float, keys: Mapping[str, Any] | None = None) -> Path:
    folder = name.replace(" ", "_").replace(",", "")
    return lab.train(folder, {"estimator.actor_learning_rate": rate, **(keys or {})}) / "adapter"


PARTS = {part.__name__: part for part in (rates, uploads, privacy)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/data/protocol"))
    options = parser.parse_args(arguments)
    quiet()
    for seed in options.seeds:
        path = options.out / f"{options.part}_{seed}.json"
        figures = PARTS[options.part](seed, options.runs)
        replace_text(path, json.dumps(figures, indent=1) + "\n")
        print(path, flush=True)


if __name__ == "__main__":
    main()
