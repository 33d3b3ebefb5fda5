"""Runs of configs/smoke.yaml, the smallest that are whole."""

import contextlib
from pathlib import Path

from firm.cli.align import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import parse

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "configs/smoke.yaml"
FRONT = (
    *("--estimator.name", "critic_free", "--estimator.num_replies", 2),
    *("--policy.conditioning.kind", "preference", "--strategy.name", "fedavg"),
)
"""Options of a run whose policy is conditioned on the preference."""


def config(*arguments: object) -> AlignmentConfig:
    """Returns the smoke configuration with the command line's changes."""
    return parse(AlignmentConfig, ["--config", str(SMOKE), *map(str, arguments)])


def run(*arguments: object) -> Path:
    """Runs it in the project, from where it finds the shipped checkpoints; returns the folder."""
    with contextlib.chdir(ROOT):
        folder = main(config(*arguments))
    assert folder is not None
    return folder
