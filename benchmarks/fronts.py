"""Hypervolumes of a sweep's methods at the preferences that all of them have, paired by seed.

    python benchmarks/fronts.py runs/front_sweep
    python benchmarks/fronts.py runs/front_sweep --true true_helpful true_harmless

Two reference points: zeros, where about half is the base model's own, and a stricter one. Models
that have collapsed are left out (`firm.fronts.collapse_reason`), and what is below the reference
counts nothing. With --true the volume is that of other scores, too, from -1.5 each.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from firm.fronts import Front, Point, hypervolume
from firm.run import print_table

Values = Mapping[str, Mapping[int, list[list[float]]]]
"""Of each point, by method and seed."""
STRICT = (0.3, 0.4)
LEAST_TRUE = -1.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, nargs="+")
    parser.add_argument("--true", nargs="+", metavar="SCORE", help="scores to measure by, too")
    parser.add_argument("--against", help="method that the others are compared with")
    options = parser.parse_args(arguments)
    fronts = {
        path.name.removesuffix(".front.json"): Front.load(path)
        for folder in options.sweep
        for path in sorted(folder.glob("*.front.json"))
    }
    common = set.intersection(*({p.preference for p in front.points} for front in fronts.values()))
    points = {
        name: [p for p in front.points if p.preference in common and p.collapse is None]
        for name, front in fronts.items()
    }
    objectives = next(iter(fronts.values())).objectives
    rewards = _values(points, lambda p: [p.rewards[name] for name in objectives])
    _show("rewards from zero", rewards, (0.0,) * len(objectives), options.against)
    if len(objectives) == len(STRICT):
        _show(f"rewards from {STRICT}", rewards, STRICT, options.against)
    if names := options.true:
        scores = _values(points, lambda p: [p.scores[name] for name in names])
        _show(", ".join(names), scores, (LEAST_TRUE,) * len(names), options.against)
    rows = [
        [
            name,
            f"{min(p.scores.get('parse', float('nan')) for p in own):.3f}",
            f"{max(p.kl for p in own):.2f}",
            str(sum(p.collapse is not None for p in fronts[name].points)),
        ]
        for name, own in points.items()
    ]
    print_table("At the ends", ["method", "least parse rate", "largest KL", "collapsed"], rows)


def _values(points: Mapping[str, list[Point]], values: Callable[[Point], list[float]]) -> Values:
    """Returns values by method and seed."""
    return {
        name: {
            seed: [values(point) for point in own if point.seed == seed]
            for seed in sorted({point.seed for point in own})
        }
        for name, own in points.items()
    }


def _show(title: str, values: Values, reference: Sequence[float], against: str | None) -> None:
    volumes = {
        name: {seed: _volume(rows, reference) for seed, rows in by_seed.items()}
        for name, by_seed in values.items()
    }
    rows = []
    for name, by_seed in volumes.items():
        seeds = " ".join(f"{volume:.3f}" for volume in by_seed.values())
        cells = [name, seeds, _mean(list(by_seed.values()))]
        if against is not None:
            shared = sorted(by_seed.keys() & volumes[against].keys())
            changes = [by_seed[seed] - volumes[against][seed] for seed in shared]
            cells.append("" if name == against else _mean(changes))
        rows.append(cells)
    heads = ["method", "by seed", "mean ± standard error"]
    heads += [] if against is None else [f"less {against}"]
    print_table(f"Hypervolume, {title}", heads, rows)


def _volume(rows: list[list[float]], reference: Sequence[float]) -> float:
    above = [row for row in rows if all(np.array(row) > np.array(reference))]
    return float(hypervolume(np.array(above), reference)) if above else 0.0


def _mean(values: Sequence[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{fmean(values):+.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
