"""Clients that an adapter needs to keep its gain under privacy, from a study of noise levels.

    python benchmarks/private.py runs/private   # of configs/private.yaml
    python benchmarks/private.py runs/private --kept 0.5 --markdown

Settings are named "ADAPTER, no noise" and "ADAPTER, N clients", where the noise of N clients is
that of the epsilon and the rounds of --given and --rounds. The first table has the gains over the
base model on the test prompts, means over the seeds, and their share of the same adapter's gain
without noise.

The second table has the clients needed: the least N from which on the mean gain stays at --kept
(nine tenths) of that without noise, interpolated in log N between the levels that were run. Its
90 % interval is the bootstrap's over all draws of the seeds with replacement, the same draw for
all adapters and levels; "<" and ">" say that it reaches beyond the levels that were run. At another
epsilon the same noise takes as many times the clients as its noise multiplier is larger.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from math import exp, inf, log
from pathlib import Path

import numpy as np

from benchmarks.frontier import Gains, gains, show_markdown, words
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
    parser.add_argument("--markdown", action="store_true", help="print tables for the docs")
    options = parser.parse_args(arguments)
    records = study_records(Sweep(options.study))
    by_seed = {
        setting: {run.seed: gains(run) for run in runs} for setting, runs in records.items() if runs
    }
    seeds = set.intersection(*(set(runs) for runs in by_seed.values())) if by_seed else set()
    if not seeds:
        parser.error("no seed is finished by every setting; go on with firm study --resume true.")
    adapters = by_adapter(
        {setting: [runs[seed] for seed in sorted(seeds)] for setting, runs in by_seed.items()}
    )
    if options.against not in adapters:
        parser.error(f"--against must be one of {', '.join(adapters)}, got {options.against}.")
    epsilons = (options.given, options.epsilon)
    noise, other_noise = (noise_for(e, options.rounds, options.delta) for e in epsilons)
    factor = other_noise / noise
    show = show_markdown if options.markdown else print_table
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

    def needed(adapter: str, draw: Sequence[int]) -> float:
        levels = {clients: values[list(draw)] for clients, values in tables[adapter].items()}
        return needed_clients(levels, kept)

    everyone = range(num_seeds)
    yardstick = np.array([needed(against, draw) for draw in draws])
    rows = []
    for adapter, levels in tables.items():
        resampled = np.array([needed(adapter, draw) for draw in draws])
        own = (needed(adapter, everyone), *_interval(resampled))
        cells = [
            "{} [{}, {}]".format(*(_sign(n, levels) + f"{n * scale:,.0f}" for n in own))
            for scale in (1.0, factor)
        ]
        other = needed(against, everyone)
        bound = {"< ": "> ", "> ": "< "}.get(_sign(own[0], levels)) or _sign(other, tables[against])
        low, high = _interval(yardstick / resampled)
        rows.append([adapter, *cells, f"{bound}{other / own[0]:.3g} [{low:.3g}, {high:.3g}]"])
    return ["", *(f"ε = {epsilon:g}" for epsilon in epsilons), "times fewer"], rows


def needed_clients(levels: Levels, kept: float) -> float:
    """Returns the least N from which on the mean gain stays at a share of that without noise.

    Between two levels the share is linear in log N. Where all levels keep it that is the lowest of
    them, where the highest does not it is that one: a bound, from above or from below.
    """
    whole = levels[inf].mean()
    shares = {clients: float(levels[clients].mean() / whole) for clients in levels}
    finite = sorted((clients for clients in shares if clients < inf), reverse=True)
    enough = finite[0]
    for clients in finite:
        if shares[clients] < kept:
            if clients == finite[0]:
                return clients
            part = (kept - shares[clients]) / (shares[enough] - shares[clients])
            return exp(log(clients) + part * (log(enough) - log(clients)))
        enough = clients
    return enough


def _values(runs: Sequence[Gains], key: str) -> np.ndarray:
    return np.array([run[key] for run in runs])


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.05, 0.95])
    return float(low), float(high)


def _count(clients: float) -> str:
    return "no noise" if clients == inf else f"{clients:,.0f}"


def _sign(clients: float, levels: Levels) -> str:
    """Returns what precedes a number of clients at either end of the levels that were run."""
    finite = [level for level in levels if level < inf]
    return "< " if clients <= min(finite) else "> " if clients >= max(finite) else ""


if __name__ == "__main__":
    main()
