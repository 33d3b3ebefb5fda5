"""The record of a front: models with their rewards, and checks that two fronts are comparable."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np

from firm.base.quantities import SHARES
from firm.fronts.hypervolume import as_reference, hypervolume
from firm.fronts.json_record import read_record, write_record
from firm.solvers.checks import as_shares

MAX_POINTS = 10_000
"""Largest number of points, which are compared with each other."""
KL = "kl"
"""Name of the KL from the base model in requirements and errors."""
_FORMAT = 1

Values = dict[str, dict[str, tuple[float, ...]]]
"""Values by prompt, by point name and quantity; NaN for prompts to which a quantity does not apply.
All points have the same prompts, in the same order."""
SAME_FIGURE = 1e-6
"""Relative tolerance within which a parameter of two calibrations counts as equal."""


@dataclass(frozen=True)
class Point:
    """One model of a front."""

    name: str
    """Unique within the front."""
    preference: tuple[float, ...] | None
    """Preference it was trained for, non-negative, in the order of the objectives; None without
    one."""
    seed: int
    """Points of a seed start from the same adapter and can therefore be merged."""
    rewards: dict[str, float]
    """Mean calibrated reward on the test prompts, by objective."""
    errors: dict[str, float]
    """Standard errors over the prompts, of the rewards and, if known, of `scores` and `kl`."""
    scores: dict[str, float]
    """Further mean scores, such as the ground truth; not part of the hypervolume."""
    kl: float
    """Mean KL from the base model per reply, in nats; NaN if it was not finite."""
    adapter: str
    """Folder of the adapter, relative to the front's file, with forward slashes."""
    collapse: str | None = None
    """Why the model counts as collapsed; None if it does not."""


