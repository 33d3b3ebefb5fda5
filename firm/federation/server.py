"""The server's side of a round: its state, what it accepts, and what it reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from statistics import median
from typing import Any, ClassVar, Self

import torch

from firm.federation.aggregation import Aggregation
from firm.federation.client import Adapter, Failure, Reply, State, Update
from firm.federation.diagnostics import (
    disagreement_bound,
    drift,
    norm_ratio,
    stationarity,
    weights_spread,
)
from firm.federation.lora import LoraMean


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
    """Whether clients send their mean Gram matrix, M² numbers, with each update: it bounds how far
    the global model is from Pareto stationarity, and the disagreement drift. Not in the paper."""
    server_learning_rate: float = 1.0
    """Server learning rate η, the factor of the clients' combined update; 1 takes their mean, as
    Algorithm 1 of FIRM does."""
    lora_mean: LoraMean = "factors"
    """What of a LoRA layer is averaged: A and B apart, as adapters are in Algorithm 1 of FIRM, or
    their products B·A, which are then brought back to rank r. Products are not in the paper."""

    averages: ClassVar[bool] = True
    """Whether the server's step is a mean of adapters, so that it may be one of products."""

    def __post_init__(self) -> None:
        if self.num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {self.num_local_steps}.")
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


class RoundFailed(RuntimeError):
    """Too few clients finished a round; what the last checkpoint holds is whole."""


Check = Callable[[Any], str | None]
"""Returns why the content of a reply cannot be used; None if it can."""


def accept(
    replies: Sequence[Reply],
    failures: Sequence[Failure],
    *,
    state: ServerState,
    cfg: RoundConfig,
    check: Check | None = None,
) -> tuple[list[Reply], list[Failure]]:
    """Returns the replies that are valid, and all failures, with the others among them.

    Valid is, unless there is another check, an update of the adapter that was sent out: the same
    names, shapes and dtypes, all values finite, a positive number of examples, and within the norm
    limit when there is one.

    Args:
        replies: What came back.
        failures: Of those from whom nothing came.
        state: The server's state that the round began with.
        cfg: The round's quorum and norm limit.
        check: What a reply must stand instead, where the content is no ``Update``.

    Raises:
        RoundFailed: When fewer than ``cfg.quorum`` are left; with every reason.
    """

    def is_update(content: Any) -> str | None:
        return invalidity(content, state.adapter, cfg.max_update_norm)

    accepted, all_failures = [], list(failures)
    for reply in replies:
        if reason := (check or is_update)(reply.content):
            failure = Failure(reply.client, reason, reply.bytes_down, reply.bytes_up)
            all_failures.append(failure)
        else:
            accepted.append(reply)
    if len(accepted) < cfg.quorum:
        reasons = "; ".join(f"{failure.client}: {failure.reason}" for failure in all_failures)
        causes = [failure.cause for failure in all_failures if failure.cause]
        raise RoundFailed(
            f"{len(accepted) or 'no'} client{'s' * (len(accepted) != 1)} finished round "
            f"{state.round + 1}, quorum {cfg.quorum} ({reasons}); repair the cause, then resume "
            f"from round {state.round}."
        ) from (causes[0] if causes else None)
    return accepted, all_failures


def invalidity(update: Any, adapter: Adapter, max_norm: float | None = None) -> str | None:
    """Returns why the server must not average an update into this adapter; None if it may.

    Args:
        update: What a client sent; anything.
        adapter: The adapter that it was sent, θ_t.
        max_norm: Longest ‖θ_c - θ_t‖; None allows any.
    """
    if not isinstance(update, Update):
        return f"the reply is no update but {type(update).__name__}"
    if strangers := update.adapter.keys() ^ adapter.keys():
        whose = "lacks" if min(strangers) in adapter else "has an unknown"
        return f"the update {whose} parameter {min(strangers)!r}"
    squares = 0.0
    for name, sent in adapter.items():
        value = update.adapter[name]
        if value.shape != sent.shape:
            return f"the update has shape {list(value.shape)} in {name!r}, not {list(sent.shape)}"
        if value.dtype != sent.dtype:
            return f"the update has dtype {value.dtype} in {name!r}, not {sent.dtype}"
        if not value.isfinite().all():
            return f"the update is not finite in {name!r}"
        squares += (value.double() - sent.double()).square().sum().item()
    if update.num_examples < 1:
        return f"the update counts {update.num_examples} examples"
    if max_norm is not None and squares**0.5 > max_norm:
        return f"the update has norm {squares**0.5:.4g}, above max_update_norm {max_norm:g}"
    return None


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


def _spread(objectives: Sequence[str], updates: Sequence[Update]) -> dict[str, dict[str, float]]:
    """How far the clients' own weights scatter, where they have some."""
    if not all("weights" in update.metrics for update in updates):
        return {}
    spread = weights_spread([update.metrics["weights"] for update in updates]).tolist()
    return {"weights_spread": dict(zip(objectives, spread, strict=True))}


def _gram_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """What the mean Gram matrices of a round tell, where clients sent them."""
    if not updates:
        return {}
    grams = [update.metrics["gram"] for update in updates]
    weights = [torch.tensor(update.metrics["weights"]).mean(dim=0) for update in updates]
    return {
        "stationarity": stationarity(grams),
        "disagreement_bound": disagreement_bound([torch.tensor(g) for g in grams], weights),
    }
