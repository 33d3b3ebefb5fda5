"""A round of any strategy: sample clients, send requests, drop invalid answers, report."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from firm.base.errors import RoundFailed
from firm.base.randomness import derive_seed
from firm.base.registry import did_you_mean
from firm.base.state import State
from firm.federation.aggregation import ServerStep
from firm.federation.client import Adapter, Failure, Reply
from firm.federation.engines.engine import Engine
from firm.federation.messages import Request, Update
from firm.federation.option import DECIDED_BY_SERVER
from firm.federation.round_config import RoundConfig
from firm.federation.server import (
    Check,
    FailedAttempt,
    ServerState,
    accept,
    round_metrics,
)
from firm.solvers.fixed import fixed_weights

logger = logging.getLogger(__name__)

RequestType = TypeVar("RequestType", bound=Request)
Result = TypeVar("Result")


class Round:
    """A round in progress, with its clients and the failures and bytes counted so far."""

    def __init__(
        self, state: ServerState, clients: Sequence[str], engine: Engine, cfg: RoundConfig
    ) -> None:
        self._start = time.perf_counter()
        self._state, self._clients, self._engine, self._cfg = state, clients, engine, cfg
        self.number = state.round + 1
        self.num_clients = len(clients)
        """Clients of the federation, of which some are sampled."""
        self.sampled = self.sample(state.seed, cfg.clients_per_round)
        self.failures: list[Failure] = []
        """Clients that did not answer or sent rejected answers so far."""
        self._bytes: dict[str, list[int]] = {}  # bytes [down, up] by client
        self.entries: State = {}
        """Entries of the round's row so far, JSON-able."""
        if state.attempts:
            self.entries["retries"] = len(state.attempts)
            self.entries["earlier_failures"] = [
                {"client": name, "reason": reason}
                for attempt in state.attempts
                for name, reason in attempt.failed.items()
            ]

    @property
    def adapter(self) -> Adapter:
        """θ_t."""
        return self._state.adapter

    @property
    def quorum(self) -> int:
        """Fewest updates in the round."""
        return self._cfg.quorum

    def sample(self, seed: int, count: int | None) -> list[str]:
        """Returns clients drawn by a seed; those that failed in this round only if needed."""
        attempts = self._state.attempts
        return sample_clients(
            self._clients,
            seed=seed,
            round_number=self.number,
            count=count,
            always=self._cfg.always,
            attempt=len(attempts),
            absent={name for attempt in attempts for name in attempt.failed},
        )

    def seed(self, purpose: str) -> int:
        """Returns a seed shared by all clients of this round and unique to the round."""
        return derive_seed(self._state.seed, purpose, self.number)

    def request(self, kind: type[RequestType], fields: Mapping[str, Any]) -> RequestType:
        """Returns a request for this round with these fields, θ_t, accepted rounds and rate."""
        state = self._state
        return kind(
            round=self.number,
            objectives=state.objectives,
            adapter=state.adapter,
            accepted=state.accepted,
            rate=state.rate,
            **fields,
        )

    def ask(
        self,
        request: Request,
        clients: Sequence[str],
        *,
        check: Check | None = None,
        common: Callable[[Any], Any] | None = None,
        may_fail: bool = False,
    ) -> list[Reply]:
        """Returns the valid replies of these clients, in order; the others become failures.

        The keyword arguments and the error are the same as for ``accept``.
        """
        replies, failures = self._engine.map(request, clients)
        for item in [*replies, *failures]:
            count = self._bytes.setdefault(item.client, [0, 0])
            count[0] += item.bytes_down
            count[1] += item.bytes_up
        try:
            replies, self.failures = accept(
                request,
                replies,
                [*self.failures, *failures],
                cfg=self._cfg,
                check=check,
                common=common,
                may_fail=may_fail,
            )
        except RoundFailed as error:
            error.spent = self.spent
            raise
        return replies

    @property
    def spent(self) -> tuple[int, int, float]:
        """Bytes to and from the clients, and seconds, so far."""
        down, up = (sum(counts[way] for counts in self._bytes.values()) for way in (0, 1))
        return down, up, time.perf_counter() - self._start

    def train(
        self, fields: Mapping[str, Any], *, clients: Sequence[str] | None = None
    ) -> list[Reply]:
        """Returns the valid replies to a local training request.

        Args:
            fields: Fields of ``LocalTraining``: the ones from ``StrategyConfig.training`` and the
                ones that the server decided in this round. Shared losses must be non-negative.
            clients: Clients to train; the sampled ones by default.
        """
        kind, fields = next(iter(self._cfg.training_requests(dict(fields)).items()))
        if fields.get("seed") is DECIDED_BY_SERVER:
            fields["seed"] = self.seed("training")
        request: Any = self.request(kind, fields)

        def check(update: Update) -> str | None:
            losses = update.metrics.get("start_losses")
            return losses_problem(losses, request.objectives) if request.share_losses else None

        replies = self.ask(request, self.sampled if clients is None else clients, check=check)
        for option in self._cfg.options:
            replies = option.collected(self, replies)
        return replies

    def finish(
        self,
        replies: Sequence[Reply],
        adapter: Adapter | None = None,
        *,
        memory: State | None = None,
        also: Sequence[str] = (),
        entries: State | None = None,
    ) -> tuple[ServerState, dict[str, Any]]:
        """Returns the server's state after the round, and the round's rows for the log.

        Args:
            replies: The accepted replies; their contents are updates.
            adapter: θ_{t+1}; by default the result of the server's step that the configuration
                composes, which adds its own entries to the row.
            memory: The strategy's state for the next round; unchanged when None.
            also: Clients without an update that still advance to their state after this round.
            entries: Additional entries of the round's row, JSON-able.
        """
        entries, hidden = {**self.entries, **(entries or {})}, ()
        if adapter is None:
            step = self._cfg.server(self._state.round)(self._step(replies, memory))
            adapter, memory, hidden = step.adapter, step.memory, step.hidden
            entries |= step.entries
        for option in self._cfg.options:
            if option.row_entry is not None and option.row_entry not in entries:
                raise RuntimeError(
                    f"{option.key} is part of the server's step that the configuration composes; "
                    "finish the round without an adapter."
                )
        names = [reply.client for reply in replies]
        after = self._state.advance(adapter, [*names, *also], memory=memory)
        totals = [
            replace(reply, bytes_down=down, bytes_up=up)
            for reply, (down, up) in ((reply, self._bytes[reply.client]) for reply in replies)
        ]
        spent = [self.spent, *(attempt.spent for attempt in self._state.attempts)]
        down, up, seconds = (sum(own) for own in zip(*spent, strict=True))
        rows = round_metrics(self._state, after, totals, self.failures, seconds=seconds)
        rows["round"].update(bytes_down=down, bytes_up=up, **entries)
        for name in hidden:
            del rows["round"][name]
        return after, rows

    def _step(self, replies: Sequence[Reply], memory: State | None) -> ServerStep:
        return ServerStep(
            start=self._state.adapter,
            updates=[reply.content for reply in replies],
            round=self.number,
            # also a failed attempt's requests may have been answered
            sampled=[
                *(n for attempt in self._state.attempts for n in attempt.asked),
                *self.sampled,
            ],
            num_clients=self.num_clients,
            num_refused=self._cfg.num_exposed(self.failures),
            memory=self._state.memory if memory is None else memory,
        )


