"""Clients' models after a round's local training, as compared in Appendix E.4 of FedCMOO.

Askin et al. (2024), arXiv:2410.16398. A trial round is run and discarded; only the clients' replies
are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firm.federation.aggregation import move_adapter
from firm.federation.client import Adapter, Failure, Reply
from firm.federation.engines.engine import Engine
from firm.federation.messages import Request, Update
from firm.federation.server import ServerState

Strategy = Callable[..., tuple[ServerState, dict[str, Any]]]
"""A strategy of ``firm.federation.strategies.STRATEGIES``."""


def local_models(
    strategy: Strategy, state: ServerState, clients: Sequence[str], engine: Engine, cfg: Any
) -> dict[str, Adapter]:
    """Returns each participant's model after the local training of a trial round.

    If clients train separately for each objective (FMGDA, FSMGDA), a client's model is the server's
    model plus the client's updates combined with the round's weights, which is its contribution to
    the global model; the paper does not state which model it uses. The engine must hold the client
    states of the server state's accepted rounds. Its pending states are those of the trial round,
    until another round of the same number replaces them.
    """
    recorder = Recorder(engine)
    _, rows = strategy(state, clients, recorder, cfg)
    weights = rows["round"].get("weights", {})
    assert recorder.request is not None
    received = recorder.request.received  # an upload may be of few bits
    return {
        reply.client: _model(received(reply.content, reply.client), state, weights)
        for reply in recorder.replies
        if reply.client in rows["round"]["clients"]
    }


def _model(content: Any, state: ServerState, weights: Mapping[str, float]) -> Adapter:
    if isinstance(content, Update):
        return content.adapter
    updates = content.updates
    return move_adapter(state.adapter, list(updates.values()), [weights[name] for name in updates])


class Recorder:
    """Wraps an engine and records the last request and the replies to it.

    Args:
        engine: Engine that runs the clients.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.request: Request | None = None
        self.replies: list[Reply] = []

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the engine's replies and failures."""
        self.request = request
        self.replies, failures = self._engine.map(request, clients)
        return self.replies, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