@dataclass(frozen=True)
class Front:
    """Models trained by one strategy for several preferences and seeds.

    Raises:
        ValueError: When names, objectives or sizes are inconsistent, a preference is invalid, or a
            value is not finite.
    """

    objectives: tuple[str, ...]
    """M names; preferences, the reference point and arrays [N, M] follow their order."""
    points: tuple[Point, ...]
    reference: tuple[float, ...]
    """Reference point of the hypervolume, [M]."""
    calibrations: dict[str, dict[str, Any]]
    """Calibration from scores to rewards, by objective, as frozen by `firm.alignment`."""
    base: dict[str, float]
    """Mean rewards of the base model, by objective."""
    strategy: str
    """Strategy that trained the models."""
    num_prompts: int
    """Number of test prompts that the rewards are means over."""
    is_conditioned: bool = False
    """True if the points of a seed are one conditioned adapter at several preferences, so that the
    mean of two of them is that adapter at the preference in between."""
    num_scored: dict[str, int] = field(default_factory=dict)
    """Number of test prompts by objective, for objectives that do not apply to all prompts."""
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean calibrated rewards on the validation prompts, by point name and objective. Selecting
    points by them keeps the rewards on the test prompts free of selection bias."""
    test_values: Values = field(default_factory=dict)
    """The test prompts' own values of rewards, scores and KL, by point name."""
    validation_values: Values = field(default_factory=dict)
    """The same of the validation prompts."""

    def __post_init__(self) -> None:
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ValueError(
                f"objectives must be distinct names, at least one, got {list(self.objectives)}."
            )
        for name in (*self.objectives, self.strategy):
            _check_shown("an objective or strategy", name)
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be positive, got {self.num_prompts}.")
        as_reference(self.reference, len(self.objectives))
        self._check_names("the calibrations", self.calibrations)
        self._check_figures("the base model", self.base)
        if len(self.points) > MAX_POINTS:
            raise ValueError(f"points must be at most {MAX_POINTS:,}, got {len(self.points):,}.")
        names = Counter(point.name for point in self.points)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(
                f"names of points must be unique, got {repeated[0]!r} {names[repeated[0]]} times."
            )
        for point in self.points:
            self._check_point(point)
        for name, rewards in self.validation.items():
            self._check_figures(f"the validation rewards of {name!r}", rewards)
        for split, values in (("test", self.test_values), ("validation", self.validation_values)):
            sizes = {len(row) for own in values.values() for row in own.values()}
            if len(sizes) > 1:
                raise ValueError(
                    f"the {split} values must have one number for each prompt, got "
                    f"{', '.join(map(str, sorted(sizes)))} numbers."
                )

    def _check_point(self, point: Point) -> None:
        for what, text in (
            ("a point's name", point.name),
            ("an adapter's folder", point.adapter),
            ("a collapse's reason", point.collapse or "-"),
        ):
            _check_shown(what, text)
        self._check_figures(f"the rewards of {point.name!r}", point.rewards)
        others = {KL, *point.scores} - set(self.objectives)
        errors = {name: error for name, error in point.errors.items() if name not in others}
        self._check_figures(f"the errors of {point.name!r}", errors)
        if point.preference is not None:
            self._shares(point)
        place = PurePosixPath(point.adapter)
        if place.is_absolute():
            raise ValueError(
                f"the adapter of {point.name!r} must be a path relative to the front's file, so "
                f"that the folder can be moved, got {point.adapter}."
            )
        if ".." in place.parts or "\\" in point.adapter:
            raise ValueError(
                f"the adapter of {point.name!r} must be inside the front's folder, without '..' or "
                f"backslashes, got {point.adapter}."
            )

    def _check_figures(self, what: str, figures: Mapping[str, float]) -> None:
        self._check_names(what, figures)
        for name, value in figures.items():
            if not math.isfinite(value):
                raise ValueError(f"{what} must have finite figures, got {value} for {name!r}.")

    def _check_names(self, what: str, figures: Mapping[str, Any]) -> None:
        if set(figures) != set(self.objectives):
            raise ValueError(
                f"{what} must have one entry for each objective ({', '.join(self.objectives)}), "
                f"got {', '.join(figures) or 'none'}."
            )

    def _shares(self, point: Point) -> np.ndarray:
        name = f"the preference of {point.name!r}"
        return as_shares(point.preference or (), len(self.objectives), name=name)

    @cached_property
    def _bounded_scores(self) -> set[str]:
        """Names of the scores that are shares of replies."""
        splits = (self.test_values, self.validation_values)
        rows = [own for values in splits for own in values.values()]
        rows += [{n: (mean,) for n, mean in point.scores.items()} for point in self.points]
        # a user's own score of the name may be on another scale
        others = {n for n in SHARES for row in rows for v in row.get(n, ()) if v < 0 or v > 1}
        return {*SHARES} - others

    def is_bounded(self, name: str) -> bool:
        """Returns whether a quantity is in [0, 1].

        That is an objective's calibrated reward, accuracy on pairs, or a share of replies.
        """
        if name in self._bounded_scores:
            return True
        return self.calibrations.get(name, {"method": "none"}).get("method", "pairs") != "none"

    @property
    def measure(self) -> str:
        """What the objectives' figures are."""
        methods = {own.get("method", "pairs") for own in self.calibrations.values()}
        if methods <= {"pairs"}:
            return "accuracy on pairs"
        return "reward" if "none" in methods else "reward in [0, 1]"

    def prompts(self, noun: str = "prompts") -> str:
        """Describes the number of prompts that the rewards are means over."""
        partial = ", ".join(f"{name} on {count}" for name, count in self.num_scored.items())
        return f"{self.num_prompts} {noun}{partial and f' ({partial})'}"

    def rewards(self) -> np.ndarray:
        """Returns the rewards of all points, shape [N, M]."""
        rows = [[point.rewards[name] for name in self.objectives] for point in self.points]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.objectives))

    @property
    def has_validation(self) -> bool:
        """True if all points have rewards on the validation prompts."""
        return all(point.name in self.validation for point in self.points)

    def selection_rewards(self) -> np.ndarray:
        """Returns the rewards by which points are selected, shape [N, M].

        These are the rewards on the validation prompts, or on the test prompts if a point lacks
        them.
        """
        if not self.has_validation:
            return self.rewards()
        rows = [[self.validation[p.name][name] for name in self.objectives] for p in self.points]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.objectives))

    def preferences(self) -> np.ndarray:
        """Returns the points' preferences scaled to sum 1, [N, M]; NaN for points without one."""
        rows = np.full((len(self.points), len(self.objectives)), np.nan)
        for row, point in zip(rows, self.points, strict=True):
            if point.preference is not None:
                row[:] = self._shares(point)
        return rows

    def of_seed(self, seed: int) -> Self:
        """Returns the front of one seed's points."""
        return replace(self, points=tuple(p for p in self.points if p.seed == seed))

    @property
    def hypervolume(self) -> float:
        """The hypervolume of all points; requires at least two, all above the reference point."""
        self._check_several()
        return hypervolume(
            self.rewards(),
            self.reference,
            names=[repr(point.name) for point in self.points],
            objectives=[repr(name) for name in self.objectives],
        )

    def _check_several(self) -> None:
        if len(self.points) < 2:
            count = "one point" if self.points else "no points"
            raise ValueError(
                f"a front with {count} has no trade-off: add models of at least two preferences."
            )

    def save(self, path: str | Path) -> None:
        """Writes the front as JSON atomically, replacing an existing file.

        Non-finite values in `kl` and `scores` are written as null and read as NaN.
        """
        write_record(path, self, version=_FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Returns the front in a file written by `save`.

        Raises:
            ValueError: When the file does not hold a valid front; names the invalid entry.
        """
        added = {"is_conditioned": False, "num_scored": {}, "validation": {}}
        added |= {"test_values": {}, "validation_values": {}}
        return read_record(path, cls, version=_FORMAT, added=added)


def _check_shown(what: str, text: str) -> None:
    """Raises `ValueError` if a text is empty or contains terminal control characters."""
    if not text or not text.isprintable():
        raise ValueError(f"{what} must be a single line of printable text, got {text[:80]!a}.")


def by_preference(front: Front) -> dict[tuple[float, ...], tuple[Point, ...]]:
    """Returns the points by preference, scaled to sum 1, in ascending order and sorted by seed."""
    groups: dict[tuple[float, ...], list[Point]] = {}
    for point, shares in zip(front.points, front.preferences(), strict=True):
        if point.preference is not None:
            # (1, 2) and (0.1, 0.2) are the same preference up to rounding
            groups.setdefault(tuple(shares.round(9).tolist()), []).append(point)
    return {key: tuple(sorted(groups[key], key=lambda point: point.seed)) for key in sorted(groups)}


def mean_front(front: Front) -> dict[tuple[float, ...], np.ndarray]:
    """Returns the mean rewards [M] over the seeds of each preference, in ascending order."""
    return {
        preference: np.mean([[p.rewards[name] for name in front.objectives] for p in points], 0)
        for preference, points in by_preference(front).items()
    }


@dataclass(frozen=True)
class SeedHypervolumes:
    """Hypervolumes of a front's seeds."""

    by_seed: dict[int, float]
    mean: float
    sd: float | None
    """Sample standard deviation (n - 1); None for a single seed."""


def seed_hypervolumes(front: Front) -> SeedHypervolumes:
    """Returns the hypervolume of each seed's points, with mean and standard deviation.

    Raises:
        ValueError: When a seed has fewer than two points or lacks a preference of another seed, so
            that their hypervolumes are not comparable, or a point is not above the reference point.
    """
    groups = by_preference(front)
    figures = {}
    for seed in sorted({point.seed for point in front.points}):
        for preference, points in groups.items():
            if seed not in {point.seed for point in points}:
                raise ValueError(
                    f"seed {seed} has no point of preference {preference}, which other seeds have: "
                    "train it, or exclude the seed or the preference."
                )
        figures[seed] = front.of_seed(seed).hypervolume
    if not figures:
        front._check_several()
    values = list(figures.values())
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return SeedHypervolumes(figures, float(np.mean(values)), sd)


def check_comparable(first: Front, second: Front) -> None:
    """Raises `ValueError` if the rewards or hypervolumes of two fronts are not comparable.

    The objectives, their order, the calibrations and the reference point must match. Strategy,
    preferences and seeds may differ: they are the subject of the comparison.
    """
    if first.objectives != second.objectives:
        raise ValueError(
            "the fronts are not comparable: the objectives are "
            f"{', '.join(first.objectives)} in the first and {', '.join(second.objectives)} in the "
            "second, and their order matters."
        )
    for name in first.objectives:
        # fronts of pairs used to be written without a method
        maps = [{"method": "pairs", **front.calibrations[name]} for front in (first, second)]
        if figure := differing_figure(*maps):
            values = [calibration.get(figure, "missing") for calibration in maps]
            raise ValueError(
                f"the fronts are not comparable: the calibration of {name!r} has {figure} "
                f"{values[0]} in the first and {values[1]} in the second; evaluate both with the "
                "same calibration."
            )
    if first.reference != second.reference:
        raise ValueError(
            f"the fronts are not comparable: the reference point is {list(first.reference)} in the "
            f"first and {list(second.reference)} in the second; choose one for both."
        )


def differing_figure(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """Returns the first parameter in which two calibrations differ; None if they are equivalent.

    Ignores the number of replies they were fitted to, which does not change the mapping.
    """
    for figure in sorted((first.keys() | second.keys()) - {"num_samples"}):
        if not _is_same(first.get(figure), second.get(figure)):
            return figure
    return None


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=SAME_FIGURE)
    return first == second
