"""Attacks that inflate a client's loss: bias and scaling, from FedMGDA+ (Hu et al., Section 6).

Attackers are honest otherwise. Against strategies that weight clients by their losses (AFL,
q-FedAvg), adding a constant to the loss is enough; against strategies that sum gradients, the loss
must be multiplied. FedMGDA+ is immune to both: λ is computed from gradients, which do not depend on
a constant, and these are normalised, which cancels a factor.
"""

from dataclasses import replace

import torch

from firm.federation.client import Gradients
from firm.fmoo.config import LossAttackConfig


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
