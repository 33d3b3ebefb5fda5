"""Composes, executes and resumes several runs, the points of one folder."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firm.base.inside import replace_text
from firm.base.sanitize import by_reason, printable
from firm.jobs.alignment import FREE_KEYS as RUN_FREE_KEYS
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import with_recorded
from firm.jobs.configs import PointsConfig
from firm.report.page import untrained_notes
from firm.report.record import read_record
from firm.run.config import compose, to_dict, to_yaml
from firm.run.differences import differences
from firm.run.directory import Run, set_aside
from firm.run.errors import UserError
from firm.run.guard import drawing
from firm.run.resuming import STUDY_NAME, continued_later
from firm.run.sweep import Outcome, Sweep, summarise

FREE_KEYS = ("out", "resume", "num_workers", "plan")
"""Keys that may differ from the folder's saved configuration on resume."""


def point_config(
    cfg: PointsConfig,
    overrides: Mapping[str, Any],
    seed: int,
    *,
    setting: str,
    source: str,
    base: Path | None = None,
) -> AlignmentConfig:
    """Returns the validated configuration of a point's run.

    Args:
        cfg: Configuration common to all points.
        overrides: Keys of this point, which take precedence over `cfg`.
        seed: Seed of this point.
        setting: W&B name shared by all points that differ only in their seed.
        source: Source of the overrides, as named in error messages.
        base: Configuration file of this point's run; by default `cfg.base`.

    All points hold out the prompts that the first seed draws, and are calibrated with it.

    Raises:
        UserError: A key is invalid, or all runs would be pushed to one repository.
    """
    first, last = ("evaluation.calibration_seed", cfg.seeds[0]), ("seed", seed)
    own = [*cfg.overrides.items(), *overrides.items()]
    if "seed" in (given := dict(own)):
        raise UserError(
            f"{source}: the seeds of several runs are a list: pass --seeds {given['seed']}."
        )
    run = compose(AlignmentConfig, [base or cfg.base], [first, *own, last], source=source)
    if (run.data.hold_out or run.pairs) and run.data.hold_out_seed is None:
        run = replace(run, data=replace(run.data, hold_out_seed=cfg.seeds[0]))
    if run.hub.repo:
        raise UserError(
            f"{source}: hub.repo must be empty with several runs, since each would overwrite the "
            f"previous one, got {run.hub.repo!r}; push the chosen adapter afterwards."
        )
    return replace(run, tracking=run.tracking.of_setting(setting))


