"""Whether long runs end better than they began: family I of docs/protocol.md.

    python benchmarks/stability.py --run runs/stability --seeds 700 701 702   # then the table
    python benchmarks/stability.py --run runs/stability --seeds 320 --settings SmolLM2
    python benchmarks/stability.py                                            # from the stored rows

Each run has its usual length, is measured on test prompts, and is resumed to several times that
length. In the miniature world: a policy conditioned on the preference and a plain one without a
critic, and PPO; and SmolLM2, conditioned.
"""

import argparse
import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.measure import quiet
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import compose, print_table
from firm.run.rows import Row

DATA = Path(__file__).parent.parent / "docs/results/data/protocol/stability.csv"
MINIATURE: dict[str, Any] = {
    "num_clients": 4,
    "engine": "stacked",
    "estimator.batch_size": 16,
    "estimator.minibatch_size": 8,
    "evaluation.num_validation_prompts": 32,
    "evaluation.num_test_prompts": 200,
    "evaluation.num_samples": 1,
    "evaluation.num_shown_samples": 0,
    "evaluation.front_every": 16,
    "checkpoints.keep_last": 1,
}
MARGIN = 0.010
"""Loss of utility in a long run that would matter."""
MAX_KL = 10.0
"""KL in nats per reply above which a policy has run away."""


@dataclass(frozen=True)
class Setting:
    """Runs of one kind."""

    base: Path
    keys: Mapping[str, Any]
    short: int = 16
    """Rounds of a run of the usual length."""
    long: int = 80
    """Rounds of a long run."""


WORLD = Path("configs/miniature.yaml")
CRITIC_FREE = {**MINIATURE, "estimator.name": "critic_free"}
CONDITIONED = {"policy.conditioning.kind": "preference", "strategy.name": "fedavg"}
SETTINGS = {
    "conditioned": Setting(WORLD, {**CRITIC_FREE, **CONDITIONED}),
    "critic-free": Setting(WORLD, CRITIC_FREE),
    "PPO": Setting(WORLD, {**MINIATURE, "estimator.name": "ppo"}),
    "SmolLM2": Setting(
        Path("configs/smollm2_front.yaml"),
        {
            "num_threads": 1,
            "evaluation.num_validation_prompts": 20,
            "evaluation.num_shown_samples": 0,
            "evaluation.front_every": 12,
            "checkpoints.keep_last": 1,
        },
        short=12,
        long=48,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="folder of the runs; without one, no runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    miniature = [name for name, own in SETTINGS.items() if own.base == WORLD]
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=miniature)
    parser.add_argument("--data", type=Path, default=DATA, help="file of the rows")
    options = parser.parse_args(arguments)
    for seed in options.seeds if options.run else ():
        for name in options.settings:
            train(options.run, name, seed)
            write_rows(options.data, [row_of(options.run, name, seed)])
    print_tables(read_rows(options.data))


def train(folder: Path, name: str, seed: int) -> None:
    """Trains what is left of a run; its log at either length is kept beside its folder."""
    quiet()
    setting, out = SETTINGS[name], folder / f"{name}-{seed}"
    for rounds in (setting.short, setting.long):
        log = folder / f"{out.name}.{rounds}.jsonl"
        if not log.exists():
            keys = {**setting.keys, "seed": seed, "rounds": rounds, "out": str(out)}
            align(compose(AlignmentConfig, [setting.base], [*keys.items(), ("resume", "auto")]))
            shutil.copy(out / "metrics.jsonl", log)


def row_of(folder: Path, name: str, seed: int) -> Row:
    """Returns the row of a finished run."""
    setting = SETTINGS[name]
    short, rows = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for log in (folder / f"{name}-{seed}.{n}.jsonl" for n in (setting.short, setting.long))
    )
    rounds = [row for row in rows if row["kind"] == "round"]
    alarms = [text for row in rounds for text in row["alarms"]]
    kls: dict[int, list[float]] = {}
    for row in rows:
        if row["kind"] == "client":
            kls.setdefault(row["round"], []).append(row["kl"])
    base = next(row for row in rows if row.get("split") == "test" and row["round"] == 0)
    return {
        "setting": name,
        "seed": seed,
        "base": fmean(rewards_of(base)),
        **dict(zip(("utility_short", "kl_short"), outcome(short), strict=True)),
        **dict(zip(("utility_long", "kl_long"), outcome(rows), strict=True)),
        "largest_round_kl": max(map(median, kls.values())),
        "rounds": len(rounds),
        "adapter_round": next(r["adapter_round"] for r in reversed(rows) if "adapter_round" in r),
        "undone": sum("trust region" in text for text in alarms),
        "alarms": len(alarms),
    }