def with_retries(
    strategy: Callable[..., Result],
    state: ServerState,
    clients: Sequence[str],
    engine: Engine,
    cfg: RoundConfig,
) -> Result:
    """Returns the result of a strategy's round, trying again if too few clients finish it.

    Of the clients that may be sampled, those that failed are asked again only if there are too few
    others.

    Raises:
        RoundFailed: The round has failed ``cfg.round_retries`` times and once more, or by the
            machine.
    """
    while True:
        try:
            return strategy(state, clients, engine, cfg)
        except RoundFailed as error:
            if error.is_of_machine or len(state.attempts) >= cfg.round_retries:
                raise
            logger.warning("%s. Trying the round again.", error.reason)
            attempt = FailedAttempt(error.asked, error.failed, error.spent)
            state = replace(state, attempts=(*state.attempts, attempt))


def sample_clients(
    clients: Sequence[str],
    *,
    seed: int,
    round_number: int,
    count: int | None = None,
    always: Sequence[str] = (),
    attempt: int = 0,
    absent: Collection[str] = (),
) -> list[str]:
    """Returns the clients of a round, drawn without replacement, in their given order.

    The draw depends only on the arguments, so a resumed run samples the same clients.

    Args:
        clients: All clients' names.
        seed: The run's seed.
        round_number: Round, from 1.
        count: Number of clients, from 1 to C; all by default.
        always: Names of clients that take part in every round. The others are sampled for the
            remaining places; there must be at least one.
        attempt: Number of failed attempts at the round, each of which has a draw of its own.
        absent: Names of clients that are drawn only if there are too few others.

    >>> sample_clients(["a", "b", "c"], seed=0, round_number=1)
    ['a', 'b', 'c']
    """
    if unknown := set(always) - set(clients):
        known = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
        near = did_you_mean(min(unknown), clients)
        raise ValueError(
            f"always has the unknown client {min(unknown)!r}; choose from {known}{near}"
        )
    if count is None:
        return list(clients)
    if not 1 <= count <= len(clients):
        raise ValueError(
            f"Clients per round must be from 1 to the number of clients, {len(clients)}, "
            f"got {count}."
        )
    num_always = len(set(always))
    if count <= num_always:
        raise ValueError(
            f"Clients per round must exceed the number of clients in always, {num_always}, "
            f"got {count}."
        )
    others = [name for name in clients if name not in always]
    retry = [attempt] if attempt else []
    generator = np.random.default_rng(derive_seed(seed, "sampling", round_number, *retry))
    order = [others[index] for index in generator.permutation(len(others)).tolist()]
    present_first = sorted(order, key=lambda name: name in absent)  # stable
    chosen = {*always, *present_first[: count - num_always]}
    return [name for name in clients if name in chosen]


def losses_problem(losses: Sequence[float] | None, objectives: Sequence[str]) -> str | None:
    """Returns why these are not valid losses [M] of a client at θ_t; None if they are valid."""
    if losses is None:
        return f"its answer lacks the losses of {', '.join(objectives)}"
    for name, loss in zip(objectives, losses, strict=True):
        if loss < 0:
            return f"its loss of {name} must be non-negative, got {loss:g}"
    return None


def losses_of(updates: Sequence[Update], weights: Sequence[float] | None) -> list[float]:
    """Returns each client's weighted sum of losses at θ_t; the weights are uniform by default."""
    rows = [update.metrics["start_losses"] for update in updates]
    losses = torch.tensor(rows, dtype=torch.float64)
    scaled = fixed_weights(torch.eye(losses.size(1), dtype=torch.float64), weights=weights)
    return (losses @ scaled).tolist()
