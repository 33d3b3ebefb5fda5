"""Measures FIRM's convergence theory: Lemma 1 in every step, and each term of Theorem 1.

    python -m recipes.theory                                          # 97 s on one core
    python -m recipes.theory --config recipes/theory/smoke.yaml       # two seconds
    python -m recipes.theory --experiment.client.critic.name exact --num_seeds 10 --out runs/mine

T-FIRM runs on random tabular MDPs, where values and gradients are known exactly. The results are a
folder: theory.html, theory.csv with every point of every seed, slopes.csv and config.yaml.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from firm.report.page import write_page
from firm.run import Run, dated_folder, print_table, run_cli, to_dict
from firm.run.files import write_csv
from firm.run.guard import drawing
from recipes.theory.page import (
    NUM_SHOWN_PAIRS,
    PAGE_NAME,
    law_cells,
    lemma_1_summary,
    page_of,
    point_rows,
    slope_rows,
    slopes_summary,
    unregularised_summary,
)
from recipes.theory.sweeps import (
    LAWS,
    SweepsConfig,
    Values,
    fit_law,
    measure_convergence,
    measure_sweep,
    measure_time,
    sample_pairs,
    sweeps,
)


@dataclass(frozen=True)
class TheoryConfig(SweepsConfig):
    """A measurement of the theory. Every sweep changes one key of `experiment`."""

    out: Path | None = None
    """Directory of the results; by default runs/theory-TIME."""


def main(cfg: TheoryConfig) -> Path:
    """Runs all sweeps, writes page and tables, prints the slopes, and returns the directory."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    with Run.create(cfg.out or dated_folder("theory"), to_dict(cfg)) as run:
        # every seed draws its own MDP, and all settings of a sweep share it
        values: Values = {}
        for sweep in sweeps(cfg):
            began = time.perf_counter()
            values |= measure_sweep(sweep, cfg)
            seconds = time.perf_counter() - began
            print(f"{sweep.name}: {len(sweep.xs)} settings, {seconds:.1f} s", flush=True)
        values |= measure_time(cfg) | measure_convergence(cfg)
        slopes = {law: fit_law(law, values, cfg) for law in LAWS}
        summary = [
            lemma_1_summary(values),
            unregularised_summary(values, cfg),
            slopes_summary(slopes),
        ]
        points, page = run.path / "theory.csv", run.path / PAGE_NAME
        write_csv(points, point_rows(values, cfg))
        write_csv(run.path / "slopes.csv", slope_rows(slopes))
        pairs = sample_pairs(cfg, num_shown=NUM_SHOWN_PAIRS)
        with drawing(f"The page {PAGE_NAME}"):
            write_page(page, page_of(cfg, values, slopes, pairs, summary=summary))
    print_table(
        f"\nSlopes on log-log axes, mean ± standard error over {cfg.num_seeds} seeds",
        ["quantity", "against", "slope", "theorem", "verdict"],
        [law_cells(law, slope) for law, slope in slopes.items()],
    )
    print("\n".join(summary), end="\n\n")
    print(f"page     {page}\npoints   {points}\n{time.perf_counter() - start:.0f} s")
    return run.path


if __name__ == "__main__":
    run_cli(main, TheoryConfig, description=__doc__ or "")
