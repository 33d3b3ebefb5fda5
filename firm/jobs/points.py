"""Composes, executes and resumes several runs, the points of one folder."""

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from firm.federation.outside import check_name, printable
from firm.fields import NumWorkers, Seed, configuration
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.run.config import compose, to_dict, to_yaml
from firm.run.errors import UserError
from firm.run.files import replace_text
from firm.run.resuming import STUDY_NAME, Resume, check_out, continued_by
from firm.run.sweep import Outcome, Sweep, summarise

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
    """Returns the run of a point; checked, so that invalid keys are reported before anything runs.

    Args:
        cfg: Configuration common to all points.
        overrides: Keys of this point, which override those of `cfg`.
        seed: Seed of this point.
        setting: W&B name shared by the points that differ from this one only in their seed.
        source: Source of the overrides, as named in error messages.
        base: Configuration file of this point's run; `cfg.base` by default.

    Raises:
        UserError: A key is invalid, or all runs would be pushed to one repository.
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
    """Executes all unfinished runs, and prints the outcome of each.

    Args:
        cfg: Configuration common to all points; saved in the folder's manifest.
        out: The folder.
        points: Distinguishing settings of each point, by name; also saved in the manifest.
        runs: Configurations of the points' runs, those that start from other points' adapters last.
        command: Subcommand of `firm` that resumes the folder.
        free_keys: Keys that may change on resuming, in addition to `FREE_KEYS`.

    Returns:
        The folder; None while other processes run some of the points.

    Raises:
        UserError: The folder is in use, or some runs failed; the message names them.
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
    """Returns the W&B group of a folder's runs."""
    return f"{cfg.name}-{sweep.id}"


def _run_point(place: str, settings: dict[str, Any]) -> None:
    """Runs or resumes one point in this process."""
    overrides = [*settings.items(), ("out", place), ("resume", "auto")]
    align(compose(AlignmentConfig, [], overrides, source="the manifest"))
