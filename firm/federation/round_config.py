"""Settings of a round that are common to all strategies.

Configurations are read without torch, so that methods import what computes with it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge

from firm.base.fields import (
    NOT_IN_PAPER,
    BoundedInt,
    Hint,
    NonNegativeInt,
    NumRounds,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.base.registry import did_you_mean
from firm.federation.capabilities import Capabilities, Capability, missing
from firm.federation.option import Option, Requests
from firm.federation.schedule import ScheduleConfig

if TYPE_CHECKING:
    from firm.federation.aggregation import ServerStep, Transform
    from firm.federation.client import Failure
    from firm.federation.engines.engine import Engine

Aggregation = Literal["uniform", "by_examples"]


@configuration
class RoundConfig:
    """Settings of a round that are common to all strategies, without options."""

    name: str = ""
    """Strategy."""
    num_local_steps: Annotated[NumRounds, Ge(1), NOT_IN_PAPER] = 1
    """Local steps per round and client, K, each on a fresh batch."""
    num_local_epochs: Annotated[BoundedInt | None, Hint("null uses num_local_steps")] = None
    """Local epochs E per round (FedMGDA+, Algorithm 1), instead of a number of steps: a client's K
    is then E times the number of full batches in its shard. null uses num_local_steps, which must
    be 1 otherwise."""
    aggregation: Aggregation = "uniform"
    """Weights of the clients: uniform (1/C, as in Algorithm 1 of FIRM) or by their number of
    examples."""
    clients_per_round: Annotated[PositiveInt | None, Hint("null uses all")] = None
    """Clients sampled per round, without replacement; null uses all clients, as in the paper."""
    always: Annotated[tuple[str, ...], NOT_IN_PAPER] = ()
    """Clients that take part in every round, such as attackers; the remaining places are filled by
    sampling."""
    quorum: Annotated[PositiveInt, NOT_IN_PAPER] = 1
    """Minimum number of updates in a round; with fewer the round fails."""
    round_retries: Annotated[NonNegativeInt, NOT_IN_PAPER] = 1
    """Number of times that a failed round is tried again before the run stops. Sampled clients that
    failed are replaced by others as far as there are any."""
    max_update_norm: Annotated[PositiveFloat | None, Hint("null accepts any"), NOT_IN_PAPER] = None
    """Maximum norm ‖θ_c - θ_t‖ of an accepted update; null accepts any norm."""
    share_gram: Annotated[bool, NOT_IN_PAPER] = False
    """Send the Gram matrix of a client's first solve, M² numbers, with each update.
    These matrices, all at θ_t, bound the disagreement drift and, on the sampled batches, the
    distance of θ_t from Pareto stationarity."""
    server_learning_rate: PositiveFloat = 1.0
    """Server learning rate η, a factor of the combined update; 1 sets the model to the clients'
    mean, as in Algorithm 1 of FIRM."""
    schedule: Annotated[ScheduleConfig | None, NOT_IN_PAPER] = None
    """Course of the strategy's weights or preference over the rounds, in their place; null: the
    same in all rounds."""

    preference_key: ClassVar[str | None] = None
    """Name of the key for a preference of the objectives; None if the strategy has none."""
    sends_adapters_only: ClassVar[bool] = False
    """True if adapters are the only messages of clients that train the model, as required by
    privacy."""
    reads_losses: ClassVar[bool] = False
    """True if clients send their losses at θ_t."""
    reads_rewards: ClassVar[bool] = False
    """True if the strategy needs the mean rewards among the clients' metrics."""
    solves_on_server: ClassVar[bool] = False
    """True if the server solves for weights in every round."""
    averages: ClassVar[bool] = True
    """True if the server averages the clients' updates."""

    def __post_init__(self) -> None:
        if self.num_local_epochs is not None and self.num_local_steps != 1:
            raise ValueError(
                "num_local_steps and num_local_epochs are mutually exclusive, got "
                f"{self.num_local_steps} and {self.num_local_epochs}; remove one of them."
            )
        self._check_schedule()
        if len(set(self.always)) < len(self.always):
            raise ValueError(f"always must name each client once, got {list(self.always)}.")
        if self.clients_per_round is not None and self.clients_per_round <= len(self.always):
            raise ValueError(
                f"clients_per_round must exceed the number of clients in always, "
                f"{len(self.always)}, got {self.clients_per_round}."
            )
        if self.clients_per_round is not None and self.quorum > self.clients_per_round:
            raise ValueError(
                f"quorum must be at most clients_per_round ({self.clients_per_round}), "
                f"got {self.quorum}."
            )
        for option in self.options:
            option.check(self)

    @property
    def options(self) -> tuple[Option, ...]:
        """The enabled options, in the order in which they wrap a client's training."""
        return ()

    def steps(self, num_rounds: int) -> "list[Transform]":
        """Returns the server's steps from updates to θ_{t+1} after ``num_rounds`` rounds."""
        from firm.federation.aggregation import Count, Mean

        return [Count(self.aggregation), Mean(self.server_learning_rate)]

    def server(self, num_rounds: int = 0) -> "Callable[[ServerStep], ServerStep]":
        """Returns the server's step, including options, after ``num_rounds`` rounds."""
        from firm.federation.aggregation import chain

        steps: Sequence[Transform] = self.steps(num_rounds)
        for option in self.options:
            steps = option.steps(steps, self)
        return chain(*steps)

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        key = self.preference_key
        if key is None:
            raise ValueError(
                f"schedule needs a strategy with weights or a preference, got {self.name}; choose "
                "firm or fedavg, for example."
            )
        if getattr(self, key) is not None:
            raise ValueError(
                f"{key} must be left out with a schedule, which sets it in each round, got "
                f"{list(getattr(self, key))}."
            )

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the settings do not fit these objectives; never by default."""

    def at_round(self, number: int, objectives: Sequence[str]) -> Self:
        """Returns the settings of a round, with the weights or preference of the schedule.

        Raises:
            ValueError: The schedule does not fit the objectives, or its function fails.
        """
        if self.schedule is None:
            return self
        assert self.preference_key is not None
        shares = self.schedule.at(number, objectives)
        return replace(self, schedule=None, **{self.preference_key: shares})

    def requests(self, objectives: Sequence[str]) -> Requests:
        """Returns the fields of every request of a round by its type, except ``ENVELOPE``.

        Other fields have their defaults; fields with the value ``DECIDED_BY_SERVER`` are set by the
        server in each round. A site agrees to these requests and to no others.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement requests.")

    def solves_at_preferences(self, objectives: Sequence[str]) -> bool:
        """Returns whether a conditioned policy's clients solve for weights at each preference."""
        options = [each.get("weighting_options", {}) for each in self.requests(objectives).values()]
        return any("preference" in each for each in options)

    def alarms(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns alarms to show after a round, each only once, from the log's rows so far."""
        return []

    def check_names(self, clients: Sequence[str]) -> None:
        """Raises ``ValueError`` if an option names another client than these."""
        for key in ("always", "preferences", "ranks"):  # only some strategies have the second
            for name in getattr(self, key, ()):
                if name not in clients:
                    raise ValueError(
                        f"strategy.{key} must name clients, {clients[0]} to {clients[-1]}, got "
                        f"{name!r}{did_you_mean(name, clients)}"
                    )

    def check_clients(self, kind: str, capabilities: Capabilities) -> None:
        """Raises ``ValueError`` if a class of clients lacks a required capability.

        Args:
            kind: Name of the class.
            capabilities: Its capabilities.
        """
        needs: dict[Capability, bool] = {
            "losses": self.reads_losses,
            "rewards": self.reads_rewards,
            "epochs": self.num_local_epochs is not None,
        }
        for capability, is_needed in needs.items():
            if is_needed and capability not in capabilities:
                name = f"strategy.name {self.name}"
                raise ValueError(missing(kind, capability, strategy=name))

    def num_exposed(self, failures: Sequence["Failure"]) -> int:
        """Returns the number of clients that count as attackers.

        They are those with rejected answers, and others that an option names.
        """
        exposed = {
            failure.client
            for failure in failures
            if failure.is_refused or any(option.exposes(failure) for option in self.options)
        }
        return len(exposed)

    def least_answers(self, num_refused: int) -> tuple[int, str]:
        """Returns the minimum number of answers in a round, and the reason for the message."""
        needs = [(self.quorum, ""), *(option.quorum(num_refused) for option in self.options)]
        return max(needs, key=lambda need: need[0])

    def message_noise(self) -> Sequence[float]:
        """Returns the noise of each part of a client's message, in multiples of its sensitivity."""
        noise = (option.message_noise() for option in self.options)
        return next((own for own in noise if own is not None), (0.0,))

    def spent_epsilon(self, num_messages: int, earlier: Mapping[float, int] | None = None) -> float:
        """Returns the ε spent by messages of one client; infinite without privacy.

        Args:
            num_messages: Number of messages under these settings.
            earlier: Numbers of parts of earlier messages, by their noise.
        """
        noise = Counter(earlier)
        for part in self.message_noise():
            noise[part] += num_messages
        spent = (option.spent_epsilon(noise) for option in self.options)
        return next((epsilon for epsilon in spent if epsilon is not None), inf)

    def check_federation(self, num_clients: int) -> None:
        """Raises ``ValueError`` if an option cannot work among this number of clients."""
        for option in self.options:
            option.check_federation(self, num_clients)

    def around(self, engine: "Engine", num_clients: int) -> "Engine":
        """Adds the sites' part of the options to the engine of a run without separate sites."""
        for option in self.options:
            engine = option.around(engine, num_clients)
        return engine

    def training_requests(self, training: dict[str, Any]) -> Requests:
        """Returns the fields of the requests of a local training, the training request first.

        These are the given fields of ``LocalTraining``, possibly changed by options.
        """
        from firm.federation.training import LocalTraining

        requests: Requests = {LocalTraining: training}
        for option in self.options:
            requests = option.requests(requests, self)
        return requests

    def local_work(self) -> dict[str, Any]:
        """Returns the fields of a request that set the length of local training."""
        return {"num_local_steps": self.num_local_steps, "num_local_epochs": self.num_local_epochs}

    def training(self) -> dict[str, Any]:
        """Returns the fields of ``LocalTraining`` that every strategy's configuration sets."""
        options = {option.key: option for option in self.options if option.travels}
        return {**self.local_work(), "share_gram": self.share_gram, "options": options}
