"""Compares adapters with their base model and prints the tables and some replies."""

from collections.abc import Sequence
from pathlib import Path

from firm.federation.outside import legible
from firm.jobs.compare import BASE, PAGE_NAME, CompareConfig, compare
from firm.jobs.finished_runs import parse_over_run
from firm.run import exit_on_user_error, print_table

NUM_PRINTED_SAMPLES = 2
"""Prompts whose replies the terminal shows; the files have `num_shown_samples`."""


def main(cfg: CompareConfig) -> Path:
    """Compares and prints; returns the directory of the results."""
    result = compare(cfg)
    for name, table in result.tables.items():
        print_table(
            f"\n{name} on {result.prompts}, {cfg.num_samples} replies each, mean ± standard error",
            ["", BASE, name, "change", "z"],
            [row.cells() for row in table],
        )
    for prompt, replies in result.samples[:NUM_PRINTED_SAMPLES]:
        print(legible(prompt.strip()))
        for name, reply in replies.items():
            print(legible(f"{name}: {reply.text.strip()}\n"))
    print(legible(f"page     {result.path / PAGE_NAME}\nfigures  {result.path / 'figures.csv'}"))
    return result.path


def cli(argv: Sequence[str] | None = None, *, description: str = "") -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    with exit_on_user_error():
        main(parse_over_run(CompareConfig, argv, key="runs", description=description))
