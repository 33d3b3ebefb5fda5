"""The client protocol, and the records that a client and the server exchange.

This module is independent of the data modality: every strategy and every engine can federate a
model that computes one gradient per objective and takes optimizer steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from firm.base.state import State
from firm.federation.capabilities import Capability, missing
from firm.gradients.jacobian import combine

Adapter = dict[str, torch.Tensor]
"""The trained parameters by name: detached CPU float tensors, always in the same order."""


@dataclass(frozen=True)
class Gradients:
    """One minibatch's gradients, one row per objective."""

    jacobian: torch.Tensor
    """Gradient of each objective's loss in the adapter's parameters, shape [M, d]."""
    losses: torch.Tensor
    """Loss of each objective, shape [M]."""
    aux: Any = None
    """Opaque input of the client's own ``step``, such as a critic's gradients."""
    preferences: torch.Tensor | None = None
    """Preferences in the minibatch, shape [K, M], if the gradients are separated by preference. The
    Jacobian then has shape [K M, d], with objective j at preference k in row k M + j."""
    served: Sequence[Sequence[int]] | None = None
    """Objectives with losses in the minibatch, one list per preference (a single list without
    preferences); rows of the others are zero. None for all that the client serves."""


class Batch(Protocol):
    """The data of one local step."""

    @property
    def whole(self) -> Any:
        """The whole batch as an argument of ``gradients``, for weights solved once per batch."""
        ...

    def minibatches(self) -> Iterator[Any]:
        """Yields arguments of ``gradients`` in the order of use (PPO: epochs x minibatches)."""
        ...


