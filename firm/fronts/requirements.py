"""Selects the model that does best among those that meet requirements, by their lower bounds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.stats import norm

from firm.fronts.front import KL, Front, Point
from firm.fronts.nearest import sound
from firm.fronts.preferences import in_words
from firm.fronts.reach import mean_preference, neighbourhoods
from firm.solvers.checks import as_shares

_SAME = 1e-9
"""Margins closer to zero than this are zero, because of rounding."""


@dataclass(frozen=True)
class Requirement:
    """A bound on an objective's reward, on the KL or on another score of the front's models."""

    name: str
    is_minimum: bool
    bound: float

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.is_minimum else '<='} {self.bound:g}"

    def margin(self, point: Point, confidence: float) -> float:
        """Returns how far a model's one-sided bound is inside the requirement; negative if outside.

        The bound is mean ∓ z · standard error, z the normal quantile of the confidence. A mean
        whose standard error the front lacks counts as it is.
        """
        values = {**point.scores, **point.rewards, KL: point.kl}
        error = float(norm.ppf(confidence)) * point.errors.get(self.name, 0.0)
        gap = values[self.name] - self.bound
        return (gap if self.is_minimum else -gap) - error


def parse_requirements(text: str, front: Front) -> list[Requirement]:
    """Parses requirements such as "harmless>=0.6, kl<=3".

    Raises:
        ValueError: A requirement is malformed, or names a quantity that a model of the front lacks.
    """
    scores = [set(point.scores) for point in front.points]
    shared = sorted(set.intersection(*scores)) if scores else []
    known, found = [*front.objectives, KL, *shared], []
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


def best_meeting(
    front: Front,
    requirements: Sequence[Requirement],
    weights: Sequence[float],
    *,
    confidence: float,
    is_mixed: bool,
) -> tuple[list[tuple[Point, float]], float]:
    """Returns the models with shares whose mixture does best among those that meet requirements.

    Rewards and their errors are linear between neighbouring preferences, as in `reaching` and
    `expected_rewards`, so each simplex of neighbours is a linear program: maximise the weighted
    rewards over the shares, with every requirement's bound inside. Excludes models that have
    collapsed or are dominated.

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
        ValueError: The weights are invalid, or no model is eligible.
    """
    shares = as_shares(weights, len(front.objectives), name="the weights of the objectives")
    found = []
    for seed in sorted({point.seed for point in front.points}):
        own = sound(front).of_seed(seed)
        if not own.points:
            continue
        cells = (
            neighbourhoods(own.preferences()) if is_mixed else [[i] for i in range(len(own.points))]
        )
        for cell in cells:
            points = [own.points[at] for at in cell]
            values = np.array([[p.rewards[name] for name in front.objectives] for p in points])
            margins = np.array([[r.margin(p, confidence) for r in requirements] for p in points])
            mixture = _best_mixture(values @ shares, margins)
            parts = [(p, float(s)) for p, s in zip(points, mixture, strict=True) if s > 1e-9]
            margin = float((mixture @ margins).min())
            margin = 0.0 if abs(margin) < _SAME else margin  # a bound that is just met is met
            found.append((min(margin, 0.0), float(mixture @ values @ shares), margin, parts))
    if not found:
        raise ValueError(
            f"none of the {len(front.points)} models has a preference and is neither dominated nor "
            "collapsed: train more models."
        )
    _, _, margin, parts = max(found, key=lambda entry: entry[:2])
    return parts, margin


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
    found = bounds(parts, requirements, confidence)
    numbers = ", ".join(f"{each} has {b:.3f}" for each, b in zip(requirements, found, strict=True))
    raise ValueError(
        f"require: no {'mixture' if is_mixed else 'measured model'} meets "
        f"{', '.join(map(str, requirements))} with {confidence:.0%} confidence. The nearest, at "
        f"the preference {in_words(front.objectives, mean_preference(parts))}, misses by "
        f"{-margin:.3f}: {numbers}. Relax a requirement, measure more prompts, or train other "
        "preferences."
    )


def free_weights(front: Front, requirements: Sequence[Requirement]) -> list[float]:
    """Returns equal weights of the objectives without a requirement, or of all if all have one."""
    bound = {each.name for each in requirements}
    free = [float(name not in bound) for name in front.objectives]
    return free if any(free) else [1.0] * len(front.objectives)


def bounds(
    parts: Sequence[tuple[Point, float]], requirements: Sequence[Requirement], confidence: float
) -> list[float]:
    """Returns the one-sided bound of a mixture of models for each requirement."""
    found = []
    for each in requirements:
        inside = sum(share * each.margin(point, confidence) for point, share in parts)
        found.append(each.bound + inside if each.is_minimum else each.bound - inside)
    return found


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
