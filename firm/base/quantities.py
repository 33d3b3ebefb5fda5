"""Quantities: registry of the numbers that runs log, each registered where it is computed.

    register(Quantity("entropy", "Entropy of the policy", "nats per token", section="training"))

The registration defines the valid values, whether a client's value may leave its site, and how
pages, figures and dashboards draw the quantity. A new quantity needs nothing else: clients may send
it, rows of a log are validated against it, and it appears on the pages of runs and studies, among
the figures with their data, and in W&B.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from firm.base.fields import metadata
from firm.base.registry import Registry
from firm.base.schema import ByObjective, ByPair, Finite, PerEach

Kind = Literal["client", "round", "evaluation"]
Lines = Literal["clients", "clients and mean", "means"]

SHARES = ("parse", "end_share")
"""Scores and side metrics that are shares of replies, however many replies a prompt has."""

RESERVED = ("kind", "round", "client", "num_examples", "bytes_down", "bytes_up")
"""Fields of a client's row in the log that the server writes itself."""

CENTERED = {"autorangeoptions": {"include": [-0.2, 0.2]}}
"""Axis of correlations, wide enough that values near zero look like it."""
PERCENT = {"rangemode": "tozero", "tickformat": "~%"}
LOG = {"type": "log", "tickformat": "~g", "nticks": 3}
"""Axis of ratios; with more ticks plotly labels each digit of a decade."""


@dataclass(frozen=True)
class Quantity:
    """A logged number, or several numbers per objective, pair of objectives or solve."""

    name: str
    """Field in the rows."""
    title: str = ""
    """Title of the figure; {} is replaced by the objective, the pair, or the only two objectives.
    Without a title, the quantity is logged but not drawn."""
    unit: str = ""
    """Label of the axis."""
    help: str = ""
    """Explanation of the quantity, for the text of its section."""
    kind: Kind = "client"
    """Kind of the rows that contain it."""
    type: Any = None
    """Type of valid values, from `firm.base.schema`; by default a number, or numbers by name."""
    may_leave: bool = True
    """True if values of clients may leave a site whose policy has no list of metrics: statistics of
    a batch may, values of a single example may not."""
    needs: tuple[str, ...] = ()
    """Quantities without which it is meaningless."""
    noisy: Any = None
    """Type of values with noise added by a client, which may be out of range; see `type_in`."""
    section: str = "further"
    """Section of a run's page; empty: none."""
    by: Literal["", "objective", "pair"] = ""
    """Number of values: a single one, one per objective or one per pair; must match `type`."""
    lines: Lines = "clients"
    """Lines to draw: clients, clients and their mean, or only the means by objective."""
    evaluated: str = ""
    """Field of evaluations with this quantity of the global model."""
    reference: float | Literal["1/M"] | None = None
    """Position of a dashed reference line."""
    axis: Mapping[str, Any] = field(default_factory=lambda: {"rangemode": "tozero"})
    """Further attributes of plotly's y-axis."""
    is_share: bool = False
    """True if the values of all objectives sum to one, so that the second of two is redundant."""
    of: Callable[[Mapping[str, Any]], float | None] | None = None
    """Function that derives the quantity from a row."""
    better: Literal["", "higher", "lower"] = ""
    """Direction of improvement, for evaluated quantities by which settings are compared."""

    def __post_init__(self) -> None:
        named = {"": Finite, "objective": ByObjective[Finite | None], "pair": ByPair[Finite | None]}
        by = [each.pairs for each in metadata(self.type) if isinstance(each, PerEach)]
        if by and not self.by:
            object.__setattr__(self, "by", "pair" if by[0] else "objective")
        if self.type is None:
            object.__setattr__(self, "type", named[self.by])

    def type_in(self, figures: Mapping[str, Any]) -> Any:
        """Returns the type of the quantity, given a client's other metrics.

        A client that clips its update and does not report the update's norm adds noise to its
        metrics (``privacy.statistics`` is noisy). Such values may leave their range, since clamping
        them would bias their mean.
        """
        is_noisy = "clipped" in figures and "update_norm" not in figures
        return self.noisy if is_noisy and self.noisy is not None else self.type


QUANTITIES: Registry[tuple[Kind, str], Quantity] = Registry("quantity")
"""Quantities by kind of row and name; pages show them in order of registration."""


def register(*quantities: Quantity) -> None:
    """Registers quantities; registering an equal quantity again has no effect.

    Raises:
        ValueError: A name is reserved for the server, or already in use by a different quantity of
            the same kind.
    """
    for quantity in quantities:
        if quantity.kind == "client" and quantity.name in RESERVED:
            raise ValueError(
                f"the quantity {quantity.name!r} is written by the server; choose another name."
            )
        QUANTITIES.add((quantity.kind, quantity.name), quantity)


def shown(section: str) -> list[Quantity]:
    """Returns the quantities drawn in a section, in order of registration."""
    return [quantity for quantity in drawn() if quantity.section == section]


def drawn() -> list[Quantity]:
    """Returns the quantities that are drawn, in order of registration."""
    return [quantity for quantity in QUANTITIES.values() if quantity.title]


def of_clients() -> dict[str, Quantity]:
    """Returns the quantities that clients send, by name."""
    return {
        name: quantity
        for (kind, name), quantity in QUANTITIES.items()
        if kind == "client" and quantity.of is None
    }
