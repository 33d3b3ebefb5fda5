"""Clients that an adapter needs to keep its gain under privacy, from a study of noise levels.

    python benchmarks/private.py runs/private   # of configs/private.yaml
    python benchmarks/private.py runs/private --kept 0.5 --markdown
    python benchmarks/private.py runs/private --kept 0.5 --bisect   # the levels to run next
    python benchmarks/private.py docs/results/data/protocol --kept 0.5   # of family E

Settings are named "ADAPTER, no noise" and "ADAPTER, N clients", where the noise of N clients is
that of the epsilon and the rounds of --given and --rounds. The first table has the gains over the
base model on the test prompts, means over the seeds, and their share of the same adapter's gain
without noise.

The second table has the clients needed: between which two of the levels that were run lies the
least N from which on the mean gain stays at --kept (nine tenths) of that without noise. Gains
collapse between two levels, so that a number interpolated there would be the grid's answer rather
than the adapter's. In brackets are the levels that hold for nine tenths of all draws of the seeds
with replacement, the same draw for all adapters and levels. At another epsilon the same noise
takes as many times the clients as its noise multiplier is larger.

With --bisect, only the level that halves each adapter's bracket is printed, with its noise
multiplier for the study: their number falls by the bracket's square root. Run the study with these
settings added, and call again, until no bracket is wider than --width.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.adapter_runs import CLIENTS
from benchmarks.frontier import Gains, gains, show_markdown, stored_gains, words
from benchmarks.privacy_budget import noise_for
from firm.report.record import study_records
from firm.run import Sweep, print_table

KEYS = ("rewards", "true_scores")
Levels = Mapping[float, np.ndarray]
"""Gains by number of clients, infinite without noise; one for each seed, shape [S]."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--against", metavar="ADAPTER", default="LoRA r = 16", help="the yardstick")
    parser.add_argument("--kept", type=float, default=0.9, help="share of the gain to be kept")
    parser.add_argument("--given", type=float, default=8.0, help="ε of the levels in the study")
    parser.add_argument("--epsilon", type=float, default=2.0, help="another ε to tell clients for")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--bisect", action="store_true", help="print the levels to run next")
    parser.add_argument("--width", type=float, default=1.25, help="ratio of a bracket's ends")
    parser.add_argument("--markdown", action="store_true", help="print tables for the docs")
    options = parser.parse_args(arguments)
    by_seed, num_clients = stored_gains(options.study, "privacy", "test"), CLIENTS
    if not by_seed:
        records = study_records(Sweep(options.study))
        by_seed = {
            setting: {run.seed: gains(run) for run in runs}
            for setting, runs in records.items()
            if runs
        }
        runs_of_all = [run for runs in records.values() for run in runs]
        num_clients = runs_of_all[0].settings["num_clients"] if runs_of_all else CLIENTS
    seeds = set.intersection(*(set(runs) for runs in by_seed.values())) if by_seed else set()
    if not seeds:
        parser.error("no seed is finished by every setting; continue with firm study --resume.")
    adapters = by_adapter(
        {setting: [runs[seed] for seed in sorted(seeds)] for setting, runs in by_seed.items()}
    )
    if options.against not in adapters:
        parser.error(f"--against must be one of {', '.join(adapters)}, got {options.against}.")
    epsilons = (options.given, options.epsilon)
    noise, other_noise = (noise_for(e, options.rounds, options.delta) for e in epsilons)
    factor = other_noise / noise
    show = show_markdown if options.markdown else print_table
    if options.bisect:
        rows = [
            [f"{adapter}, {clients} clients", f"{num_clients * noise / clients:.3g}"]
            for adapter, clients in next_levels(adapters, options.kept, options.width).items()
        ]
        show("Levels to run next", ["setting", "strategy.privacy.noise_multiplier"], rows)
        return
    print(f"{len(seeds)} seeds that all settings have.")
    show("Gains under noise", *gain_table(adapters, epsilons, factor))
    for key in KEYS:
        show(
            f"Clients that keep {options.kept:g} of the gain in the {words(key)}",
            *needed_table(adapters, key, options.kept, options.against, epsilons, factor),
        )


def by_adapter(
    paired: Mapping[str, Sequence[Gains]],
) -> dict[str, dict[float, Sequence[Gains]]]:
    """Returns the gains by adapter and number of clients, most clients first."""
    adapters: dict[str, dict[float, Sequence[Gains]]] = {}
    for setting, runs in paired.items():
        adapter, level = setting.rsplit(", ", 1)
        clients = inf if level == "no noise" else float(level.removesuffix(" clients"))
        adapters.setdefault(adapter, {})[clients] = runs
    return {
        adapter: {clients: levels[clients] for clients in sorted(levels, reverse=True)}
        for adapter, levels in adapters.items()
    }