def outcome(rows: Sequence[Row]) -> tuple[float, float]:
    """Returns the final expected utility, and the largest KL, on the test prompts.

    Of a conditioned policy the utility is the mean over its preferences p of p·r, at the fold that
    is best for it; of others, the mean reward.
    """
    tests = [r for r in rows if r["kind"] == "evaluation" and r["split"].startswith("test")]
    last = [row for row in tests if row["round"] == max(each["round"] for each in tests)]
    front = [row for row in last if "preference" in row]
    if not front:
        return fmean(rewards_of(last[-1])), last[-1]["kl"]
    rewards = np.array([rewards_of(row) for row in front])  # [K, M]
    utilities = np.array([row["preference"] for row in front]) @ rewards.T  # [K, K]
    return float(utilities.max(1).mean()), max(row["kl"] for row in front)


def rewards_of(row: Row) -> list[float]:
    """Returns the mean rewards of an evaluation's row, by objective."""
    return [reward["mean"] for reward in row["rewards"].values()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows to the CSV file, with four decimals; a row replaces the one of the same run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_rows(path) if path.exists() else []
    by_run = {(row["setting"], int(row["seed"])): row for row in [*known, *rows]}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for _, row in sorted(by_run.items()):
            writer.writerow({k: f"{v:.4g}" if k != "setting" else v for k, v in row.items()})


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of `write_rows`."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k == "setting" else float(v) for k, v in row.items()} for row in rows]


def print_tables(rows: Sequence[Row]) -> None:
    """Prints utilities, the paired change with its bound, and what the guard did, by setting."""
    table = []
    for name, setting in SETTINGS.items():
        own = [row for row in rows if row["setting"] == name]
        if len(own) < 2:
            continue
        change = np.array([row["utility_long"] - row["utility_short"] for row in own])
        error = change.std(ddof=1) / len(change) ** 0.5
        low = change.mean() - stats.t.ppf(0.95, len(own) - 1) * error
        p = stats.t.sf((change.mean() + MARGIN) / error, len(own) - 1)
        table.append(
            [
                f"{name}, {setting.short} and {setting.long} rounds",
                str(len(own)),
                *(f"{fmean(r[k] for r in own):.3f}" for k in ("base", *UTILITIES)),
                f"{change.mean():+.4f}",
                f"{low:+.4f}",
                f"{p:.2g}",
                f"{max(row['kl_long'] for row in own):.1f}",
                str(sum(row["kl_long"] > MAX_KL for row in own)),
                str(sum(row["utility_long"] < row["base"] for row in own)),
                str(sum(row["alarms"] > 0 for row in own)),
                str(int(sum(row["undone"] for row in own))),
            ]
        )
    print_table(
        "utility on test prompts; change is paired by seed, low its one-sided 95 % bound, p that "
        f"of a loss of {MARGIN:g} or more",
        [
            *("", "seeds", "base", "short", "long", "change", "low", "p", "max KL"),
            *(f"KL > {MAX_KL:g}", "below base", "with alarms", "undone"),
        ],
        table,
    )


UTILITIES = ("utility_short", "utility_long")


if __name__ == "__main__":
    main()
