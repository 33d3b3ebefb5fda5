"""FedAvg on a fixed weighted sum of the objectives: the baseline without conflict resolution.

McMahan et al. (2017), arXiv:1602.05629, with the loss Σⱼ wⱼ Lⱼ; FedProx (Li et al. 2020,
arXiv:1812.06127) with a proximal term; and FedAvg-n of Hu et al. (2022), arXiv:2006.11489, which
is FedAvg with updates of unit norm.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from firm.base.fields import Hint, NonNegativeFloat, configuration
from firm.federation.aggregation import Count, Mean, Transform, UnitLengths
from firm.federation.engines.engine import Engine
from firm.federation.messages import Request
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import StrategyConfig, strategy
from firm.solvers.fixed import fixed_weights


@configuration
class ScalarConfig(StrategyConfig):
    """Options of local training on a fixed weighted sum of the objectives."""

    weights: tuple[float, ...] | None = None
    """Weight of each objective, scaled to sum 1; null weights them equally."""
    proximal: Annotated[NonNegativeFloat, Hint("0 is off")] = 0.0
    """Strength μ of the proximal term μ/2 ‖θ - θ_t‖² in the local loss."""
    decay: Annotated[float, Interval(gt=0, le=1), Hint("1 is none")] = 1.0
    """Factor of the server learning rate every 100 rounds, in (0, 1]. FedMGDA+ uses β = D^(100/T)
    for a total decay by D in T rounds: 0.891 for a decay to a tenth in 2000 rounds."""

    preference_key: ClassVar[str | None] = "weights"

    def __post_init__(self) -> None:
        fixed_weights(np.eye(max(1, len(self.weights or ()))), weights=self.weights)
        super().__post_init__()

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the weights do not fit these objectives."""
        fixed_weights(np.eye(len(objectives)), weights=self.weights)

    def local_training(self) -> dict[str, Any]:
        """Returns the fields of each round's ``LocalTraining`` request."""
        return {
            **self.training(),
            "weighting": "fixed",
            "weighting_options": {"weights": self.weights},
            "proximal": self.proximal,
            "share_losses": self.reads_losses,
        }

    def requests(self, objectives: Sequence[str]) -> dict[type[Request], dict[str, Any]]:
        """Returns the requests of a round; see ``StrategyConfig``."""
        return self.training_requests(self.local_training())

    def learning_rate(self, num_rounds: int) -> float:
        """Returns η · decay^⌊t/100⌋ after t finished rounds; it changes every 100 rounds."""
        return self.server_learning_rate * self.decay ** (num_rounds // 100)


@configuration
class FedAvgConfig(ScalarConfig):
    """Options of FedAvg on a weighted sum."""

    name: Literal["fedavg"] = "fedavg"
    """Strategy."""
    normalize_updates: bool = False
    """Normalise every update to norm 1 first (FedAvg-n); a zero update stays zero."""

    sends_adapters_only: ClassVar[bool] = True

    def steps(self, num_rounds: int) -> list[Transform]:
        """Returns the server's steps along the mean of the updates or of the normalised updates."""
        return [
            *([UnitLengths()] if self.normalize_updates else []),
            Count(self.aggregation),
            Mean(self.learning_rate(num_rounds)),
        ]


@strategy
def fedavg(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedAvgConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedAvg, and the round's rows for the log."""
    this_round = Round(state, clients, engine, cfg)
    return this_round.finish(this_round.train(cfg.local_training()))
