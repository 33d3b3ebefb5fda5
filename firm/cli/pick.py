"""Prints which model answers a wish, what it should earn, and how to talk to it."""

import shlex
from functools import partial
from pathlib import Path

from firm.federation.outside import legible
from firm.jobs.pick import PickConfig, pick
from firm.run import print_table, run_cli


def main(cfg: PickConfig) -> Path:
    """Prints which model answers the wish; returns the adapter's folder."""
    picked = pick(cfg)
    print(f"wanted    {picked.in_words(picked.want)}")
    if picked.front.is_conditioned:
        print(f"reached   at the preference {picked.in_words(picked.preference)}")
    for point, share in picked.parts:
        part = f", share {share:.3f}" if cfg.merge else ""
        preference = picked.in_words(point.preference)
        print(f"model     {point.name}, {picked.made} {preference}{part}")
    print_table(
        "\nReward in [0, 1], mean ± standard error over prompts",
        ["", "base", "expected"],
        picked.reward_rows,
    )
    print(picked.evidence)
    print(legible(f"adapter   {picked.adapter}"))
    for what, command in picked.commands().items():
        print(legible(f"{what:<10}{shlex.join(command)}"))
    return picked.adapter


cli = partial(run_cli, main, PickConfig)
