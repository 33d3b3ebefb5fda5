"""Alarms about the course of a run: collapses, and objectives that are sacrificed or teach nothing.

Each compares the newest rounds with the first, and is raised once a sign has lasted for
``ALARM_ROUNDS`` rounds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean, median, stdev
from typing import Any

from firm.federation.diagnostics import ALARM_ROUNDS

Rows = Sequence[Mapping[str, Any]]
Rounds = Sequence[Rows]
"""Rows of the clients, by round."""

LENGTH_FACTOR = 4.0
"""Factor between the lengths of replies in the first and in later rounds that raises an alarm."""
END_SHARE = 0.1
"""Share of replies that end by themselves, of those that did in the first round, below which
replies have no end."""
ENTROPY_SHARE = 0.05
"""Share of the first round's entropy below which the policy always says the same."""
NO_SIGNAL = 0.9
"""Share of groups with equal rewards, or of replies with the largest score, above which an
objective is hardly trained."""
IN_TAIL = 0.2
"""Share of replies in the upper tail of the base model's scores, of which 0.1 % lay there if they
were normally distributed, above which a policy may exploit the reward model."""
SHARE_ALARMS = {
    "zero_variance_share": (
        NO_SIGNAL,
        "{share:.0%} of the groups of replies have equal rewards of {name}, and do not train it. "
        "Raise estimator.num_replies or rollout.temperature, choose prompts on which replies "
        "differ, or set estimator.zero_variance to leave_out.",
    ),
    "saturated_share": (
        NO_SIGNAL,
        "{share:.0%} of the replies have the largest score of {name}: its reward is saturated. "
        "Lower its weight, or choose harder prompts or a stricter reward.",
    ),
    "tail_share": (
        IN_TAIL,
        "{share:.0%} of the replies have scores of {name} in the upper tail of the base model's, "
        "where it was never calibrated: a sign of reward hacking, unless the reward has few "
        "values. Read the samples, raise estimator.kl.coefficient, or add a second reward for "
        "what {name} should measure.",
    ),
}
"""Bounds of metrics by objective, and the alarms above them."""
LENGTH_CORRELATION, LENGTH_RISE = 0.5, 0.4
"""Correlation of scores with length, and its rise since the first round, that raise an alarm."""
SACRIFICE_ROUNDS = 6
"""Number of rounds over which covariances with the combined advantage are averaged."""
NUM_RECENT = ALARM_ROUNDS + SACRIFICE_ROUNDS
"""Number of newest rounds that the alarms compare with the first."""
T_QUANTILE = 3.365
"""Student's t with `SACRIFICE_ROUNDS` - 1 degrees of freedom, one-sided 99 %: covariances of few
replies are noisy."""
REMEDY = (
    "Lower estimator.actor_learning_rate or estimator.num_epochs, or raise estimator.kl.coefficient"
)


def course_alarms(rows: Rows, *, max_approx_kl: float | None) -> list[str]:
    """Returns the alarms about the rounds so far that concern the newest one.

    Args:
        rows: Rows of the log, including those of the round that has just ended.
        max_approx_kl: KL of an update above which clients stop, in nats per token.
    """
    clients = [row for row in rows if row.get("kind") == "client"]
    if not clients:
        return []
    rounds = [list(own) for _, own in groupby(clients, key=itemgetter("round"))]
    return [
        *_length_alarms(rounds),
        *_signal_alarms(rounds),
        *_sacrifice_alarms(rounds),
        *_entropy_alarms(rounds),
        *_validation_alarms(rows),
        *_client_alarms(clients, clients[-1]["round"], max_approx_kl),
    ]


def _length_alarms(rounds: Rounds) -> Iterator[str]:
    lengths, ends = _medians(rounds, "response_length"), _medians(rounds, "end_share")
    if not lengths:
        return
    first, last = lengths[0], lengths[-1]
    if _has_lasted([length * LENGTH_FACTOR < first for length in lengths]):
        yield (
            f"replies have shrunk from {first:.1f} tokens in the first round to {last:.1f}: if no "
            f"objective asks for this, the policy collapses. {REMEDY}."
        )
    if _has_lasted([length > first * LENGTH_FACTOR for length in lengths]):
        yield (
            f"replies have grown from {first:.1f} tokens in the first round to {last:.1f}: a "
            f"reward may favour length (see its correlation with it). {REMEDY}, or set "
            "estimator.missing_end_penalty."
        )
    if ends and _has_lasted([share < END_SHARE * ends[0] for share in ends]):
        yield (
            f"{ends[-1]:.0%} of the replies end by themselves, {ends[0]:.0%} in the first round: "
            "set estimator.missing_end_penalty, or raise rollout.max_new_tokens."
        )


def _entropy_alarms(rounds: Rounds) -> Iterator[str]:
    entropies = _medians(rounds, "entropy")
    if entropies and _has_lasted([each < ENTROPY_SHARE * entropies[0] for each in entropies]):
        yield (
            f"the policy's entropy has fallen from {entropies[0]:.3g} nats per token in the first "
            f"round to {entropies[-1]:.2g}: it hardly varies its replies, so that groups of them "
            f"teach nothing. {REMEDY}."
        )


