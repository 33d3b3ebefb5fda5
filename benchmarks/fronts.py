"""Hypervolumes of sweeps' methods at the preferences and seeds that all have, paired by seed.

    python benchmarks/fronts.py runs/front_sweep --against separate_runs
    python benchmarks/fronts.py runs/front_sweep --true true_helpful true_harmless
    python benchmarks/fronts.py runs/front_sweep --picture docs/front \
        --methods one_conditioned_run rewarded_soups separate_runs
    python benchmarks/fronts.py docs/fronts/hh --against separate_runs --points

A method that several folders have is one method: seeds may have been run apart. `docs/fronts` keeps
the fronts of studies whose runs are gone.

Two reference points: zeros, where about half is the base model's own, and the base model's rewards,
which only models above them in all rewards exceed. Models that have collapsed are left out
(`firm.fronts.collapse_reason`), and what is below the reference counts nothing. With --true the
volume is that of other scores, too, from -1.5 each. Differences have 95 % intervals over the seeds
by Student's t. How far parse rates fall is compared at equal preferences, as means over the seeds.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from firm.fronts import Front, Point, by_preference, preference_correlations
from firm.fronts.hypervolume import volumes
from firm.report.front_page import front_figure
from firm.report.seeds import mean_difference
from firm.report.static import save_figure
from firm.run import print_table

Values = Mapping[str, Mapping[int, list[list[float]]]]
"""Of each point, by method and seed."""
LEAST_TRUE = -1.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, nargs="+")
    parser.add_argument("--true", nargs="+", metavar="SCORE", help="scores to measure by, too")
    parser.add_argument("--methods", nargs="+", help="which ones; all unless given")
    parser.add_argument("--picture", type=Path, help="where to draw the fronts, without a suffix")
    parser.add_argument("--against", help="method that the others are compared with")
    parser.add_argument("--points", action="store_true", help="print means by preference, too")
    options = parser.parse_args(arguments)
    fronts: dict[str, Front] = {}
    for path in (path for folder in options.sweep for path in sorted(folder.glob("*.front.json"))):
        name, front = path.name.removesuffix(".front.json"), Front.load(path)
        known = fronts.get(name, replace(front, points=()))
        if twice := {p.name for p in known.points} & {p.name for p in front.points}:
            parser.error(f"two folders have {sorted(twice)[0]}; leave one of them out.")
        fronts[name] = replace(front, points=(*known.points, *front.points))
    for name in options.methods or ():
        if name not in fronts:
            parser.error(f"--methods must be of {', '.join(fronts)}, got {name}.")
    fronts = {name: fronts[name] for name in options.methods or fronts}
    if options.against not in (None, *fronts):
        parser.error(f"--against must be one of {', '.join(fronts)}, got {options.against}.")
    common = set.intersection(*(set(by_preference(front)) for front in fronts.values()))
    seeds = set.intersection(*({p.seed for p in front.points} for front in fronts.values()))
    fronts = {name: _at(front, common, seeds) for name, front in fronts.items()}
    if options.picture:
        named = {front.strategy: front for front in fronts.values()}
        print(*save_figure(front_figure(named), options.picture))
    sound = {
        name: [point for point in front.points if point.collapse is None]
        for name, front in fronts.items()
    }
    objectives = next(iter(fronts.values())).objectives
    print(f"{len(common)} preferences and {len(seeds)} seeds that all methods have.")
    rewards = _values(sound, lambda p: [p.rewards[name] for name in objectives])
    _show("rewards from zero", rewards, (0.0,) * len(objectives), options.against)
    base = tuple(next(iter(fronts.values())).base[name] for name in objectives)
    _show("rewards from the base model's", rewards, base, options.against)
    if names := options.true:
        scores = _values(sound, lambda p: [p.scores[name] for name in names])
        _show(", ".join(names), scores, (LEAST_TRUE,) * len(names), options.against)
    _show_ends(fronts, options.against)
    if options.points:
        _show_points(fronts)


def _at(front: Front, preferences: set[tuple[float, ...]], seeds: set[int]) -> Front:
    """Returns the points of some preferences and seeds."""
    groups = by_preference(front).items()
    kept = [p for group, own in groups if group in preferences for p in own if p.seed in seeds]
    return replace(front, points=tuple(kept))


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
    found = {
        name: {seed: float(volumes(np.array(rows) - reference)) for seed, rows in by_seed.items()}
        for name, by_seed in values.items()
    }
    rows = []
    for name, by_seed in found.items():
        seeds = " ".join(f"{volume:.3f}" for volume in by_seed.values())
        cells = [name, seeds, _mean(list(by_seed.values()))]
        if against is not None:
            other = found[against]
            shared = sorted(by_seed.keys() & other.keys())
            changes = [by_seed[seed] - other[seed] for seed in shared]
            own, peer = fmean(by_seed[s] for s in shared), fmean(other[s] for s in shared)
            ratio = f"{own / peer:.3f}" if peer else "–"  # no model above the reference point
            cells += ["", ""] if name == against else [_interval(changes), ratio]
        rows.append(cells)
    heads = ["method", "by seed", "mean ± standard error"]
    heads += [] if against is None else [f"less {against}", "ratio"]
    print_table(f"Hypervolume, {title}", heads, rows)


def _show_ends(fronts: Mapping[str, Front], against: str | None) -> None:
    """Prints whether preferences steer, and what happens where the models are worst."""
    parses = {name: _parse_rates(front) for name, front in fronts.items()}
    rows = []
    for name, front in fronts.items():
        seeds = sorted({point.seed for point in front.points})
        correlations = [preference_correlations(front.of_seed(seed)) for seed in seeds]
        steering = [
            [value for row in correlations if (value := row[each]) is not None]
            for each in front.objectives
        ]
        cells = [
            name,
            ", ".join(f"{fmean(own):.3f}" if own else "–" for own in steering),
            f"{min(p.scores.get('parse', float('nan')) for p in front.points):.3f}",
            f"{max(p.kl for p in front.points):.2f}",
            f"{fmean(p.kl for p in front.points):.2f}",
            str(sum(p.collapse is not None for p in front.points)),
        ]
        if against is not None:
            falls = [rate - parses[name][at] for at, rate in parses[against].items()]
            cells.append("" if name == against else f"{max(falls):.3f}")
        rows.append(cells)
    heads = ["method", "Spearman's ρ", "least parse rate", "largest KL", "mean KL", "collapsed"]
    heads += [] if against is None else [f"largest fall of parse rate below {against}"]
    print_table("Along the front", heads, rows)


def _show_points(fronts: Mapping[str, Front]) -> None:
    """Prints means and standard errors over the seeds, by preference, and the base model's."""
    first = next(iter(fronts.values()))
    rows = [["base model", "", *(f"{first.base[name]:.3f}" for name in first.objectives), ""]]
    for method, front in fronts.items():
        for preference, points in by_preference(front).items():
            columns = [[p.rewards[name] for p in points] for name in front.objectives]
            columns.append([p.kl for p in points])
            cells = [f"{fmean(column):.3f} ± {_error(column):.3f}" for column in columns]
            rows.append([method, ", ".join(f"{share:.2f}" for share in preference), *cells])
    print_table("Means over the seeds", ["method", "preference", *first.objectives, "KL"], rows)


def _parse_rates(front: Front) -> dict[tuple[float, ...], float]:
    """Returns the mean parse rate over the seeds, by preference."""
    return {
        preference: fmean(point.scores.get("parse", float("nan")) for point in points)
        for preference, points in by_preference(front).items()
    }


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):+.4f} ± {_error(values):.4f}"


def _interval(values: Sequence[float]) -> str:
    return mean_difference(values).text(4) if len(values) > 1 else f"{fmean(values):+.4f}"


def _error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
