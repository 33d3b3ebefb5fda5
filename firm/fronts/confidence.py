"""One-sided confidence bounds on a mean, from independent values such as one per prompt.

Values in [0, 1] get bounds that hold at any number of values: Clopper and Pearson's for values that
are all 0 or 1, and otherwise the inverse of a test by betting. Others get Student's t, widened
where the bootstrap says that their distribution is skewed.
"""

import math

import numpy as np
from scipy.optimize import root_scalar
from scipy.stats import beta, norm, t

_NUM_BETS = 50
"""Sizes of bets over which the test by betting is averaged."""
_PRECISION = 1e-6
"""Width of the last interval of a bisection."""
_NUM_RESAMPLES = 2_000


def check_confidence(confidence: float) -> float:
    """Returns a confidence in (0.5, 1).

    Raises:
        ValueError: When it is not; a bound at 0.5 or less would be looser than the mean itself.
    """
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must be greater than 0.5 and less than 1, got {confidence}.")
    return float(confidence)


def lower_bound(values: np.ndarray, confidence: float, *, is_bounded: bool) -> float:
    """Returns a lower bound on the mean of the distribution of independent values.

    Args:
        values: Values, shape [N].
        confidence: Probability in (0.5, 1) with which the bound is at most the mean.
        is_bounded: Whether values are in [0, 1].

    Returns:
        The bound; -inf if the values say nothing, as when fewer than two or all equal ones are not
        bounded. Equal values are no certainty: other ones may have been missed. Values that are all
        0 or 1 count as those of a share, whether or not they are bounded.
    """
    delta = 1 - check_confidence(confidence)
    if is_bounded and not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"values must be in [0, 1], got {values.min():g} to {values.max():g}.")
    if not len(values):
        return 0.0 if is_bounded else -math.inf
    if np.isin(values, (0, 1)).all():
        return _of_proportion(int(values.sum()), len(values), delta)
    return _by_betting(values, delta) if is_bounded else _of_student(values, delta)


def upper_bound(values: np.ndarray, confidence: float, *, is_bounded: bool) -> float:
    """Returns an upper bound on the mean; see `lower_bound`."""
    if is_bounded or np.isin(values, (0, 1)).all():
        return 1 - lower_bound(1 - values, confidence, is_bounded=is_bounded)
    return -lower_bound(-values, confidence, is_bounded=False)


def share_interval(share: float, num: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns Clopper and Pearson's two-sided interval of a share of independent cases.

    It is exact also where no case or every case holds, and a standard error would be 0.

    Args:
        share: Share of the cases that hold, in [0, 1]; a case may count in part, as a tie does.
        num: Number of cases, at least 1.
        confidence: Minimum probability that the interval covers the share.
    """
    delta = (1 - check_confidence(confidence)) / 2
    successes = min(max(round(share * num, 6), 0.0), num)
    low, off = (_of_proportion(own, num, delta) for own in (successes, num - successes))
    return low, 1 - off


def paired_interval(change: float, error: float, num: int) -> tuple[float, float]:
    """Returns a 95 % interval of the change of a share.

    Every case changes by -1, 0 or 1, so that mean and standard error tell how many rose and fell.
    The interval is Tango's (1998), which inverts the score test of a change, widened to that of the
    exact sign test: given the number of changes, rises are a share of them (McNemar, 1947). It
    excludes 0 only if the two-sided sign test rejects it at 5 %. Without changes it covers the
    rises or falls that so few cases may have missed.

    Args:
        change: Mean change.
        error: Its standard error.
        num: Number of cases.
    """
    num_changed = min(round(error**2 * num * (num - 1) + num * change**2), num)
    if not num_changed:
        missed = share_interval(0.0, num)[1]
        return -missed, missed
    ends = share_interval((1 + change * num / num_changed) / 2, num_changed)
    by_sign = [(2 * end - 1) * num_changed / num for end in ends]
    rises, falls = (num_changed + num * change) / 2, (num_changed - num * change) / 2
    high = _largest_change(rises, falls, num)
    return min(by_sign[0], -_largest_change(falls, rises, num)), max(by_sign[1], high)


def half_width(error: float, num: int, confidence: float) -> float:
    """Returns the distance of Student's bound from a mean with a standard error.

    Args:
        error: Standard error of the mean.
        num: Number of values.
        confidence: Confidence of the one-sided bound.

    Returns:
        The distance; inf for fewer than two values, or where the error is 0 or not finite.
    """
    if num < 2 or not (math.isfinite(error) and error > 0):
        return math.inf
    return float(t.ppf(check_confidence(confidence), num - 1)) * error


def _of_proportion(successes: float, num: int, delta: float) -> float:
    """Returns the bound of Clopper and Pearson (1934), at which so many successes have odds δ."""
    return float(beta.ppf(delta, successes, num - successes + 1)) if successes else 0.0


def _largest_change(rises: float, falls: float, num: int) -> float:
    """Returns the largest change of a share that Tango's score test does not reject at 2.5 %."""
    critical = float(norm.ppf(0.975))

    def excess(change: float) -> float:
        # the most likely share of falls under this change
        b = (2 * num - rises + falls) * change - rises - falls
        c = -falls * change * (1 - change)
        share = (math.sqrt(max(b * b - 8 * num * c, 0.0)) - b) / (4 * num)
        variance = num * (2 * share + change * (1 - change))
        return num * change - (rises - falls) - critical * math.sqrt(max(variance, 0.0))

    observed = (rises - falls) / num
    return 1.0 if excess(1.0) <= 0 else float(root_scalar(excess, bracket=(observed, 1.0)).root)


def _by_betting(values: np.ndarray, delta: float) -> float:
    """Returns the smallest mean that a test by betting does not reject.

    Under a mean of at most m, a gambler who stakes a share f of the capital on each value x has
    the expected capital E[Π (1 + f (x / m - 1))] <= 1, also averaged over stakes. By Markov's
    inequality it exceeds 1 / δ with probability at most δ (Waudby-Smith and Ramdas, 2024,
    arXiv:2010.09686). It falls as m rises, so that the means that are not rejected are an interval.
    """
    stakes = (np.arange(_NUM_BETS) + 0.5) / _NUM_BETS
    low, high = 0.0, float(values.mean())
    while high - low > _PRECISION:
        middle = (low + high) / 2
        logs = np.log1p(stakes[:, None] * (values / middle - 1)).sum(1)  # [bets]
        wealth = np.logaddexp.reduce(logs) - math.log(_NUM_BETS)
        if wealth > -math.log(delta):
            low = middle
        else:
            high = middle
    return low


def _of_student(values: np.ndarray, delta: float) -> float:
    """Returns Student's bound, or that of the bootstrap of Student's t where it is wider.

    Student's is too narrow for means of skewed values, such as KLs (Hall, 1988). The bootstrap is
    taken at δ / 2, since few values of a long tail show only a part of its skewness.
    """
    num, mean = len(values), values.mean()
    error = values.std(ddof=1) / math.sqrt(num) if num > 1 else 0.0
    if error == 0:
        return -math.inf
    resampled = values[np.random.default_rng(0).integers(num, size=(_NUM_RESAMPLES, num))]
    errors = resampled.std(axis=1, ddof=1) / math.sqrt(num)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (resampled.mean(1) - mean) / errors
    ratios[np.isnan(ratios)] = 0.0  # the mean itself, without spread
    skewed = np.quantile(ratios, 1 - delta / 2, method="higher")  # inf: equal values are too likely
    return float(mean - max(t.ppf(1 - delta, num - 1), skewed) * error)
