"""Seconds of a round beside the estimate of `firm plan`.

    python benchmarks/plan_time.py
    python benchmarks/plan_time.py --configs miniature smollm2_front

Shipped configurations, with their models, on this machine's default device and one CPU thread. Two
rounds are trained, and the second is measured. The estimate is for prompts and replies of maximum
length, which real ones fall short of.
"""

import argparse
import tempfile
from collections.abc import Sequence

import datasets

from benchmarks.measure import quiet
from firm.federation import Processes
from firm.jobs.alignment import main as align
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan import make_plan
from firm.run import Run, compose, print_table
from firm.run.shipped import with_shipped_paths

CONFIGS = ("miniature", "miniature_critic_free", "smollm2_front")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    options = parser.parse_args(arguments)
    quiet()
    datasets.disable_progress_bars()
    rows = []
    for name in options.configs:
        planned, measured = seconds_of_a_round(name)
        rows.append([name, f"{measured:.1f}", f"{planned:.1f}", f"{measured / planned:.2f}"])
    header = ["configuration", "measured", "planned", "measured / planned"]
    print_table("Seconds of a round", header, rows)


def seconds_of_a_round(name: str) -> tuple[float, float]:
    """Returns the planned and the measured seconds of a round of a shipped configuration."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "rounds": 2,
            "num_threads": 1,
            "evaluation.num_validation_prompts": 0,
            "evaluation.num_test_prompts": 4,
            "evaluation.num_calibration_prompts": 4,
            "evaluation.num_shown_samples": 0,
            "evaluation.front_every": None,
            "checkpoints.keep_best": False,
            "out": f"{folder}/run",
        }
        cfg = compose(AlignmentConfig, [name], list(settings.items()))
        plan = make_plan(with_shipped_paths(cfg), client_names(cfg), Processes())
        assert plan.seconds is not None, plan.notes
        align(cfg)
        rounds = [row["seconds"] for row in Run(f"{folder}/run").rows() if row["kind"] == "round"]
    return plan.seconds.round, rounds[-1]


if __name__ == "__main__":
    main()
