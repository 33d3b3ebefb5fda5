"""The server's side of a round: its state, what it accepts, and what it reports."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from statistics import median
from typing import Any, ClassVar, Self

import torch

from firm.federation.accounting import require_accountant
from firm.federation.aggregation import Aggregation, update_length
from firm.federation.client import (
    Adapter,
    Capability,
    Client,
    Failure,
    Reply,
    State,
    missing,
)
from firm.federation.diagnostics import (
    disagreement_bound,
    drift,
    norm_ratio,
    stationarity,
    weights_spread,
)
from firm.federation.lora import LoraMean
from firm.federation.messages import Request, Update
from firm.federation.outside import printable
from firm.federation.privacy import PrivacyConfig, breach
from firm.federation.robust import RobustConfig


@dataclass(frozen=True)
class ServerState:
    """All that the server carries from round to round."""

    adapter: Adapter
    """Parameters of the global model's adapter, θ_t."""
    objectives: tuple[str, ...]
    """Names of the M objectives, in the order of every [M, ...] tensor."""
    seed: int
    """The run's seed; client sampling derives its own from it."""
    round: int = 0
    """Rounds finished."""
    accepted: dict[str, int] = field(default_factory=dict)
    """The last round whose update was accepted, by client; clients without one are absent."""
    memory: State = field(default_factory=dict)
    """What a strategy itself carries from round to round, such as the last round's weights."""

    def advance(
        self, adapter: Adapter, clients: Sequence[str], *, memory: State | None = None
    ) -> Self:
        """Returns the state after a round that accepted these clients' updates.

        Args:
            adapter: θ_{t+1}.
            clients: Whose local training was accepted.
            memory: What the strategy carries on; as before when None.
        """
        finished = self.round + 1
        accepted = {**self.accepted, **dict.fromkeys(clients, finished)}
        memory = self.memory if memory is None else memory
        return replace(self, adapter=adapter, round=finished, accepted=accepted, memory=memory)

    def to_state(self) -> State:
        """Returns what a checkpoint holds; ``from_state`` is the way back."""
        return {**vars(self), "objectives": list(self.objectives)}

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Returns the server's state that ``to_state`` wrote."""
        return cls(**{**state, "objectives": tuple(state["objectives"])})


