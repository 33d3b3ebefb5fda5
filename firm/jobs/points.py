"""Runs of several settings, each a point of one folder: composed, run, and taken up again."""

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from firm.federation.outside import check_name, printable
from firm.fields import NumWorkers, Seed, configuration
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import Outcome, Resume, Sweep, UserError, compose, summarise, to_dict, to_yaml
from firm.run.files import replace_text
from firm.run.resuming import STUDY_NAME, check_out, continued_by

FREE_KEYS = ("out", "resume", "num_workers", "plan")
"""What may differ from the folder's own configuration when it is resumed."""


@configuration
class PointsConfig:
    """Runs below one folder, of one base and several seeds."""

    name: str = "points"
    """Opens the folder's name."""
    out: Path | None = None
    """The folder; by default runs/NAME-TIME."""
    resume: Resume = False
    """Continue what is not finished: `--resume FOLDER` by that folder's own configuration;
    `--out FOLDER --resume` by the one that is given; auto begins where there is nothing yet; Python
    files that only the folder names need `--allow_code`, as it may be somebody else's."""
    plan: bool = False
    """Print the runs and what the first of them would do, and stop."""
    base: Path = Path("configs/miniature.yaml")
    """Configuration of the runs."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of all runs and their values, such as {rounds: 8}, laid over the base."""
    seeds: list[Seed] = field(default_factory=lambda: [0])
    """Seeds of the runs. Rewards mean the same in all runs of a base: the first seed calibrates
    them."""
    num_workers: NumWorkers = 1
    """Runs at a time, each in a process of its own."""

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        check_out(self.resume, self.out)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more different numbers, got {self.seeds}.")


def point_config(
    cfg: PointsConfig,
    overrides: Mapping[str, Any],
    seed: int,
    *,
    setting: str,
    source: str,
    base: Path | None = None,
) -> AlignmentConfig:
    """Returns the run of a point; checked, so that a wrong key is reported before anything runs.

    Args:
        cfg: What all points have in common.
        overrides: The point's own keys, over those of all.
        seed: The point's.
        setting: What W&B calls the points that differ from it by their seed alone.
        source: What messages call the place that the overrides come from.
        base: Configuration of the run in place of that of all.

    Raises:
        UserError: A key is wrong, or all runs would be pushed to one repository.
    """
    keys = {"evaluation.calibration_seed": cfg.seeds[0], **cfg.overrides, **overrides, "seed": seed}
    run = compose(AlignmentConfig, [base or cfg.base], list(keys.items()), source=source)
    if run.hub.repo:
        raise UserError(
            f"{source}: hub.repo must be empty where there are several runs, of which each would "
            f"replace the one before it, got {run.hub.repo!r}; push the one that you choose."
        )
    return replace(run, tracking=run.tracking.of_setting(setting))


def run_points(
    cfg: PointsConfig,
    out: Path,
    points: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, AlignmentConfig],
    *,
    command: str,
    free_keys: Collection[str] = (),
) -> Sweep | None:
    """Runs what is not done yet, and prints how each run ends.

    Args:
        cfg: What all points have in common; kept in the folder's manifest.
        out: The folder.
        points: What tells each point from the others, by its name; kept in the manifest, too.
        runs: The points' runs. Those that start from adapters of other points come last.
        command: The word after `firm` that continues the folder.
        free_keys: Keys beside `FREE_KEYS` that may differ when the folder is taken up.

    Returns:
        The folder; None while other processes are at some of the points.

    Raises:
        UserError: The folder is taken, or some runs failed; names them.
    """
    free = {*FREE_KEYS, *free_keys}
    settings = {key: value for key, value in to_dict(cfg).items() if key not in free}
    sweep = Sweep.open(out, settings, points, resume=cfg.resume)
    if not (out / STUDY_NAME).exists():
        replace_text(out / STUDY_NAME, to_yaml(cfg))  # the manifest lacks the free keys
    waves: tuple[dict, dict] = {}, {}
    for name, run in runs.items():
        is_last = any(Path(folder).is_relative_to(out / "points") for folder in run.start)
        waves[is_last][name] = to_dict(
            replace(run, tracking=run.tracking.within(tracking_group(cfg, sweep)))
        )
    pending, outcomes = sweep.pending(), list[Outcome]()
    work = f"{len(points)} runs, {len(pending)} to do, {cfg.num_workers} at a time"
    print(printable(f"{out}: {work}"), flush=True)
    for wave in waves:
        with continued_by(command, out):
            for outcome in sweep.work(_run_point, wave, num_workers=cfg.num_workers):
                outcomes.append(outcome)
                state = printable(outcome.problem or f"{outcome.seconds:.0f} s")
                print(f"[{len(outcomes)}/{len(pending)}] {outcome.name}: {state}", flush=True)
        summarise(outcomes)
    if left := sweep.pending():
        print(f"{len(left)} runs are with other processes; call again with --resume when they end")
        return None
    return sweep


def tracking_group(cfg: PointsConfig, sweep: Sweep) -> str:
    """Returns what W&B puts the runs of a folder together with."""
    return f"{cfg.name}-{sweep.id}"


def _run_point(place: str, settings: dict[str, Any]) -> None:
    """Runs one point in this process, or takes it up."""
    overrides = [*settings.items(), ("out", place), ("resume", "auto")]
    align(compose(AlignmentConfig, [], overrides, source="the manifest"))
