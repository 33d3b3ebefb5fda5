"""A client in a page, which keeps a secret that must never leave its site."""

from collections.abc import Iterator
from typing import Any

import torch

from firm.federation import Adapter, Client, Gradients, State
from firm.gradients import jacobian

OBJECTIVES = ("helpful", "harmless")
SECRET = "Human: what I told nobody"
"""Stands in every error of the clients, and must never leave a site."""


class Quadratic(Client):
    """A client in a page: objective j is half the squared distance to its target.

    Args:
        name: Its name.
        num_examples: Size of its shard, which it keeps to itself where privacy says so.
    """

    objectives = OBJECTIVES
    capabilities = frozenset({"losses"})

    def __init__(self, name: str, num_examples: int = 17) -> None:
        self.name, self.num_examples = name, num_examples
        self._targets = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
        self._parameters = {
            "first": torch.zeros(2, requires_grad=True),
            "second": torch.zeros(1, requires_grad=True),
        }

    def load(self, adapter: Adapter, round: int = 1) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if adapter[name].shape != parameter.shape:
                    raise ValueError(f"{SECRET}: another shape")
                parameter.copy_(adapter[name])

    @property
    def whole(self) -> None:
        return None

    def minibatches(self) -> Iterator[None]:
        yield None

    def batches(self, num_steps: int) -> Iterator["Quadratic"]:
        for _ in range(num_steps):
            yield self

    def gradients(self, minibatch: Any) -> Gradients:
        losses = self._losses()
        return Gradients(jacobian(losses, self._parameters.values()), losses.detach())

    def losses(self) -> torch.Tensor:
        return self._losses().detach()

    def _losses(self) -> torch.Tensor:
        point = torch.cat(list(self._parameters.values()))
        return (point - self._targets).square().sum(dim=1) / 2

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        direction = weights.float() @ gradients.jacobian.float()
        with torch.no_grad():
            for parameter, change in zip(
                self._parameters.values(), direction.split([2, 1]), strict=True
            ):
                parameter -= 0.1 * change

    def adapter(self) -> Adapter:
        return {name: value.detach().clone() for name, value in self._parameters.items()}

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        return {}


START = {"first": torch.tensor([0.1, 0.2]), "second": torch.tensor([0.3])}
