"""FIRM: every client resolves conflicts between its objectives, and the server averages updates.

Algorithm 1 of "FIRM: Federated In-client Regularized Multi-objective Alignment" (Nourzad et al.).
"""

from collections.abc import Sequence
from typing import Any

from firm.federation.engines.engine import Engine
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FirmConfig


@strategy
def firm_round(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FirmConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FIRM, and the round's rows for the log."""
    this_round = Round(state, clients, engine, cfg)

    # the server sends the adapter θ_t to the clients of this round, and each of them takes K local
    # steps along its own consensus direction λᵀJ
    replies = this_round.train(cfg.local_training(state.objectives))

    # the server averages the valid updates, or the output of a robust rule, and steps towards the
    # mean: θ_{t+1}
    return this_round.finish(replies)
