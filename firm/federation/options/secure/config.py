"""Settings of secure sums, which are read without the cryptography."""

from typing import Annotated, Literal, NotRequired, TypedDict

from firm.base.fields import NOT_IN_PAPER, Hint, NonNegativeInt, configuration
from firm.base.quantities import Quantity, register
from firm.base.schema import Count, NonNegative

Secure = Literal["masks"]
Neighbours = Literal["all", "few"]
NUM_BYTES: dict[str, int] = {"uniform": 6, "by_examples": 8}
"""Bytes of a number, by how clients count: 10⁹ examples in 256ths need more than 48 bits."""
TASKS = ("masked_training", "share_keys", "send_masked", "confirm_members", "reveal_shares")
"""Tasks of a secure sum, in order."""
FEWEST = 2
"""Fewest updates in a sum: the mean of a single one would reveal it."""


class SecureFigures(TypedDict):
    """Metrics of a secure sum, in the row of its round."""

    num_updates: Count
    masked_bytes: NotRequired[Count]
    seconds: NotRequired[NonNegative]
    rounding: NotRequired[NonNegative]


register(Quantity("secure", kind="round", type=SecureFigures))


@configuration(source=NOT_IN_PAPER)
class MasksConfig:
    """Assumptions of the masks of secure sums."""

    num_colluders: Annotated[NonNegativeInt | None, Hint("null is a third of the clients")] = None
    """Number f of the federation's clients that may collude with the server, which may ask all of
    them in one round. A sum of n clients requires at least f + 2, and more than (n + f) / 2 that
    stay to its end; null is a third of the federation, rounded down."""
    neighbours: Neighbours = "all"
    """Pairs of clients that share a mask. all: every pair. few: each client and its neighbours in a
    random graph, which fails to protect with a probability of at most 2^-40; for hundreds of
    clients, few of which collude."""
