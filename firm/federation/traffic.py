"""Counts the requests, messages and bytes in a round of a strategy."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from firm.base.errors import RoundFailed
from firm.base.state import State
from firm.federation.client import Failure, Reply
from firm.federation.messages import Message, Request, Sizes
from firm.federation.serialization import pack
from firm.federation.server import ServerState
from firm.federation.strategies import STRATEGIES, StrategyConfig

SAMPLED_PARAMETERS = 1_000_000
"""Maximum columns of the Jacobian that a planned client compresses; the bytes of the others are
proportional, up to the rounding of ranks."""


class Traffic:
    """An engine that counts messages sent and received; its clients fail to train.

    Messages contain empty adapters and Jacobians with few columns; the counts include the bytes
    that real messages would have in addition.

    Args:
        objectives: Names of the objectives.
        num_passes: Optimizer steps of one local training.
        adapter: The adapter's parameters, which may be without storage.
    """

    def __init__(
        self, objectives: tuple[str, ...], num_passes: int, adapter: Mapping[str, torch.Tensor]
    ) -> None:
        self._adapter_bytes = sum(parameter.nbytes for parameter in adapter.values())
        self._num_parameters = sum(parameter.numel() for parameter in adapter.values())
        num_columns = min(self._num_parameters, SAMPLED_PARAMETERS) or SAMPLED_PARAMETERS
        self._scale = self._num_parameters / num_columns
        self._sizes = Sizes(num_columns, num_passes, _metrics(objectives))
        self.bytes_down = self.bytes_up = self.uploads = 0
        self.num_clients = 0
        """Number of clients that train."""
        self.num_trainings = self.num_solves = 0
        """Trainings per client and round, and solves per training."""
        self.takes_whole_batches = False

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Counts the request and its replies; training requests fail, which ends the round."""
        answer = request.example(clients[0], self._sizes)
        down = len(pack(request.of(clients[0]))) + self._adapter_bytes + self._missing(request)
        up = len(pack(answer)) + self._missing(answer)
        up += request.parameter_bytes(self._num_parameters, self._adapter_bytes)
        self.bytes_down += len(clients) * down
        self.bytes_up += len(clients) * up
        self.uploads = max(self.uploads, len(clients) * up)
        self.takes_whole_batches |= request.takes_whole_batches
        if request.num_trainings == 0:
            return [Reply(name, answer, 0, 0) for name in clients], []
        self.num_clients, self.num_trainings = len(clients), request.num_trainings
        self.num_solves = request.num_solves(self._sizes.num_passes)
        return [], [Failure(name, "only planned") for name in clients]

    def _missing(self, message: Message) -> int:
        """Returns the bytes of the columns that a message omits."""
        columns = [getattr(message, name) for name in message.column_fields]
        return round((self._scale - 1) * sum(map(_tensor_bytes, columns)))

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns an empty state."""
        return {}

    def restore_client_states(self, states: State) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    entries = content.values() if isinstance(content, dict) else ()
    return sum(_tensor_bytes(entry) for entry in entries)


def round_traffic(
    strategy: StrategyConfig,
    objectives: tuple[str, ...],
    clients: Sequence[str],
    *,
    num_passes: int,
    adapter: Mapping[str, torch.Tensor],
) -> Traffic:
    """Returns the traffic of one round of a strategy.

    Args:
        strategy: The strategy.
        objectives: Names of the objectives.
        clients: Names of all clients.
        num_passes: Optimizer steps of one local training.
        adapter: The adapter's parameters, which may be without storage; empty if unknown.
    """
    traffic = Traffic(objectives, num_passes, adapter)
    state = ServerState(dict.fromkeys(adapter, torch.empty(0)), objectives=objectives, seed=0)
    with suppress(RoundFailed):
        own = strategy.at_round(1, objectives)
        STRATEGIES[strategy.name](state, clients, traffic, own)
    assert traffic.num_clients
    return traffic


def _metrics(objectives: Sequence[str]) -> dict[str, Any]:
    """Returns 7 values per objective and 30 others, a close approximation of a client's metrics."""
    digits = 1 / 3  # as many digits as a measured value
    by_objective = dict.fromkeys(objectives, digits)
    return {
        **{f"figure of objectives {i}": by_objective for i in range(7)},
        **{f"figure {i:04d}": digits for i in range(30)},
    }
