"""The site's part of secure aggregation, around whatever engine runs the clients."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from firm.federation.client import Failure, Reply, State
from firm.federation.engines.engine import Engine, checked_reply, divided, request_sizes
from firm.federation.masking import Key
from firm.federation.messages import Request, Update
from firm.federation.secure import (
    FEWEST,
    MaskedTraining,
    MaskedUpdate,
    OpenedMean,
    OpenSum,
    Secure,
    masked_update,
    opened_mean,
)
from firm.federation.serialization import pack
from firm.federation.server import too_long


def with_own_key(engine: Engine, secure: Secure | None) -> Engine:
    """Returns the engine of a run in one place, where nobody else needs the key.

    There secure aggregation protects nobody, but costs and ends as it would between sites.
    """
    return engine if secure is None else SecureEngine(engine, Key.generate())


class SecureEngine:
    """Masks what clients send before it leaves, and opens sums; implements ``Engine``.

    All else goes to the engine within.

    Args:
        engine: Runs the clients.
        key: The federation's.
        least_in_mean: Fewest updates in a sum that is opened.
    """

    def __init__(self, engine: Engine, key: Key, *, least_in_mean: int = FEWEST) -> None:
        self._engine, self._key, self._least_in_mean = engine, key, least_in_mean

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``."""
        if isinstance(request, OpenSum):
            return self._open(request, clients)
        if not isinstance(request, MaskedTraining):
            return self._engine.map(request, clients)
        replies, failures = self._engine.map(request.plain(), clients)
        kept, own_failures = divided(self._masked(request, reply) for reply in replies)
        return kept, [*failures, *own_failures]

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns the states that the engine within keeps."""
        return self._engine.client_states(accepted)

    def restore_client_states(self, states: State) -> None:
        """Continues from what ``client_states`` returned."""
        self._engine.restore_client_states(states)

    def close(self) -> None:
        """Ends what the engine within started."""
        self._engine.close()

    def _masked(self, request: MaskedTraining, reply: Reply) -> Reply | Failure:
        """Returns a client's reply under a mask, or why its update stays at the site."""
        update = reply.content
        assert isinstance(update, Update)
        begin = time.perf_counter()
        try:
            if reason := too_long(update.adapter, request.adapter, request.max_update_norm):
                raise ValueError(f"{reason}, and stays at its site")
            nonce, numbers = masked_update(request, update, self._key)
        except ValueError as error:
            return Failure(reply.client, str(error), reply.bytes_down, kind=type(error).__name__)
        metrics = update.metrics
        if "seconds" in metrics:
            seconds = {**metrics["seconds"], "mask": time.perf_counter() - begin}
            metrics = {**metrics, "seconds": seconds}
        content = MaskedUpdate(update.client, numbers, nonce, metrics)
        return replace(reply, content=content, bytes_up=len(pack(content)))

    def _open(self, request: OpenSum, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the mean that a sum gives, for each client that is asked, or why there is none.

        A sum of few updates would tell of each.
        """
        size_of = request_sizes(request)
        try:
            if len(set(request.nonces)) < max(self._least_in_mean, len(request.nonces)):
                raise ValueError(
                    f"a sum of {len(set(request.nonces))} different updates is not opened here, "
                    f"only one of at least {self._least_in_mean}"
                )
            content = OpenedMean(opened_mean(request, self._key))
        except ValueError as error:
            kind = type(error).__name__
            return [], [Failure(name, str(error), size_of(name), kind=kind) for name in clients]
        size = len(pack(content))
        outcomes = (checked_reply(request, name, content, size_of(name), size) for name in clients)
        return divided(outcomes)
