"""What clients can do: optional methods, which strategies may need, and attacks."""

from collections.abc import Collection
from typing import Literal

Capability = Literal["losses", "rewards", "epochs", "weighted_gradients"]
"""losses: ``losses()``. rewards: ``metrics()`` has the mean reward of each objective, as "rewards".
epochs: ``batches_per_epoch``. weighted_gradients: ``weighted_gradients`` takes one backward
pass."""
Capabilities = Collection[Capability]
UpdateAttack = Literal["sign_flip", "scaling", "collusion"]
"""sign_flip sends θ_t - s(θ_c - θ_t) instead of θ_c, scaling sends θ_t + s(θ_c - θ_t), and
collusion moves θ_t by s‖θ_c - θ_t‖ in a random direction shared by all colluders."""

_NEEDS: dict[Capability, tuple[str, str]] = {
    "losses": ("losses on a client's whole shard", "choose another strategy"),
    "rewards": ("the rewards of what a client trains on", "choose another strategy"),
    "epochs": ("the number of batches in a client's shard", "set num_local_steps instead"),
}


def missing(client: str, capability: Capability, *, strategy: str = "the strategy") -> str:
    """Returns the error message for a client (or a class of clients) that lacks a capability."""
    need, remedy = _NEEDS[capability]
    return f"{strategy} needs {need}, which {client} does not have; {remedy}."
