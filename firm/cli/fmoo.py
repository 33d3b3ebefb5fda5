"""Runs a study of classic algorithms and prints its table."""

import time
from functools import partial
from pathlib import Path

from firm.federation.outside import legible, printable
from firm.jobs import fmoo_page
from firm.jobs.fmoo import run_classic
from firm.jobs.fmoo_config import ClassicConfig
from firm.run import print_table, run_cli, study_to_resume
from firm.run.guard import drawing


def main(cfg: ClassicConfig) -> Path:
    """Runs what is not finished of the study, prints the table, and returns the directory."""
    start = time.perf_counter()
    result = run_classic(cfg)
    title = f"{cfg.split.capitalize()} samples at the end, mean over seeds"
    with drawing("The table"):
        print_table(title, *fmoo_page.summary(cfg, result.runs))
    for where, text in fmoo_page.alarms_of(cfg, result.runs):
        print(f"note: {printable(f'{where}: {text}', max_length=5_000)}")
    page = result.path / fmoo_page.PAGE_NAME
    print(legible(f"page     {page}\n{time.perf_counter() - start:.0f} s"))
    return result.path


cli = partial(
    run_cli,
    main,
    ClassicConfig,
    default_file="configs/fmoo/two_digits.yaml",
    resumed=study_to_resume,
)
