"""Base against aligned model over several seeds of one configuration: the spread behind a claim.

    python benchmarks/seeds.py --seeds 1 2 3
    python benchmarks/seeds.py --seeds 1 2 3 --config configs/hh_small.yaml --min-z -2

Runs `recipes/firm_hh.py` once per seed, each in a process of its own, and prints every score's
paired change on held-out prompts in standard errors. Further arguments go to the recipe. Exits 1
when a z lies below `--min-z`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from firm.run import print_table

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--config", default=str(ROOT / "configs/miniature.yaml"))
    parser.add_argument("--out", default="runs/seeds")
    parser.add_argument("--min-z", type=float, default=3.0)
    arguments, overrides = parser.parse_known_args()
    rows, lowest, final = [], float("inf"), {}
    for seed in arguments.seeds:
        out = Path(arguments.out) / f"{Path(arguments.config).stem}_seed_{seed}"
        command = [sys.executable, "recipes/firm_hh.py", "--config", arguments.config]
        command += ["--seed", str(seed), "--out", str(out), *overrides]
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        text = (ROOT / out / "metrics.jsonl").read_text().splitlines()
        evaluations = [row for row in map(json.loads, text) if row["kind"] == "evaluation"]
        base, final = (row for row in evaluations if row["split"] == "test")
        for name, change in final["change"].items():
            z = change["mean"] / change["se"] if change["se"] else 0.0
            if name != "parse":
                lowest = min(lowest, z)
            before, after = base["scores"][name], final["scores"][name]
            rows.append(
                [
                    f"seed {seed}, {name}",
                    f"{before['mean']:.3f} ± {before['se']:.3f}",
                    f"{after['mean']:.3f} ± {after['se']:.3f}",
                    f"{change['mean']:+.3f} ± {change['se']:.3f}",
                    f"{z:+.1f}",
                    "",
                ]
            )
        rows[-1][-1] = f"{seconds:.0f} s"
    print_table(
        f"{Path(arguments.config).stem}, {final['num_prompts']} held-out prompts, "
        f"{final['num_samples']} replies each",
        ["", "base", "aligned", "change", "z", "time"],
        rows,
    )
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"lowest z of a score: {lowest:.1f}; most memory of a run: {memory:.2f} GiB")
    sys.exit(lowest < arguments.min_z)


if __name__ == "__main__":
    main()