@dataclass(frozen=True)
class RoundConfig:
    """What every strategy leaves to choose about a round; a strategy's own keys come on top."""

    num_local_steps: int = 1
    """Local steps per round and client, K, each on a fresh batch. Its value is not in the paper."""
    num_local_epochs: int | None = None
    """Passes of each client over its own shard per round, E of FedMGDA+'s Algorithm 1, in place of
    a number of steps: a client's K is then E times the whole batches in its shard. null counts in
    num_local_steps, which must stay 1 otherwise."""
    aggregation: Aggregation = "uniform"
    """Whether clients count alike (1/C, as in Algorithm 1 of FIRM) or by their number of
    examples."""
    clients_per_round: int | None = None
    """Clients drawn for each round, without replacement; null takes all, as the paper does."""
    always: tuple[str, ...] = ()
    """Names of clients that take part in every round, such as attackers; the others are drawn for
    the places that are left. Not in the paper."""
    quorum: int = 1
    """Fewest clients whose updates a round needs; with fewer the run stops. Not in the paper."""
    max_update_norm: float | None = None
    """Longest update ‖θ_c - θ_t‖ that is accepted; null accepts any length. Not in the paper."""
    share_gram: bool = False
    """Whether clients send the Gram matrix of their first solve, M² numbers, with each update: at
    the common model θ_t it bounds the disagreement drift and, for the batches drawn there, how far
    θ_t is from Pareto stationarity. Not in the paper."""
    server_learning_rate: float = 1.0
    """Server learning rate η, the factor of the clients' combined update; 1 takes their mean, as
    Algorithm 1 of FIRM does."""
    lora_mean: LoraMean = "factors"
    """What of a LoRA layer is averaged: A and B apart, as adapters are in Algorithm 1 of FIRM, or
    their products B·A, which are then brought back to rank r. Products are not in the paper."""
    robust: RobustConfig = field(default_factory=RobustConfig)
    """What the mean is taken of where some clients may attack. Not in the paper."""

    privacy: PrivacyConfig | None = None
    """Differential privacy of the clients; null: none. Not in the paper."""

    sends_adapters_only: ClassVar[bool] = False
    """Whether clients send nothing that trains the model but their adapters, which is all that
    privacy covers."""
    reads_losses: ClassVar[bool] = False
    """Whether clients send their losses at θ_t."""
    averages: ClassVar[bool] = True
    """Whether the server's step is a mean of adapters, so that it may be one of products."""

    def __post_init__(self) -> None:
        if self.num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {self.num_local_steps}.")
        if self.num_local_epochs is not None:
            if self.num_local_epochs < 1:
                raise ValueError(
                    f"num_local_epochs must be at least 1, got {self.num_local_epochs}; null "
                    "counts in num_local_steps."
                )
            if self.num_local_steps != 1:
                raise ValueError(
                    "local training has num_local_steps or num_local_epochs, got both, "
                    f"{self.num_local_steps} and {self.num_local_epochs}; leave one of them out."
                )
        if self.clients_per_round is not None and self.clients_per_round < 1:
            raise ValueError(
                f"clients_per_round must be at least 1, got {self.clients_per_round}; "
                "null takes all."
            )
        if len(set(self.always)) < len(self.always):
            raise ValueError(f"always must name each client once, got {list(self.always)}.")
        if self.clients_per_round is not None and self.clients_per_round <= len(self.always):
            raise ValueError(
                f"clients_per_round must be more than the {len(self.always)} that always take "
                f"part, got {self.clients_per_round}."
            )
        if self.quorum < 1:
            raise ValueError(f"quorum must be at least 1 client, got {self.quorum}.")
        if self.clients_per_round is not None and self.quorum > self.clients_per_round:
            raise ValueError(
                f"quorum must be at most clients_per_round ({self.clients_per_round}), "
                f"got {self.quorum}."
            )
        if self.max_update_norm is not None and not self.max_update_norm > 0:
            raise ValueError(
                f"max_update_norm must be positive, got {self.max_update_norm}; null accepts any."
            )
        if not 0 < self.server_learning_rate < inf:
            raise ValueError(
                "server_learning_rate must be positive and finite, got "
                f"{self.server_learning_rate}."
            )
        if self.lora_mean not in ("factors", "products"):
            raise ValueError(f"lora_mean must be factors or products, got {self.lora_mean!r}.")
        if self.lora_mean == "products" and not self.averages:
            raise ValueError(
                "lora_mean products is for strategies that take the clients' mean (firm, fedavg, "
                f"fedcmoo and fedcmoo_pref); {type(self).__name__} needs factors."
            )
        if self.lora_mean == "products" and self.server_learning_rate != 1:
            raise ValueError(
                "lora_mean products is for the mean itself; server_learning_rate must be 1, got "
                f"{self.server_learning_rate}."
            )
        self._check_robust()
        if self.privacy is not None:
            self._check_privacy(self.privacy)

    def check_clients(self, kind: type[Client]) -> None:
        """Raises ``ValueError`` naming a capability that the strategy needs and clients lack.

        Args:
            kind: The clients' class.
        """
        needs: dict[Capability, bool] = {
            "losses": self.reads_losses,
            "epochs": self.num_local_epochs is not None,
        }
        for capability, is_needed in needs.items():
            if is_needed and capability not in kind.capabilities:
                raise ValueError(missing(kind.__name__, capability))

    def local_work(self) -> dict[str, Any]:
        """Returns the fields of a request that say how long local training is."""
        return {
            "num_local_steps": self.num_local_steps,
            "num_local_epochs": self.num_local_epochs,
        }

    def training(self) -> dict[str, Any]:
        """Returns the fields of ``LocalTraining`` that every strategy's configuration decides."""
        return {
            **self.local_work(),
            "share_gram": self.share_gram,
            "privacy": self.privacy,
        }

    def _check_robust(self) -> None:
        """Raises ``ValueError`` on a robust rule that does not go with the other keys."""
        rule, least = self.robust.rule, self.robust.min_updates
        if rule == "none":
            return
        if not self.averages:
            raise ValueError(
                "robust is for strategies that take the clients' mean (firm, fedavg, fedcmoo and "
                f"fedcmoo_pref); {type(self).__name__} needs robust.rule none, got {rule}."
            )
        if self.aggregation != "uniform":
            raise ValueError(
                "a robust rule counts all alike, since clients tell their own number of examples; "
                f"aggregation must be uniform with robust.rule {rule}, got {self.aggregation}."
            )
        if self.lora_mean == "products" and rule != "multi_krum":
            raise ValueError(
                "lora_mean products takes whole adapters, which of the robust rules only "
                f"multi_krum leaves several of; set lora_mean to factors with robust.rule {rule}."
            )
        if self.clients_per_round is not None and self.clients_per_round < least:
            raise ValueError(
                f"robust.rule {rule} with num_attackers {self.robust.num_attackers} needs "
                f"clients_per_round of at least {least}, got {self.clients_per_round}."
            )

    def _check_privacy(self, privacy: PrivacyConfig) -> None:
        """Raises ``ValueError`` where ε would not hold of what is sent or done with it."""
        if not self.sends_adapters_only:
            raise ValueError(
                "privacy covers the mean of adapters, and not the Jacobians, losses or updates by "
                "objective that others send; it is for strategies firm and fedavg, got "
                f"{type(self).__name__}."
            )
        if self.aggregation != "uniform":
            raise ValueError(
                "privacy needs clients that count alike, or one could change the mean by more than "
                f"its share; aggregation must be uniform, got {self.aggregation}."
            )
        if self.lora_mean != "factors":
            raise ValueError(
                "privacy clips A and B, whose products have no such limit; lora_mean must be "
                f"factors, got {self.lora_mean}."
            )
        if self.robust.rule != "none":
            raise ValueError(
                "privacy is accounted for the plain mean; robust.rule must be none, got "
                f"{self.robust.rule}."
            )
        if self.max_update_norm is not None:
            raise ValueError(
                "privacy.clip_norm limits the updates already, and refusing one would tell of it; "
                f"max_update_norm must be null, got {self.max_update_norm}."
            )
        if self.share_gram and privacy.statistics != "exact":
            raise ValueError(
                "share_gram sends exact Gram matrices; with privacy set it to false, or "
                f"privacy.statistics to exact, got {privacy.statistics}."
            )
        require_accountant()


