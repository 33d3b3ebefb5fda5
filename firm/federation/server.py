"""The server's side of a round: its state, the validation of answers, and the rows of the log."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple, Self

import torch

from firm.base.errors import RoundFailed
from firm.base.quantities import Quantity, register
from firm.base.sanitize import by_reason, printable
from firm.base.schema import Count, Named, NonNegative
from firm.base.state import State
from firm.federation.aggregation import update_length
from firm.federation.client import Adapter, Failure, Reply
from firm.federation.diagnostics import (
    disagreement_bound,
    drift,
    norm_ratio,
    stationarity,
    weights_spread,
)
from firm.federation.messages import Request, Update
from firm.federation.round_config import RoundConfig
from firm.federation.schema import Invalid

register(
    Quantity("seconds", kind="round", type=NonNegative),
    Quantity("retries", kind="round", type=Count),
    Quantity("dropped_fields", kind="round", type=Named[Count]),
)


class FailedAttempt(NamedTuple):
    """An attempt at a round that too few clients finished."""

    asked: tuple[str, ...]
    """Names of the clients that received a request."""
    failed: Mapping[str, str]
    """Reasons of those that did not answer, or whose answers were refused, by name."""
    spent: tuple[int, int, float] = (0, 0, 0.0)
    """Bytes to and from the clients, and seconds."""


@dataclass(frozen=True)
class ServerState:
    """State that the server keeps between rounds."""

    adapter: Adapter
    """Parameters of the global model's adapter, θ_t."""
    objectives: tuple[str, ...]
    """Names of the M objectives, in the order of every [M, ...] tensor."""
    seed: int
    """Seed of the run, from which client sampling derives its own."""
    round: int = 0
    """Number of finished rounds."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Last round with an accepted update, by client; clients without one are absent."""
    memory: State = field(default_factory=dict)
    """State of the strategy between rounds, such as the last round's weights."""
    rate: float = 1.0
    """Factor of the clients' learning rates, in (0, 1]."""
    attempts: tuple[FailedAttempt, ...] = ()
    """Failed attempts at the next round; never in a checkpoint."""

    def advance(
        self, adapter: Adapter, clients: Sequence[str], *, memory: State | None = None
    ) -> Self:
        """Returns the state after a round that accepted updates from these clients.

        Args:
            adapter: θ_{t+1}.
            clients: Names of the clients with accepted updates.
            memory: The strategy's state for the next round; unchanged when None.
        """
        finished = self.round + 1
        accepted = {**self.accepted, **dict.fromkeys(clients, finished)}
        memory = self.memory if memory is None else memory
        return replace(
            self, adapter=adapter, round=finished, accepted=accepted, memory=memory, attempts=()
        )

    def to_state(self) -> State:
        """Returns the state in the form saved in a checkpoint; the inverse of ``from_state``."""
        content = {**vars(self), "objectives": list(self.objectives)}
        del content["attempts"]  # a run that resumes begins the round anew
        return content

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Returns the server's state from the result of ``to_state``."""
        return cls(**{**state, "objectives": tuple(state["objectives"])})


Check = Callable[[Any], str | None]
"""Returns why an answer cannot be used; None if it can."""


def accept(
    request: Request,
    replies: Sequence[Reply],
    failures: Sequence[Failure],
    *,
    cfg: RoundConfig,
    check: Check | None = None,
    common: Callable[[Any], Any] | None = None,
    may_fail: bool = False,
) -> tuple[list[Reply], list[Failure]]:
    """Returns the replies that are valid in this round, and all failures.

    The engine has already validated every answer against its schema. This function checks that
    updates are within the norm limit, if there is one, and have the form that the options require.

    Args:
        request: The request that was sent.
        replies: The replies that were received.
        failures: Failures of the clients that did not answer.
        cfg: Configuration of the round with its quorum, norm limit and options.
        check: The strategy's validation of an answer.
        common: Returns a value on which all answers must agree, such as the number of columns of a
            Jacobian; answers that differ from the most frequent value are refused.
        may_fail: Whether the round continues without any answer.

    Raises:
        RoundFailed: Fewer valid answers are left than ``cfg.quorum`` or an option requires, or the
            machine or rollout engine of this program's clients failed, which can always be mended
            before a resumption.
    """
    replies, problems = list(replies), []
    for place, reply in enumerate(replies):
        replies[place], problem = _decoded_reply(reply, request)
        problems.append(problem or _problem(replies[place].content, request, cfg, check))
    if common is not None:
        problems = _with_disagreements(replies, problems, common)
    accepted, all_failures = [], list(failures)
    for reply, problem in zip(replies, problems, strict=True):
        if problem:
            failure = Failure(
                reply.client, problem, reply.bytes_down, reply.bytes_up, is_refused=True
            )
            all_failures.append(failure)
        else:
            accepted.append(reply)
    quorum, why = cfg.least_answers(cfg.num_exposed(all_failures))
    of_machine = [failure for failure in all_failures if failure.is_of_machine]
    if of_machine or (len(accepted) < quorum and not may_fail):
        reasons = "; ".join(by_reason((each.client, each.reason) for each in all_failures))
        causes = [each.cause for each in (*of_machine, *all_failures) if each.cause]
        limit = f", quorum {quorum}{why}" if len(accepted) < quorum else ", not all"
        raise RoundFailed(
            f"{len(accepted) or 'no'} client{'s' * (len(accepted) != 1)} finished round "
            f"{request.round}{limit} ({reasons or 'no failures'})",
            number=request.round,
            asked=sorted({each.client for each in (*replies, *all_failures)}),
            failed={each.client: each.reason for each in all_failures},
            is_of_machine=bool(of_machine),
        ) from (causes[0] if causes else None)
    return accepted, all_failures


