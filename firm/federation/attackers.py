"""Clients that train honestly but send manipulated updates, to test robust rules.

Attacks on rewards or losses are in ``firm.alignment.attacks`` and ``firm.fmoo.attacks``.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch

from firm.base.randomness import derive_seed
from firm.federation.aggregation import move_adapter, update_length
from firm.federation.capabilities import UpdateAttack
from firm.federation.client import Adapter, Batch, Client
from firm.federation.serialization import pack


class Attacker:
    """Wraps a client and manipulates its updates; everything else is forwarded to the client.

    Args:
        client: The wrapped client; it must be loaded, trained and restored only by the wrapper.
        kind: The attack. Sign flips follow Li et al. (2019), "RSA: Byzantine-Robust Stochastic
            Aggregation Methods for Distributed Learning from Heterogeneous Datasets",
            arXiv:1811.03761.
        scale: s, positive.
        seed: The run's seed; colluding attackers need the same seed.
    """

    def __init__(
        self, client: Client, kind: UpdateAttack, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        self._client, self._kind, self._scale, self._seed = client, kind, scale, seed
        self._start: Adapter = {}
        self._is_training = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also before __init__, when there is no client yet
            raise AttributeError(name)
        return getattr(self._client, name)

    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts a local training from the server's adapter."""
        self._start, self._is_training = adapter, False
        self._client.rate = self.rate
        self._client.load(adapter, round)

    def batches(self, num_steps: int) -> Iterator[Batch]:
        """Yields the client's batches; the adapter is honest until they are exhausted."""
        self._is_training = True  # a proximal term reads the adapter during training
        yield from self._client.batches(num_steps)
        self._is_training = False

    def adapter(self) -> Adapter:
        """Returns the manipulated adapter; during local training, the honest one."""
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
        return move_adapter(self._start, [adapter], [factor])


def common_direction(start: Adapter, *, seed: int) -> dict[str, torch.Tensor]:
    """Returns a random direction of norm 1, the same for all clients that received θ_t.

    A client does not know the round, but θ_t differs between rounds and is the same for all
    clients: the direction is seeded by its bytes and the run's seed. The tensors are float64.
    """
    digest = sha256(pack(start)).hexdigest()
    generator = torch.Generator().manual_seed(derive_seed(seed, "collusion", digest))
    direction = {
        name: torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        for name, parameter in start.items()
    }
    length = sum(part.square().sum().item() for part in direction.values()) ** 0.5
    return {name: part / length for name, part in direction.items()}