class RoundFailed(RuntimeError):
    """Too few clients finished a round; what the last checkpoint holds is whole."""


Check = Callable[[Any], str | None]
"""Returns why an answer cannot be used; None if it can."""


def accept(
    request: Request,
    replies: Sequence[Reply],
    failures: Sequence[Failure],
    *,
    cfg: RoundConfig,
    check: Check | None = None,
    common: Callable[[Any], int] | None = None,
) -> tuple[list[Reply], list[Failure]]:
    """Returns the replies that are valid, and all failures, with the others among them.

    The engine has read every answer by its schema. Here it is held against the round: an update
    must be within the norm limit when there is one, and clipped, where privacy asks clients for
    that alone; a strategy checks what else it needs.

    Args:
        request: What was asked.
        replies: What came back.
        failures: Of those from whom nothing came.
        cfg: The round's quorum and norm limit.
        check: What the strategy checks in an answer.
        common: What all answers must have in common, such as the number of columns of a Jacobian;
            those that differ from the most frequent value are refused.

    Raises:
        RoundFailed: When fewer than ``cfg.quorum`` are left, or than the robust rule needs; with
            every reason.
    """
    problems = [_problem(reply.content, request, cfg, check) for reply in replies]
    if common is not None:
        values = [
            None if problem else common(reply.content)
            for reply, problem in zip(replies, problems, strict=True)
        ]
        counts = Counter(value for value in values if value is not None)
        usual = max(counts, key=lambda value: counts[value], default=None)
        problems = [
            problem or (f"its answer has {value}, the others' {usual}" if value != usual else None)
            for problem, value in zip(problems, values, strict=True)
        ]
    accepted, all_failures = [], list(failures)
    for reply, problem in zip(replies, problems, strict=True):
        if problem:
            failure = Failure(
                reply.client, problem, reply.bytes_down, reply.bytes_up, is_refused=True
            )
            all_failures.append(failure)
        else:
            accepted.append(reply)
    num_attackers = cfg.robust.attackers_left(num_refused(all_failures))
    quorum = max(cfg.quorum, cfg.robust.updates_needed(num_attackers))
    if len(accepted) < quorum:
        reasons = "; ".join(f"{failure.client}: {failure.reason}" for failure in all_failures)
        causes = [failure.cause for failure in all_failures if failure.cause]
        whose = ""
        if quorum > cfg.quorum:
            whose = f" of robust.rule {cfg.robust.rule} with {num_attackers} attackers left"
        raise RoundFailed(
            f"{len(accepted) or 'no'} client{'s' * (len(accepted) != 1)} finished round "
            f"{request.round}, quorum {quorum}{whose} ({reasons or 'no failures'}); repair the "
            f"cause, then resume from round {request.round - 1}."
        ) from (causes[0] if causes else None)
    return accepted, all_failures


