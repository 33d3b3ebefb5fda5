"""Alarms about the KL controller, and about rounding in the log-probabilities behind the KL."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from firm.alignment.estimator_config import MAX_KL_ERROR, KLConfig

INERT_KL_CHANGE = 0.05
"""Relative change of the KL coefficient below which a controller counts as inert."""


def kl_alarm(config: KLConfig, *, batch_size: int, num_steps: int) -> str | None:
    """Returns an alarm if the adaptive KL controller has almost no effect; otherwise None.

    With the maximum deviation in each of n local steps, the coefficient c ends at c (1 ± 0.2 B /
    H)ⁿ for batches of B responses and horizon H. The alarm is raised if even that changes it by
    less than 5 %, and names the longest horizon that allows 5 %; and if c is 0, which no factor
    changes.

    Args:
        config: The KL controller.
        batch_size: Responses per local step, B.
        num_steps: Local steps of a client in the whole run; 0 raises no alarm.
    """
    if config.controller == "fixed" or num_steps == 0:
        return None
    if config.coefficient == 0:
        return (
            "the adaptive KL controller is inert: it multiplies estimator.kl.coefficient, which is "
            "0; set a positive one, or set estimator.kl.controller to fixed."
        )
    most = MAX_KL_ERROR * batch_size  # largest relative change of a step, times the horizon
    if num_steps * math.log1p(most / config.horizon) >= math.log1p(INERT_KL_CHANGE):
        return None
    low, high = (
        config.coefficient * (1 + sign * most / config.horizon) ** num_steps for sign in (-1, 1)
    )
    horizon = most / ((1 + INERT_KL_CHANGE) ** (1 / num_steps) - 1)  # with which it would reach 5 %
    return (
        "the adaptive KL controller is inert, with almost no effect on the KL coefficient: with "
        f"estimator.kl.horizon {config.horizon:,g} the run's {num_steps:,} local steps of "
        f"{batch_size:,} responses take its coefficient from {config.coefficient:g} to {low:.4g} "
        f"or {high:.4g} at most; a horizon of about "
        f"{float(f'{horizon:.2g}'):,g} would allow {INERT_KL_CHANGE:.0%}. For a constant "
        "coefficient, set estimator.kl.controller to fixed."
    )


LARGE_MISMATCH = 0.1
"""Rounding error of log-probabilities, relative to the KL, from which on it raises an alarm."""
MISMATCH_ROUNDS = 3
"""Rounds to wait for a KL to compare the rounding error to, if there is no target."""


def mismatch_alarm(rows: Sequence[Mapping[str, Any]], config: KLConfig) -> str | None:
    """Returns an alarm if much of the KL is rounding error; otherwise None.

    Log-probabilities of cached generation and of a forward pass differ by rounding only. This adds
    zero-mean noise to the KL, whose reference log-probabilities come from a forward pass. Raised
    once: in the first round if the controller has a target KL, else after `MISMATCH_ROUNDS`,
    compared to the KL of the last one.

    Args:
        rows: Rows of the log so far; uses the clients' "kl" and "logprob_mismatch_per_reply".
        config: The KL controller.
    """
    clients = [row for row in rows if row.get("kind") == "client" and row.get("kl") is not None]
    mismatches = (row.get("logprob_mismatch_per_reply") for row in clients)
    measured = [mismatch for mismatch in mismatches if mismatch is not None]
    number = max((row["round"] for row in clients), default=0)
    is_aimed_at = config.controller == "adaptive"
    if not measured or number != (1 if is_aimed_at else MISMATCH_ROUNDS):
        return None
    kl = config.target
    if not is_aimed_at:
        kl = abs(fmean(row["kl"] for row in clients if row["round"] == number))
    mismatch = fmean(measured)
    if mismatch < LARGE_MISMATCH * kl:
        return None
    return (
        f"log-probabilities at generation and in a forward pass differ by {mismatch:.2g} nats per "
        f"reply (root mean square), which is not small compared to the KL of {kl:.2g}: set "
        "rollout.logprobs to forward, or policy.dtype to float32."
    )


RATIO_ROUNDING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}
"""Largest root mean square log-ratio per token that counts as rounding, at temperature 1."""


def ratio_alarm(
    rows: Sequence[Mapping[str, Any]], *, dtype: str, temperature: float, key: str
) -> str | None:
    """Returns an alarm if a policy has ratios other than 1 before its first update; otherwise None.

    Raised in the first round, for the client with the largest difference.

    Args:
        rows: Rows of the log so far.
        dtype: Dtype of the policy's parameters.
        temperature: Temperature of the rollouts; it divides logits and thus scales their rounding
            errors.
        key: Metric of the clients to use: "first_log_ratio", of the first minibatch; or
            "logprob_mismatch", which is unaffected by the adapter's dropout.
    """
    clients = [row for row in rows if row.get("kind") == "client"]
    if max((row["round"] for row in clients), default=0) != 1:
        return None
    worst = max(clients, key=lambda row: row.get(key) or 0.0)
    difference, rounding = worst.get(key) or 0.0, RATIO_ROUNDING[dtype] / temperature
    if difference <= rounding:
        return None
    in_evaluation = worst.get("logprob_mismatch") or 0.0
    reason = (
        "generation and a forward pass differ: set rollout.logprobs to forward"
        if in_evaluation > rounding
        else "the model's outputs differ between training and evaluation mode: look for noise or "
        "layers that depend on the mode"
    )
    return (
        "a policy that was not updated has probability ratios other than 1: log-probabilities of "
        f"{worst.get('client', 'a client')} at sampling and in its first update differ by "
        f"{difference:.2g} nats per token (root mean square), of which rounding in {dtype} "
        f"explains {rounding:.2g}. {reason[0].upper()}{reason[1:]}."
    )
