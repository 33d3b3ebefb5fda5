"""What a client is to the server: the protocol it implements and the records it exchanges.

Nothing here knows text or images. Whatever can turn a minibatch into one gradient per objective
and take a step can be federated by every strategy, on every engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Adapter = dict[str, torch.Tensor]
"""The trained parameters by name: detached CPU float tensors, always in the same order."""

State = dict[str, Any]
"""What a checkpoint can hold: nested dicts and lists of tensors, numbers, strings, bools, None."""


@dataclass(frozen=True)
class Gradients:
    """One minibatch's gradients, one row per objective."""

    jacobian: torch.Tensor
    """Gradient of each objective's loss in the adapter's parameters, shape [M, d]."""
    losses: torch.Tensor
    """Loss of each objective, shape [M]."""
    aux: Any = None
    """What the client's own ``step`` needs beside (a critic's gradients, say); opaque here."""


class Batch(Protocol):
    """The data of one local step."""

    @property
    def whole(self) -> Any:
        """The whole batch as one thing that ``gradients`` takes; weights per batch come of it."""
        ...

    def minibatches(self) -> Iterator[Any]:
        """Yields what ``gradients`` takes, in the order of use (PPO: epochs x minibatches)."""
        ...


class Client(Protocol):
    """A private shard of data with a model that can give gradients and take steps.

    Everything that outlives a round (optimizer moments, critic, KL coefficient, generators,
    position in the shard) belongs to ``state``; the adapter itself comes from the server each time.

    A client may have ``batches_per_epoch``, the batches in one pass over its shard: a local epoch
    takes as many local steps.

    A client may have ``weighted_gradients(minibatch, weights)``, which returns the gradient of the
    weighted sum of the losses as a Jacobian of one row, from one backward pass; and
    ``weighted_steps(num_steps, weights, proximal=...)``, which takes all local steps on that sum by
    itself and returns how many it took, 0 where it leaves them to the loop.

    A client may have ``skip_failed_batches()``, which leaves out, from the present state on, as
    many batches as were drawn since the last ``load``. Engines call it after a failure, once they
    have restored the accepted state: a client that drew the same batch again would fail for ever.

    A client whose optimizer outlives a round has ``alone(objective, state)``, for strategies that
    train on each objective by itself: it returns to the batches and random numbers of a state, but
    to what training on this objective alone has left in the optimizer, fresh at first. ``state``
    then holds that for each objective.
    """

    name: str
    """Unique in the federation."""
    num_examples: int
    """Size of the shard; ``by_examples`` aggregation weighs by it."""
    objectives: tuple[str, ...]
    """Names of the M objectives, in the order of the Jacobian's rows."""

    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts a local training from the server's adapter, which is copied.

        Args:
            adapter: θ_t.
            round: The run's round, from 1, for what changes with it (a learning rate's schedule).
        """
        ...

    def batches(self, num_steps: int) -> Iterator[Batch]:
        """Yields one batch per local step, lazily: the model after step k draws batch k + 1."""
        ...

    def gradients(self, minibatch: Any) -> Gradients:
        """Returns the gradients of all objectives at the current parameters."""
        ...

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Takes one optimizer step along the weighted gradient, and the critic's step.

        Args:
            gradients: What ``gradients`` returned for this minibatch.
            weights: Weights of the objectives, shape [M], non-negative, sum 1.
        """
        ...

    def adapter(self) -> Adapter:
        """Returns a copy of the current adapter."""
        ...

    def state(self) -> State:
        """Returns a deep copy of everything but the adapter that shapes later rounds."""
        ...

    def restore(self, state: State) -> None:
        """Returns to a state that ``state`` gave; the argument stays untouched."""
        ...

    def metrics(self) -> dict[str, Any]:
        """Returns JSON-able metrics of the local training since ``load``.

        Those that are registered (``register_metrics``) reach the server.
        """
        ...


@dataclass(frozen=True)
class Reply:
    """What a client answered, and the serialized bytes that went each way."""

    client: str
    content: Any
    """The answer, of the type that the request names, with every field checked."""
    bytes_down: int
    bytes_up: int
    dropped: int = 0
    """Unknown fields that were left out of the answer."""


@dataclass(frozen=True)
class Failure:
    """A client that did not finish its part of a round, or was refused, and why."""

    client: str
    reason: str
    bytes_down: int = 0
    bytes_up: int = 0
    is_refused: bool = False
    """Whether an answer came that no honest client sends: it counts as one of the attackers that a
    robust rule assumes."""
    kind: str = field(default="", compare=False)
    """Kind of the error and the machine's number for it, which quote no data; empty where there was
    no error."""
    cause: BaseException | None = field(default=None, compare=False)
    """What was raised, where that happened in this process."""


class ProcessLost(RuntimeError):
    """Another process of the run is gone; no client's fault, and the last checkpoint is whole."""


class TeamLost(ProcessLost):
    """It worked on the same client as this process."""


def total_seconds(metrics: dict[str, Any]) -> float:
    """Returns the time of all stages that a client's metrics tell of; 0 where they tell of none."""
    seconds = metrics.get("seconds")
    stages = seconds.values() if isinstance(seconds, dict) else ()
    return sum(value for value in stages if isinstance(value, int | float))