class Client(ABC):
    """A private shard of data with a model that computes gradients and takes optimizer steps.

    A client implements the abstract methods and overrides the optional methods that it declares in
    ``capabilities``. Everything that persists between rounds (optimizer moments, critic, KL
    coefficient, generators, position in the shard) belongs to ``state``; the server sends the
    adapter itself in each round.
    """

    name: str
    """Unique in the federation."""
    num_examples: int
    """Size of the shard, the client's weight in ``by_examples`` aggregation."""
    objectives: tuple[str, ...]
    """Names of the M objectives, in the order of the Jacobian's rows."""
    capabilities: frozenset[Capability] = frozenset()
    """Optional methods that the client implements."""
    shared: slice = slice(None)
    """The Jacobian's columns that all objectives share."""
    is_conditioned: bool = False
    """Whether the model takes a preference, by which ``gradients_by_preference`` separates."""
    rate: float = 1.0
    """Factor of the learning rates in this round, in (0, 1], which engines take from requests."""

    @cached_property
    def carried(self) -> dict[str, Any]:
        """State that options keep between the client's rounds, stored with ``state``."""
        return {}

    @abstractmethod
    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts the local training of a round (from 1) from a copy of the adapter θ_t."""

    @abstractmethod
    def batches(self, num_steps: int) -> Iterator[Batch]:
        """Yields one batch per local step, lazily: the model after step k draws batch k + 1."""

    @abstractmethod
    def gradients(self, minibatch: Any) -> Gradients:
        """Returns the gradients of all objectives at the current parameters."""

    def gradients_by_preference(self, minibatch: Any) -> Gradients:
        """Returns the gradients of all objectives, separated by the examples' preferences.

        Called if ``is_conditioned``.
        """
        raise NotImplementedError(f"{self.name} has no gradients by preference.")

    def keep_first_batch(self) -> None:  # noqa: B027 # optional for clients
        """Keeps the next batch for later tasks of the round that start from the same state.

        Tasks call it after ``load``, to save a client the work of drawing the batch again. By
        default nothing is kept.
        """

    @abstractmethod
    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Takes one optimizer step along the weighted gradient, and one step of the critic.

        Args:
            gradients: Result of ``gradients`` for this minibatch.
            weights: Weights of the Jacobian's rows, shape [M], non-negative, sum 1. Shape [K M] if
                the gradients are separated by preference; the weights of each preference sum to 1.
        """

    @abstractmethod
    def adapter(self) -> Adapter:
        """Returns a copy of the current adapter."""

    @abstractmethod
    def state(self) -> State:
        """Returns a deep copy of all state that affects later rounds, except the adapter."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Restores a state returned by ``state``; the argument is not modified."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Returns JSON-able metrics of the local training since ``load``.

        Only registered metrics (`firm.base.quantities`) are sent to the server.
        """

    @cached_property
    def served(self) -> tuple[int, ...]:
        """Indices of the objectives that the client has losses for, by default all."""
        return tuple(range(len(self.objectives)))

    def of_served(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns weights [M] in float32, zero for objectives that the client does not serve."""
        factors = torch.zeros(len(self.objectives))
        factors[list(self.served)] = weights.float()[list(self.served)]
        return factors

    def losses(self) -> torch.Tensor:
        """Returns the mean losses over the whole shard at the loaded adapter, shape [M]."""
        raise ValueError(missing(self.name, "losses"))

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one pass over the shard, the local steps of one local epoch."""
        raise ValueError(missing(self.name, "epochs"))

    def weighted_gradients(self, minibatch: Any, weights: torch.Tensor) -> Gradients:
        """Returns the gradient of the losses' sum with weights [M], as a Jacobian with one row.

        With the capability "weighted_gradients" it takes one backward pass and no Jacobian.
        """
        gradients = self.gradients(minibatch)
        return replace(gradients, jacobian=combine(gradients.jacobian, weights)[None])

    def weighted_steps(self, num_steps: int, weights: torch.Tensor, *, proximal: float) -> int:
        """Takes all local steps on a weighted sum of the losses in one call, if supported.

        The loss includes μ/2 ‖θ - θ_t‖² with μ = ``proximal``. Returns the number of steps taken;
        with 0, the default, the steps are taken by the loop over batches instead.
        """
        return 0

    def alone(self, objective: str, state: State) -> None:
        """Restores the batches and random numbers of a state, to train on one objective only.

        A client whose optimizer persists between rounds keeps a separate optimizer in ``state`` for
        each objective trained this way. By default the whole state is restored.
        """
        self.restore(state)

    def skip_failed_batches(self) -> None:  # noqa: B027 # optional for clients
        """Skips the batches drawn since ``load``, starting at the current state.

        Engines call it after a failure, once they have restored the accepted state: a client that
        drew the same batch again would fail in every round. By default no batches are skipped.
        """


class LazyClients(Sequence[Client]):
    """Clients that are built when they are needed, such as those sampled for a round.

    Args:
        names: Their names.
        build: Returns the client of a name in its initial state.
    """

    def __init__(self, names: Sequence[str], build: Callable[[str], Client]) -> None:
        self.names, self.build = names, build

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Client:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Builds the client at an index."""
        return self.build(self.names[index])


@dataclass(frozen=True)
class Reply:
    """A client's answer, and the number of serialized bytes in each direction."""

    client: str
    content: Any
    """The answer, of the type that the request names, with every field checked."""
    bytes_down: int
    bytes_up: int
    dropped: int = 0
    """Number of unknown fields that were dropped from the answer."""


@dataclass(frozen=True)
class Failure:
    """A client that failed in a round or sent an answer that was rejected, and the reason."""

    client: str
    reason: str
    bytes_down: int = 0
    bytes_up: int = 0
    is_refused: bool = False
    """True if the client sent an answer that no honest client sends; it then counts as one of the
    attackers assumed by a robust rule."""
    kind: str = field(default="", compare=False)
    """Type of the error and its OS error number, which reveal no data; empty without an error."""
    cause: BaseException | None = field(default=None, compare=False)
    """The exception, if it was raised in this process."""
    is_of_machine: bool = field(default=False, compare=False)
    """True if it was the machine or rollout engine that this program's clients share: it had no
    memory left, or could not sample."""
