"""Asks for model, data and reward models, and writes a configuration."""

import shlex
import sys
from functools import partial

from firm.jobs.init import InitConfig, init
from firm.run import run_cli


def main(cfg: InitConfig) -> None:
    """Writes what `cfg` says, and prints how to go on."""
    written = init(cfg, input if sys.stdin.isatty() else None)
    objectives = " and ".join(written.config.rewards)
    print(f"{written.path}: {written.config.policy.path} is aligned to {objectives}")
    file = shlex.quote(str(written.path))
    print(f"what would run  firm plan --config {file}")
    print(f"run it          firm align --config {file}")


cli = partial(run_cli, main, InitConfig)
