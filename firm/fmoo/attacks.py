"""Attacks that inflate a user's loss: bias and scaling, from FedMGDA+ (Hu et al., section 6).

An attacker is otherwise honest. Against a strategy that weighs clients by their losses (AFL,
q-FedAvg), adding a constant to the loss is enough; against a strategy that sums gradients, the loss
must be multiplied. FedMGDA+ is immune to both: λ is computed from gradients, which do not depend on
a constant, and these are normalised, which cancels a factor.
"""

from dataclasses import replace
from typing import Literal

import torch

from firm.federation.client import Gradients
from firm.fields import FiniteFloat, configuration


@configuration
class LossAttackConfig:
    """Who attacks, and how. By default nobody does."""

    kind: Literal["none", "bias", "scaling"] = "none"
    """bias: every loss of an attacker plus ``amount``, its gradients as they are. scaling: losses
    and gradients times ``amount``. none: nobody attacks, whatever the other keys say."""
    clients: tuple[str, ...] = ()
    """Names of the attackers. They take part in the rounds that they are drawn for, as all do; a
    strategy's ``always`` has them in every one."""
    amount: FiniteFloat = 0.0
    """What is added (bias, finite) or multiplied with (scaling, positive)."""

    def __post_init__(self) -> None:
        if self.kind == "none":
            return
        if not self.clients:
            raise ValueError(f"A {self.kind} attack needs attackers: name some in clients.")
        if len(set(self.clients)) < len(self.clients):
            raise ValueError(f"clients must name each attacker once, got {list(self.clients)}.")
        if self.kind == "scaling" and self.amount <= 0:
            raise ValueError(f"amount must be positive in a scaling attack, got {self.amount}.")

    def has_attacker(self, client: str) -> bool:
        """Returns whether the client attacks."""
        return self.kind != "none" and client in self.clients


def attacked_losses(losses: torch.Tensor, *, client: str, attack: LossAttackConfig) -> torch.Tensor:
    """Returns the losses [M] that a client reports: f + amount (bias), f · amount (scaling), or f.

    Clients that the attack does not name are honest.
    """
    if not attack.has_attacker(client):
        return losses
    return losses + attack.amount if attack.kind == "bias" else losses * attack.amount


def attacked_gradients(gradients: Gradients, *, client: str, attack: LossAttackConfig) -> Gradients:
    """Returns the gradients and losses that a client trains with and sends.

    A constant has no gradient: the bias attack changes the losses alone.
    """
    if not attack.has_attacker(client):
        return gradients
    factor = attack.amount if attack.kind == "scaling" else 1.0
    losses = attacked_losses(gradients.losses, client=client, attack=attack)
    return replace(gradients, jacobian=gradients.jacobian * factor, losses=losses)
