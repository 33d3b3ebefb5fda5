"""Sweeps preferences to find the trade-offs that each method can reach."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from firm.base.preferences import NamedShares, grid, in_order, in_words, preference_folder
from firm.base.sanitize import legible
from firm.federation.strategies import StrategyConfig
from firm.fronts.front import Front, seed_hypervolumes
from firm.fronts.hypervolume import PackageMissing
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import SweepConfig
from firm.jobs.plan.tables import print_plans
from firm.jobs.points import point_config, run_points, tracking_group
from firm.jobs.workspace import show_layout
from firm.report.front_page import front_figure, write_front_page
from firm.report.page import PAGE_NAME
from firm.report.record import final_row, is_base, read_record
from firm.report.run_front import SCORES_NAME, num_scored, point_of, values_by_prompt
from firm.report.static import save_figure
from firm.run.config import compose, to_dict, to_yaml
from firm.run.errors import UserError
from firm.run.guard import drawing
from firm.run.names import dated_folder, slug
from firm.run.progress import print_table
from firm.run.sweep import Sweep
from firm.run.tracking import open_tracker

MERGES = {"soup": "mean", "ties": "ties", "dare_linear": "dare_linear", "dare_ties": "dare_ties"}
"""Ways to merge the adapters of single objectives, by a method's kind."""
MEASURED = {
    "reward in [0, 1]": "rewards in [0, 1] on",
    "reward": "rewards on",
    "accuracy on pairs": "accuracies on held-out pairs of replies to",
}
"""Words before the number of prompts, by `Front.measure`."""


@dataclass(frozen=True)
class PointConfig:
    """Identifies a point of a sweep; stored as plain data in the manifest."""

    method: str
    preference: tuple[float, ...]
    seed: int

    @property
    def setting(self) -> str:
        """Returns the name shared by all seeds: method, preference in percent."""
        return f"{self.method} {preference_folder(self.preference)}"

    @property
    def name(self) -> str:
        """Returns the folder name: method, preference in percent, seed."""
        return f"{slug(self.method)}-{preference_folder(self.preference)}-seed_{self.seed}"


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep."""

    path: Path
    """The sweep's folder."""
    fronts: dict[str, Front]
    """Front of every method, by name."""
    report: Path
    """HTML page of the sweep."""


def sweep_configs(cfg: SweepConfig, out: Path) -> dict[str, AlignmentConfig]:
    """Returns the validated configurations of all points, by name."""
    objectives = _base(cfg).objectives
    points = _points(_with_order(cfg, objectives), objectives)
    return {name: _run_config(cfg, point, out, objectives) for name, point in points.items()}


def sweep(cfg: SweepConfig) -> SweepResult | None:
    """Runs the unfinished points of a sweep, and writes its fronts, page and figure.

    Returns:
        The result; None while other processes run some of the points.

    Raises:
        UserError: A key is invalid, the folder is in use, some points failed, or a model does not
            exceed the reference point.
    """
    out, base = cfg.out or dated_folder(cfg.name), _base(cfg)
    objectives = base.objectives
    cfg = _with_order(cfg, objectives)
    points = {name: vars(point) for name, point in _points(cfg, objectives).items()}
    runs = sweep_configs(cfg, out)
    folder = run_points(
        cfg,
        out,
        points,
        runs,
        kind="sweep",
        own_keys={name: ("methods", point["method"]) for name, point in points.items()},
        show_finished=partial(_show_finished, cfg, objectives),
        free_keys=["reference"],
    )
    if folder is None:
        return None
    fronts, page = _write_results(cfg, folder, objectives, cfg.methods)
    tracking = base.tracking.within(tracking_group(cfg, folder))
    with open_tracker(
        tracking, out, folder.manifest["config"], objectives=objectives, job_type="front"
    ) as tracker:
        tracker.log_points("front", _rows(fronts), summary=_hypervolumes(fronts))
    show_layout(out)
    return SweepResult(out, fronts, page)


