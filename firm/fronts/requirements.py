"""Selects the model that does best among those that meet requirements, and certifies that it does.

Models are selected by bounds on validation prompts, and certified by bounds on test prompts. A
front without the values of validation prompts serves for both by bounds that hold for all of its
models at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from firm.base.preferences import in_words
from firm.fronts.certificate import Bound, Certificate
from firm.fronts.confidence import check_confidence, half_width, lower_bound, upper_bound
from firm.fronts.front import KL, Front, Point
from firm.fronts.nearest import check_eligible, sound
from firm.fronts.reach import interpolated, mean_preference
from firm.solvers.checks import as_shares

_SAME = 1e-9
"""Margins closer to zero than this are zero, because of rounding."""
Parts = Sequence[tuple[Point, float]]
"""Models with shares that sum to 1."""


@dataclass(frozen=True)
class Requirement:
    """A bound on an objective's reward, on the KL or on another score of the front's models."""

    name: str
    is_minimum: bool
    bound: float

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.is_minimum else '<='} {self.bound:g}"

    def margin(self, value: float) -> float:
        """Returns how far a value is inside the requirement; negative if outside."""
        return value - self.bound if self.is_minimum else self.bound - value


@dataclass(frozen=True)
class _Evidence:
    """What the prompts of one split say about the models of a front."""

    front: Front
    is_validation: bool
    confidence: float
    """Confidence of one bound."""

    def bound(self, parts: Parts, requirement: Requirement) -> tuple[float, float, int]:
        """Returns the one-sided bound of a mixture of models, its mean and the number of prompts.

        The bound is infinitely far outside the requirement if the prompts give none.
        """
        name, is_bounded = requirement.name, self.front.is_bounded(requirement.name)
        rows = self._values(parts, name)
        if rows is None:
            return self._by_errors(parts, requirement)
        shares = np.array([share for _, share in parts])
        values = (shares @ rows).clip(rows.min(0), rows.max(0))  # rounding may lead out of them
        values = values[np.isfinite(values)]
        bound = lower_bound if requirement.is_minimum else upper_bound
        mean = float(values.mean()) if len(values) else np.nan
        return bound(values, self.confidence, is_bounded=is_bounded), mean, len(values)

    def _values(self, parts: Parts, name: str) -> np.ndarray | None:
        """Returns the prompts' values of models, [N, prompts]; None if the front lacks them."""
        front = self.front
        known = front.validation_values if self.is_validation else front.test_values
        rows = [known.get(point.name, {}).get(name) for point, _ in parts]
        if None not in rows:
            return np.array(rows, dtype=np.float64)
        if self.is_validation:
            return None
        # equal values are known from their mean
        means = [_value(point, name) for point, _ in parts]
        errors = [point.errors.get(name) for point, _ in parts]
        if not front.is_bounded(name) or any(errors) or None in errors:
            return None
        return np.repeat(np.array(means)[:, None], self._num_prompts(name), axis=1)

    def _by_errors(self, parts: Parts, requirement: Requirement) -> tuple[float, float, int]:
        """Returns Student's bound from the means and standard errors alone; see `bound`."""
        name, num = requirement.name, self._num_prompts(requirement.name)
        mean = sum(share * _value(point, name) for point, share in parts)
        error = sum(share * point.errors.get(name, np.inf) for point, share in parts)
        width = half_width(error, num, self.confidence)
        return mean - width if requirement.is_minimum else mean + width, mean, num

    def _num_prompts(self, name: str) -> int:
        return self.front.num_scored.get(name, self.front.num_prompts)


def _value(point: Point, name: str) -> float:
    return {**point.scores, **point.rewards, KL: point.kl}[name]


def parse_requirements(text: str, front: Front) -> list[Requirement]:
    """Parses requirements such as "harmless>=0.6, kl<=3".

    Raises:
        ValueError: A requirement is malformed, or names a quantity that a model of the front lacks.
    """
    scores = [set(point.scores) for point in front.points]
    shared = sorted(set.intersection(*scores)) if scores else []
    has_kl = any(np.isfinite(point.kl) for point in front.points)  # pairs measure none
    known, found = [*front.objectives, *([KL] if has_kl else []), *shared], []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(.+?)\s*([<>])=\s*(\S+)\s*", part)
        try:
            bound = float(match[3]) if match else float("nan")
        except ValueError:
            bound = float("nan")
        if match is None or not np.isfinite(bound):
            raise ValueError(
                f"require must be NAME>=NUMBER or NAME<=NUMBER, separated by commas, got "
                f"{part.strip()!r}."
            )
        if match[1] not in known:
            raise ValueError(
                f"require has the unknown {match[1]!r}; choose from {', '.join(known)}."
            )
        found.append(Requirement(match[1], match[2] == ">", bound))
    return found


