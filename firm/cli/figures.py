"""Writes the paper's figures from a study's runs."""

from functools import partial
from pathlib import Path

from firm.jobs.paper import FiguresConfig, write_figures
from firm.run import run_cli


def main(cfg: FiguresConfig) -> Path:
    """Writes figures, data and page, and prints the page's path."""
    page = write_figures(cfg)
    print(page)
    return page


cli = partial(run_cli, main, FiguresConfig)
