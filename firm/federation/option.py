"""Options of a federation: features such as privacy that are independent of the strategy.

An option is one file in ``firm.federation.options``. It defines the option's settings, its wrapper
of a client's training, its decoding of received updates, its steps on the server, and its
conflicts. An option that is off adds no code to the path of a round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from firm.base.registry import Registry

if TYPE_CHECKING:
    import torch

    from firm.federation.aggregation import Transform
    from firm.federation.client import Adapter, Client, Failure, Reply
    from firm.federation.engines.engine import Engine
    from firm.federation.messages import Request, Update
    from firm.federation.round_config import RoundConfig
    from firm.federation.rounds import Round

Train = Callable[["Client", Any], "Update"]
"""A client's local training: ``(client, request) -> update``, with a ``LocalTraining`` request."""

Requests = dict[type["Request"], dict[str, Any]]
"""Fields of requests, except ``ENVELOPE``, by request type."""


DECIDED_BY_SERVER = "decided by the server"
"""Placeholder for a field that the strategy's server decides in each round."""


@dataclass(frozen=True)
class Need:
    """A value of another key that an option requires."""

    key: str
    """The key below ``strategy``, such as "aggregation" or "robust.rule"."""
    value: Any
    """Required value."""
    reason: str
    """Reason, the first part of the error message."""
    others: tuple[Any, ...] = ()
    """Further valid values."""


class Option:
    """Base class of options; by default no method has an effect.

    Attributes:
        key: Name of the option, its key below ``strategy``.
        needs: Values of other keys that the option requires.
        travels: Whether clients need the option: it is sent with each ``LocalTraining``.
        row_entry: Entry that the option adds to the row of every round.
        scope: Strategies that support the option. "any": every strategy. "mean": strategies that
            take a mean of updates. "adapters": strategies in which adapters are the only messages
            of clients that train the model.
    """

    key: ClassVar[str]
    needs: ClassVar[tuple[Need, ...]] = ()
    travels: ClassVar[bool] = False
    row_entry: ClassVar[str | None] = None
    scope: ClassVar[str] = "any"

    def check(self, cfg: "RoundConfig") -> None:
        """Raises ``ValueError`` on a conflict with other keys of the strategy."""
        fits = {"any": True, "mean": cfg.averages, "adapters": cfg.sends_adapters_only}
        if not fits[self.scope]:
            raise ValueError(
                f"{self.key} {_SCOPES[self.scope]}; remove it, or choose a strategy such as fedavg "
                f"or firm, got {cfg.name}."
            )
        for need in self.needs:
            given, valid = _value(cfg, need.key, need.value), (need.value, *need.others)
            if given not in valid:
                raise ValueError(
                    f"{need.reason}; with {self.key}, {need.key} must be "
                    f"{' or '.join(map(_shown, valid))}, got {_shown(given)}."
                )

    # --- On the clients

    def wrap(self, train: Train) -> Train:
        """Returns the local training with the option applied, in the client's own process."""
        return train

    def trained(self, adapter: "Adapter", client: str) -> "torch.Tensor | None":
        """Returns a mask of the parameters that a client trains, bool [d]; None for all."""
        return None

    # In transit

    def of(self, clients: Sequence[str]) -> Self:
        """Returns the option as sent to some clients, without information about the others."""
        return self

    def to_network(self) -> Self:
        """Returns the option in the form sent over the network."""
        return self

    def num_bytes(self, num_parameters: int) -> int | None:
        """Returns the size of an update's parameters in bytes; None if it is unchanged."""
        return None

    def received(self, update: "Update", request: Any) -> "Update":
        """Returns a received update in the form that the server uses.

        Raises:
            Invalid: The update does not have the form that the option requires.
        """
        return update

    # On the server

    def check_federation(self, cfg: "RoundConfig", num_clients: int) -> None:
        """Raises ``ValueError`` if a federation of this size cannot have the option."""

    def around(self, engine: "Engine", num_clients: int) -> "Engine":
        """Adds the sites' part of the option to the engine of a run without separate sites."""
        return engine

    def requests(self, requests: Requests, cfg: "RoundConfig") -> Requests:
        """Returns the requests of a local training, the training request itself first."""
        return requests

    def quorum(self, num_refused: int) -> tuple[int, str]:
        """Returns the minimum number of answers, and text to follow it in an error message."""
        return 0, ""

    def exposes(self, failure: "Failure") -> bool:
        """Returns whether a client counts as an attacker although no answer of it was rejected."""
        return False

    def collected(self, this_round: "Round", replies: list["Reply"]) -> list["Reply"]:
        """Returns the valid replies of a training in the form that the strategy uses."""
        return replies

    def steps(self, steps: "Sequence[Transform]", cfg: "RoundConfig") -> "Sequence[Transform]":
        """Returns the server's steps with the option's steps inserted."""
        return steps

    # Outside of rounds

    def message_noise(self) -> Sequence[float] | None:
        """Returns the noise of each part of a client's message; None without accounting.

        It is in multiples of the part's sensitivity; 0 for a part without noise.
        """
        return None

    def spent_epsilon(self, noise: Mapping[float, int]) -> float | None:
        """Returns the ε of numbers of parts of messages by their noise; None without accounting."""
        return None

    def notes(self) -> list[str]:
        """Returns notes for the user about these settings; none about default values."""
        return []


OPTIONS: Registry[str, type[Option]] = Registry(
    "option",
    {
        "privacy": "firm.federation.options.privacy",
        "ranks": "firm.federation.options.ranks",
        "upload": "firm.federation.options.uploads",
    },
)
"""Options that travel with requests, by key."""

Kind = TypeVar("Kind", bound=type[Option])


def option(kind: Kind) -> Kind:
    """Registers an option that is sent to clients; a class decorator.

    Raises:
        ValueError: The key is taken.
    """
    return OPTIONS.add(kind.key, kind)


_SCOPES = {
    "mean": "requires a strategy that averages the clients' updates",
    "adapters": "covers the mean of adapters only, not the Jacobians, losses or updates by "
    "objective that other strategies send",
}


def _value(cfg: Any, key: str, default: Any) -> Any:
    """Returns the value of a key such as "robust.rule"; the default if the strategy lacks it."""
    try:
        return attrgetter(key)(cfg)
    except AttributeError:
        return default


def _shown(value: Any) -> str:
    """Formats a value as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