def _write_results(
    cfg: SweepConfig,
    folder: Sweep,
    objectives: tuple[str, ...],
    methods: Iterable[str],
    notes: Sequence[str] = (),
) -> tuple[dict[str, Front], Path]:
    """Writes the methods' fronts of finished runs, their page and their publication figure."""
    fronts = {
        method: replace(
            front_of(folder, method, objectives, cfg.reference),
            is_conditioned=cfg.methods[method].kind == "front",
        )
        for method in methods
    }
    _check_reference(fronts)
    for method, front in fronts.items():
        front.save(folder.path / f"{slug(method)}.front.json")
    page = write_front_page(
        folder.path / PAGE_NAME,
        fronts,
        runs={
            method: {p.name: read_record(folder.run_path(p.name)) for p in front.points}
            for method, front in fronts.items()
        },
        row_rewards={method: row_rewards(folder, front) for method, front in fronts.items()},
        config=to_yaml(cfg),
        title=cfg.name,
        notes=notes,
    )
    with drawing("The figure front"):
        save_figure(front_figure(fronts), folder.path / "figures" / "front")
    return fronts, page


def _show_finished(cfg: SweepConfig, objectives: tuple[str, ...], folder: Sweep, note: str) -> None:
    """Writes the results of the methods that have finished runs, and prints the page's path."""
    pending, points = folder.pending(), folder.manifest["points"]
    begun = Counter(point["method"] for name, point in points.items() if name not in pending)
    methods = [method for method in cfg.methods if begun[method] > 1]  # a single model is no front
    if not methods:
        return
    _, page = _write_results(cfg, folder, objectives, methods, [note])
    print(legible(f"report   {page}"))


def _base(cfg: SweepConfig) -> AlignmentConfig:
    """Returns the base configuration of all points."""
    return compose(AlignmentConfig, [cfg.base], list(cfg.overrides.items()), source="overrides")


def front_of(
    sweep: Sweep, method: str, objectives: tuple[str, ...], reference: list[float] | None
) -> Front:
    """Returns the front of a method over its finished points.

    Excludes points without a valid final evaluation in the log, with a warning.
    """
    points, records, validation, values = [], [], {}, {}
    for name, point in sweep.manifest["points"].items():
        if point["method"] != method or not sweep.is_done(name):
            continue
        path = sweep.run_path(name)
        record = read_record(path)
        if record.objectives != objectives:
            raise UserError(
                f"{path} has the objectives {', '.join(record.objectives)}, the sweep "
                f"{', '.join(objectives)}; run this point again."
            )
        with drawing(f"The point {name}"):
            base, final = record.evaluations["test"][0], record.evaluations["test"][-1]
            points.append(
                point_of(
                    name,
                    base,
                    final,
                    record.objectives,
                    preference=tuple(point["preference"]),
                    seed=point["seed"],
                    adapter=str((path / "adapter").relative_to(path.parent.parent)),
                )
            )
            records.append(record)
            if own := values_by_prompt(path / SCORES_NAME, objectives):
                values[name] = own
            row = final_row(record, "validation")
            if row and row["round"] == final["round"] and not is_base(row):
                means = {n: row["rewards"][n]["mean"] for n in record.objectives}
                validation[name] = means
    if not records:
        raise UserError(f"{method} has no run with a valid final evaluation; run its points again.")
    header, first = records[0].header, records[0].evaluations["test"]
    return Front(
        objectives=objectives,
        points=tuple(points),
        reference=tuple(reference or [0.0] * len(objectives)),
        calibrations={
            name: header["calibration"].get(name, {"method": "pairs"}) for name in objectives
        },
        base={name: first[0]["rewards"][name]["mean"] for name in objectives},
        strategy=method,
        num_prompts=first[0]["num_prompts"],
        num_scored=num_scored(first[0], objectives),
        validation=validation,
        test_values=values,
    )


