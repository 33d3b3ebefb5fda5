"""Finds the preference that reaches a target point on the front of a conditioned model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import factorial

import numpy as np
from scipy.linalg import null_space
from scipy.spatial import Delaunay, QhullError

from firm.base.preferences import MAX_CELLS
from firm.fronts.front import Front, Point
from firm.fronts.nearest import check_eligible, sound
from firm.solvers.checks import as_shares
from firm.solvers.min_norm import min_norm_weights

_SAME = 1e-6
"""Misses below this, relative to the front's ranges, count as equal."""


def reaching(front: Front, target: Sequence[float]) -> list[tuple[Point, float]]:
    """Returns models with shares that mix their preferences into one that reaches a target point.

    The target is a direction on the measured front, not a preference to train for. An objective's
    gain is 0 at the smallest and 1 at the largest reward of the models that are neither collapsed
    nor dominated; a point reaches the target if its gains are proportional to the target shares.
    Rewards are assumed to be linear between neighbouring preferences, so that the solution in each
    simplex of neighbours is the minimum-norm convex combination of ``gain - Σ gain · target``. The
    simplex with the smallest miss is chosen; among several that reach the target, such as those of
    other seeds, the one with the largest gains.

    Intended for fronts with one conditioned adapter per seed: it is linear in the preference, so
    that folding it at the mixed preference gives the mixture of the models. Models that have
    collapsed are excluded; of runs of their own, also dominated ones.

    Args:
        front: The measured models.
        target: Shares of the objectives, shape [M]; scaled to sum 1.

    Returns:
        At most M models of one seed with positive shares that sum to 1.

    Raises:
        ValueError: When the target is invalid, or no model is eligible.
    """
    target_shares = as_shares(target, len(front.objectives), name="the target trade-off")
    eligible = sound(front)
    check_eligible(eligible, front)
    rewards = eligible.selection_rewards()
    least, ranges = rewards.min(axis=0), np.ptp(rewards, axis=0)
    found = []
    for own, cells in interpolated(front, eligible):
        gains = (own.selection_rewards() - least) / np.where(ranges > 0, ranges, 1.0)
        totals = gains.sum(axis=1, keepdims=True)
        misses = gains - totals * target_shares  # [N, M], linear in the models
        misses = misses.round(12)  # squares of smaller values would underflow in the Gram matrix
        for cell in cells:
            shares = min_norm_weights(misses[cell] @ misses[cell].T)
            missed = max(float(np.linalg.norm(shares @ misses[cell])), _SAME)
            total = float((shares @ gains[cell]).sum())
            parts = [(own.points[i], float(s)) for i, s in zip(cell, shares, strict=True) if s > 0]
            found.append((total < 0, missed, -total, parts))  # below 0 it is the opposite direction
    return min(found, key=lambda entry: entry[:3])[3]


def interpolated(front: Front, eligible: Front) -> list[tuple[Front, list[list[int]]]]:
    """Returns the models of each seed that may be mixed, and the simplices of neighbours.

    At a preference that was measured, a conditioned adapter is the model that was measured there.
    So a dominated one stays between its neighbours: rewards interpolated across it would contradict
    it. Of the simplices around a collapsed model, the faces without it are left. Adapters of
    separate runs give other models when they are mixed, so the eligible ones are neighbours.

    Args:
        front: The measured models.
        eligible: Those that may be chosen; see `sound`.

    Returns:
        For each seed with an eligible model its models, and indices of them by simplex.
    """
    found = []
    for seed in sorted({point.seed for point in eligible.points}):
        own = eligible.of_seed(seed)
        if front.is_conditioned:
            own = front.of_seed(seed)
            points = [p for p in own.points if p.preference is not None]
            if eligible.has_validation:  # rewards on test prompts are not comparable
                points = [p for p in points if p.name in front.validation]
            own = replace(own, points=tuple(points))
        cells = [
            [i for i in cell if own.points[i].collapse is None]
            for cell in neighbourhoods(own.preferences())
        ]
        found.append((own, [cell for cell in cells if cell]))
    return found


def mean_preference(parts: Sequence[tuple[Point, float]]) -> list[float]:
    """Returns the weighted mean of models' preferences by shares that sum to 1, shape [M]."""
    rows = [
        share * as_shares(point.preference or (), len(point.rewards), name=point.name)
        for point, share in parts
    ]
    return np.sum(rows, axis=0).tolist()


def widest_gap(preferences: np.ndarray, rewards: np.ndarray) -> tuple[float, ...]:
    """Returns the preference midway between the neighbours with the most distant rewards.

    Measuring there repeatedly spaces a front's points evenly in reward space rather than in
    preference, as SURF does (arXiv:2605.20619), but with evaluations only.

    Args:
        preferences: Preferences of the measured points, rows that sum to 1, shape [N, M], N ≥ 2.
        rewards: Rewards of the same points, shape [N, M].
    """
    edges = [
        (first, second)
        for cell in neighbourhoods(preferences)
        for place, first in enumerate(cell)
        for second in cell[place + 1 :]
    ]
    first, second = max(edges, key=lambda edge: np.linalg.norm(rewards[edge[0]] - rewards[edge[1]]))
    return tuple(((preferences[first] + preferences[second]) / 2).tolist())


def neighbourhoods(preferences: np.ndarray) -> list[list[int]]:
    """Returns simplices of at most M neighbouring preferences that cover the measured range.

    Args:
        preferences: Rows that sum to 1, shape [N, M].

    Raises:
        ValueError: When there would be more than `MAX_CELLS`.
    """
    count, num_objectives = preferences.shape
    if count <= num_objectives:
        return [list(range(count))]
    if num_objectives == 2:
        order = np.argsort(preferences[:, 0], kind="stable").tolist()
        return [list(pair) for pair in pairwise(order)]
    places, place = np.unique(preferences.round(9), axis=0, return_inverse=True)
    if len(places) < count:  # several models at one preference, each in the cells of its place
        at = [np.flatnonzero(place.reshape(-1) == i).tolist() for i in range(len(places))]
        cells = [product(*(at[i] for i in cell)) for cell in neighbourhoods(places)]
        return [list(cell) for own in cells for cell in own]
    if count * factorial(num_objectives - 1) > MAX_CELLS:
        raise ValueError(
            f"{count} models of {num_objectives} objectives have too many neighbourhoods: measure "
            "fewer preferences."
        )
    plane = null_space(
        np.ones((1, num_objectives))
    )  # an isometry, so the order of the objectives has no effect
    try:
        return Delaunay(preferences @ plane).simplices.tolist()
    except QhullError:  # degenerate points, such as on a line: QJ joggles the input
        return Delaunay(preferences @ plane, qhull_options="QJ").simplices.tolist()
