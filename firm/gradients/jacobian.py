"""The gradients of all objectives, one row each; their Gram matrix and weighted sum."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch._subclasses.fake_tensor import FakeTensor

Parameters = Iterable[torch.Tensor] | Mapping[str, torch.Tensor]
"""Tensors, or tensors by name; their order is the order of the Jacobian's columns."""

CHUNK = 65_536
"""Columns per float64 product: 0.5 MB per row, which fits into the CPU's cache."""


def jacobian(
    losses: torch.Tensor | Sequence[torch.Tensor],
    parameters: Parameters,
    *,
    retain_graph: bool = False,
) -> torch.Tensor:
    """Returns the gradient of each loss; leaves the parameters and their ``grad`` unchanged.

    Runs one backward pass per loss: autograd's batched mode is slower on the CPU and holds
    activations of M graphs.

    Args:
        losses: M scalar losses, a tensor of shape [M] or a sequence.
        parameters: Tensors of any float dtype with d entries in total, or a mapping of names to
            tensors; names appear in error messages. Their order is the order of the columns.
        retain_graph: Whether to keep the graph after the last loss.

    Returns:
        Shape [M, d], on the parameters' device, float32, or float64 if a parameter is; zero where a
        loss does not depend on a parameter.

    Raises:
        ValueError: When there is no loss or no parameter, a parameter does not require grad, or a
            loss has no graph or a loss or gradient is not finite; names which.
    """
    tensors = check_parameters(parameters)
    num_objectives = len(losses)
    check_losses(losses)
    rows = jacobian_buffer(num_objectives, tensors)
    for objective, loss in enumerate(losses):
        gradients = torch.autograd.grad(
            loss,
            tensors,
            retain_graph=retain_graph or objective < num_objectives - 1,
            materialize_grads=True,
        )
        start = 0
        for gradient in gradients:
            stop = start + gradient.numel()
            rows[objective, start:stop] = gradient.reshape(-1)
            start = stop
    check_finite_rows(rows)
    return rows


def gram_matrix(jacobian: torch.Tensor) -> torch.Tensor:
    """Returns all inner products of the rows, G = JJᵀ, summed in float64.

    Nearly parallel gradients need this precision: a single float32 product over 4.5 million columns
    is accurate to three or four digits, these sums to thirteen; they take 7 ms at M = 2.

    Args:
        jacobian: Gradients, one row per objective, any float dtype (16-bit entries are widened
            exactly, a chunk at a time), shape [M, d].

    Returns:
        float64, shape [M, M], symmetric, on the Jacobian's device, or on the CPU from an MPS
        device, which has no float64.

    Raises:
        ValueError: When the shape is not [M, d], M is 0, or a row holds NaN or infinity; names the
            objective.
    """
    if jacobian.ndim != 2:
        raise ValueError(f"jacobian must have shape [M, d], got {list(jacobian.shape)}.")
    if len(jacobian) == 0:
        raise ValueError(f"jacobian must hold at least one row, got shape {list(jacobian.shape)}.")
    if jacobian.device.type == "mps":
        jacobian = jacobian.cpu()
    num_objectives = len(jacobian)
    gram = jacobian.new_zeros(num_objectives, num_objectives, dtype=torch.float64)
    for chunk in jacobian.split(CHUNK, dim=1):
        chunk = chunk.double()
        gram += chunk @ chunk.T
    if not gram.isfinite().all():
        check_finite_rows(jacobian)
    return (gram + gram.T) / 2  # a matrix product may round its two triangles differently


def combine(jacobian: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of the rows, λᵀJ; with M = 1 and weight 1, the row bit for bit.

    Shapes [M, d] and [M] give [d], in the Jacobian's dtype and on its device.
    """
    if weights.shape != jacobian.shape[:1]:
        raise ValueError(
            f"weights must have shape {list(jacobian.shape[:1])} for this Jacobian, "
            f"got {list(weights.shape)}."
        )
    first, *others = weights.tolist()
    direction = jacobian[0] * first
    for row, weight in zip(jacobian[1:], others, strict=True):
        direction.add_(row, alpha=weight)
    return direction


def check_parameters(parameters: Parameters) -> list[torch.Tensor]:
    """Returns the parameters in their order; raises ``ValueError`` unless each requires grad."""
    if isinstance(parameters, Mapping):
        names = [f" ({name!r})" for name in parameters]
        tensors = list(parameters.values())
    else:
        tensors = list(parameters)
        names = [""] * len(tensors)
    if not tensors:
        raise ValueError("parameters must hold at least one tensor, got none.")
    for index, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            raise ValueError(
                f"Parameter {index}{names[index]} does not require grad; "
                "set requires_grad before the losses are computed, or leave it out."
            )
    return tensors


def jacobian_buffer(num_objectives: int, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns an uninitialised buffer [M, d], float32, or float64 if a parameter is."""
    dtype = reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
    shape = [num_objectives, sum(map(torch.Tensor.numel, parameters))]
    return parameters[0].new_empty(shape, dtype=dtype)  # fake if the parameters are


def has_values(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds data, unlike meta and fake tensors."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def check_finite_rows(rows: torch.Tensor) -> None:
    """Raises ``ValueError`` with the first objective that has a non-finite row in [M, d]."""
    # a finite sum proves that all entries are, and is forty times cheaper than checking each
    if not has_values(rows) or rows.sum(dim=1).isfinite().all():
        return
    is_finite = torch.isfinite(rows).all(dim=1).tolist()
    if not all(is_finite):
        raise ValueError(
            f"The gradient of objective {is_finite.index(False)} is not finite; "
            "look for NaN or infinity in its loss and rewards, or lower the learning rate."
        )


def check_losses(losses: torch.Tensor | Sequence[torch.Tensor], unit: str = "objective") -> None:
    """Raises ``ValueError`` unless the losses, one per `unit`, are finite and have a graph."""
    if len(losses) == 0:
        raise ValueError(f"losses must hold at least one {unit}'s loss, got none.")
    is_stacked = isinstance(losses, torch.Tensor)
    for at, loss in enumerate([losses] if is_stacked else losses):
        if not loss.requires_grad:
            raise ValueError(
                f"The loss of {unit} {at} has no gradient; "
                "compute it from parameters that require grad."
            )
    # before the backward passes: losses share operations, so a NaN in one reaches every row
    stacked = losses if is_stacked else torch.stack(list(losses))
    is_finite = stacked.isfinite().tolist() if has_values(stacked) else []
    if not all(is_finite):
        raise ValueError(
            f"The loss of {unit} {is_finite.index(False)} is not finite; "
            "look for NaN or infinity in its inputs and rewards, or lower the learning rate."
        )
