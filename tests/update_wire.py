"""An update's way from a client to the server, through the options of its request."""

from functools import reduce

from firm.federation import Update
from firm.federation.training import LocalTraining


def training(start, *options):
    """Returns a request of a local training with options."""
    return LocalTraining(
        round=1,
        objectives=("left", "right"),
        adapter=start,
        num_local_steps=1,
        weighting="fixed",
        options={option.key: option for option in options},
    )


def sent(client, adapter, request):
    """Returns the form in which an adapter leaves a client that trained it."""

    def train(client, request):
        return Update(client.name, adapter, 1, {"num_steps": 1})

    wrapped = reduce(lambda inner, option: option.wrap(inner), request.options.values(), train)
    return wrapped(client, request).adapter


def received(content, request, client="a"):
    """Returns the adapter that the server has of it."""
    return request.received(Update(client, content, 1, {}), client).adapter
