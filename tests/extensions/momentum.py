"""A strategy of another package: FedAvg with momentum at the server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Interval

from firm.base.fields import configuration
from firm.federation import Engine, ServerState
from firm.federation.rounds import Round
from firm.federation.strategies import strategy
from firm.federation.strategies.fedavg import FedAvgConfig


@configuration
class MomentumConfig(FedAvgConfig):
    """Options of FedAvg with server momentum."""

    name: Literal["momentum"] = "momentum"
    """The strategy."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Share of the last round's velocity that stays."""


@strategy
def momentum_round(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: MomentumConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round, and the round's rows for the log."""
    this_round = Round(state, clients, engine, cfg)
    after, rows = this_round.finish(this_round.train(cfg.local_training()))
    old = state.memory.get("velocity", {})
    velocity = {
        name: after.adapter[name] - value + (cfg.momentum * old[name] if name in old else 0)
        for name, value in state.adapter.items()
    }
    adapter = {name: value + velocity[name] for name, value in state.adapter.items()}
    memory = {**after.memory, "velocity": velocity}  # options have theirs in it, too
    return replace(after, adapter=adapter, memory=memory), rows
