"""Measures the convergence theory: Lemma 1 in every step, each term of Theorem 1 by itself."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from firm.jobs.theory_page import (
    NUM_SHOWN_PAIRS,
    PAGE_NAME,
    lemma_1_summary,
    page_of,
    point_rows,
    slope_rows,
    slopes_summary,
    unregularised_summary,
)
from firm.report.page import write_page
from firm.run import Run, dated_folder, to_dict
from firm.run.files import write_csv
from firm.run.guard import drawing
from firm.theory.scaling import Slope
from firm.theory.sweeps import (
    LAWS,
    Law,
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
    """One measurement of the theory. Every sweep changes one key of `experiment`."""

    out: Path | None = None
    """Directory of the results; by default runs/theory-TIME."""


@dataclass(frozen=True)
class TheoryResult:
    """What was measured."""

    path: Path
    """Directory of the results."""
    slopes: dict[Law, Slope]
    """The fitted slope of every law."""
    summary: list[str]
    """What held, in sentences."""


def measure_theory(cfg: TheoryConfig) -> TheoryResult:
    """Measures every term over all sweeps, printing their seconds, and writes page and tables."""
    torch.set_num_threads(1)
    out = cfg.out or dated_folder("theory")
    with Run.create(out, to_dict(cfg)) as run:
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
        write_csv(run.path / "theory.csv", point_rows(values, cfg))
        write_csv(run.path / "slopes.csv", slope_rows(slopes))
        pairs = sample_pairs(cfg, num_shown=NUM_SHOWN_PAIRS)
        with drawing(f"The page {PAGE_NAME}"):
            write_page(run.path / PAGE_NAME, page_of(cfg, values, slopes, pairs, summary=summary))
    return TheoryResult(run.path, slopes, summary)
