"""Options of a federation: what any strategy can have and none has to know, such as privacy.

An option is one file in ``firm.federation.options``: its settings, what it wraps around a client's
training, what it makes of an update that arrives, its steps on the server, and its conflicts. An
option that is off does not exist: a round without options calls nothing of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

import torch
from pydantic import PlainValidator, ValidationInfo

from firm.federation.client import Adapter, Client, Reply
from firm.federation.messages import Request, Update
from firm.federation.schema import Invalid, context, invalid, read_record, shown
from firm.federation.transforms import Transform

if TYPE_CHECKING:
    from firm.federation.engines.engine import Engine
    from firm.federation.round_config import RoundConfig
    from firm.federation.rounds import Round

Train = Callable[[Client, Any], Update]
"""A client's local training: ``(client, request) -> update``, the request a ``LocalTraining``."""

Requests = dict[type[Request], dict[str, Any]]
"""Fields of requests beside ``ENVELOPE``, by the requests' types."""


@dataclass(frozen=True)
class Need:
    """A value that another key must have for an option to work."""

    key: str
    """The key below ``strategy``, such as "aggregation" or "robust.rule"."""
    value: Any
    """What it must be."""
    reason: str
    """Why; the message goes on with the key, the value and what was given."""


class Option:
    """Base class of options; every method's default changes nothing.

    Attributes:
        key: Name of the option, its key below ``strategy``.
        needs: Values that other keys must have.
        travels: Whether clients need the option: it is sent with each ``LocalTraining``.
        row_entry: Entry that the option adds to the row of every round.
        scope: What the option can work on. "any": every strategy. "mean": those that take a mean
            of updates. "adapters": those whose clients send nothing else that trains the model.
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
                f"{self.key} {_SCOPES[self.scope]}; leave it out, or choose a strategy such as "
                f"fedavg or firm, got {cfg.name}."
            )
        for need in self.needs:
            given = _value(cfg, need.key, need.value)
            if given != need.value:
                raise ValueError(
                    f"{need.reason}; with {self.key}, {need.key} must be {_shown(need.value)}, got "
                    f"{_shown(given)}."
                )

    # at the clients

    def wrap(self, train: Train) -> Train:
        """Returns the local training with the option applied, in the client's own process."""
        return train

    def trained(self, adapter: Adapter, client: str) -> torch.Tensor | None:
        """Returns which of the parameters a client trains, bool [d]; None: all."""
        return None

    # on the way

    def of(self, clients: Sequence[str]) -> Self:
        """Returns the option as it goes to some clients, without a word about the others."""
        return self

    def to_network(self) -> Self:
        """Returns the option as it leaves this program."""
        return self

    def num_bytes(self, num_parameters: int) -> int | None:
        """Returns the bytes of an update's numbers; None: those of the adapter's own type."""
        return None

    def received(self, update: Update, request: Any) -> Update:
        """Returns an update as the server uses it.

        Raises:
            Invalid: It is not as the option has clients send it.
        """
        return update

    # on the server

    def around(self, engine: "Engine") -> "Engine":
        """Returns the engine of a run in one place, with the sites' part of the option."""
        return engine

    def requests(self, requests: Requests, cfg: "RoundConfig") -> Requests:
        """Returns the requests by which clients train, that of the training first."""
        return requests

    def quorum(self, num_refused: int) -> tuple[int, str]:
        """Returns the fewest answers that a round needs, and words that follow the number."""
        return 0, ""

    def collected(self, this_round: "Round", replies: list[Reply]) -> list[Reply]:
        """Returns the valid replies of a training as the strategy uses them."""
        return replies

    def steps(self, steps: Sequence[Transform], cfg: "RoundConfig") -> Sequence[Transform]:
        """Returns the server's steps with the option's own among them."""
        return steps

    # beside a round

    def spent_epsilon(self, num_messages: int) -> float | None:
        """Returns the ε that so many messages of one client spend; None: none is accounted for."""
        return None

    def notes(self) -> list[str]:
        """Returns what a user of these settings has to know; nothing of the defaults."""
        return []


OPTIONS: dict[str, type[Option]] = {}
"""Options that travel with requests, by key."""

Kind = TypeVar("Kind", bound=type[Option])


def option(kind: Kind) -> Kind:
    """Registers an option that travels; a decorator of its class.

    Raises:
        ValueError: The key is taken.
    """
    if kind.key in OPTIONS:
        raise ValueError(f"an option {kind.key!r} exists already; choose another key.")
    OPTIONS[kind.key] = kind
    return kind


def _options(value: Any, info: ValidationInfo) -> dict[str, Option]:
    if not isinstance(value, Mapping):
        raise invalid("a mapping", value)
    for key in value:
        if key not in OPTIONS:
            raise Invalid(f" has the unknown option {shown(key)}")
    return {
        key: read_record(OPTIONS[key], item, f".{key}", context(info))
        for key, item in value.items()
    }


OptionsByKey = Annotated[dict[str, Any], PlainValidator(_options)]
"""Options of a request: registered ones, by key, in the order of application."""


_SCOPES = {
    "mean": "is for strategies that take the clients' mean",
    "adapters": "covers the mean of adapters, and not the Jacobians, losses or updates by "
    "objective that others send",
}


def _value(cfg: Any, key: str, default: Any) -> Any:
    """Returns the value of a key such as "robust.rule"; the default where a strategy lacks it."""
    try:
        return attrgetter(key)(cfg)
    except AttributeError:
        return default


def _shown(value: Any) -> str:
    """Returns a value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
