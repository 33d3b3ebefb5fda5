"""Gradients of many clients of a small model in one batched pass.

For small matrices the overhead per call exceeds the arithmetic, so batching all clients is faster.
Convolutions with separate weights per client are slower than running clients sequentially.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, vmap

from firm.federation.lockstep import outcome_of
from firm.fmoo.modules import Dropout, MultiTaskModel
from firm.fmoo.task_data import SHIPPED_LOSSES, check_finite
from firm.gradients.jacobian import check_finite_rows, check_losses

Losses = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]
"""Maps the M heads' outputs and the targets to the mean losses [M]."""

_STACKABLE = (MultiTaskModel, nn.ModuleList, nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU)


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """A client's request for gradients."""

    parameters: Mapping[str, torch.Tensor]
    inputs: torch.Tensor
    """Prepared inputs of the client's batch."""
    targets: torch.Tensor
    select: Callable[[torch.Tensor], torch.Tensor]
    """Maps all losses [M] to the losses, or sums of losses, to differentiate, [k]."""

    def check_losses(self, losses: torch.Tensor, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` with the first selected loss of [M] that is not finite."""
        if not self.select(losses).isfinite().all():
            # alone, each shows whether it is selected: others may be NaN
            is_lost = [not self.select(own).isfinite().all() for own in losses.diag()]
            check_finite(losses.where(torch.tensor(is_lost, device=losses.device), 0), objectives)


def is_stackable(model: nn.Module, losses: Collection[str]) -> bool:
    """Returns whether a batched pass is faster for a model: dense layers without dropout.

    User-defined modules and losses may do things that vmap does not support, such as branch on
    values.
    """
    return set(losses) <= SHIPPED_LOSSES and all(
        type(module) in _STACKABLE or (isinstance(module, Dropout) and module.rate == 0)
        for module in model.modules()
    )


def gradients_together(
    asked: list[GradientRequest],
    *,
    model: nn.Module,
    losses: Losses,
    objectives: Sequence[str],
) -> list[tuple[torch.Tensor, torch.Tensor] | ValueError]:
    """Returns each client's losses [M] and gradients [k, d], or the error it raised.

    Args:
        asked: Requests with batches of the same shape and the same number k of selected losses.
        model: Model to call with the clients' parameters.
        losses: Loss function of the outputs.
        objectives: Names of the M losses.
    """
    leaves = {
        name: torch.stack([each.parameters[name].detach() for each in asked]).requires_grad_()
        for name in asked[0].parameters
    }

    def losses_of(
        parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        return losses(functional_call(model, parameters, (inputs,)), targets)

    inputs = torch.stack([each.inputs for each in asked])
    targets = torch.stack([each.targets for each in asked])
    all_losses = vmap(losses_of)(leaves, inputs, targets)  # [C, M]
    selected = [each.select(own) for each, own in zip(asked, all_losses.unbind(), strict=True)]
    wanted = torch.stack(selected)  # [C, k]
    rows = wanted.new_empty(*wanted.shape, sum(leaf[0].numel() for leaf in leaves.values()))
    count = wanted.shape[1]
    for k in range(count):
        # clients share no parameters, so a non-finite loss affects only its own client's rows
        gradients = torch.autograd.grad(
            wanted[:, k].sum(),
            list(leaves.values()),
            retain_graph=k < count - 1,
            materialize_grads=True,
        )
        torch.cat([gradient.flatten(1) for gradient in gradients], dim=1, out=rows[:, k])
    checked = [
        outcome_of(each.check_losses, own, objectives)
        or outcome_of(check_losses, own_selected)
        or outcome_of(check_finite_rows, own_rows)
        for each, own, own_selected, own_rows in zip(
            asked, all_losses.detach(), selected, rows, strict=True
        )
    ]
    results = zip(checked, all_losses.detach(), rows, strict=True)
    return [error or (own, own_rows) for error, own, own_rows in results]
