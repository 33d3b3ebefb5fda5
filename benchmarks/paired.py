"""Local steps of this tree beside those of another checkout, as paired ratios.

    git worktree add --detach ../before COMMIT
    python benchmarks/paired.py ../before

Each tree runs in a process of its own, on one thread, with the variants of its own
`benchmarks/local_step.py`. The steps alternate between the trees, so that both meet the same noise
of the machine, and which tree goes first alternates too. Every figure is a median over the steps,
that of the ratio over the pairs; its bracket is the 95 % interval of a median, from order
statistics.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.measure import quiet
from firm.run import print_table

PAIRS = 15  # of local steps, after one that warms up
NAMES = tuple(
    f"{variant}, M = {count}"
    for variant in ("PPO, network", "PPO, heads", "critic-free")
    for count in (1, 2, 4)
)
# With 15 pairs, the fourth smallest and the fourth largest enclose the median in 96.5 % of cases.
RANK = 3

WORKER = f"""
import sys
sys.path.insert(0, sys.argv[1])
import json, logging
from benchmarks.measure import quiet
quiet()
logging.disable(logging.WARNING)
from benchmarks.local_step import VARIANTS, checkpoint_path, load_prompts, local_step
from benchmarks.local_step import PromptsConfig
path = checkpoint_path("policy").parent / "prompts_train.jsonl"
prompts = load_prompts(PromptsConfig(str(path)))
steps = {{}}
for name in {NAMES!r}:
    variant, count = name.rsplit(", M = ", 1)
    steps[name] = local_step(*VARIANTS[variant], prompts, num_objectives=int(count))
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(steps[line.strip()]()["whole"]), flush=True)
"""


class Tree:
    """The local steps of one checkout, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            cwd=path,
            env={**os.environ, "PYTHONPATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("ready")

    def seconds(self, name: str) -> float:
        """Takes one local step of a variant; returns its wall-clock seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._answer()))

    def _answer(self, expected: str | None = None) -> str:
        """Returns the next line of output that is an answer, not a message of a library."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.strip()
            is_answer = text == expected if expected else text.replace(".", "", 1).isdigit()
            if is_answer:
                return text
        raise SystemExit("a tree's process ended before its steps were taken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="another checkout of this repository")
    before_path = parser.parse_args().before.resolve()
    quiet()
    now, before = Tree(Path(__file__).resolve().parents[1]), Tree(before_path)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for pair in range(PAIRS + 1):
        for name in NAMES:
            if pair % 2:
                seconds = now.seconds(name), before.seconds(name)
            else:
                others = before.seconds(name)
                seconds = now.seconds(name), others
            if pair:
                taken[name].append(seconds)
    rows = []
    for name, pairs in taken.items():
        ratios = sorted(own / others for own, others in pairs)
        rows.append([
            name,
            f"{1e3 * median(own for own, _ in pairs):.0f}",
            f"{1e3 * median(others for _, others in pairs):.0f}",
            f"{median(ratios):.3f} [{ratios[RANK]:.3f}, {ratios[-1 - RANK]:.3f}]",
        ])  # fmt: skip
    print_table(
        f"median of {PAIRS} local steps, milliseconds, 1 thread",
        ["", "this tree", before_path.name, "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
