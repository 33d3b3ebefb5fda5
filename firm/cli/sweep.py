"""Runs a sweep over preferences and prints its fronts."""

from functools import partial
from pathlib import Path

from firm.cli import align
from firm.federation.outside import legible
from firm.fronts import Front
from firm.jobs.sweep import SweepConfig, sweep, sweep_configs
from firm.run import print_table, run_cli, study_to_resume


def main(cfg: SweepConfig) -> Path | None:
    """Runs what is not done yet; returns the folder, None after a plan or with points elsewhere."""
    if cfg.plan:
        return align.print_plans(sweep_configs(cfg, cfg.out or Path("runs")), "point")
    result = sweep(cfg)
    if result is None:
        return None
    for method, front in result.fronts.items():
        _print_front(method, front)
    print(legible(f"report   {result.report}"))
    return result.path


def _print_front(method: str, front: Front) -> None:
    rows = [
        [
            ", ".join(f"{share:.2f}" for share in point.preference or ()),
            str(point.seed),
            *(f"{point.rewards[n]:.3f} ± {point.errors[n]:.3f}" for n in front.objectives),
            *(f"{value:.3f}" for value in point.scores.values()),
            f"{point.kl:.2f}",
            point.collapse or "",
        ]
        for point in front.points
    ]
    header = ["preference", "seed", *front.objectives, *front.points[0].scores, "KL", "collapsed"]
    print_table(f"{method}: rewards in [0, 1] on {front.prompts()}", header, rows)


cli = partial(run_cli, main, SweepConfig, resumed=study_to_resume)