def num_refused(failures: Sequence[Failure]) -> int:
    """Returns how many clients sent an answer that was refused."""
    return len({failure.client for failure in failures if failure.is_refused})


def _problem(content: Any, request: Request, cfg: RoundConfig, check: Check | None) -> str | None:
    """Why an answer cannot be used in this round; None if it can."""
    if not isinstance(content, request.answer):
        return f"its answer is no {request.answer.__name__} but {type(content).__name__}"
    try:
        if isinstance(content, Update):
            if reason := too_long(content.adapter, request, cfg):
                return reason
            if reason := breach(content, request.adapter, cfg.privacy):
                return reason
        return check(content) if check else None
    except Exception as error:  # whatever checking a hostile answer may raise is its sender's
        return printable(f"its answer is refused: {type(error).__name__}: {error}")


def too_long(adapter: Adapter, request: Request, cfg: RoundConfig) -> str | None:
    """Returns why an adapter is too far from θ_t; None if it is near enough."""
    if cfg.max_update_norm is None:
        return None
    norm = update_length(request.adapter, adapter)
    if norm <= cfg.max_update_norm:
        return None
    return f"its update has norm {norm:.4g}, above max_update_norm {cfg.max_update_norm:g}"


def round_metrics(
    before: ServerState,
    after: ServerState,
    replies: Sequence[Reply],
    failures: Sequence[Failure],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Returns a round's rows for the log: one of the round, and one of each accepted client.

    Args:
        before: The server's state that the round began with.
        after: The state that it ended with.
        replies: The accepted replies, in client order; their contents are updates.
        failures: Of everybody else who was asked.
        seconds: The round's wall-clock time.

    Returns:
        {"round": row, "clients": [row, ...]}, JSON-able.
    """
    updates = [reply.content for reply in replies]
    norms = [row for update in updates for row in update.metrics.get("gradient_norms", ())]
    ratio = median(map(norm_ratio, norms)) if norms else inf
    return {
        "round": {
            "kind": "round",
            "round": after.round,
            "clients": [reply.client for reply in replies],
            "failures": [
                {"client": failure.client, "reason": failure.reason} for failure in failures
            ],
            "seconds": seconds,
            "bytes_down": sum(item.bytes_down for item in [*replies, *failures]),
            "bytes_up": sum(item.bytes_up for item in [*replies, *failures]),
            **_spread(before.objectives, updates),
            **_dropped(replies),
            "drift": drift([update.adapter for update in updates], after.adapter, before.adapter),
            "norm_ratio": ratio if isfinite(ratio) else None,
            **_gram_metrics([update for update in updates if "gram" in update.metrics]),
        },
        "clients": [
            {
                "kind": "client",
                "round": after.round,
                "client": reply.client,
                "num_examples": reply.content.num_examples,
                **reply.content.metrics,
                "bytes_down": reply.bytes_down,
                "bytes_up": reply.bytes_up,
            }
            for reply in replies
        ],
    }


def _dropped(replies: Sequence[Reply]) -> dict[str, dict[str, int]]:
    """How many unknown fields were left out of whose answers, where there were any."""
    counts = {reply.client: reply.dropped for reply in replies if reply.dropped}
    return {"dropped_fields": counts} if counts else {}


def _spread(objectives: Sequence[str], updates: Sequence[Update]) -> dict[str, dict[str, float]]:
    """How far the clients' own weights scatter, where they have some."""
    if not all("weights" in update.metrics for update in updates):
        return {}
    spread = weights_spread([update.metrics["weights"] for update in updates]).tolist()
    return {"weights_spread": dict(zip(objectives, spread, strict=True))}


def _gram_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Bounds for the first solves of a round, all at θ_t, where clients sent their Gram matrices.

    Later solves are at each client's own parameters: the mean gradient of different models tells
    of none, and weights that are averaged before they are compared may disagree by turns.
    """
    if not updates:
        return {}
    grams = [update.metrics["gram"] for update in updates]
    weights = [torch.tensor(update.metrics["weights"][0]) for update in updates]
    return {
        "stationarity": stationarity(grams),
        "disagreement_bound": disagreement_bound([torch.tensor(g) for g in grams], weights),
    }
