"""The server's side of a round: its state, what it accepts, and what it reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from firm.federation.client import Adapter, Failure, Reply, State
from firm.federation.diagnostics import drift, weights_spread


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

    def advance(self, adapter: Adapter, clients: Sequence[str]) -> Self:
        """Returns the state after a round that accepted these clients' updates."""
        finished = self.round + 1
        accepted = {**self.accepted, **dict.fromkeys(clients, finished)}
        return replace(self, adapter=adapter, round=finished, accepted=accepted)

    def to_state(self) -> State:
        """Returns what a checkpoint holds; ``from_state`` is the way back."""
        return {**vars(self), "objectives": list(self.objectives)}

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Returns the server's state that ``to_state`` wrote."""
        return cls(**{**state, "objectives": tuple(state["objectives"])})


def check_round_config(num_local_steps: int, clients_per_round: int | None) -> None:
    """Raises ``ValueError`` on numbers that no strategy can run a round with."""
    if num_local_steps < 1:
        raise ValueError(f"num_local_steps must be at least 1, got {num_local_steps}.")
    if clients_per_round is not None and clients_per_round < 1:
        raise ValueError(
            f"clients_per_round must be at least 1, got {clients_per_round}; null takes all."
        )


class RoundFailed(RuntimeError):
    """No client finished a round; what the last checkpoint holds is whole."""


def accept(
    replies: Sequence[Reply], failures: Sequence[Failure], *, round_number: int
) -> tuple[list[Reply], list[Failure]]:
    """Returns the replies whose updates are finite, and all failures, with the others among them.

    Raises:
        RoundFailed: When no client is left; with the first reason.
    """
    accepted, all_failures = [], list(failures)
    for reply in replies:
        if broken := _first_nonfinite(reply.content.adapter):
            reason = f"the update is not finite in {broken!r}"
            failure = Failure(reply.client, reason, reply.bytes_down, reply.bytes_up)
            all_failures.append(failure)
        else:
            accepted.append(reply)
    if not accepted:
        first = all_failures[0]
        raise RoundFailed(
            f"No client finished round {round_number}; {first.client}: {first.reason}"
        ) from first.cause
    return accepted, all_failures


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
    spread = weights_spread([update.metrics["weights"] for update in updates]).tolist()
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
            "weights_spread": dict(zip(before.objectives, spread, strict=True)),
            "drift": drift([update.adapter for update in updates], after.adapter, before.adapter),
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


def _first_nonfinite(adapter: Adapter) -> str | None:
    return next((name for name, value in adapter.items() if not torch.isfinite(value).all()), None)