def _with_disagreements(
    replies: Sequence[Reply], problems: Sequence[str | None], common: Callable[[Any], Any]
) -> list[str | None]:
    """Adds a problem for each answer that differs from the most frequent value."""
    values = [
        None if problem else common(reply.content)
        for reply, problem in zip(replies, problems, strict=True)
    ]
    counts = Counter(value for value in values if value is not None)
    usual = max(counts, key=lambda value: counts[value], default=None)
    return [
        problem or (f"its answer has {value}, the others' {usual}" if value != usual else None)
        for problem, value in zip(problems, values, strict=True)
    ]


def _decoded_reply(reply: Reply, request: Request) -> tuple[Reply, str | None]:
    """Returns a reply in the form that the server uses, or the reason why it is refused."""
    try:
        return replace(reply, content=request.received(reply.content, reply.client)), None
    except Invalid as error:
        return reply, printable(f"its answer is refused: {error}")


def _problem(content: Any, request: Request, cfg: RoundConfig, check: Check | None) -> str | None:
    if not isinstance(content, request.answer):
        return f"its answer must be of type {request.answer.__name__}, got {type(content).__name__}"
    try:
        if isinstance(content, Update):
            reason = too_long(content.adapter, request.adapter, cfg.max_update_norm)
            if reason is not None:
                return reason
        return check(content) if check else None
    except Exception as error:  # any error caused by a hostile answer is its sender's failure
        return printable(f"its answer is refused: {type(error).__name__}: {error}")


def too_long(adapter: Adapter, start: Adapter, limit: float | None) -> str | None:
    """Returns why an adapter is too far from θ_t; None if it is near enough or without a limit."""
    if limit is None:
        return None
    norm = update_length(start, adapter)
    return (
        None
        if norm <= limit
        else f"its update has norm {norm:.4g}, above max_update_norm {limit:g}"
    )


def round_metrics(
    before: ServerState,
    after: ServerState,
    replies: Sequence[Reply],
    failures: Sequence[Failure],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Returns a round's rows for the log, {"round": row, "clients": [row, ...]}, JSON-able.

    The accepted replies contain updates and are in client order; the failures are of all other
    clients that received a request.
    """
    updates = [reply.content for reply in replies]
    norms = [row for update in updates for row in update.metrics.get("gradient_norms", ())]
    ratio = median(map(norm_ratio, norms)) if norms else inf
    dropped = {reply.client: reply.dropped for reply in replies if reply.dropped}
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
            **({"dropped_fields": dropped} if dropped else {}),
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
    """Returns the spread of the clients' weights, if clients chose weights themselves."""
    if not all("weights" in update.metrics for update in updates):
        return {}
    spread = weights_spread([update.metrics["weights"] for update in updates]).tolist()
    return {"weights_spread": dict(zip(objectives, spread, strict=True))}


def _gram_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Returns bounds for the first solves of a round, at θ_t, if clients sent Gram matrices.

    Later solves are at each client's own parameters: a mean of gradients at different models is
    the gradient of none of them, and averaging weights before comparing them can hide
    disagreements that alternate. The bound on stationarity is one of the objectives that some
    client's first solve has: the others' zero gradients say nothing of the model.
    """
    if not updates:
        return {}
    first = [(update.metrics["gram"], update.metrics["weights"][0]) for update in updates]
    grams, weights = (torch.tensor(each, dtype=torch.float64) for each in zip(*first, strict=True))
    rows = (grams.diagonal(dim1=1, dim2=2) > 0).any(0) | (weights > 0).any(0)  # [M]
    bound = {"disagreement_bound": disagreement_bound(list(grams), list(weights))}
    if not rows.any():
        return bound
    return {"stationarity": stationarity(grams[:, rows][:, :, rows].tolist()), **bound}
