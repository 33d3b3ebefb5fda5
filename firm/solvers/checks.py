"""Input checks of the solvers, and conversion to float64 and back."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from scipy.linalg import get_lapack_funcs

from firm.solvers.settings import check_shares

(potrf,) = get_lapack_funcs(("potrf",), dtype=np.float64)

EPS = float(np.finfo(np.float64).eps)

ArrayT = TypeVar("ArrayT", torch.Tensor, np.ndarray)


def as_gram(gram: torch.Tensor | np.ndarray) -> np.ndarray:
    """Returns a checked, exactly symmetric float64 copy of a Gram matrix, shape [..., M, M].

    Mirrored entries may differ by 1e-6 of the largest entry, and eigenvalues may be M times that
    below zero, to allow for the error of float32 sums; by more if the dtype is less precise.
    """
    matrix = as_float64(gram, name="gram")
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"gram must have shape [..., M, M] with M >= 1, got {list(gram.shape)}.")
    mirror = matrix.swapaxes(-1, -2)
    slack = rounding(gram) * np.abs(matrix).max(axis=(-1, -2), initial=0.0)  # [...]
    difference = np.abs(matrix - mirror).max(axis=(-1, -2), initial=0.0)
    if (difference > slack).any():
        raise ValueError(
            f"gram must be symmetric, got mirrored entries {difference.max():.3g} apart"
            f"{_where(difference > slack)}."
        )
    matrix = matrix / 2 + mirror / 2
    slack = slack * matrix.shape[-1]
    if not _is_above(matrix, -slack):
        smallest = np.linalg.eigvalsh(matrix)[..., 0]
        if (smallest < -slack).any():
            raise ValueError(
                "gram must be positive semidefinite, as J @ J.T always is, got the eigenvalue "
                f"{smallest.min():.3g}{_where(smallest < -slack)}."
            )
    return matrix


def _is_above(matrix: np.ndarray, bound: np.ndarray) -> bool:
    """Returns whether all eigenvalues reach the bound [...]; may be False because of rounding."""
    if matrix.shape[-1] <= 2:
        return False if matrix.shape[-1] == 1 else _is_above_of_two(matrix, bound)
    if matrix.ndim > 2:
        return False
    shifted = matrix.copy()
    shifted.flat[:: len(matrix) + 1] -= bound
    return bool(
        potrf(shifted, lower=1, overwrite_a=1)[1] == 0
    )  # a Cholesky is cheaper than eigenvalues


def _is_above_of_two(matrix: np.ndarray, bound: np.ndarray) -> bool:
    first, second = matrix[..., 0, 0] - bound, matrix[..., 1, 1] - bound
    off = matrix[..., 0, 1]
    # products of two entries would overflow above 1e154, products of roots do not
    is_definite = np.sqrt(np.maximum(first, 0)) * np.sqrt(np.maximum(second, 0)) >= np.abs(off)
    return bool((is_definite & (first >= 0) & (second >= 0)).all())


def _where(is_wrong: np.ndarray) -> str:
    if is_wrong.ndim == 0:
        return ""
    return f" in batch entry {np.argwhere(is_wrong)[0].tolist()}"


def as_float64(values: torch.Tensor | np.ndarray, *, name: str) -> np.ndarray:
    """Returns the values as finite float64 on the CPU, or raises ``ValueError``."""
    if isinstance(values, torch.Tensor) and values.is_floating_point():
        wide = values.detach().to("cpu", torch.float64).numpy()
    elif isinstance(values, np.ndarray) and values.dtype.kind == "f":
        wide = values.astype(np.float64)
    else:
        kind = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{name} must be a float tensor or array, got {kind}.")
    check_finite(wide, name=name, remedy="; check the gradients")
    return wide


def check_finite(values: np.ndarray, *, name: str, remedy: str = "") -> None:
    """Raises ``ValueError`` with the first NaN or infinite value and its index."""
    is_finite = np.isfinite(values)
    if not is_finite.all():
        first = np.argwhere(~is_finite)[0].tolist()
        raise ValueError(f"{name} must be finite, got {values[tuple(first)]} at {first}{remedy}.")


def as_shares(
    values: Sequence[float] | np.ndarray, num_objectives: int, *, name: str
) -> np.ndarray:
    """Returns non-negative numbers, one per objective, scaled to sum 1; float64, shape [M]."""
    check_shares(values, num_objectives, name=name)
    shares = np.array(values, dtype=np.float64)
    shares /= shares.max()  # before summing, which may overflow
    return shares / shares.sum()


def as_box(
    center: Sequence[float] | np.ndarray | None, radius: float | None, num_objectives: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of the box |λ - center| ≤ radius within [0, 1], two of shape [M]."""
    if radius is None:
        raise ValueError("center requires a radius, the half-width of the box, got none.")
    if not 0 <= radius < np.inf:
        raise ValueError(f"radius must be non-negative and finite, got {radius}.")
    if center is None:
        center = np.full(num_objectives, 1.0 / num_objectives)
    middle = np.array(center, dtype=np.float64)
    if middle.shape != (num_objectives,) or not np.isfinite(middle).all():
        raise ValueError(
            f"center must have one finite entry for each of the {num_objectives} objectives, "
            f"got {center}."
        )
    lower, upper = np.clip([middle - radius, middle + radius], 0.0, 1.0)
    slack = 4 * num_objectives * EPS  # sums of bounds are rounded
    if lower.sum() > 1 + slack or upper.sum() < 1 - slack:
        raise ValueError(
            f"The box contains no weights: entries within it sum to between {lower.sum():g} and "
            f"{upper.sum():g}, never to 1. Choose a larger radius or another center."
        )
    return lower, upper


