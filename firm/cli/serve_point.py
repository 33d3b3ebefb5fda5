"""Prints which model answers a wish, what it should earn, and how to talk to it."""

import shlex
from functools import partial
from pathlib import Path

from firm.jobs.serve_point import ServeConfig, serve_point
from firm.run import print_table, run_cli


def main(cfg: ServeConfig) -> Path:
    """Prints which model answers the wish; returns the adapter's folder."""
    served = serve_point(cfg)
    print(f"wanted    {served.in_words(served.want)}")
    if served.front.is_conditioned:
        print(f"reached   at the preference {served.in_words(served.preference)}")
    for point, share in served.parts:
        part = f", share {share:.3f}" if cfg.merge else ""
        preference = served.in_words(point.preference)
        print(f"model     {point.name}, {served.made} {preference}{part}")
    print_table(
        "\nReward in [0, 1], mean ± standard error over prompts",
        ["", "base", "expected"],
        served.reward_rows,
    )
    print(served.evidence)
    print(f"adapter   {served.adapter}")
    for what, command in served.commands().items():
        print(f"{what:<10}{shlex.join(command)}")
    return served.adapter


cli = partial(run_cli, main, ServeConfig)