def is_validated(front: Front, requirements: Sequence[Requirement]) -> bool:
    """Returns whether validation prompts can choose a model: all models have their values."""
    names = {each.name for each in requirements} | set(front.objectives)
    return bool(front.points) and all(
        names <= front.validation_values.get(point.name, {}).keys() for point in front.points
    )


def _evidence_of_choice(
    front: Front, requirements: Sequence[Requirement], confidence: float
) -> _Evidence:
    """Returns the evidence by which a model is chosen.

    On test prompts, which also certify the model, all bounds of all models hold at once.
    """
    if is_validated(front, requirements):
        return _Evidence(front, True, check_confidence(confidence))
    delta = (1 - check_confidence(confidence)) / max(1, len(front.points) * len(requirements))
    return _Evidence(front, False, 1 - delta)


def best_meeting(
    front: Front,
    requirements: Sequence[Requirement],
    weights: Sequence[float],
    *,
    confidence: float,
    is_mixed: bool,
) -> tuple[list[tuple[Point, float]], float]:
    """Returns the models with shares whose mixture does best among those that meet requirements.

    Rewards and their bounds are linear between neighbouring preferences, as in `reaching` and
    `expected_rewards`, so each simplex of neighbours is a linear program: maximise the weighted
    rewards over the shares, with every requirement's bound inside. Excludes models that have
    collapsed or of which nothing is known about a requirement, and, where they would be chosen
    alone, those dominated in the rewards and, if anything else is required, in the bounds. On
    validation prompts, models whose bounds meet the requirements at twice their distance from the
    mean are preferred, so that the chosen one passes on the test prompts as well.

    Args:
        front: The measured models.
        requirements: Bounds that the model must meet.
        weights: Weights of the objectives' rewards, shape [M].
        confidence: Confidence of each one-sided bound, in (0.5, 1).
        is_mixed: Whether models of neighbouring preferences may be mixed; otherwise each stands for
            itself, and only measured rewards count.

    Returns:
        Models of one seed with positive shares that sum to 1, and the smallest margin among the
        requirements. If it is negative, no mixture meets all of them, and this one misses them by
        the least.

    Raises:
        ValueError: The weights or the confidence are invalid, or no model is eligible.
    """
    shares = as_shares(weights, len(front.objectives), name="the weights of the objectives")
    evidence = _evidence_of_choice(front, requirements, confidence)
    found, num_unknown = [], 0
    of_rewards = all(r.is_minimum and r.name in front.objectives for r in requirements)

    known: dict[str, list[tuple[float, float]]] = {}

    def bounds(point: Point) -> list[tuple[float, float]]:
        """Returns bound and mean by requirement, which may take a bootstrap, once."""
        if point.name not in known:
            known[point.name] = [evidence.bound([(point, 1.0)], r)[:2] for r in requirements]
        return known[point.name]

    def gains(point: Point) -> list[float]:
        if of_rewards:
            return []
        pairs = zip(requirements, bounds(point), strict=True)
        margins = [requirement.margin(bound) for requirement, (bound, _) in pairs]
        return np.nan_to_num(margins, nan=-np.finfo(float).max).tolist()  # unknown is worst

    eligible = sound(front, gains)
    if is_mixed:
        groups = interpolated(front, eligible)
    else:
        groups = [(eligible, [[i] for i in range(len(eligible.points))])]
    for own, cells in groups:
        every_value = own.selection_rewards() if evidence.is_validation else own.rewards()
        found_bounds = [bounds(point) for point in own.points]
        every_margin, of_means = (
            np.array(
                [
                    [r.margin(pair[place]) for r, pair in zip(requirements, row, strict=True)]
                    for row in found_bounds
                ]
            )
            for place in (0, 1)
        )
        # the test's bound misses the mean by as much again (Thomas et al., 2019)
        cautious = 2 * every_margin - of_means if evidence.is_validation else every_margin
        is_known = [bool(np.isfinite(row).all()) for row in every_margin]
        num_unknown += is_known.count(False)
        for cell in ([at for at in cell if is_known[at]] for cell in cells):
            if not cell:
                continue
            points, values = [own.points[at] for at in cell], every_value[cell]
            mixture = _best_mixture(values @ shares, cautious[cell])
            parts = [(p, float(s)) for p, s in zip(points, mixture, strict=True) if s > 1e-9]
            wide, margin = (_least(mixture @ rows[cell]) for rows in (cautious, every_margin))
            found.append((min(wide, 0.0), float(mixture @ values @ shares), margin, parts))
    if not found and num_unknown:
        raise ValueError(
            f"require: nothing is known about {', '.join(map(str, requirements))}, since too few "
            "values of the front's models differ: measure more prompts."
        )
    check_eligible(eligible, front)
    _, _, margin, parts = max(found, key=lambda entry: entry[:2])
    return parts, margin


