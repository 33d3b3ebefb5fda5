"""A whole client in a page: quadratic objectives, noisy batches, Adam, its own random stream."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from firm.base.quantities import Quantity, register
from firm.base.schema import Finite, Items, PerObjective
from firm.federation import Adapter, Client, Gradients, RandomStream, State
from firm.gradients import combine, jacobian

OBJECTIVES = ("left", "right")
register(Quantity("step_losses", type=Items[PerObjective[Finite]]))


@dataclass(frozen=True)
class QuadraticBatch:
    noise: torch.Tensor
    """Shift of every target, shape [num_minibatches, d]."""

    @property
    def whole(self) -> torch.Tensor:
        return self.noise.mean(dim=0)

    def minibatches(self) -> Iterator[torch.Tensor]:
        return iter(self.noise)


class QuadraticClient(Client):
    """Objective j is the half squared distance to its own target, up to a batch's noise.

    Args:
        name: Name in the federation.
        targets: Minima of the objectives, shape [M, d].
        stream_name: Name of the random stream; ``name`` by default.
        fails_in: Loads, counted from 1, at whose first step the client raises.
        diverges_in: Loads at whose end the adapter is NaN.
        served: Objectives that the client has losses for; the others' gradients are zero.
        scored: Those of which batches have losses; by default all that are served.
        scale: Factor of all losses, and so of their gradients.
        bias: Added to all losses.
        uneven_draws: Whether a batch draws one more random number while the first parameter is
            positive, as a longer reply does.
        batches_per_epoch: By default the client cannot tell.
        parameters: Names and shapes of the d parameters; three in "first" and "second" by default.
        rewarded: Objectives whose rewards, 1 less their mean loss in training, the client sends.
    """

    capabilities = frozenset({"losses"})

    def __init__(
        self,
        name: str,
        targets: torch.Tensor,
        *,
        objectives: tuple[str, ...] = OBJECTIVES,
        num_examples: int = 10,
        stream_name: str | None = None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
        lr: float = 0.1,
        noise: float = 0.5,
        num_minibatches: int = 2,
        fails_in: tuple[int, ...] = (),
        diverges_in: tuple[int, ...] = (),
        served: tuple[int, ...] | None = None,
        scored: tuple[int, ...] | None = None,
        scale: float = 1.0,
        bias: float = 0.0,
        uneven_draws: bool = False,
        batches_per_epoch: int | None = None,
        parameters: Adapter | None = None,
        rewarded: tuple[str, ...] = (),
    ):
        self.name, self.objectives, self.num_examples = name, objectives, num_examples
        self._targets, self._noise, self._num_minibatches = targets, noise, num_minibatches
        self._parameters = {
            name: torch.zeros(value.shape, requires_grad=True)
            for name, value in (
                parameters or {"first": torch.zeros(2), "second": torch.zeros(1)}
            ).items()
        }
        self._new_optimizer = partial(optimizer, self._parameters.values(), lr=lr)
        self._optimizer = self._new_optimizer()
        self._alone: dict[str, torch.optim.Optimizer] = {}
        self._in_charge = self._optimizer
        self._stream = RandomStream(7, "client", stream_name or name)
        self._num_loads, self._fails_in, self._diverges_in = 0, fails_in, diverges_in
        self._num_batches = self._num_drawn = 0
        if served is not None:
            self.served = served
        self._scored = scored
        self._scale, self._bias, self._uneven_draws = scale, bias, uneven_draws
        self._batches_per_epoch = batches_per_epoch
        self._rewarded = rewarded

    @property
    def batches_per_epoch(self) -> int:
        return self._batches_per_epoch or super().batches_per_epoch

    def load(self, adapter: Adapter, round: int = 1) -> None:
        self._num_loads += 1
        self._num_drawn = 0
        self._losses: list[list[float]] = []
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(adapter[name])

    def batches(self, num_steps: int) -> Iterator[QuadraticBatch]:
        for _ in range(num_steps):
            self._num_batches += 1
            self._num_drawn += 1
            with self._stream:
                noise = self._noise * torch.randn(self._num_minibatches, self._targets.size(1))
                if self._uneven_draws and self._parameters["first"][0] > 0:
                    torch.randn(1)
            yield QuadraticBatch(noise)

    def gradients(self, minibatch: torch.Tensor) -> Gradients:
        losses = self._losses_at(minibatch)
        rows = jacobian(losses, self._parameters.values())
        scored = self.served if self._scored is None else self._scored
        rows[[j for j in range(len(rows)) if j not in scored]] = 0.0
        served = None if self._scored is None else [list(scored)]
        return Gradients(rows, losses.detach(), served=served)

    def losses(self) -> torch.Tensor:
        return self._losses_at(torch.zeros(self._targets.size(1))).detach()

    def _losses_at(self, noise: torch.Tensor) -> torch.Tensor:
        point = torch.cat([value.reshape(-1) for value in self._parameters.values()])
        squares = (point - self._targets - noise).square().sum(dim=1)
        return self._scale * squares / 2 + self._bias  # [M]

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        if self._num_loads in self._fails_in:
            raise ArithmeticError("the quadratic has no bottom")
        self._losses.append(gradients.losses.tolist())
        direction = combine(gradients.jacobian, weights)
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        for parameter, grad in zip(self._parameters.values(), direction.split(sizes), strict=True):
            parameter.grad = grad.view(parameter.shape).clone()
        self._in_charge.step()
        if self._num_loads in self._diverges_in:
            with torch.no_grad():
                self._parameters["second"].fill_(float("nan"))

    def adapter(self) -> Adapter:
        return {name: value.detach().clone() for name, value in self._parameters.items()}

    def state(self) -> State:
        return {
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "alone": {
                name: copy.deepcopy(optimizer.state_dict())
                for name, optimizer in self._alone.items()
            },
            "stream": self._stream.state(),
            "num_batches": self._num_batches,
        }

    def restore(self, state: State) -> None:
        self._in_charge = self._optimizer
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._alone = {name: self._new_optimizer() for name in state["alone"]}
        for name, optimizer in self._alone.items():
            optimizer.load_state_dict(copy.deepcopy(state["alone"][name]))
        self._rewind(state)

    def alone(self, objective: str, state: State) -> None:
        self._in_charge = self._alone.setdefault(objective, self._new_optimizer())
        self._rewind(state)

    def _rewind(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._num_batches = state["num_batches"]

    def skip_failed_batches(self) -> None:
        list(self.batches(self._num_drawn))

    def metrics(self) -> dict:
        own = {"step_losses": self._losses, "seconds": {"step": 0.0}}
        if not self._rewarded:
            return own
        rewards = dict(zip(self.objectives, 1 - np.mean(self._losses, axis=0), strict=True))
        rewards |= {name: None for name in rewards if name not in self._rewarded}
        return own | {"rewards": rewards}