def _signal_alarms(rounds: Rounds) -> Iterator[str]:
    """Yields alarms about objectives that are hardly trained, exploited, or reward length."""
    for key, (bound, text) in SHARE_ALARMS.items():
        for name in _names(rounds, key):
            shares = _medians(rounds, key, name)
            if _has_lasted([share > bound for share in shares]):
                yield text.format(share=shares[-1], name=name)
    for name in _names(rounds, "score_length_correlation"):
        own = _medians(rounds, "score_length_correlation", name)
        signs = [each > max(LENGTH_CORRELATION, own[0] + LENGTH_RISE) for each in own]
        if _has_lasted(signs):
            yield (
                f"the correlation of {name} with the length of replies has risen from {own[0]:.2f} "
                f"at first to {own[-1]:.2f}: the policy may be padding. {REMEDY}, or add "
                "an objective for brevity."
            )


def _sacrifice_alarms(rounds: Rounds) -> Iterator[str]:
    """Yields an alarm on each weighted objective that the steps of the latest rounds lower."""
    key = "advantage_covariance"
    weights = [own for row in rounds[-1] for own in row.get("weights") or ()]
    for j, name in enumerate(_names(rounds, key)):
        if all(own[j] == 0 for own in weights):  # of all clients
            continue
        own = _medians(rounds, key, name)[-NUM_RECENT:]
        windows = [
            own[end - SACRIFICE_ROUNDS : end] for end in range(SACRIFICE_ROUNDS, len(own) + 1)
        ]
        bounds = [fmean(each) + T_QUANTILE * stdev(each) / len(each) ** 0.5 for each in windows]
        if _has_lasted([bound < 0 for bound in bounds]):
            yield (
                f"{name} is sacrificed to the other objectives: for {ALARM_ROUNDS} rounds its "
                "reward has varied against the combined advantage (mean covariance "
                f"{fmean(windows[-1]):.2g}), so that steps lower it. Raise its weight "
                "(strategy.weights or strategy.preference), or solve for weights by strategy firm "
                "without a preference."
            )


def _validation_alarms(rows: Rows) -> Iterator[str]:
    means: list[tuple[float, float]] = []
    for row in rows:
        if row.get("kind") == "evaluation" and row.get("split") == "validation":
            if not (rewards := row["rewards"].values()):
                continue
            errors = [reward.get("se") or 0.0 for reward in rewards]
            means.append((fmean(r["mean"] for r in rewards), math.hypot(*errors) / len(errors)))
    has_fallen, best = list[bool](), (-math.inf, 0.0)
    for own in means:
        has_fallen.append(best[0] - own[0] > 2 * math.hypot(best[1], own[1]))  # two standard errors
        best = max(best, own)
    if _has_lasted(has_fallen):
        is_of_pairs = any("preferred_log_ratio" in row for row in rows)
        what = "accuracy on validation pairs" if is_of_pairs else "reward on validation prompts"
        remedy = REMEDY.replace("kl.coefficient", "beta") if is_of_pairs else REMEDY
        yield (
            f"the mean {what} has been below its best, {best[0]:.3f}, by "
            f"more than two standard errors for {ALARM_ROUNDS} evaluations, and is now "
            f"{means[-1][0]:.3f}. The run leaves its best adapter if it keeps it "
            f"(checkpoints.keep_best). {remedy}, or fewer rounds."
        )


def _client_alarms(clients: Rows, last: int, most: float | None) -> Iterator[str]:
    """Yields an alarm on the clients that have skipped a part of their round for the first time."""
    if most is None:
        return
    early = [row for row in clients if (row.get("approx_kl") or 0.0) > most]
    known = {row["client"] for row in early if row["round"] < last}
    new = {row["client"]: row for row in early if row["round"] == last}
    named = [
        f"{client} ({row['approx_kl']:.3g} nats per token)"
        for client, row in new.items()
        if client not in known
    ]
    if named:
        yield (
            f"the policy of {', '.join(named)} has left the one that sampled its batch by more "
            f"than estimator.max_approx_kl, {most:g}: the client skips the rest of its round."
        )


def _names(rounds: Rounds, key: str) -> list[str]:
    """Returns the objectives of a metric in the newest round."""
    return list(dict.fromkeys(name for row in rounds[-1] for name in row.get(key) or ()))


def _medians(rounds: Rounds, key: str, name: str = "") -> list[float]:
    """Returns the clients' medians of a metric, by objective if there is a name.

    They are those of the first round with the metric and, in order, of the newest `NUM_RECENT`;
    none if the newest round lacks it, so that there is nothing new.
    """
    recent: list[float] = []
    for rows in reversed(rounds):
        if values := _values(rows, key, name):
            recent.insert(0, median(values))
        if not recent or len(recent) == NUM_RECENT:
            break
    if len(recent) < NUM_RECENT:
        return recent
    first = next(own for rows in rounds if (own := _values(rows, key, name)))
    return [median(first), *recent]


def _values(rows: Rows, key: str, name: str) -> list[float]:
    """Returns a metric of the clients that have it."""
    found = [row.get(key) for row in rows]
    if name:
        found = [None if own is None else own.get(name) for own in found]
    return [own for own in found if own is not None]


def _has_lasted(signs: Sequence[bool]) -> bool:
    """Returns whether a sign is seen for the ``ALARM_ROUNDS``-th time in a row, and no longer."""
    return (
        len(signs) >= ALARM_ROUNDS
        and all(signs[-ALARM_ROUNDS:])
        and (len(signs) == ALARM_ROUNDS or not signs[-ALARM_ROUNDS - 1])
    )
