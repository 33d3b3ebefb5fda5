"""Prints which model answers a wish, what it should earn, and how to talk to it."""

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from firm.fronts import expected_rewards, nearest, neighbours
from firm.jobs.serve_point import (
    ServeConfig,
    check_there,
    commands,
    how_known,
    in_words,
    load_front,
    model_card,
    parse_want,
    reward_rows,
    write_merged,
)
from firm.run import print_table, run_cli


def main(cfg: ServeConfig) -> Path:
    """Says which model answers the wish; returns the adapter's folder."""
    front = load_front(cfg.front)
    want = parse_want(cfg.want, front.objectives)
    chosen = neighbours(front, want) if cfg.merge else [(nearest(front, want), 1.0)]
    folders = [cfg.front.parent / point.adapter for point, _ in chosen]
    for (point, _), folder in zip(chosen, folders, strict=True):
        check_there(point, folder, cfg.front.parent)
    expected = expected_rewards(chosen)
    adapter = folders[0]
    if cfg.merge:
        adapter = cfg.out or Path("runs") / f"merged-{datetime.now():%Y%m%d-%H%M%S}"
        card = model_card(front, want, chosen, expected, folders)
        write_merged(adapter, folders, [share for _, share in chosen], card)

    print(f"wanted    {in_words(front, want)}")
    for point, share in chosen:
        part = f", share {share:.3f}" if cfg.merge else ""
        print(f"model     {point.name}, trained for {in_words(front, point.preference)}{part}")
    print_table(
        "\nReward in [0, 1], mean ± standard error over prompts",
        ["", "base", "expected"],
        reward_rows(front, expected),
    )
    print(how_known(front, want, chosen))
    print(f"adapter   {adapter}")
    for what, command in commands(folders, adapter if cfg.merge else None).items():
        print(f"{what:<10}{shlex.join(command)}")
    return adapter


def cli(argv: Sequence[str] | None = None, *, description: str = "") -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    run_cli(main, ServeConfig, argv, description=description)
