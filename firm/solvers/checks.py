"""The border of the solvers: what comes in is checked and widened, what goes out is cast back."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

ArrayT = TypeVar("ArrayT", torch.Tensor, np.ndarray)


def as_gram(gram: torch.Tensor | np.ndarray) -> np.ndarray:
    """Returns a checked, exactly symmetric float64 copy of a Gram matrix, shape [..., M, M].

    Raises:
        ValueError: On another type or shape, NaN, infinities, asymmetry, or a matrix that is no
            Gram matrix because it has a clearly negative eigenvalue.
    """
    matrix = as_float64(gram, name="gram")
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"gram must have shape [..., M, M] with M >= 1, got {list(gram.shape)}.")
    mirror = np.swapaxes(matrix, -1, -2)
    slack = rounding(gram) * np.abs(matrix).max(axis=(-1, -2), initial=0.0)  # [...]
    difference = np.abs(matrix - mirror).max(axis=(-1, -2), initial=0.0)
    if (difference > slack).any():
        raise ValueError(
            f"gram must be symmetric, got mirrored entries {difference.max():.3g} apart."
        )
    matrix = matrix / 2 + mirror / 2
    smallest = np.linalg.eigvalsh(matrix)[..., 0]
    if (smallest < -matrix.shape[-1] * slack).any():
        raise ValueError(
            "gram must be positive semidefinite, as every J @ J.T is, got the eigenvalue "
            f"{smallest.min():.3g}."
        )
    return matrix


def as_float64(values: torch.Tensor | np.ndarray, *, name: str) -> np.ndarray:
    """Returns the values as finite float64 in the CPU's memory, or raises ``ValueError``."""
    if isinstance(values, torch.Tensor) and values.is_floating_point():
        wide = values.detach().to("cpu", torch.float64).numpy()
    elif isinstance(values, np.ndarray) and values.dtype.kind == "f":
        wide = values.astype(np.float64)
    else:
        kind = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{name} must be a float tensor or array, got {kind}.")
    if not np.isfinite(wide).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity; look at the gradients.")
    return wide


def as_shares(
    values: Sequence[float] | np.ndarray, num_objectives: int, *, name: str
) -> np.ndarray:
    """Returns non-negative numbers, one per objective, scaled to sum 1; float64, shape [M].

    Raises:
        ValueError: When one is negative or not finite, all are zero, or their count is not M.
    """
    shares = np.array(values, dtype=np.float64)
    if shares.shape != (num_objectives,):
        raise ValueError(
            f"{name} must have one entry for each of the {num_objectives} objectives, got {values}."
        )
    if not (np.isfinite(shares).all() and shares.min() >= 0 and shares.max() > 0):
        raise ValueError(f"{name} must be finite, non-negative and not all zero, got {values}.")
    shares /= shares.max()  # first, because the sum itself may overflow
    return shares / shares.sum()


def like(values: np.ndarray, example: ArrayT) -> ArrayT:
    """Returns the values in the type, dtype and device of the example."""
    if isinstance(example, torch.Tensor):
        return torch.as_tensor(values).to(example.device, example.dtype)
    return values.astype(example.dtype)


def rounding(values: torch.Tensor | np.ndarray) -> float:
    """Returns how far rounding may bend values of this dtype, relative to the largest."""
    if isinstance(values, torch.Tensor):
        eps = torch.finfo(values.dtype).eps
    else:
        eps = float(np.finfo(values.dtype).eps)
    return max(1e-6, 8 * eps)  # 1e-6: a float64 Gram is often summed from float32 products
