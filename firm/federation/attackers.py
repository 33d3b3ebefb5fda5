"""Clients that train honestly and send something else, to test robust rules against.

Attackers of the rewards or losses, and so of the training itself, are the wings' own.
"""

from collections.abc import Iterator
from hashlib import sha256
from math import inf
from typing import Any, Literal, get_args

import torch

from firm.federation.aggregation import moved, update_length
from firm.federation.client import Adapter, Batch, Client
from firm.federation.randomness import derive_seed
from firm.federation.serialization import pack
from firm.fields import did_you_mean

UpdateAttack = Literal["sign_flip", "scaling", "collusion"]
"""sign_flip: θ_t - s(θ_c - θ_t) in place of θ_c. scaling: θ_t + s(θ_c - θ_t). collusion: from θ_t
s‖θ_c - θ_t‖ far into a random direction that all colluders share."""


class Attacker:
    """A client whose updates are attacked on their way out; all else is the client's within.

    Args:
        client: The client within; loaded, trained and restored by way of this one alone.
        kind: The attack. Sign flips are those of Li et al. (2019), "RSA: Byzantine-Robust
            Stochastic Aggregation Methods for Distributed Learning from Heterogeneous Datasets",
            arXiv:1811.03761.
        scale: s, positive.
        seed: The run's; colluders need the same.
    """

    def __init__(
        self, client: Client, kind: UpdateAttack, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        if kind not in get_args(UpdateAttack):
            kinds = ", ".join(get_args(UpdateAttack))
            near = did_you_mean(kind, get_args(UpdateAttack))
            raise ValueError(f"kind must be one of {kinds}, got {kind!r}{near}")
        if not 0 < scale < inf:
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        self._client, self._kind, self._scale, self._seed = client, kind, scale, seed
        self._start: Adapter = {}
        self._is_training = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also before __init__, where there is no client to ask
            raise AttributeError(name)
        return getattr(self._client, name)

    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts a local training from the server's adapter."""
        self._start, self._is_training = adapter, False
        self._client.load(adapter, round)

    def batches(self, num_steps: int) -> Iterator[Batch]:
        """Yields the client's batches; until they end its adapter stays honest."""
        self._is_training = True  # a proximal term asks for the adapter, and pulls it back
        yield from self._client.batches(num_steps)
        self._is_training = False

    def adapter(self) -> Adapter:
        """Returns what is sent in place of the adapter; during local training the adapter."""
        adapter = self._client.adapter()
        if self._is_training:
            return adapter
        if self._kind == "collusion":
            length = update_length(self._start, adapter) * self._scale
            direction = common_direction(self._start, seed=self._seed)
            return {
                name: (parameter.double() + length * direction[name]).to(parameter.dtype)
                for name, parameter in self._start.items()
            }
        factor = -self._scale if self._kind == "sign_flip" else self._scale
        return moved(self._start, [adapter], [factor])


def common_direction(start: Adapter, *, seed: int) -> dict[str, torch.Tensor]:
    """Returns a random direction of length 1 that all who were sent the adapter θ_t agree on.

    A client does not know the round. θ_t is another in every round and the same for all: its bytes
    and the run's seed are the direction's seed. The tensors are float64.
    """
    digest = sha256(pack(start)).hexdigest()
    generator = torch.Generator().manual_seed(derive_seed(seed, "collusion", digest))
    direction = {
        name: torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        for name, parameter in start.items()
    }
    length = sum(part.square().sum().item() for part in direction.values()) ** 0.5
    return {name: part / length for name, part in direction.items()}
