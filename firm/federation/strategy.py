"""Strategies: the options that all have, and the registry that each one's file fills."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from annotated_types import Ge

from firm.federation.accounting import require_accountant
from firm.federation.aggregation import Aggregation
from firm.federation.client import Capability, Client, missing
from firm.federation.lora import LoraMean
from firm.federation.masking import MAX_MESSAGES
from firm.federation.messages import Request
from firm.federation.privacy import PrivacyConfig
from firm.federation.robust import RobustConfig
from firm.federation.secure import FEWEST, Secure, secure_requests
from firm.federation.training import LocalTraining
from firm.federation.transforms import (
    Count,
    Mean,
    Privacy,
    Robust,
    Secured,
    ServerStep,
    Transform,
    chain,
)
from firm.federation.uploads import UploadConfig
from firm.fields import NOT_IN_PAPER, Hint, NumRounds, PositiveFloat, PositiveInt, configuration


@configuration
class StrategyConfig:
    """Options of a round that every strategy has; a strategy's own come on top."""

    name: str = ""
    """The strategy."""
    num_local_steps: Annotated[NumRounds, Ge(1), NOT_IN_PAPER] = 1
    """Local steps per round and client, K, each on a fresh batch."""
    num_local_epochs: Annotated[PositiveInt | None, Hint("null counts in num_local_steps")] = None
    """Passes of each client over its own shard per round, E of FedMGDA+'s Algorithm 1, in place of
    a number of steps: a client's K is then E times the whole batches in its shard. null counts in
    num_local_steps, which must stay 1 otherwise."""
    aggregation: Aggregation = "uniform"
    """Whether clients count alike (1/C, as in Algorithm 1 of FIRM) or by their number of
    examples."""
    clients_per_round: Annotated[PositiveInt | None, Hint("null takes all")] = None
    """Clients drawn for each round, without replacement; null takes all, as the paper does."""
    always: Annotated[tuple[str, ...], NOT_IN_PAPER] = ()
    """Names of clients that take part in every round, such as attackers; the others are drawn for
    the places that are left."""
    quorum: Annotated[PositiveInt, NOT_IN_PAPER] = 1
    """Fewest clients whose updates a round needs; with fewer the run stops."""
    max_update_norm: Annotated[PositiveFloat | None, Hint("null accepts any"), NOT_IN_PAPER] = None
    """Longest update ‖θ_c - θ_t‖ that is accepted; null accepts any length."""
    share_gram: Annotated[bool, NOT_IN_PAPER] = False
    """Whether clients send the Gram matrix of their first solve, M² numbers, with each update: at
    the common model θ_t it bounds the disagreement drift and, for the batches drawn there, how far
    θ_t is from Pareto stationarity."""
    server_learning_rate: PositiveFloat = 1.0
    """Server learning rate η, the factor of the clients' combined update; 1 takes their mean, as
    Algorithm 1 of FIRM does."""
    lora_mean: Annotated[LoraMean, NOT_IN_PAPER] = "factors"
    """What of a LoRA layer is averaged: A and B apart, as adapters are in Algorithm 1 of FIRM, or
    their products B·A, which are then brought back to rank r."""
    robust: Annotated[RobustConfig, NOT_IN_PAPER] = field(default_factory=RobustConfig)
    """Robust aggregation, where some clients may attack."""
    privacy: Annotated[PrivacyConfig | None, NOT_IN_PAPER] = None
    """Differential privacy of the clients; null: none."""
    secure: Annotated[Secure | None, NOT_IN_PAPER] = None
    """Secure aggregation: sites hide updates under masks, and a server that follows the protocol
    and repeats no round learns their mean alone; null: none."""
    upload: Annotated[UploadConfig | None, NOT_IN_PAPER] = None
    """Quantised uploads; null sends updates in the adapter's own type."""
    ranks: Annotated[dict[str, PositiveInt], NOT_IN_PAPER] = field(default_factory=dict)
    """Ranks of single clients, by name, where they are fewer than the adapter's: such a client
    trains and sends the first ones of each LoRA layer."""

    preference_key: ClassVar[str | None] = None
    """Name of the option that takes a preference of the objectives; None where there is none."""
    sends_adapters_only: ClassVar[bool] = False
    """Whether clients send nothing that trains the model but their adapters, which is all that
    privacy covers."""
    reads_losses: ClassVar[bool] = False
    """Whether clients send their losses at θ_t."""
    solves_on_server: ClassVar[bool] = False
    """Whether the server solves for weights in every round."""
    averages: ClassVar[bool] = True
    """Whether the server's step is a mean of adapters, so that it may be one of products."""

    def __post_init__(self) -> None:
        if self.num_local_epochs is not None and self.num_local_steps != 1:
            raise ValueError(
                "local training has num_local_steps or num_local_epochs, got both, "
                f"{self.num_local_steps} and {self.num_local_epochs}; leave one of them out."
            )
        if len(set(self.always)) < len(self.always):
            raise ValueError(f"always must name each client once, got {list(self.always)}.")
        if self.clients_per_round is not None and self.clients_per_round <= len(self.always):
            raise ValueError(
                f"clients_per_round must be more than the {len(self.always)} that always take "
                f"part, got {self.clients_per_round}."
            )
        if self.clients_per_round is not None and self.quorum > self.clients_per_round:
            raise ValueError(
                f"quorum must be at most clients_per_round ({self.clients_per_round}), "
                f"got {self.quorum}."
            )
        self._check_averages()
        if self.privacy is not None:
            self._check_privacy(self.privacy)
        if self.secure is not None:
            self._check_secure()
        if self.upload is not None and self.privacy is not None and self.privacy.at == "server":
            raise ValueError(
                "rounding makes a clipped update longer than privacy.clip_norm, which the server "
                "refuses; with upload set privacy.at to client, got server."
            )
        if self.ranks:
            self._check_ranks()
        self.server()  # or its transformations do not go together

    def server(self, num_rounds: int = 0) -> Callable[[ServerStep], ServerStep]:
        """Returns the server's step, composed, after so many finished rounds.

        Raises:
            ValueError: Options of the step do not go together.
        """
        return chain(
            Robust(self.robust),
            Count(self.aggregation),
            Mean(self.lora_mean, self.server_learning_rate),
            *self.protections(),
        )

    def protections(self) -> tuple[Transform, ...]:
        """Returns the end of every server's step: what keeps clients' data from others."""
        return Privacy(self.privacy, has_regulars=bool(self.always)), Secured(self.secure)

    @classmethod
    def forms(cls) -> list[type["StrategyConfig"]]:
        """Returns the registered configurations of this kind, each with its own ``name``."""
        return [_CONFIGS[name] for name in sorted(STRATEGIES) if issubclass(_CONFIGS[name], cls)]

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` on options that do not fit these objectives; by default all do."""

    def requests(self, objectives: Sequence[str]) -> dict[type[Request], dict[str, Any]]:
        """Returns the fields of every request of a round beside ``ENVELOPE``, by its type.

        A field that is not among them has its default, and one whose value is ``DECIDED_BY_SERVER``
        is the server's to decide in each round. A site agrees to these requests and to no others.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it asks of clients.")

    def alarms(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns alarms to show after a round, each text once, from the log's rows so far."""
        return []

    def check_clients(self, kind: type[Client]) -> None:
        """Raises ``ValueError`` on a class of clients that lacks a needed capability."""
        needs: dict[Capability, bool] = {
            "losses": self.reads_losses,
            "epochs": self.num_local_epochs is not None,
        }
        for capability, is_needed in needs.items():
            if is_needed and capability not in kind.capabilities:
                name = f"strategy.name {self.name}"
                raise ValueError(missing(kind.__name__, capability, strategy=name))

    def training_requests(self, training: dict[str, Any]) -> dict[type[Request], dict[str, Any]]:
        """Returns the fields of the requests by which clients train, that of the training first.

        These are the given ones of ``LocalTraining``, or what secure aggregation makes of them.
        """
        if self.secure is None:
            return {LocalTraining: training}
        return secure_requests(
            training, aggregation=self.aggregation, max_update_norm=self.max_update_norm
        )

    def local_work(self) -> dict[str, Any]:
        """Returns the fields of a request that say how long local training is."""
        return {"num_local_steps": self.num_local_steps, "num_local_epochs": self.num_local_epochs}

    def training(self) -> dict[str, Any]:
        """Returns the fields of ``LocalTraining`` that every strategy's configuration decides."""
        return {
            **self.local_work(),
            "share_gram": self.share_gram,
            "privacy": self.privacy,
            "upload": self.upload,
            "ranks": self.ranks,
        }

    def _check_averages(self) -> None:
        """Raises ``ValueError`` on options of a mean where none is taken, or of too few updates."""
        rule, least = self.robust.rule, self.robust.min_updates
        means = ", ".join(kind.name for kind in StrategyConfig.forms() if kind.averages)
        if not self.averages and self.lora_mean == "products":
            raise ValueError(
                f"lora_mean products is for strategies that take the clients' mean ({means}); "
                f"{type(self).__name__} needs factors."
            )
        if not self.averages and rule != "none":
            raise ValueError(
                f"robust is for strategies that take the clients' mean ({means}); "
                f"{type(self).__name__} needs robust.rule none, got {rule}."
            )
        if self.clients_per_round is not None and self.clients_per_round < least:
            raise ValueError(
                f"robust.rule {rule} with num_attackers {self.robust.num_attackers} needs "
                f"clients_per_round of at least {least}, got {self.clients_per_round}."
            )

    def _check_privacy(self, privacy: PrivacyConfig) -> None:
        """Raises ``ValueError`` where ε would not hold of what clients send."""
        self._check_sends_adapters_only("privacy")
        if self.max_update_norm is not None:
            raise ValueError(
                "privacy.clip_norm limits the updates already, and refusing one would reveal it; "
                f"max_update_norm must be null, got {self.max_update_norm}."
            )
        if self.share_gram and privacy.statistics != "exact":
            raise ValueError(
                "share_gram sends exact Gram matrices; with privacy set it to false, or "
                f"privacy.statistics to exact, got {privacy.statistics}."
            )
        require_accountant()

    def _check_secure(self) -> None:
        """Raises ``ValueError`` where the server could not do its part without single updates."""
        self._check_sends_adapters_only("secure aggregation")
        if self.upload is not None:
            raise ValueError(
                "masks hide whole numbers of 48 bits, whatever an update was rounded to; upload "
                f"must be null with secure aggregation, got {self.upload.bits} bits."
            )
        if not FEWEST <= (self.clients_per_round or FEWEST) <= MAX_MESSAGES:
            raise ValueError(
                f"secure aggregation adds {FEWEST} to {MAX_MESSAGES} updates; clients_per_round "
                f"must be in that range, got {self.clients_per_round}."
            )

    def _check_ranks(self) -> None:
        """Raises ``ValueError`` where a mean over those who train a rank would not do."""
        self._check_sends_adapters_only("ranks")
        problems = {
            "robust.rule must be none": self.robust.rule != "none",
            "lora_mean must be factors": self.lora_mean != "factors",
            "normalize_updates must be false": getattr(self, "normalize_updates", False),
            "privacy must be null": self.privacy is not None,
            "secure must be null": self.secure is not None,
        }
        for problem in (text for text, is_there in problems.items() if is_there):
            raise ValueError(
                "where clients have ranks of their own, each rank is averaged over those who train "
                f"it; {problem}."
            )

    def _check_sends_adapters_only(self, what: str) -> None:
        """Raises ``ValueError`` where clients send more of their gradients than an adapter."""
        if not self.sends_adapters_only:
            kinds = [kind for kind in StrategyConfig.forms() if kind.sends_adapters_only]
            raise ValueError(
                f"{what} covers the mean of adapters, and not the Jacobians, losses or updates by "
                "objective that others send; it is for strategies "
                f"{', '.join(kind.name for kind in kinds)}, got {type(self).__name__}."
            )


Strategy = Callable[..., tuple[Any, dict[str, Any]]]
"""One round of an algorithm: ``(state, clients, engine, cfg) -> (state, metrics)``.

From the server's state (never changed), the names of all clients in the order in which their
updates are summed, the engine that runs them and the strategy's configuration, to the state after
the round and the round's rows for the log. Raises ``RoundFailed`` when fewer than ``cfg.quorum``
clients finished.
"""

STRATEGIES: dict[str, Strategy] = {}
"""Every strategy by its configuration's ``name``."""
_CONFIGS: dict[str, type[StrategyConfig]] = {}

Function = TypeVar("Function", bound=Strategy)


def strategy(function: Function) -> Function:
    """Registers a strategy under the ``name`` of its configuration, the type of its ``cfg``."""
    config = get_type_hints(function).get("cfg")
    if not (isinstance(config, type) and issubclass(config, StrategyConfig)):
        raise ValueError(f"{function.__name__} needs an argument cfg, a StrategyConfig.")
    name = config.__dataclass_fields__["name"].default
    if not name or name in STRATEGIES:
        raise ValueError(
            f"{config.__name__} needs a name of its own, got {name!r}; taken: "
            f"{', '.join(STRATEGIES)}."
        )
    STRATEGIES[name], _CONFIGS[name] = function, config
    return function
