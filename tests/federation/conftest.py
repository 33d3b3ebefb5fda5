"""Quadratic clients, the server's state before their first round, and an engine that meddles."""

import pytest
import torch

from firm.federation import Failure, Gradients, LocalEngine, Reply, ServerState
from firm.federation.engines.engine import checked_reply
from firm.gradients import jacobian
from tests.quadratic import OBJECTIVES, QuadraticClient


class SummingClient(QuadraticClient):
    """A client that takes the gradient of a weighted sum in one pass, and shares two parameters."""

    capabilities = frozenset({"losses", "weighted_gradients"})
    shared = slice(0, 2)
    num_sums = 0

    def weighted_gradients(self, minibatch: torch.Tensor, weights: torch.Tensor) -> Gradients:
        self.num_sums += 1
        losses = self._losses_at(minibatch)
        row = jacobian((weights.float() @ losses)[None], self._parameters.values())
        return Gradients(row, losses.detach())


class MeddledEngine(LocalEngine):
    """Changes one client's answers to one task on their way, before they are read.

    Args:
        clients: The clients.
        task: Name of the task.
        culprit: Whose answers.
        change: From an answer's fields to what arrives in place of them.
    """

    def __init__(self, clients, task, culprit, change):
        super().__init__(clients)
        self._task, self._culprit, self._change = task, culprit, change

    def map(self, request, clients):
        replies, failures = super().map(request, clients)
        read = [
            checked_reply(request, reply.client, self._change(dict(vars(reply.content))), 10, 10)
            if (request.task, reply.client) == (self._task, self._culprit)
            else reply
            for reply in replies
        ]
        return (
            [each for each in read if isinstance(each, Reply)],
            failures + [each for each in read if isinstance(each, Failure)],
        )


@pytest.fixture
def meddled_engine():
    """Builds a ``MeddledEngine``: ``meddled_engine(clients, task, culprit, change)``."""
    return MeddledEngine


TARGETS = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])


@pytest.fixture
def new_client():
    """Builds a client: ``new_client(name="client_0", targets=TARGETS, **options)``."""

    def build(name: str = "client_0", targets: torch.Tensor = TARGETS, **options):
        return QuadraticClient(name, targets, **options)

    return build


@pytest.fixture
def new_plain_client():
    """Builds a client of exact gradients and plain descent: ``new_plain_client(name, targets)``."""

    def build(name: str, targets: list[list[float]], *, sums: bool = False, **options):
        kind = SummingClient if sums else QuadraticClient
        plain = {"noise": 0.0, "num_minibatches": 1, "optimizer": torch.optim.SGD, "lr": 0.5}
        return kind(name, torch.tensor(targets), **{**plain, **options})

    return build


@pytest.fixture
def origin():
    """The server's state at zero."""
    adapter = {"first": torch.zeros(2), "second": torch.zeros(1)}
    return ServerState(adapter=adapter, objectives=OBJECTIVES, seed=0)


@pytest.fixture
def run_rounds():
    """Runs some rounds: ``run_rounds(strategy, clients, state, cfg)`` to the state and rows."""

    def run(strategy, clients, state, cfg, *, num_rounds: int = 1):
        engine, names, rows = LocalEngine(clients), [client.name for client in clients], []
        for _ in range(num_rounds):
            state, metrics = strategy(state, names, engine, cfg)
            rows.append(metrics)
        return state, rows

    return run


@pytest.fixture
def point():
    """The model of a state as one vector: ``point(state)``, shape [3]."""
    return lambda state: torch.cat(list(state.adapter.values()))


@pytest.fixture
def start():
    """The server's state before the first round."""
    adapter = {"first": torch.tensor([0.1, 0.2]), "second": torch.tensor([0.3])}
    return ServerState(adapter=adapter, objectives=OBJECTIVES, seed=0)
