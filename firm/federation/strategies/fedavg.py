"""FedAvg on a fixed weighted sum of the objectives: the baseline without conflict resolution.

McMahan et al. (2017), arXiv:1602.05629, with the loss Σⱼ wⱼ Lⱼ; FedProx (Li et al. 2020,
arXiv:1812.06127) with a proximal term; and FedAvg-n of Hu et al. (2022), arXiv:2006.11489, which
is FedAvg with updates of unit norm.
"""

from collections.abc import Sequence
from typing import Any

from firm.federation.engines.engine import Engine
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FedAvgConfig


@strategy
def fedavg(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedAvgConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedAvg, and the round's rows for the log."""
    this_round = Round(state, clients, engine, cfg)
    return this_round.finish(this_round.train(cfg.local_training()))
