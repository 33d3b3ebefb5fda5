"""The gradients of all objectives, one row each."""

from collections.abc import Iterable, Sequence

import torch


def jacobian(
    losses: torch.Tensor | Sequence[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> torch.Tensor:
    """Returns the gradient of each loss in the parameters, which stay untouched, as do their grads.

    One backward pass per loss: the batched forms of autograd are slower on the CPU and hold M
    graphs' worth of activations.

    Args:
        losses: M scalar losses, a tensor of shape [M] or a sequence.
        parameters: Tensors with d entries together; their order is the order of the columns.
        retain_graph: Whether the graph is kept after the last loss.

    Returns:
        float32, shape [M, d], on the parameters' device; zeros where a loss uses no parameter.

    Raises:
        ValueError: When a loss has no graph, or a loss or gradient is not finite; names the
            objective.
    """
    parameters = list(parameters)
    num_objectives = len(losses)
    _check_losses(losses)
    rows = torch.empty(
        num_objectives,
        sum(parameter.numel() for parameter in parameters),
        dtype=torch.float32,
        device=parameters[0].device,
    )
    for objective, loss in enumerate(losses):
        gradients = torch.autograd.grad(
            loss,
            parameters,
            retain_graph=retain_graph or objective < num_objectives - 1,
            materialize_grads=True,
        )
        start = 0
        for gradient in gradients:
            stop = start + gradient.numel()
            rows[objective, start:stop] = gradient.reshape(-1)
            start = stop
    if not rows.sum(dim=1).isfinite().all():  # forty times cheaper than a look at every entry
        check_finite_rows(rows)
    return rows


def _check_losses(losses: torch.Tensor | Sequence[torch.Tensor]) -> None:
    for objective, loss in enumerate(losses):
        if not loss.requires_grad:
            raise ValueError(
                f"The loss of objective {objective} has no gradient; "
                "compute it from parameters that require one."
            )
    # before the gradients, because where losses share operations one NaN spoils every row
    is_finite = torch.stack(list(losses)).isfinite().tolist()
    if not all(is_finite):
        raise ValueError(
            f"The loss of objective {is_finite.index(False)} is not finite; "
            "look for NaN or infinity in its rewards."
        )


def check_finite_rows(rows: torch.Tensor) -> None:
    """Raises ``ValueError`` with the first objective whose row, of shape [M, d], is not finite."""
    is_finite = torch.isfinite(rows).all(dim=1).tolist()
    if not all(is_finite):
        raise ValueError(
            f"The gradient of objective {is_finite.index(False)} is not finite; "
            "look for NaN or infinity in its loss and rewards."
        )
