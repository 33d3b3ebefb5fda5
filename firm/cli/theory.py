"""Measures the convergence theory and prints the slopes."""

import time
from functools import partial
from pathlib import Path

from firm.jobs.theory import TheoryConfig, measure_theory
from firm.jobs.theory_page import PAGE_NAME, law_cells
from firm.run import print_table, run_cli


def main(cfg: TheoryConfig) -> Path:
    """Measures, prints, and returns the directory of the results."""
    start = time.perf_counter()
    result = measure_theory(cfg)
    print_table(
        f"\nSlopes on log-log axes, mean ± standard error over {cfg.num_seeds} seeds",
        ["quantity", "against", "slope", "theorem", "verdict"],
        [law_cells(law, slope) for law, slope in result.slopes.items()],
    )
    print("\n".join(result.summary), end="\n\n")
    page, points = result.path / PAGE_NAME, result.path / "theory.csv"
    print(f"page     {page}\npoints   {points}\n{time.perf_counter() - start:.0f} s")
    return result.path


cli = partial(run_cli, main, TheoryConfig)
