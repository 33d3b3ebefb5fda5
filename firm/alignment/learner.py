"""Training state of one client beside the adapter: its estimator and optimizer."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from firm.alignment.estimators import Estimator


@dataclass(eq=False)
class Learner:
    """An estimator with its parameters, and the adapter's optimizer.

    The optimizer is bound to the one adapter in the model but has its own moments: clients take
    turns by copying their adapters in, and each passes its learner to the trainer's stages.
    """

    estimator: Estimator
    actor_optimizer: torch.optim.Optimizer
    num_steps: int = 0
    """Optimizer steps since it was made or restored."""

    def state(self) -> dict[str, Any]:
        """Returns a deep copy of everything that training changes."""
        optimizer = self.actor_optimizer.state_dict()
        return copy.deepcopy({"estimator": self.estimator.state(), "actor_optimizer": optimizer})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state()` returned; the given state is not modified."""
        state = copy.deepcopy(state)
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.estimator.restore(state["estimator"])
        self.num_steps = 0
