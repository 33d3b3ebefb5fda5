"""What every strategy's round does alike: draw clients, ask them, keep what is valid, report."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Any

import torch

from firm.federation.accounting import spend
from firm.federation.aggregation import update_length
from firm.federation.client import Adapter, Failure, Reply, State, Update
from firm.federation.engines.engine import Engine
from firm.federation.privacy import server_noised
from firm.federation.randomness import derive_seed
from firm.federation.sampling import sample_clients
from firm.federation.server import (
    Check,
    RoundConfig,
    ServerState,
    accept,
    round_metrics,
)
from firm.federation.validity import invalidity
from firm.solvers import fixed_weights


class Round:
    """A round under way: who takes part, and what has come back so far.

    Args:
        state: The server's state that the round begins with; never changed.
        clients: Names of all clients, in the order in which their updates are summed.
        engine: Where they run.
        cfg: What the strategy leaves to choose about a round.
    """

    def __init__(
        self, state: ServerState, clients: Sequence[str], engine: Engine, cfg: RoundConfig
    ) -> None:
        self._start = time.perf_counter()
        self._state, self._engine, self._cfg = state, engine, cfg
        self.number = state.round + 1
        self._num_clients = len(clients)
        self.sampled = sample_clients(
            clients,
            seed=state.seed,
            round_number=self.number,
            count=cfg.clients_per_round,
            always=cfg.always,
        )
        self._failures: list[Failure] = []
        self._bytes: dict[str, list[int]] = {}  # down and up, by client

    def seed(self, purpose: str) -> int:
        """Returns a seed that all clients of this round share, and no other round does."""
        return derive_seed(self._state.seed, purpose, self.number)

    def ask(
        self, task: str, clients: Sequence[str], payload: State, *, check: Check | None = None
    ) -> list[Reply]:
        """Returns the valid replies of these clients, in order; the others become failures.

        The payload goes out with the round, the accepted rounds and the adapter θ_t.

        Args:
            task: Name of a registered task.
            clients: Whom to ask.
            payload: What the task reads beside.
            check: What a reply must stand; by default that of an ``Update`` of the adapter.

        Raises:
            RoundFailed: When fewer than the quorum replied.
        """
        state = self._state
        envelope = {"round": self.number, "accepted": state.accepted, "adapter": state.adapter}
        replies, failures = self._engine.map(task, clients, {**envelope, **payload})
        for item in [*replies, *failures]:
            count = self._bytes.setdefault(item.client, [0, 0])
            count[0] += item.bytes_down
            count[1] += item.bytes_up
        replies, failures = accept(
            replies, [*self._failures, *failures], state=state, cfg=self._cfg, check=check
        )
        self._failures = failures
        return replies

    def train(
        self, payload: State, *, clients: Sequence[str] | None = None, check: Check | None = None
    ) -> list[Reply]:
        """Returns the valid replies of "local_training"; see ``ask``.

        Args:
            payload: "weighting", "weighting_options" and whatever else differs from one solve per
                minibatch.
            clients: Whom to ask; the sampled ones by default.
            check: As in ``ask``.
        """
        return self.ask(
            "local_training",
            self.sampled if clients is None else clients,
            {
                "num_local_steps": self._cfg.num_local_steps,
                "solve_per": "minibatch",
                "share_gram": self._cfg.share_gram,
                **({"privacy": asdict(self._cfg.privacy)} if self._cfg.privacy else {}),
                **payload,
            },
            check=check,
        )

    def finish(
        self,
        adapter: Adapter,
        replies: Sequence[Reply],
        *,
        memory: State | None = None,
        also: Sequence[str] = (),
        entries: State | None = None,
        learning_rate: float | None = None,
    ) -> tuple[ServerState, dict[str, Any]]:
        """Returns the server's state after the round, and the round's rows for the log.

        Bytes are those of all that was asked in the round. With privacy the server's noise, where
        it adds any, comes on top of the adapter, and the row's "privacy" is what ``spend`` tells.

        Args:
            adapter: θ_{t+1}.
            replies: The accepted replies; their contents are updates.
            memory: What the strategy carries on; as before when None.
            also: Clients without an update whose states count as after this round all the same.
            entries: What else the round's row holds, JSON-able.
            learning_rate: η that the step was taken with; the configuration's by default.
        """
        privacy = self._cfg.privacy
        if privacy is not None:
            adapter = server_noised(
                adapter,
                privacy,
                num_updates=len(replies),
                learning_rate=learning_rate or self._cfg.server_learning_rate,
                round_number=self.number,
            )
            ledger, spent = spend(
                privacy,
                self._state.memory.get("privacy", {}),
                [reply.content for reply in replies],
                asked=self.sampled,
                num_clients=self._num_clients,
                has_regulars=bool(self._cfg.always),
            )
            memory = {**(self._state.memory if memory is None else memory), "privacy": ledger}
            entries = {**(entries or {}), "privacy": spent}
        names = [reply.client for reply in replies]
        after = self._state.advance(adapter, [*names, *also], memory=memory)
        totals = [
            replace(reply, bytes_down=down, bytes_up=up)
            for reply, (down, up) in ((reply, self._bytes[reply.client]) for reply in replies)
        ]
        seconds = time.perf_counter() - self._start
        rows = round_metrics(self._state, after, totals, self._failures, seconds=seconds)
        down, up = (sum(counts) for counts in zip(*self._bytes.values(), strict=True))
        rows["round"].update(bytes_down=down, bytes_up=up, **(entries or {}))
        if privacy is not None and privacy.at == "server" and privacy.statistics != "exact":
            del rows["round"]["drift"]  # of deltas without noise
        return after, rows


def update_lengths(start: Adapter, updates: Sequence[Update]) -> list[float]:
    """Returns the lengths ‖θ_c - θ_t‖ of the updates, summed in float64."""
    return [update_length(start, update.adapter) for update in updates]


def zero_updates(replies: Sequence[Reply], lengths: Sequence[float] | None) -> dict[str, list[str]]:
    """Returns an entry of the round's row that names the clients whose updates have no direction.

    Nothing where all have one, or where it does not matter.
    """
    if lengths is None:
        return {}
    names = [reply.client for reply, length in zip(replies, lengths, strict=True) if length == 0]
    return {"zero_updates": names} if names else {}


def with_losses(state: ServerState, cfg: RoundConfig) -> Check:
    """Returns the check of updates that tell usable losses as well: M, finite, not negative."""

    def check(content: Any) -> str | None:
        if reason := invalidity(content, state.adapter, state.objectives, cfg.max_update_norm):
            return reason
        return losses_invalidity(content.metrics.get("start_losses"), state)

    return check


def losses_invalidity(losses: Any, state: ServerState) -> str | None:
    """Returns why these cannot be a client's losses at θ_t; None if they can."""
    if not isinstance(losses, list | tuple) or len(losses) != len(state.objectives):
        return f"the reply has no loss for each of {', '.join(state.objectives)}"
    for name, loss in zip(state.objectives, losses, strict=True):
        if not 0 <= loss < inf:
            return f"the loss of {name} is {loss}, not finite and non-negative"
    return None


def losses_of(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """Returns each client's weighted sum of its objectives' losses at θ_t.

    Args:
        updates: With "start_losses" among their metrics.
        weights: Of the objectives, scaled to sum 1; None weighs them alike.
    """
    rows = [update.metrics["start_losses"] for update in updates]
    losses = torch.tensor(rows, dtype=torch.float64)
    scaled = fixed_weights(torch.eye(losses.size(1), dtype=torch.float64), weights=weights)
    return (losses @ scaled).tolist()