def run_points(
    cfg: PointsConfig,
    out: Path,
    points: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, AlignmentConfig],
    *,
    kind: str,
    own_keys: Mapping[str, Sequence[str]],
    show_finished: Callable[[Sweep, str], Any],
    free_keys: Collection[str] = (),
) -> Sweep | None:
    """Executes all unfinished runs and prints their outcomes.

    Args:
        cfg: Configuration common to all points; saved in the folder's manifest.
        out: The folder.
        points: Distinguishing settings of each point, by name; also saved in the manifest.
        runs: Configurations of the points' runs; runs that start from adapters of other points are
            executed last.
        kind: Name of such folders in messages.
        own_keys: Path of the keys of each point, by its name. On resuming they may change unless
            one of their points is finished; unfinished runs with other keys start again.
        show_finished: Called if some runs failed, or on interruption, but others are finished, with
            the folder and a sentence that names the others; writes the page of the finished runs.
        free_keys: Keys that may change on resuming, in addition to `FREE_KEYS`.

    Returns:
        The folder; None while other processes run some of the points.

    Raises:
        UserError: The folder is in use, or some runs failed; the message names them.
    """
    free = {*FREE_KEYS, *free_keys}
    settings = {key: value for key, value in to_dict(cfg).items() if key not in free}

    def change() -> None:
        for name, run in runs.items():
            _set_aside_changed(out, name, run)
        replace_text(out / STUDY_NAME, to_yaml(cfg))

    sweep = Sweep.open(
        out,
        settings,
        points,
        resume=cfg.resume,
        kind=kind,
        own_keys=own_keys,
        # the first seed draws what all points hold out
        lists={"seeds": 1, "preferences": 0, "resolution": 0},
        on_change=change,
    )
    if not (out / STUDY_NAME).exists():
        replace_text(out / STUDY_NAME, to_yaml(cfg))  # the manifest lacks the free keys
    waves: tuple[dict, dict] = {}, {}
    pending, outcomes = sweep.pending(), list[Outcome]()
    last = {
        name
        for name, run in runs.items()
        if any(Path(folder).is_relative_to(out / "points") for folder in run.start)
    }
    movable = {*pending, *last}
    for name, run in runs.items():  # before anything is moved
        if pending and name not in movable:
            _check_unchanged(out, name, run)
    for name, run in runs.items():
        if name in movable:  # its base file, or this folder's path, may have changed
            _set_aside_changed(out, name, run)
        waves[name in last][name] = to_dict(
            replace(run, tracking=run.tracking.within(tracking_group(cfg, sweep)))
        )
    work = f"{len(points)} runs, {len(pending)} unfinished, {cfg.num_workers} at a time"
    print(printable(f"{out}: {work}"), flush=True)

    def tell(name: str, line: str) -> None:
        print(printable(f"{name}: {line}", max_length=500), flush=True)

    def show() -> None:
        if sweep.pending() and set(sweep.pending()) < set(points):
            with drawing("The page of the finished runs"):
                show_finished(sweep, _unfinished_note(sweep, outcomes))

    for wave in waves:
        with continued_later(out):
            try:
                done = sweep.work(_run_point, wave, num_workers=cfg.num_workers, on_progress=tell)
                for outcome in done:
                    outcomes.append(outcome)
                    state = printable(outcome.problem or f"{outcome.seconds:.0f} s")
                    print(f"[{len(outcomes)}/{len(pending)}] {outcome.name}: {state}", flush=True)
                    if not outcome.problem:
                        for note in untrained_notes([read_record(sweep.run_path(outcome.name))]):
                            print(f"note: {printable(note)}", flush=True)
            except KeyboardInterrupt:
                show()
                raise
        if any(outcome.problem for outcome in outcomes):
            show()
        summarise(outcomes, out)
        if set(wave).intersection(sweep.pending()):
            break  # others train what the next ones start from
    if left := sweep.pending():
        again = shlex.join(["firm", "resume", str(out)])
        print(f"{len(left)} runs are executed by other processes; then run `{again}`")
        return None
    return sweep


def _unfinished_note(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """Returns a sentence that names the unfinished runs and, if they failed, the reasons."""
    problems = {each.name: printable(each.problem, max_length=500) for each in outcomes}
    reasons = [(name, problems.get(name, "it has not ended")) for name in sweep.pending()]
    return f"Runs that are not finished, and not shown: {'; '.join(by_reason(reasons))}"


def _set_aside_changed(out: Path, name: str, run: AlignmentConfig) -> None:
    """Moves an unfinished run that cannot continue with its new configuration.

    Raises:
        UserError: Another process is executing the run.
    """
    place = out / "points" / name
    if not (place / "config.yaml").exists() or Run(place).record().get("status") == "finished":
        return
    # more rounds at a constant rate are those of a run from the start; another guard is not
    is_longer = run.rounds >= Run(place).settings().get("rounds", run.rounds)
    is_extended = is_longer and run.estimator.learning_rate_schedule == "constant"
    if _changes(place, run, ("rounds",) if is_extended else ()):
        aside = set_aside(place, out / "replaced" / name)
        print(printable(f"{name} starts again; its unfinished run is now {aside}"), flush=True)


def _check_unchanged(out: Path, name: str, run: AlignmentConfig) -> None:
    """Refuses to run further points by other settings than a finished one had.

    Raises:
        UserError: The settings of the finished run differ; a file that they come from was edited.
    """
    if changes := _changes(out / "points" / name, run):
        raise UserError(
            f"{name} in {out} is finished with other settings: {', '.join(changes[:3])}. The runs "
            "that are left would not be comparable: restore the base file, or choose another --out."
        )


def _changes(place: Path, run: AlignmentConfig, free_keys: Sequence[str] = ()) -> list[str]:
    """Returns the differences of a run's settings from those that it is to have now."""
    asked = to_dict(with_recorded(replace(run, out=place, resume="auto")))
    return differences(Run(place).settings(), asked, (*RUN_FREE_KEYS, *free_keys))


def tracking_group(cfg: PointsConfig, sweep: Sweep) -> str:
    """Returns the W&B group of a folder's runs."""
    return f"{cfg.name}-{sweep.id}"


def _run_point(place: str, settings: dict[str, Any]) -> None:
    """Runs or resumes one point in this process."""
    overrides = [*settings.items(), ("out", place), ("resume", "auto")]
    align(compose(AlignmentConfig, [], overrides, source="the manifest"))
