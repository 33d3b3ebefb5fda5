"""Attacks that inflate a client's loss: bias and scaling, from FedMGDA+ (Hu et al., Section 6).

Attackers are honest otherwise. Against strategies that weight clients by their losses (AFL,
q-FedAvg), adding a constant to the loss is enough; against strategies that sum gradients, the loss
must be multiplied. FedMGDA+ is immune to both: λ is computed from gradients, which do not depend on
a constant, and these are normalised, which cancels a factor.
"""

from dataclasses import replace
from typing import Literal

import torch

from firm.base.fields import FiniteFloat, configuration
from firm.federation.client import Gradients


@configuration
class LossAttackConfig:
    """Attack on the clients' losses; off by default."""

    kind: Literal["none", "bias", "scaling"] = "none"
    """bias adds ``amount`` to every loss of an attacker and leaves its gradients unchanged. scaling
    multiplies losses and gradients by ``amount``. none disables the attack; the other keys are then
    ignored."""
    clients: tuple[str, ...] = ()
    """Names of the attackers. They are sampled for rounds like other clients; list them under the
    strategy's ``always`` to include them in every round."""
    amount: FiniteFloat = 0.0
    """The added constant (bias) or the positive factor (scaling)."""

    def __post_init__(self) -> None:
        if self.kind == "none":
            return
        if not self.clients:
            raise ValueError(f"A {self.kind} attack needs attackers: list them in clients.")
        if len(set(self.clients)) < len(self.clients):
            raise ValueError(f"clients must name each attacker once, got {list(self.clients)}.")
        if self.kind == "scaling" and self.amount <= 0:
            raise ValueError(f"amount must be positive in a scaling attack, got {self.amount}.")

    def has_attacker(self, client: str) -> bool:
        """Returns whether the client attacks."""
        return self.kind != "none" and client in self.clients


def attacked_losses(losses: torch.Tensor, *, client: str, attack: LossAttackConfig) -> torch.Tensor:
    """Returns the losses [M] that a client reports: f + amount (bias), f · amount (scaling), or f.

    Clients that are not listed as attackers report their losses unchanged.
    """
    if not attack.has_attacker(client):
        return losses
    return losses + attack.amount if attack.kind == "bias" else losses * attack.amount


def attacked_gradients(gradients: Gradients, *, client: str, attack: LossAttackConfig) -> Gradients:
    """Returns the gradients and losses that a client trains with and sends.

    A constant has no gradient, so the bias attack changes only the losses.
    """
    if not attack.has_attacker(client):
        return gradients
    factor = attack.amount if attack.kind == "scaling" else 1.0
    losses = attacked_losses(gradients.losses, client=client, attack=attack)
    return replace(gradients, jacobian=gradients.jacobian * factor, losses=losses)
