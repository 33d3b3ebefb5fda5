"""Evaluation measures of the classic federated multi-objective papers, as functions on arrays.

All raise ``ValueError`` on empty arrays, mismatched shapes or non-finite values. See also
``firm.federation.diagnostics.stationarity`` for the bound on Pareto stationarity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from firm.fronts.correlation import rank_correlation
from firm.solvers.checks import check_finite


def delta_m(
    values: ArrayLike, reference: ArrayLike, *, is_higher_better: bool | Sequence[bool]
) -> float:
    """Returns the mean relative performance drop from a reference; lower is better.

    That is Δ_M = (1/M) Σ_m (-1)^{ℓ_m} (S_m - R_m) / R_m of Appendix E.3 of FedCMOO (Askin et al.),
    with ℓ_m = 1 if higher values are better, else 0. 0.01 means one percent worse on average,
    negative values mean better. The reference is usually single-objective training.

    Args:
        values: S, final accuracy or loss of each objective, shape [M].
        reference: R, the reference's values, shape [M], positive.
        is_higher_better: Whether higher is better; one flag for all objectives or one for each.

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
    """Distribution of the users' accuracies."""

    mean: float
    std: float
    """Population standard deviation, since all users are included."""
    worst: float
    best: float


def user_summary(accuracies: ArrayLike, *, share: float = 0.05) -> UserSummary:
    """Returns mean, standard deviation, worst and best 5 % of the users' accuracies [C].

    Worst is the quantile at ``share`` in (0, 0.5], best the quantile at ``1 - share``, with linear
    interpolation. The paper does not define them; the digits in its Tables 8 and 9 for 100 users
    match this definition, not a mean over the five worst users.

    >>> user_summary([0.5, 0.7, 0.9]).worst
    0.52
    """
    if not 0 < share <= 0.5:
        raise ValueError(f"share must be in (0, 0.5], got {share}.")
    users = _array(accuracies, "accuracies", ndim=1)
    worst, best = np.quantile(users, [share, 1 - share])
    return UserSummary(float(users.mean()), float(users.std()), float(worst), float(best))


def improved_share(before: ArrayLike, after: ArrayLike) -> float:
    """Returns the share of participants whose losses the server's step did not raise, in [0, 1].

    That is ``Σ_{i ∈ I_t} 1{f_i(w_{t+1}) ≤ f_i(w_t)} / |I_t|`` (footnote 6 of FedMGDA+, Hu et al.):
    unchanged losses count. With several objectives a participant counts if none of its losses rose.
    ``before`` and ``after`` are the participants' training losses, shape [C] or [C, M].
    """
    old = _array(before, "before")
    if old.ndim not in (1, 2):
        raise ValueError(f"before must have shape [C] or [C, M], got {list(old.shape)}.")
    new = _array(after, "after", shape=old.shape)
    has_kept = new <= old
    return float(has_kept.reshape(len(old), -1).all(axis=1).mean())


def local_progress(before: ArrayLike, after: ArrayLike) -> np.ndarray:
    """Returns each objective's decrease of the loss in local training, averaged over the clients.

    That is (1/C) Σ_c (F_{c,m}(x_start) - F_{c,m}(x_end)) on the clients' own data, [C, M] to [M]:
    Appendix E.4 of FedCMOO, which compares algorithms from the same global models.
    """
    old = _array(before, "before", ndim=2)
    return (old - _array(after, "after", shape=old.shape)).mean(axis=0)


def preference_correlation(preferences: ArrayLike, losses: ArrayLike) -> float | None:
    """Returns how well runs achieve the loss ratios that their preferences request, in [-1, 1].

    A preference r requests r₁F₁ = ... = r_M F_M (Eq. 7 of FedCMOO), so that F_j/F_k should be
    r_k/r_j. For each pair of objectives, Spearman's ρ is computed between requested and achieved
    ratios over the runs; it is 0 if all runs achieve the same ratio. The result is the mean over
    the pairs with three or more distinct requested ratios, or None if there is no such pair.

    Args:
        preferences: r of each run, shape [N, M], positive.
        losses: Final losses of each run, shape [N, M], positive.

    >>> preference_correlation([[1, 3], [1, 1], [3, 1]], [[0.6, 0.3], [0.4, 0.4], [0.2, 0.5]])
    1.0
    """
    requested = _array(preferences, "preferences", ndim=2)
    achieved = _array(losses, "losses", ndim=2, shape=requested.shape)
    for name, values in (("preferences", requested), ("losses", achieved)):
        if values.min() <= 0:
            raise ValueError(f"{name} must be positive, got {values.min():g}.")
    correlations = []
    for j, k in combinations(range(requested.shape[1]), 2):
        targets = requested[:, k] / requested[:, j]  # [N]
        ratios = achieved[:, j] / achieved[:, k]  # [N]
        if len(np.unique(targets.round(9))) > 2:
            correlations.append(rank_correlation(targets, ratios) or 0.0)
    return float(np.mean(correlations)) if correlations else None


def rounds_to_loss(rounds: ArrayLike, losses: ArrayLike, target: float) -> int | None:
    """Returns the first round whose loss reaches the target, or None (FMGDA, Table 2).

    Rounds [T] must increase; losses [T] are one objective's losses after these rounds.

    >>> rounds_to_loss([0, 10, 20], [2.0, 0.5, 0.1], 0.5)
    10
    """
    measured = _array(rounds, "rounds", ndim=1)
    values = _array(losses, "losses", ndim=1, shape=measured.shape)
    if (np.diff(measured) <= 0).any():
        raise ValueError(f"rounds must increase, got {measured.astype(int).tolist()}.")
    reached = np.flatnonzero(values <= target)
    return int(measured[reached[0]]) if len(reached) else None


def _array(
    values: ArrayLike, name: str, *, ndim: int | None = None, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {list(array.shape)}.")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}.")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty.")
    check_finite(array, name=name)
    return array
