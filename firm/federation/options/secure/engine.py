"""The sites' side of secure sums: an engine that keeps updates, and sends them under masks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from firm.base.state import State
from firm.federation.aggregation import flat
from firm.federation.client import Adapter, Failure, Reply
from firm.federation.engines.engine import Engine, checked_reply, split_outcomes
from firm.federation.messages import Request, Update
from firm.federation.options.noise import share_of_noise
from firm.federation.options.secure.config import FEWEST
from firm.federation.options.secure.messages import MaskedTraining, SumRequest, Trained
from firm.federation.options.secure.part import MemoryLedger, Origin, Part, SumLedger, Terms
from firm.federation.options.secure.protocol import Identities, assumed_colluders
from firm.federation.serialization import packed_size
from firm.federation.server import too_long

EXAMPLES_PER_WEIGHT = 256
"""Examples of a client that weighs 1, where clients count by their number of examples: so large
weights and small ones are both exact enough."""
MAX_SKIPPED = 100
"""Most batches that a request can skip."""


class SecureEngine:
    """Keeps the clients' updates until they are under masks; implements ``Engine``.

    A client has one part in one sum at a time, which a new training replaces. All other calls are
    forwarded to the wrapped engine.

    Args:
        engine: Engine that runs the clients.
        identities: Signs for the clients, and checks the signatures of others.
        num_clients: Clients of the federation that this party has agreed to.
        run: Name of the run, which signatures contain.
        least_in_mean: Minimum number of updates in a sum to be opened.
        repeats: Whether a sum that was opened may be repeated with other clients.
        ledger: Record of the sums that the clients have helped to open; in memory by default.
    """

    def __init__(
        self,
        engine: Engine,
        identities: Identities,
        *,
        num_clients: int,
        run: str = "",
        least_in_mean: int = FEWEST,
        repeats: bool = False,
        ledger: SumLedger | None = None,
    ) -> None:
        self._engine, self._identities, self._run = engine, identities, run
        self._num_clients, self._least_in_mean, self._repeats = num_clients, least_in_mean, repeats
        self._ledger = MemoryLedger() if ledger is None else ledger
        self._parts: dict[str, Part] = {}

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``."""
        if isinstance(request, MaskedTraining):
            return self._train(request, clients)
        if isinstance(request, SumRequest):
            return split_outcomes(self._step(request, name) for name in clients)
        return self._engine.map(request, clients)

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns the client states of the wrapped engine."""
        return self._engine.client_states(accepted)

    def restore_client_states(self, states: State) -> None:
        """Restores the states returned by ``client_states``."""
        self._engine.restore_client_states(states)

    def close(self) -> None:
        """Closes the wrapped engine."""
        self._engine.close()

    def _train(
        self, request: MaskedTraining, clients: Sequence[str]
    ) -> tuple[list[Reply], list[Failure]]:
        """Returns keys of a new sum from clients that have trained."""
        by_skipped: dict[int, list[str]] = {}
        for name in clients:
            self._parts.pop(name, None)
            by_skipped.setdefault(self._num_skipped(request, name), []).append(name)
        outcomes: dict[str, Reply | Failure] = {}
        for skipped, names in by_skipped.items():
            replies, failures = self._engine.map(request.plain(skipped=skipped), names)
            outcomes |= {failure.client: failure for failure in failures}
            outcomes |= {reply.client: self._reply_with_keys(request, reply) for reply in replies}
        return split_outcomes(outcomes[name] for name in clients)

    def _num_skipped(self, request: MaskedTraining, client: str) -> int:
        """Returns the batches to skip where a sum may be repeated with other clients.

        Their updates from the same accepted round are in opened sums; equal updates would cancel in
        the difference of two sums.
        """
        if not self._repeats:
            return 0
        start = (self._run, client, request.accepted.get(client, 0))
        count = sum((row["run"], row["client"], row["base"]) == start for row in self._ledger.sums)
        return min(count * request.num_local_steps, MAX_SKIPPED)

    def _reply_with_keys(self, request: MaskedTraining, reply: Reply) -> Reply | Failure:
        """Returns a client's keys, or a failure if its update must not leave the site."""
        update = reply.content
        assert isinstance(update, Update)
        try:
            if reason := too_long(update.adapter, request.adapter, request.max_update_norm):
                raise ValueError(f"{reason}, and stays at its site")
            part = Part(
                reply.client,
                request.round,
                origin=Origin(request.accepted.get(reply.client, 0), _digest(request.adapter)),
                values=weighted_numbers(request, update),
                num_bytes=request.num_bytes,
                terms=Terms(
                    self._run,
                    assumed_colluders(request.num_colluders, self._num_clients),
                    request.neighbours,
                    self._least_in_mean,
                    self._repeats,
                ),
                identities=self._identities,
                ledger=self._ledger,
                noise=_noise(request, reply.client),
            )
        except ValueError as error:
            return Failure(reply.client, str(error), reply.bytes_down, kind=type(error).__name__)
        self._parts[reply.client] = part
        content = Trained(reply.client, part.public, update.metrics)
        return checked_reply(request, reply.client, content, reply.bytes_down, packed_size(content))

    def _step(self, request: SumRequest, client: str) -> Reply | Failure:
        """Returns a client's answer to a step of the sum, or why it refuses."""
        own_request = request.of(client)
        bytes_down = packed_size(own_request)
        try:
            part = self._parts.get(client)
            if part is None or part.round_number != request.round:
                raise ValueError(f"{client} has no update in a sum of round {request.round}")
            content = own_request.carried_out(part)
        except ValueError as error:
            return Failure(client, str(error), bytes_down, kind=type(error).__name__)
        return checked_reply(request, client, content, bytes_down, packed_size(content))


def _digest(adapter: Adapter) -> str:
    digest = hashlib.sha256()
    for name, parameter in adapter.items():
        digest.update(
            name.encode() + parameter.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def weighted_numbers(request: MaskedTraining, update: Update) -> np.ndarray:
    """Returns w_c (θ_c - θ_t) and w_c, float64 [d + 1]."""
    weight = 1.0
    if request.aggregation == "by_examples":
        weight = update.num_examples / EXAMPLES_PER_WEIGHT
    delta = flat(update.adapter, torch.float64) - flat(request.adapter, torch.float64)
    return np.append(weight * delta.numpy(), weight)


def _noise(request: MaskedTraining, client: str) -> Callable[[int], np.ndarray] | None:
    """Returns a function that draws a client's share of the noise; None if there is none to add."""
    privacy = request.options.get("privacy")
    if privacy is None or privacy.at != "sum":
        return None
    size = sum(parameter.numel() for parameter in request.adapter.values())

    def noise(num_honest: int) -> np.ndarray:
        return np.append(share_of_noise(privacy, client, request.round, size, num_honest), 0.0)

    return noise