def row_rewards(sweep: Sweep, front: Front) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rewards of a front's points on each row of the test data, and the rows' prompts.

    Rewards have shape [N, R, M], with NaN for missing ones; prompts are numbers, shape [R].
    """
    files = [sweep.run_path(point.name) / SCORES_NAME for point in front.points]
    tables = [load_file(file) for file in files]
    rewards = [np.stack([t[f"rewards/{n}"] for n in front.objectives], axis=1) for t in tables]
    return np.stack(rewards), tables[0]["prompt"]


def _with_order(cfg: SweepConfig, objectives: tuple[str, ...]) -> SweepConfig:
    """Returns a sweep with preferences and reference point in the order of the objectives."""
    names, reference = ", ".join(objectives), cfg.reference
    try:
        preferences = in_order(cfg.preferences, objectives, "preferences")
    except ValueError as error:
        raise UserError(str(error)) from error
    if isinstance(reference, NamedShares) and set(reference.names) == set(objectives):
        reference = [reference.by_name()[name] for name in objectives]
    if reference is not None and (
        isinstance(reference, NamedShares) or len(reference) != len(objectives)
    ):
        got = to_dict(reference)
        raise UserError(f"reference must have a value for each of {names}, got {got}.")
    return replace(cfg, preferences=preferences, reference=reference)


def _points(cfg: SweepConfig, objectives: tuple[str, ...]) -> dict[str, PointConfig]:
    """Returns all points by folder name."""
    names = ", ".join(objectives)
    preferences = [tuple(p) for p in cfg.preferences] or grid(cfg.resolution or 4, len(objectives))
    for preference in preferences:
        if len(preference) != len(objectives):
            raise UserError(
                f"preferences must have an entry for each of {names}, got {list(preference)}."
            )
        if min(preference) < 0 or not 0 < sum(preference) < float("inf"):
            raise UserError(
                "preferences must be finite, non-negative and not all zero, got "
                f"{list(preference)}."
            )
    if len(preferences) < 2:
        raise UserError(f"preferences must have at least two vectors, got {cfg.preferences}.")
    scaled = [tuple(share / sum(p) for share in p) for p in preferences]
    if len(set(scaled)) < len(scaled):
        raise UserError(f"preferences must differ, got {cfg.preferences}.")
    corners = grid(1, len(objectives))
    points = []
    for method, config in cfg.methods.items():
        trained = {**dict.fromkeys(MERGES, corners), "front": [_equal_shares(objectives)]}
        trained = trained.get(config.kind, [])
        needed = [preference for preference in trained if preference not in scaled]
        points += [
            PointConfig(method, preference, seed)
            for seed, preference in product(cfg.seeds, [*needed, *scaled])
        ]
    by_name = {point.name: point for point in points}
    if len(by_name) < len(points):
        raise UserError(
            "preferences must differ in the first four digits of their percentages, which name the "
            f"points' folders, got {cfg.preferences}."
        )
    return by_name


def _run_config(
    cfg: SweepConfig, point: PointConfig, out: Path, objectives: tuple[str, ...]
) -> AlignmentConfig:
    """Returns the validated configuration of a point's run."""
    method, source = cfg.methods[point.method], f"methods.{point.method}.overrides"
    overrides = dict(method.overrides)
    if method.kind in MERGES and max(point.preference) < 1:
        corners = [PointConfig(point.method, c, point.seed) for c in grid(1, len(objectives))]
        overrides["start"] = {
            str(out / "points" / corner.name / "adapter"): share
            for corner, share in zip(corners, point.preference, strict=True)
        }
        overrides["start_merge"] = MERGES[method.kind]
        overrides |= {"rounds": 0, "policy.lora.freeze_a": False}  # nothing is trained
    if method.kind == "front":
        trained = PointConfig(point.method, _equal_shares(objectives), point.seed)
        if point.name == trained.name:  # the sweep runs its preferences as separate points
            overrides["policy.conditioning.kind"] = "preference"
            overrides |= {"evaluation.preferences": [], "evaluation.num_refined": 0}
        else:
            overrides["policy.conditioning.kind"] = "none"  # its adapter is folded
            overrides |= {"evaluation.preferences": None, "evaluation.num_refined": 0}
            groups = {**to_dict(_base(cfg))["groups"], **(overrides.get("groups") or {})}
            overrides["groups"] = {n: {**own, "preferences": None} for n, own in groups.items()}
            overrides["policy.lora.freeze_a"] = False  # nothing is trained
            overrides["start"] = {str(out / "points" / trained.name / "adapter"): 1.0}
            overrides["start_preference"] = list(point.preference)
            overrides["rounds"] = 0
    build = partial(point_config, cfg, seed=point.seed, setting=point.setting, source=source)
    run = build(overrides)  # only a complete configuration knows its strategy's preference key
    if run.strategy.preference_key is None:
        kinds = [kind for kind in StrategyConfig.forms() if not kind.reads_losses]
        names = ", ".join(kind.name for kind in kinds if kind.preference_key is not None)
        raise UserError(
            f"methods.{point.method}: strategy {run.strategy.name} does not support preferences; "
            f"choose from {names}."
        )
    if run.policy.conditioning.kind == "none":  # otherwise each prompt has its own preference
        overrides[f"strategy.{run.strategy.preference_key}"] = list(point.preference)
    elif method.kind != "front":
        raise UserError(
            f"methods.{point.method}: kind {method.kind} trains a run for each preference, but "
            "policy.conditioning.kind is preference, which trains all of them at once; set it to "
            "none, or choose kind front."
        )
    return build(overrides)


