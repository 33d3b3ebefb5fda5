"""What the papers of the classic wing measure, as pure functions on arrays.

The Gram matrix's error is ``firm.gradients.nrmse``; the bound on Pareto stationarity is
``firm.federation.diagnostics.stationarity``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata


def delta_m(
    values: ArrayLike, reference: ArrayLike, *, is_higher_better: bool | Sequence[bool]
) -> float:
    """Returns the mean relative loss of performance against a reference; smaller is better.

    That is Δ_M = (1/M) Σ_m (-1)^{ℓ_m} (S_m - R_m) / R_m of Appendix E.3 of FedCMOO (Askin et al.),
    with ℓ_m = 1 where higher values are better, else 0. 0.01 means one per cent worse on average,
    a negative value better. The reference is usually each objective trained alone.

    Args:
        values: S, final accuracy or loss of each objective, shape [M].
        reference: R, the same of the reference, shape [M], positive.
        is_higher_better: Whether higher is better, for all objectives or for each.

    Raises:
        ValueError: On shapes that differ, values that are not finite, a reference that is not
            positive, or as many flags as there are no objectives.

    >>> round(delta_m([94.4, 92.6], [95.4, 93.1], is_higher_better=True), 4)
    0.0079
    """
    performance = _array(values, "values", ndim=1)
    baseline = _array(reference, "reference", ndim=1, shape=performance.shape)
    if baseline.min() <= 0:
        raise ValueError(f"reference must be positive, got {baseline.min():g}.")
    flags = np.asarray(is_higher_better)
    if flags.shape not in ((), performance.shape):
        raise ValueError(
            f"is_higher_better must be one flag or one for each of the {len(performance)} "
            f"objectives, got {is_higher_better}."
        )
    changes = (performance - baseline) / baseline
    return float(np.where(flags, -changes, changes).mean())


@dataclass(frozen=True)
class UserSummary:
    """How a figure is spread over the users."""

    mean: float
    std: float
    """Of the population: the users are all that there are."""
    worst: float
    best: float


def user_summary(accuracies: ArrayLike, *, share: float = 0.05) -> UserSummary:
    """Returns mean, spread, and the worst and best 5 % of the users' accuracies.

    Worst is the percentile at ``share``, best that at ``1 - share``, interpolated linearly between
    the sorted users. The paper does not say how it takes them; the digits that its Tables 8 and 9
    print for 100 users are those of this, not of a mean over the five worst users. Of C users the
    percentile lies at place ``share`` (C - 1), counted from 0: with fewer than 22 users between the
    two worst ones, with two close to the worse one, with one at it.

    Args:
        accuracies: Each user's accuracy, or another figure of which more is better, shape [C].
        share: Where the tails end, in (0, 0.5].

    Raises:
        ValueError: Without users, on values that are not finite, or a share out of range.

    >>> user_summary([0.5, 0.7, 0.9]).worst
    0.52
    """
    if not 0 < share <= 0.5:
        raise ValueError(f"share must be in (0, 0.5], got {share}.")
    users = _array(accuracies, "accuracies", ndim=1)
    worst, best = np.quantile(users, [share, 1 - share])
    return UserSummary(float(users.mean()), float(users.std()), float(worst), float(best))


def improved_share(before: ArrayLike, after: ArrayLike) -> float:
    """Returns the share of participants that the server's step did not make worse.

    That is ``Σ_{i ∈ I_t} 1{f_i(w_{t+1}) ≤ f_i(w_t)} / |I_t|`` (footnote 6 of FedMGDA+, Hu et al.):
    an unchanged loss counts. With several objectives a participant counts if none of its losses
    rose.

    Args:
        before: Training losses of the round's participants at w_t, shape [C] or [C, M].
        after: The same at w_{t+1}.

    Returns:
        In [0, 1].

    Raises:
        ValueError: On shapes that differ, no participants, or losses that are not finite.
    """
    old = _array(before, "before")
    if old.ndim not in (1, 2):
        raise ValueError(f"before must have shape [C] or [C, M], got {list(old.shape)}.")
    new = _array(after, "after", shape=old.shape)
    has_kept = new <= old
    return float(has_kept.reshape(len(old), -1).all(axis=1).mean())


def local_progress(before: ArrayLike, after: ArrayLike) -> np.ndarray:
    """Returns how far each objective's loss falls in a local training, averaged over the clients.

    That is (1/C) Σ_c (F_{c,m}(x_start) - F_{c,m}(x_end)) on the clients' own data: Appendix E.4 of
    FedCMOO, which compares algorithms from the same global models. For accuracies, change the sign.

    Args:
        before: Losses at the start of the local training, shape [C, M].
        after: Losses at its end, shape [C, M].

    Returns:
        Shape [M]; positive where the losses fell.

    Raises:
        ValueError: On shapes that differ, no clients, or losses that are not finite.
    """
    old = _array(before, "before", ndim=2)
    return (old - _array(after, "after", shape=old.shape)).mean(axis=0)


def running_mean(values: ArrayLike, window: int) -> np.ndarray:
    """Returns at each place the mean of the last ``window`` values; of all so far at the start.

    Args:
        values: Shape [T].
        window: How many, at least 1; the figures of Appendix E.4 of FedCMOO have 40.

    Raises:
        ValueError: Without values, on values that are not finite, or a window below 1.

    >>> running_mean([1.0, 3.0, 5.0], 2).tolist()
    [1.0, 2.0, 4.0]
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}.")
    series = _array(values, "values", ndim=1)
    sums = np.cumsum(np.concatenate([[0.0], series]))
    ends = np.arange(1, len(series) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Returns Spearman's ρ, the correlation of ranks; equal values share their mean rank.

    Args:
        first: Shape [N], N ≥ 2.
        second: Shape [N].

    Returns:
        In [-1, 1].

    Raises:
        ValueError: On shapes that differ, values that are not finite, or values all equal.

    >>> round(rank_correlation([1.0, 2.0, 3.0], [10.0, 1000.0, 100.0]), 12)
    0.5
    """
    one = _array(first, "first", ndim=1)
    two = _array(second, "second", ndim=1, shape=one.shape)
    for name, values in (("first", one), ("second", two)):
        if np.ptp(values) == 0:
            raise ValueError(f"{name} must hold at least two different values, got {values}.")
    return float(np.corrcoef(rankdata(one), rankdata(two))[0, 1].clip(-1, 1))


def preference_correlation(preferences: ArrayLike, losses: ArrayLike) -> float:
    """Returns how well runs follow the ratios of losses that their preferences ask for.

    A preference r asks for r₁F₁ = ... = r_M F_M (Eq. 7 of FedCMOO), so that F_j/F_k should be
    r_k/r_j. For each pair of objectives this is Spearman's ρ between wanted and reached ratios over
    the runs; returned is the mean over the pairs of which the runs want different ratios.

    Args:
        preferences: r of each run, shape [N, M], positive.
        losses: Final losses of each run, shape [N, M], positive.

    Returns:
        In [-1, 1]; 1 where the ratios come in the wanted order. A pair whose reached ratio is the
        same in all runs counts as 0.

    Raises:
        ValueError: On shapes that differ, values that are not positive and finite, or runs that
            all want the same ratios.

    >>> preference_correlation([[1, 3], [1, 1], [3, 1]], [[0.6, 0.3], [0.4, 0.4], [0.2, 0.5]])
    1.0
    """
    wishes = _array(preferences, "preferences", ndim=2)
    ends = _array(losses, "losses", ndim=2, shape=wishes.shape)
    for name, values in (("preferences", wishes), ("losses", ends)):
        if values.min() <= 0:
            raise ValueError(f"{name} must be positive, got {values.min():g}.")
    correlations = []
    for j, k in combinations(range(wishes.shape[1]), 2):
        wanted, reached = wishes[:, k] / wishes[:, j], ends[:, j] / ends[:, k]
        if np.ptp(wanted) > 0:
            constant = np.ptp(reached) == 0
            correlations.append(0.0 if constant else rank_correlation(wanted, reached))
    if not correlations:
        raise ValueError("preferences must ask for different ratios of losses in different runs.")
    return float(np.mean(correlations))


def rounds_to_loss(rounds: ArrayLike, losses: ArrayLike, target: float) -> int | None:
    """Returns the first round whose loss is at most the target; None if none is (FMGDA, Table 2).

    Args:
        rounds: The rounds in which the loss was measured, rising, shape [T].
        losses: Loss of one objective after each of them, shape [T].
        target: Loss to reach.

    Raises:
        ValueError: On shapes that differ, values that are not finite, or rounds that do not rise.

    >>> rounds_to_loss([0, 10, 20], [2.0, 0.5, 0.1], 0.5)
    10
    """
    measured = _array(rounds, "rounds", ndim=1)
    values = _array(losses, "losses", ndim=1, shape=measured.shape)
    if (np.diff(measured) <= 0).any():
        raise ValueError(f"rounds must rise, got {measured.astype(int).tolist()}.")
    reached = np.flatnonzero(values <= target)
    return int(measured[reached[0]]) if len(reached) else None


def total_variation(weights: ArrayLike) -> float:
    """Returns how much the weights moved over the rounds: Σ_t ½ ‖λ_t - λ_{t-1}‖₁.

    One round adds from 0, where the weights stay, to 1, where all weight changes its objective.

    Args:
        weights: λ of each round, shape [T, M], on the simplex.

    Returns:
        In [0, T - 1].

    Raises:
        ValueError: On weights that are not on the simplex (to 1e-4) or no weights at all.

    >>> total_variation([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    0.5
    """
    rows = _array(weights, "weights", ndim=2)
    tolerance = 1e-4  # float32 weights, as rows of a log hold them
    if rows.min() < -tolerance or np.abs(rows.sum(axis=1) - 1).max() > tolerance:
        raise ValueError("weights must be non-negative and sum to 1 in every round.")
    return float(np.abs(np.diff(rows, axis=0)).sum() / 2)


def _array(
    values: ArrayLike, name: str, *, ndim: int | None = None, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """The values in float64, checked: some, finite, of these dimensions or this shape."""
    array = np.asarray(values, dtype=np.float64)
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {list(array.shape)}.")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}.")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty.")
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        raise ValueError(f"{name} must be finite, got {array[tuple(place)]} at {place}.")
    return array
