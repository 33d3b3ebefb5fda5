"""A logged quantity of another package."""

from firm.base.quantities import Quantity, register

register(
    Quantity(
        "reply_loss",
        title="Loss of a reply",
        unit="nats",
        help="The negative log-probability of a whole reply.",
    )
)
