"""A trust region for the rounds of a run: undoes updates after which the policy runs away.

The KL from the base model of the replies that round t trains on belongs to the adapter that it
starts from, θ_{t-1}, and with several local steps also to the clients' own. It is measured anyway,
so that the guard costs nothing. What round t - 1 did to the policy is known at the end of round t:
both are undone then, and round t + 1 starts from θ_{t-2}.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from firm.alignment.stop_rules import StopRule
from firm.base.fields import (
    NOT_IN_PAPER,
    Hint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    configuration,
)
from firm.base.state import State

if TYPE_CHECKING:
    from firm.federation.server import ServerState

NUM_RECENT = 5
"""Rounds whose KL defines the trust region."""
_BLIND = (
    "guard.kl_growth and guard.max_kl have no effect, since no client reports response_length, of "
    "which they are multiples: let the sites' policy.metrics contain it."
)


@configuration(source=NOT_IN_PAPER)
class GuardConfig:
    """Protection against policies that run away from the base model.

    The KL of a round is the clients' median on the replies that they train on; of a conditioned
    policy the largest of those weighted by the preference for an objective. With pairs it is the
    loss of log-probability of the preferred replies.
    """

    kl_growth: Annotated[float | None, Ge(1), Hint("null is off")] = 2.0
    """Trust region of a round: its KL may be up to this multiple of the largest one in the five
    rounds before, plus `kl_slack` per token. Beyond it this round and the one before are undone,
    and the learning rates are halved from then on. null: no trust region."""
    kl_slack: NonNegativeFloat = 0.1
    """Nats per token of the first round's replies that the trust region adds."""
    max_kl: Annotated[PositiveFloat | None, Hint("null is off")] = 1.0
    """Ceiling of a round's KL, in nats per token of the first round's replies. Above it the run
    ends with its best adapter. null: no ceiling."""
    max_rollbacks: NonNegativeInt = 5
    """Updates that are undone before the run ends with its best adapter."""
    stop_when: tuple[str, ...] = ()
    """Rules that end the run, with its best adapter, such as "kl > 8", "rewards.helpful >= 0.9",
    "validation.rewards.helpful < 0.4", or "response_length < 4 for 3" in three consecutive
    rounds."""

    def __post_init__(self) -> None:
        _ = self.rules

    @property
    def rules(self) -> list[StopRule]:
        """The rules of `stop_when`."""
        if self.stop_when:  # their quantities are registered where they are computed
            for module in ("strategies", "objective_training", "rounds"):
                import_module(f"firm.federation.{module}")
            import_module("firm.alignment.client")
        return [StopRule.parse(text) for text in self.stop_when]