def as_start(start: torch.Tensor | np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Returns checked initial weights for a single matrix [M, M], float64, shape [M]."""
    weights = as_float64(start, name="start")
    if matrix.ndim != 2 or weights.shape != matrix.shape[:1]:
        raise ValueError(
            "start must have shape [M] and is supported for a single gram [M, M] only, got "
            f"{list(weights.shape)} for {list(matrix.shape)}."
        )
    if not weights.max() > 0:
        raise ValueError(f"start must have a positive entry, got {weights.tolist()}.")
    return weights


def as_values(values: torch.Tensor | np.ndarray, matrix: np.ndarray, *, name: str) -> np.ndarray:
    """Returns values [..., M], one per objective of a Gram matrix [..., M, M], in float64."""
    point = as_float64(values, name=name)
    if point.shape != matrix.shape[:-1]:
        raise ValueError(
            f"{name} must have shape {list(matrix.shape[:-1])} for this gram, "
            f"got {list(point.shape)}."
        )
    return point


def as_weights(weights: torch.Tensor | np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Returns checked weights on the simplex for a gram [..., M, M], float64, shape [..., M]."""
    point = as_values(weights, matrix, name="weights")
    slack = rounding(weights)
    if (point < -slack).any() or (np.abs(point.sum(axis=-1) - 1) > slack).any():
        raise ValueError(
            f"weights must be non-negative and sum to 1, got minimum {point.min():.3g} and sums "
            f"from {point.sum(axis=-1).min():.6g} to {point.sum(axis=-1).max():.6g}."
        )
    return point


def like(values: np.ndarray, example: ArrayT) -> ArrayT:
    """Returns the values in the type, dtype and device of the example."""
    if isinstance(example, torch.Tensor):
        return torch.as_tensor(values).to(example.device, example.dtype)
    return values.astype(example.dtype)


def rounding(values: torch.Tensor | np.ndarray) -> float:
    """Returns the tolerance for rounding errors of this dtype, relative to the largest value."""
    if isinstance(values, torch.Tensor):
        eps = torch.finfo(values.dtype).eps
    else:
        eps = float(np.finfo(values.dtype).eps)
    return max(1e-6, 8 * eps)  # 1e-6: a float64 Gram is often summed from float32 products
