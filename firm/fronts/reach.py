"""Finds the preference that reaches a target point on the front of a conditioned model."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.linalg import null_space
from scipy.spatial import Delaunay, QhullError

from firm.fronts.front import Front, Point
from firm.fronts.nearest import sound
from firm.solvers import min_norm_weights
from firm.solvers.checks import as_shares

_SAME = 1e-6
"""Wishes missed by less than this, in shares of the front's ranges, are met equally well."""


def reaching(front: Front, want: Sequence[float]) -> list[tuple[Point, float]]:
    """Returns models with shares that mix their preferences into the one that reaches a target.

    The target is a direction on the measured front, not a preference to train for. An objective's
    gain is 0 at the smallest and 1 at the largest reward of the front's models; the target is met
    where the gains are proportional to the target shares. Rewards are assumed to be linear between
    neighbouring preferences, so that the solution in each simplex of neighbours is the shortest
    convex combination of ``gain - Σ gain · want``. If no simplex meets the target, the one with the
    smallest miss is taken; if several do, the one with the largest gains.

    Models that have collapsed or that another one of their seed dominates are left out. Meant for
    points of one conditioned adapter for each seed, which is linear in the preference: its fold at
    the sum of the preferences is the mean of the models.

    Args:
        front: The measured models.
        want: Shares of the objectives, shape [M]; scaled to sum 1.

    Returns:
        At most M models of one seed with positive shares that sum to 1.

    Raises:
        ValueError: The target is not such a vector, or no model is left.
    """
    target = as_shares(want, len(front.objectives), name="the wanted trade-off")
    seeds = sorted({point.seed for point in front.points})
    fronts = [own for seed in seeds if (own := sound(front.of_seed(seed))).points]
    if not fronts:
        raise ValueError(
            f"none of {len(front.points)} models has a preference and is neither dominated nor "
            "collapsed: train more."
        )
    rewards = np.concatenate([own.rewards() for own in fronts])
    least, ranges = rewards.min(axis=0), np.ptp(rewards, axis=0)
    found = []
    for own in fronts:
        gains = (own.rewards() - least) / np.where(ranges > 0, ranges, 1.0)
        misses = gains - gains.sum(axis=1, keepdims=True) * target  # [N, M], linear in the models
        misses = misses.round(12)  # squares of smaller values underflow in the Gram matrices
        for cell in neighbourhoods(own.preferences()):
            shares = min_norm_weights(misses[cell] @ misses[cell].T)
            missed = max(float(np.linalg.norm(shares @ misses[cell])), _SAME)
            parts = [(own.points[i], float(s)) for i, s in zip(cell, shares, strict=True) if s > 0]
            found.append((missed, -float((shares @ gains[cell]).sum()), parts))
    return min(found, key=lambda entry: entry[:2])[2]


def mean_preference(parts: Sequence[tuple[Point, float]]) -> list[float]:
    """Returns the mean of some models' preferences by their shares, of sum 1, shape [M]."""
    rows = [
        share * as_shares(point.preference or (), len(point.rewards), name=point.name)
        for point, share in parts
    ]
    return np.sum(rows, axis=0).tolist()


def widest_gap(preferences: np.ndarray, rewards: np.ndarray) -> tuple[float, ...]:
    """Returns the preference in the middle of the longest step between neighbours on a front.

    Measuring there repeatedly spaces a front's points by its length and not by preference, as SURF
    does (arXiv:2605.20619), with evaluations only.

    Args:
        preferences: Preferences of the measured points, rows of sum 1, shape [N, M], at least two.
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
    """Returns sets of at most M neighbouring preferences, simplices that cover the measured range.

    Args:
        preferences: Rows of sum 1, shape [N, M].
    """
    count, num_objectives = preferences.shape
    if count <= num_objectives:
        return [list(range(count))]
    if num_objectives == 2:
        order = np.argsort(preferences[:, 0], kind="stable").tolist()
        return [list(pair) for pair in pairwise(order)]
    plane = null_space(np.ones((1, num_objectives)))  # keeps distances, whatever the order
    try:
        return Delaunay(preferences @ plane).simplices.tolist()
    except QhullError:  # points on a line or in a lower-dimensional plane: QJ joggles them
        return Delaunay(preferences @ plane, qhull_options="QJ").simplices.tolist()