def _least(margins: np.ndarray) -> float:
    """Returns the smallest margin; 0 if a bound is just met, up to rounding."""
    margin = float(margins.min())
    return 0.0 if abs(margin) < _SAME else margin


def meeting(
    front: Front,
    requirements: Sequence[Requirement],
    weights: Sequence[float] | None = None,
    *,
    confidence: float,
    is_mixed: bool,
) -> list[tuple[Point, float]]:
    """Returns the models that do best among those that meet requirements; see `best_meeting`.

    Args:
        front: The measured models.
        requirements: Bounds that the model must meet.
        weights: Weights of the objectives' rewards, shape [M]; by default equal weights of the
            objectives without a requirement.
        confidence: Confidence of each one-sided bound, in (0.5, 1).
        is_mixed: Whether models of neighbouring preferences may be mixed.

    Raises:
        ValueError: None does; the message has the numbers of the nearest.
    """
    parts, margin = best_meeting(
        front,
        requirements,
        weights or free_weights(front, requirements),
        confidence=confidence,
        is_mixed=is_mixed,
    )
    if margin >= 0:
        return parts
    evidence = _evidence_of_choice(front, requirements, confidence)
    found = [_mixed_bound(evidence, parts, each) for each in requirements]
    numbers = ", ".join(f"{each} has {b:.3f}" for each, b in zip(requirements, found, strict=True))
    prompts = "validation" if evidence.is_validation else "test"
    raise ValueError(
        f"require: no {'mixture' if is_mixed else 'measured model'} meets "
        f"{', '.join(map(str, requirements))} on {prompts} prompts with {confidence:.0%} "
        f"confidence. The nearest, at the preference "
        f"{in_words(front.objectives, mean_preference(parts))}, misses by {-margin:.3f}: "
        f"{numbers}. Relax a requirement, measure more prompts, or train other preferences."
    )


def certify(
    front: Front, parts: Parts, requirements: Sequence[Requirement], *, confidence: float
) -> Certificate:
    """Returns the certificate of a model that `meeting` has chosen, by the test prompts.

    Args:
        front: The measured models.
        parts: The model, as shares of measured ones.
        requirements: Bounds that it must meet.
        confidence: Probability in (0.5, 1) with which a model that misses one does not pass.
    """
    is_apart = is_validated(front, requirements)
    if is_apart:
        evidence = _Evidence(front, False, check_confidence(confidence))
    else:
        evidence = _evidence_of_choice(front, requirements, confidence)
    bounds = []
    for each in requirements:
        bound, mean, num = evidence.bound(parts, each)
        if not is_apart:
            bound = _mixed_bound(evidence, parts, each)
        margin = each.margin(bound)
        passes = bool(np.isfinite(bound) and margin >= -_SAME)
        shown = float(bound) if np.isfinite(bound) else float("nan")
        bounds.append(Bound(str(each), shown, mean, num, passes))
    preference = map(float, mean_preference(parts))
    return Certificate(
        dict(zip(front.objectives, preference, strict=True)),
        tuple(bounds),
        float(confidence),
        "test",
        1 if is_apart else len(front.points),
        len(parts) > 1,
        all(own.passes for own in bounds),
    )


def _mixed_bound(evidence: _Evidence, parts: Parts, requirement: Requirement) -> float:
    """Returns the mixture of models' bounds; holds for all mixtures if theirs hold at once."""
    return sum(share * evidence.bound([(point, 1.0)], requirement)[0] for point, share in parts)


def free_weights(front: Front, requirements: Sequence[Requirement]) -> list[float]:
    """Returns equal weights of the objectives without a requirement, or of all if all have one."""
    bound = {each.name for each in requirements}
    free = [float(name not in bound) for name in front.objectives]
    return free if any(free) else [1.0] * len(front.objectives)


def _best_mixture(values: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """Returns the shares [N] with the largest value whose margins [N, R] are not negative.

    If there are none, those with the largest smallest margin.
    """
    count = len(values)
    simplex = {"A_eq": np.ones((1, count)), "b_eq": [1.0], "bounds": (0, None)}
    solved = linprog(-values, A_ub=-margins.T, b_ub=np.zeros(margins.shape[1]), **simplex)
    if solved.status == 0:
        return np.maximum(solved.x, 0) / np.maximum(solved.x, 0).sum()
    widened = linprog(
        [*np.zeros(count), -1.0],
        A_ub=np.hstack([-margins.T, np.ones((margins.shape[1], 1))]),
        b_ub=np.zeros(margins.shape[1]),
        A_eq=np.array([[1.0] * count + [0.0]]),
        b_eq=[1.0],
        bounds=[(0, None)] * count + [(None, None)],
    )
    shares = np.maximum(widened.x[:count], 0)
    return shares / shares.sum()
