"""FedAvg: from the clients' adapters to the server's next one."""

from collections.abc import Sequence
from typing import Literal

import torch

from firm.federation.client import Adapter, Update

Aggregation = Literal["uniform", "by_examples"]


def aggregate(updates: Sequence[Update], *, by: Aggregation = "uniform") -> Adapter:
    """Returns the mean of the updates' adapters.

    Sums run in float64 in the order of the updates, so that equal adapters give the same adapter
    back, bit for bit, and equal updates in equal order the same mean.

    Args:
        updates: At least one; all with the same parameter names and shapes.
        by: "uniform" weighs every client 1/C, as the last line of Algorithm 1 of FIRM (Nourzad
            et al.) does; "by_examples" weighs it by the size of its shard.

    Returns:
        A new adapter in the first one's order and dtypes.

    Raises:
        ValueError: Without updates or examples, or when an adapter does not fit the first one;
            names the client.
    """
    if not updates:
        raise ValueError("There is no update to aggregate.")
    shares = [1 if by == "uniform" else update.num_examples for update in updates]
    total = sum(shares)
    if min(shares) < 0 or total <= 0:
        raise ValueError(f"Clients need examples to be weighed by, got counts {shares}.")
    first = updates[0]
    for update in updates[1:]:
        _check_fits(update, first)
    mean = {}
    for name, parameter in first.adapter.items():
        accumulator = torch.zeros(parameter.shape, dtype=torch.float64)
        for update, share in zip(updates, shares, strict=True):
            accumulator += share * update.adapter[name].double()
        mean[name] = (accumulator / total).to(parameter.dtype)
    return mean


def _check_fits(update: Update, first: Update) -> None:
    if strangers := update.adapter.keys() ^ first.adapter.keys():
        raise ValueError(
            f"The update of {update.client} has other parameters than that of {first.client}, "
            f"first {min(strangers)!r}; all clients need the same model and adapter settings."
        )
    for name, parameter in first.adapter.items():
        shape = update.adapter[name].shape
        if shape != parameter.shape:
            raise ValueError(
                f"The update of {update.client} has shape {list(shape)} for {name!r}, that of "
                f"{first.client} {list(parameter.shape)}; use one adapter configuration for all."
            )
