"""The clients of one algorithm in a classic study."""

from dataclasses import dataclass

import torch

from firm.federation.engines.engine import Engine
from firm.federation.engines.stacked import StackedEngine
from firm.federation.strategies import StrategyConfig
from firm.fmoo.client import SupervisedClient
from firm.fmoo.workspace import Workspace


@dataclass(frozen=True, eq=False)
class SupervisedFederation:
    """The clients of one algorithm, with the components to evaluate them."""

    cfg: StrategyConfig
    """The strategy and its settings."""
    workspace: Workspace
    clients: list[SupervisedClient]
    engine: Engine
    shards: dict[str, torch.Tensor]
    """Indices of the samples that each client trains on, into the training data."""
    held_out: dict[str, torch.Tensor]
    """Indices of the samples that each client keeps for its user's accuracy; may be empty."""

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [client.name for client in self.clients]

    @property
    def has_joint_passes(self) -> bool:
        """True if all clients' gradients are computed in one pass."""
        return isinstance(self.engine, StackedEngine) and self.workspace.is_stackable
