"""KL from the reference policy: estimates per token, the penalty coefficient, and alarms."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Literal

import torch

from firm.alignment.sequences import Rollouts
from firm.fields import NOT_IN_PAPER, NonNegativeFloat, Paper, PositiveFloat, configuration
from firm.quantities import Quantity, register

register(
    Quantity(
        "kl",
        "KL from the base model",
        "nats per reply",
        "A KL that runs away, an entropy that collapses or replies that grow without end are signs "
        "of over-optimisation.",
        section="training",
        evaluated="kl",
    ),
    Quantity("kl_coefficient", "KL coefficient", "coefficient", section="training"),
)

MAX_KL_ERROR = 0.2
"""Largest relative deviation of the KL from its target that the adaptive controller counts."""
INERT_KL_CHANGE = 0.05
"""A controller that cannot change the KL coefficient by this share of it is said to do nothing."""


@configuration
class KLConfig:
    """How far the policy may move from the reference."""

    controller: Annotated[Literal["fixed", "adaptive"], Paper("A.1")] = "adaptive"
    """Fixed coefficient, or the proportional controller of Ziegler et al. (2019), section 2.2."""
    coefficient: Annotated[NonNegativeFloat, NOT_IN_PAPER] = 0.2
    """Coefficient of the KL penalty, at the start when adaptive."""
    target: Annotated[PositiveFloat, Paper("A.1"), NOT_IN_PAPER] = 0.03
    """KL per response (nats, summed over tokens) that the adaptive controller aims at; that it
    is counted per response is not in the paper."""
    horizon: Annotated[PositiveFloat, NOT_IN_PAPER] = 10_000
    """Responses over which the adaptive controller corrects a deviation: a step changes the
    coefficient by at most a fifth of batch size / horizon. 10,000, as TRL had it, is more than the
    paper's run has: 16 rounds of 16 responses, with four local steps each, change it by 2 % at
    most."""
    form: Annotated[Literal["k1", "k3"], NOT_IN_PAPER] = "k1"
    """k1: log ratio; k3: lower variance, never negative."""


def kl_penalty(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, form: str = "k1"
) -> torch.Tensor:
    """Returns the estimate per token of the KL divergence from the reference, shape [B, T].

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy, shape [B, T].
        reference_logprobs: The same under the reference, shape [B, T].
        form: "k1" (log ratio: unbiased, may be negative) or "k3" (lower variance, never
            negative). The sampling distribution is the policy's.

    Raises:
        ValueError: The form is unknown.
    """
    log_ratio = reference_logprobs - logprobs
    if form == "k1":
        return -log_ratio
    if form == "k3":
        return (log_ratio.exp() - 1) - log_ratio
    raise ValueError(f"no KL form {form!r}: choose k1 or k3.")


def adapted_kl_coefficient(
    coefficient: float, kl: float, *, num_responses: int, config: KLConfig
) -> float:
    """Returns the KL coefficient of the next local step (Ziegler et al., 2019, section 2.2).

    The relative deviation of the KL (nats per response) from its target counts up to 20 %, so that
    a horizon's worth of responses changes the coefficient by a fifth or so at most.
    """
    if config.controller == "fixed":
        return coefficient
    error = min(max(kl / config.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1.0 + error * num_responses / config.horizon)


class KLPenalty:
    """The KL penalty of one learner; its ``coefficient`` follows the controller."""

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coefficient = config.coefficient

    def per_token(self, rollouts: Rollouts) -> torch.Tensor:
        """Returns the estimate of the KL from the reference, shape [B, T]."""
        return kl_penalty(rollouts.logprobs, rollouts.reference_logprobs, form=self._config.form)

    def adapt(self, kl: torch.Tensor) -> None:
        """Ends a local step with this KL per token, shape [B, T]: adapts the coefficient."""
        self.coefficient = adapted_kl_coefficient(
            self.coefficient, _per_response(kl), num_responses=len(kl), config=self._config
        )

    def metrics(self, kl: torch.Tensor) -> dict[str, float]:
        """Returns the figures of a batch: the mean KL per response in nats, and the coefficient."""
        return {"kl": _per_response(kl), "kl_coefficient": self.coefficient}


def _per_response(kl: torch.Tensor) -> float:
    return kl.sum(1).mean().item()


def kl_alarm(config: KLConfig, *, batch_size: int, num_steps: int) -> str | None:
    """Returns an alarm where the adaptive KL controller cannot act; None otherwise.

    With the largest deviation in each of n local steps the coefficient c ends at c (1 ± 0.2 B / H)ⁿ
    for batches of B responses and horizon H. The alarm is raised when even that is a change of less
    than 5 %, with the longest horizon that allows it; and when c is 0, which no factor changes.

    Args:
        config: The KL controller.
        batch_size: Responses in a local step, B.
        num_steps: Local steps of a client in the whole run; with 0 there is no alarm.
    """
    if config.controller == "fixed" or num_steps == 0:
        return None
    if config.coefficient == 0:
        return (
            "the adaptive KL controller is inert, it cannot act: it multiplies "
            "estimator.kl.coefficient, which is 0; start from a positive one, or set "
            "estimator.kl.controller to fixed."
        )
    most = MAX_KL_ERROR * batch_size
    if num_steps * math.log1p(most / config.horizon) >= math.log1p(INERT_KL_CHANGE):
        return None
    low, high = (
        config.coefficient * (1 + sign * most / config.horizon) ** num_steps for sign in (-1, 1)
    )
    horizon = most / ((1 + INERT_KL_CHANGE) ** (1 / num_steps) - 1)
    return (
        "the adaptive KL controller is inert, it leaves the KL coefficient nearly as it is: with "
        f"estimator.kl.horizon {config.horizon:,g} the run's {num_steps:,} local steps of "
        f"{batch_size:,} responses take its coefficient from {config.coefficient:g} to {low:.4g} "
        f"or {high:.4g} at most; a horizon of about "
        f"{float(f'{horizon:.2g}'):,g} would allow {INERT_KL_CHANGE:.0%}. Where the coefficient is "
        "to stay, set estimator.kl.controller to fixed."
    )


LARGE_MISMATCH = 0.1
"""Share of the KL from which on rounding in log-probabilities is not small beside it."""


def mismatch_alarm(
    rows: Sequence[Mapping[str, Any]], config: KLConfig, *, rounds: int = 3
) -> str | None:
    """Returns an alarm if much of the KL is rounding error; None otherwise.

    Log-probabilities of cached generation and those of a forward pass differ by rounding alone. In
    the KL, whose reference part comes from a forward pass, this is noise of mean zero. Raised once:
    in the first round if the controller has a target KL, else after ``rounds``, by their last KL.

    Args:
        rows: Rows of the log so far; the clients' "kl" and "logprob_mismatch_per_reply" are read.
        config: The KL controller.
        rounds: Rounds to wait for a KL to compare with, where there is no target.
    """
    clients = [row for row in rows if row.get("kind") == "client" and row.get("kl") is not None]
    mismatches = (row.get("logprob_mismatch_per_reply") for row in clients)
    measured = [mismatch for mismatch in mismatches if mismatch is not None]
    number = max((row["round"] for row in clients), default=0)
    is_aimed_at = config.controller == "adaptive"
    if not measured or number != (1 if is_aimed_at else rounds):
        return None
    kl = config.target
    if not is_aimed_at:
        kl = abs(fmean(row["kl"] for row in clients if row["round"] == number))
    mismatch = fmean(measured)
    if mismatch < LARGE_MISMATCH * kl:
        return None
    return (
        f"log-probabilities at generation and in a forward pass differ by {mismatch:.2g} nats per "
        f"reply (root mean square), which is not small beside the KL of {kl:.2g}: set "
        "rollout.logprobs to forward, or policy.dtype to float32."
    )


RATIO_ROUNDING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}
"""Largest root mean square of a log-ratio per token at temperature 1 that counts as rounding."""


def ratio_alarm(
    rows: Sequence[Mapping[str, Any]], *, dtype: str, temperature: float, key: str
) -> str | None:
    """Returns an alarm where a policy that was not updated has ratios other than 1; None otherwise.

    Raised in the first round, for the client with the largest difference.

    Args:
        rows: Rows of the log so far.
        dtype: Type of the policy's parameters.
        temperature: Temperature of the rollouts; it divides logits and so multiplies their
            rounding.
        key: Figure of the clients to read: "first_log_ratio", of the first minibatch; or
            "logprob_mismatch", which is free of the adapter's dropout.
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
        else "the model answers otherwise in an update than in evaluation: look for noise or "
        "layers that depend on its mode"
    )
    return (
        "a policy that was not updated has probability ratios other than 1: log-probabilities of "
        f"{worst.get('client', 'a client')} at sampling and in its first update differ by "
        f"{difference:.2g} nats per token (root mean square), where rounding in {dtype} explains "
        f"{rounding:.2g}. {reason[0].upper()}{reason[1:]}."
    )