def _equal_shares(objectives: tuple[str, ...]) -> tuple[float, ...]:
    """Returns equal shares, the preference of the point that trains a conditioned policy."""
    return tuple(1 / len(objectives) for _ in objectives)


def _check_reference(fronts: Mapping[str, Front]) -> None:
    """Raises `UserError` if a model does not exceed the reference point, before any output."""
    for method, front in fronts.items():
        try:
            _ = front.hypervolume
        except PackageMissing:  # the page says so
            continue
        except ValueError as error:
            raise UserError(
                f"{method}: {error} The runs are kept: lower --reference or remove the cause, and "
                "continue with `firm resume`."
            ) from error


def _rows(fronts: Mapping[str, Front]) -> list[dict[str, Any]]:
    """Returns a table row for each point of each method."""
    return [
        {
            "method": method,
            "preference": in_words(front.objectives, point.preference or ()),
            "seed": point.seed,
            **point.scores,
            **{f"{name} se": point.errors[name] for name in point.rewards},
            **point.rewards,
            "KL": point.kl if math.isfinite(point.kl) else None,
            "adapter": point.adapter,
            "collapse": point.collapse or "",
        }
        for method, front in fronts.items()
        for point in front.points
    ]


def _hypervolumes(fronts: Mapping[str, Front]) -> dict[str, float]:
    """Returns each method's mean hypervolume over seeds, if defined."""
    means = {}
    for method, front in fronts.items():
        with suppress(ValueError):  # a single point, or one that does not exceed the reference
            means[f"hypervolume/{method}"] = seed_hypervolumes(front).mean
    return means


def main(cfg: SweepConfig) -> Path | None:
    """Runs or plans a sweep; returns its folder, or None after a plan or with points elsewhere."""
    if cfg.plan:
        return print_plans(sweep_configs(cfg, cfg.out or Path("runs")), "point")
    result = sweep(cfg)
    if result is None:
        return None
    for method, front in result.fronts.items():
        _print_front(method, front, MEASURED[front.measure])
    print(legible(f"report   {result.report}"))
    return result.path


def _print_front(method: str, front: Front, measured: str) -> None:
    has_kl = any(math.isfinite(point.kl) for point in front.points)
    rows = [
        [
            in_words(front.objectives, point.preference or ()),
            str(point.seed),
            *(f"{point.rewards[n]:.3f} ± {point.errors[n]:.3f}" for n in front.objectives),
            *(f"{value:.3f}" for value in point.scores.values()),
            *([f"{point.kl:.2f}", point.collapse or ""] if has_kl else []),
        ]
        for point in front.points
    ]
    header = ["preference", "seed", *front.objectives, *front.points[0].scores]
    header += ["KL", "collapsed"] if has_kl else []
    print_table(f"{method}: {measured} {front.prompts()}", header, rows)