def gain_table(
    adapters: Mapping[str, Mapping[float, Sequence[Gains]]],
    epsilons: Sequence[float],
    factor: float,
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of gains, parse rate's change and KL, means over the seeds."""
    rows = []
    for adapter, levels in adapters.items():
        for clients, runs in levels.items():
            cells = [adapter, _count(clients), _count(clients * factor)]
            for key in KEYS:
                gain, whole = _values(runs, key).mean(), _values(levels[inf], key).mean()
                cells += [f"{gain:+.3f}", f"{gain / whole:.2f}"]
            parse, kl = _values(runs, "parse").mean(), _values(runs, "kl").mean()
            rows.append([*cells, f"{parse:+.3f}", f"{kl:.3g}"])
    numbers = [f"clients at ε = {epsilon:g}" for epsilon in epsilons]
    header = ["", *numbers, words(KEYS[0]), "share", words(KEYS[1]), "share", "parse", "KL"]
    return header, rows


def needed_table(
    adapters: Mapping[str, Mapping[float, Sequence[Gains]]],
    key: str,
    kept: float,
    against: str,
    epsilons: Sequence[float],
    factor: float,
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the clients needed at both ε, beside those of the yardstick."""
    tables = {
        adapter: {clients: _values(runs, key) for clients, runs in levels.items()}
        for adapter, levels in adapters.items()
    }
    num_seeds = len(next(iter(tables[against].values())))
    draws = [list(draw) for draw in product(range(num_seeds), repeat=num_seeds)]

    def brackets(adapter: str, draws: Sequence[Sequence[int]]) -> np.ndarray:
        levels = tables[adapter]
        return np.array(
            [
                needed_clients({n: values[list(draw)] for n, values in levels.items()}, kept)
                for draw in draws
            ]
        )

    everyone = [range(num_seeds)]
    rows = []
    for adapter in tables:
        own, other = (brackets(name, everyone) for name in (adapter, against))
        drawn, other_drawn = (brackets(name, draws) for name in (adapter, against))
        cells = [
            f"{_between(own[0] * scale)} {_between(_interval(drawn) * scale, '[]')}"
            for scale in (1.0, factor)
        ]
        fewer = [_times_fewer(other, own)[0], _interval(_times_fewer(other_drawn, drawn))]
        is_yardstick = adapter == against
        ratio = "1" if is_yardstick else f"{_between(fewer[0])} {_between(fewer[1], '[]')}"
        rows.append([adapter, *cells, ratio])
    return ["", *(f"ε = {epsilon:g}" for epsilon in epsilons), "times fewer"], rows


def needed_clients(levels: Levels, kept: float) -> tuple[float, float]:
    """Returns between which levels lies the least N that keeps a share of the gain without noise.

    From that N on the mean gain stays at the share. The first level does not keep it, or is 0 where
    all do; the second does, and so do all above it, or is infinite where the highest does not.
    """
    whole = levels[inf].mean()
    enough = inf
    for clients in sorted((clients for clients in levels if clients < inf), reverse=True):
        if levels[clients].mean() < kept * whole:
            return clients, enough
        enough = clients
    return 0.0, enough


def next_levels(
    adapters: Mapping[str, Mapping[float, Sequence[Gains]]], kept: float, width: float
) -> dict[str, int]:
    """Returns the number of clients that halves each adapter's bracket, on a logarithmic scale.

    Adapters whose bracket's ends are at most `width` times apart are left out; an open bracket is
    extended by three times.
    """
    levels = {}
    for adapter, own in adapters.items():
        values = {clients: _values(runs, KEYS[0]) for clients, runs in own.items()}
        low, high = needed_clients(values, kept)
        if low > 0 and high <= low * width:
            continue
        middle = 3 * low if high == inf else high / 3 if low == 0 else math.sqrt(low * high)
        digits = 1 - math.floor(math.log10(middle))
        clients = max(1, round(round(middle, digits)))
        if clients not in own:
            levels[adapter] = clients
    return levels


def _times_fewer(others: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns the least and the greatest ratio of numbers within brackets, shape [N, 2] each."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.stack([others[:, 0] / own[:, 1], others[:, 1] / own[:, 0]], axis=1)
    return np.nan_to_num(ratios, nan=0.0, posinf=inf)


def _values(runs: Sequence[Gains], key: str) -> np.ndarray:
    return np.array([run[key] for run in runs])


def _interval(brackets: np.ndarray) -> np.ndarray:
    """Returns the bounds of nine tenths of the draws, of their brackets [N, 2]."""
    low = np.quantile(brackets[:, 0], 0.05, method="lower")
    return np.array([low, np.quantile(brackets[:, 1], 0.95, method="higher")])


def _between(bracket: np.ndarray, ends: str = "") -> str:
    low, high = (f"{number:,.3g}" if number < 100 else f"{number:,.0f}" for number in bracket)
    if ends:
        return f"[{low}, {'∞' if bracket[1] == inf else high}]"
    if bracket[1] == inf:
        return f"above {low}"
    return f"at most {high}" if bracket[0] == 0 else f"{low} to {high}"


def _count(clients: float) -> str:
    return "no noise" if clients == inf else f"{clients:,.0f}"


if __name__ == "__main__":
    main()