class KLGuard:
    """Judges each round by its KL, and keeps the last adapter inside the trust region.

    Args:
        config: Its limits.
        is_fresh: Whether the run starts from the base model, whose KL is zero; otherwise the first
            round's KL is the start's own, from which the limits count.
    """

    def __init__(self, config: GuardConfig, *, is_fresh: bool = True) -> None:
        self.config = config
        self.stopped = ""
        """Why the run has ended before its last round; empty if it has not."""
        self._kls = [0.0] if is_fresh else []
        self._start_kl: float | None = 0.0 if is_fresh else None
        self._num_tokens = 0.0
        self._num_rollbacks = 0
        self._good: State = {}
        self.undone_round: int | None = None
        """The last round whose update was undone; None if none was."""

    def judge(
        self, clients: Sequence[Mapping[str, Any]], before: "ServerState", after: "ServerState"
    ) -> "tuple[ServerState, list[str]]":
        """Returns the state to continue from after a round, and alarms.

        This is `after`, unless the policy that the round started from had run away.

        Args:
            clients: The round's rows of the clients.
            before: The server's state before the round.
            after: Its state after the round.
        """
        self._good = self._good or _checkpoint(before)
        kl, num_tokens = round_kl(clients), _median(clients, "response_length")
        if not self._num_tokens and num_tokens is not None:
            self._num_tokens = max(1.0, num_tokens)
        if kl is None or not self._num_tokens:  # hidden by the clients or their sites
            return after, []
        if self._start_kl is None:
            self._start_kl = kl
        is_of_pairs = any("preferred_log_ratio" in row for row in _trainings(clients))
        what = "the KL of its replies"
        if is_of_pairs:
            what = "the log-probability that preferred replies have lost"
        limit, ceiling, found = self.limit, self.ceiling, f"{what}, {kl:.3g} nats, is above"
        if limit is not None and kl > limit:
            return self._undo(after, f"{found} the trust region's {limit:.3g}")
        if ceiling is not None and kl > ceiling:
            self.stopped = (
                f"{found} the ceiling of {ceiling:.3g} (guard.max_kl {self.config.max_kl:g} per "
                "token). Lower estimator.actor_learning_rate or estimator.num_epochs, or raise "
                + ("estimator.beta" if is_of_pairs else "estimator.kl.coefficient")
            )
            return after, [_end_alarm(self.stopped)]
        self._kls = [*self._kls, kl][-NUM_RECENT:]  # inside: the region moves along
        if before.round != self.undone_round:  # which has the adapter of an earlier round
            self._good = _checkpoint(before)  # the KL measured now is that of the round's start
        return after, []

    def blind_alarms(self, clients: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns an alarm if the first round's rows have a KL, but no length to judge it by."""
        has_limits = self.config.kl_growth is not None or self.config.max_kl is not None
        is_blind = round_kl(clients) is not None and not self._num_tokens
        return [_BLIND] if has_limits and is_blind else []

    @property
    def limit(self) -> float | None:
        """The trust region's largest KL in nats per reply; None if there is none yet."""
        growth = self.config.kl_growth
        if growth is None or not self._kls or not self._num_tokens:
            return None
        # estimates of a small KL may be negative
        return growth * max(0.0, *self._kls) + self.config.kl_slack * self._num_tokens

    @property
    def ceiling(self) -> float | None:
        """The largest KL in nats per reply; None if there is none yet."""
        most = self.config.max_kl
        if most is None or self._start_kl is None or not self._num_tokens:
            return None
        return self._start_kl + most * self._num_tokens

    def is_inside(self, kl: float | None) -> bool:
        """Returns whether a KL is within trust region and ceiling; true if one is unknown."""
        limits = [limit for limit in (self.limit, self.ceiling) if limit is not None]
        return kl is None or kl <= min(limits, default=kl)

    def good(self, state: "ServerState") -> "ServerState":
        """Returns a state with the last adapter that was measured inside the trust region."""
        return replace(state, adapter=self._good["adapter"]) if self._good else state

    @property
    def good_round(self) -> int | None:
        """The round after which that adapter was reached; None if there is none yet."""
        return self._good.get("round")

    def state(self) -> State:
        """Returns the state to keep in a checkpoint."""
        return {
            "kls": list(self._kls),
            "start_kl": self._start_kl,
            "num_tokens": self._num_tokens,
            "num_rollbacks": self._num_rollbacks,
            "stopped": self.stopped,
            "good": self._good,
            "undone_round": self.undone_round,
        }

    def restore(self, state: State) -> None:
        """Restores a state returned by `state`."""
        self._kls, self._num_tokens = list(state["kls"]), state["num_tokens"]
        self._num_rollbacks, self.stopped = state["num_rollbacks"], state["stopped"]
        self._start_kl, self._good = state["start_kl"], state["good"]
        self.undone_round = state.get("undone_round")  # absent in older checkpoints

    def _undo(self, after: "ServerState", why: str) -> "tuple[ServerState, list[str]]":
        self.undone_round = after.round
        if self._num_rollbacks >= self.config.max_rollbacks:
            self.stopped = f"{why}, after {self._num_rollbacks} undone updates"
            return self.good(after), [_end_alarm(self.stopped)]
        self._num_rollbacks += 1
        # the strategy's memory stays: what it has counted, such as the clients' ε, has happened
        state = replace(self.good(after), rate=after.rate / 2)
        return state, [
            f"{why}: training continues from the adapter of round {self._good['round']}, with "
            f"learning rates times {state.rate:g}."
        ]


def round_kl(clients: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the KL of a round, in nats per reply; None if no client reports it.

    It is the median over the clients; of a conditioned policy the largest median by objective. The
    median is not moved by a client that alone has a few unlikely replies.

    Args:
        clients: Rows of the clients, with "kl" and "kl_by_preference", or "preferred_log_ratio";
            of clients that train objectives separately, one such row each in "by_objective".
    """
    rows = _trainings(clients)
    known = [row for row in rows if not ("clipped" in row and "update_norm" not in row)]  # noisy
    kls = [row["kl"] for row in known if row.get("kl") is not None]
    # of pairs
    kls += [-row["preferred_log_ratio"] for row in known if "preferred_log_ratio" in row]
    asked = [row["kl_by_preference"] for row in known if row.get("kl_by_preference")]
    names = asked[0] if asked else ()
    by_objective = [[own[name] for own in asked if own.get(name) is not None] for name in names]
    return max((median(column) for column in [kls, *by_objective] if column), default=None)


def _trainings(clients: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the clients' rows, or their rows by objective where these are trained separately."""
    return [own for row in clients for own in row.get("by_objective", {"": row}).values()]


def _median(clients: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [row[key] for row in _trainings(clients) if row.get(key) is not None]
    return median(known) if known else None


def _checkpoint(state: "ServerState") -> State:
    return {"adapter": state.adapter, "round": state.round}


def _end_alarm(why: str) -> str:
    return f"the run ends, because {why}."
