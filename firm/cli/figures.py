"""Writes the paper's figures from a study's runs."""

from collections.abc import Sequence
from pathlib import Path

from firm.jobs.paper import FiguresConfig, write_figures
from firm.run import run_cli


def main(cfg: FiguresConfig) -> Path:
    """Writes figures, data and page, and prints the page's path."""
    page = write_figures(cfg)
    print(page)
    return page


def cli(argv: Sequence[str] | None = None, *, description: str = "") -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    run_cli(main, FiguresConfig, argv, description=description)
