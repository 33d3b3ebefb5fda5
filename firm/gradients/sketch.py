"""CountSketch of a Jacobian, and a hybrid that sketches the residual of a low-rank approximation.

A sketch multiplies all clients' Jacobians by the same random matrix C with a single ±1 in every
row. It is linear: the sum of sketches is the sketch of the sum. It therefore works with secure
aggregation, which reveals only the sum, and the Gram matrix is computed from the sketches directly,
without decompression.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firm.base.sizes import FLOAT_BYTES
from firm.gradients.compression import (
    Compressor,
    JacobianMessage,
    LowRankCompressor,
    LowRankMessage,
    check_values,
    index_dtype,
    near_square,
)

CHUNK = 65_536
"""Columns summed per chunk; bounds the memory and does not affect the result."""


@dataclass(frozen=True)
class CountSketchMessage(JacobianMessage):
    """Signed sums of a Jacobian's columns."""

    sketch: torch.Tensor
    """The sketched Jacobian A C, float32 [M, k]."""
    shared_seed: int
    """Seed of C; the same for all clients of a round."""

    def _check(self) -> None:
        check_values("sketch", self.sketch, (self.shape[0], self.sketch.size(-1)))

    def reconstruct(self) -> torch.Tensor:
        """Returns A C Cᵀ, an unbiased but noisy estimate of the Jacobian, float32 [M, d].

        The Gram matrix of this estimate is biased by its noise; that of `parts` is not.
        """
        return from_sketch(self.sketch, self.shape[1], self.shared_seed)

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the sketch, whose inner products are unbiased estimates of the Jacobian's."""
        return [(1, self.sketch)]


@dataclass(frozen=True)
class CountSketchCompressor(Compressor):
    """Sums columns with random signs in k = ⌊budget / M⌋ buckets; inner products are unbiased.

    CountSketch after Charikar, Chen and Farach-Colton (2002), with one departure: buckets are
    assigned evenly (a random permutation modulo k) instead of independently. Two columns then
    collide with probability (d/k - 1)/(d - 1) instead of 1/k, which at a budget of d is smaller by
    a factor of 1 - 1/M: half the variance at M = 2, and no error if the budget covers every entry.

    The inner product of rows x and y has mean xᵀy and a variance of about
    (‖x‖²‖y‖² + (xᵀy)²) (1 - k/d)/k, independent of the spectrum and of the clients' heterogeneity.

    Signs and buckets are drawn from a CPU generator seeded with `shared_seed`, even for a Jacobian
    on a GPU, so that they agree on all machines with the same release of torch.
    """

    message = CountSketchMessage

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[Any]:
        num_objectives, num_parameters = jacobian.shape
        num_buckets = min(budget // num_objectives, num_parameters)
        if num_buckets < 1:
            raise ValueError(
                f"a budget of {budget} numbers is too small for one bucket for each of the "
                f"{num_objectives} objectives; set at least {num_objectives}."
            )
        return to_sketch(jacobian, num_buckets, shared_seed), shared_seed


@dataclass(frozen=True)
class HybridMessage(JacobianMessage):
    """The leading components S of a Jacobian A, and a sketch of the residual R = A - S."""

    left: torch.Tensor
    """Left singular vectors times the singular values, float32 [rows, r]."""
    right: torch.Tensor
    """Right singular vectors, float32 [r, columns]."""
    sketch: torch.Tensor
    """The sketched residual R C, float32 [M, k]."""
    shared_seed: int
    """Seed of C; the same for all clients of a round."""

    def _check(self) -> None:
        self._split()

    def reconstruct(self) -> torch.Tensor:
        """Returns S + R C Cᵀ, an unbiased estimate of the Jacobian, float32 [M, d]."""
        low_rank, rest = self._split()
        return low_rank.reconstruct().add_(rest.reconstruct())

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Returns S, the sketch of S with sign -1, and the sketch of A.

        S Sᵀ is known exactly, the cross terms and R Rᵀ are estimated by the sketch:
        S Sᵀ + (SC)(RC)ᵀ + (RC)(SC)ᵀ + (RC)(RC)ᵀ = S Sᵀ - (SC)(SC)ᵀ + (AC)(AC)ᵀ.
        This is unbiased, because S does not depend on C: it is the sketch of A with S as a control
        variate. Any multiple of the first two terms would be unbiased; the multiple 1 cancels the
        sketch's noise in S Sᵀ entirely. The estimate may be indefinite.
        """
        low_rank = self._split()[0].reconstruct()
        sketch = to_sketch(low_rank, self.sketch.size(1), self.shared_seed)
        return [(1, low_rank), (-1, sketch), (1, sketch + self.sketch)]

    def _split(self) -> tuple[LowRankMessage, CountSketchMessage]:
        return (
            LowRankMessage(self.shape, self.left, self.right),
            CountSketchMessage(self.shape, self.sketch, self.shared_seed),
        )


@dataclass(frozen=True)
class HybridCompressor(LowRankCompressor):
    """Spends half of the budget on the leading components and the rest on a sketch of the residual.

    Not in the paper. More accurate than either part alone if the spectrum falls fast but not to
    zero. Not linear, hence incompatible with secure aggregation: the low-rank part of a sum is not
    the sum of the low-rank parts.
    """

    message = HybridMessage

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[Any]:
        component = sum(near_square(jacobian.numel()))
        if budget // 2 < component:
            raise ValueError(
                f"half of a budget of {budget} numbers is too small for rank 1: one component of a "
                f"Jacobian of shape {list(jacobian.shape)} takes {component}; set at least "
                f"{2 * component} or use count_sketch."
            )
        # the subspace differs by client, the sketch's C is shared
        left, right = super()._fields(jacobian, budget // 2, generator, shared_seed)
        low_rank = LowRankMessage((jacobian.size(0), jacobian.size(1)), left, right)
        rest = CountSketchCompressor(budget - low_rank.num_bytes // FLOAT_BYTES).compress(
            jacobian - low_rank.reconstruct(), generator=generator, shared_seed=shared_seed
        )
        return left, right, rest.sketch, shared_seed


def to_sketch(jacobian: torch.Tensor, num_buckets: int, seed: int) -> torch.Tensor:
    """Returns A C with the C of a seed: columns with random signs, summed in random buckets.

    A is float32 [M, d], the result float32 [M, num_buckets], with at most d buckets.
    """
    buckets, signs = _buckets_and_signs(jacobian.size(1), num_buckets, seed, jacobian.device)
    sketch = jacobian.new_zeros(jacobian.size(0), num_buckets)
    for start in range(0, jacobian.size(1), CHUNK):
        columns = slice(start, start + CHUNK)
        sketch.index_add_(1, buckets[columns].long(), jacobian[:, columns] * signs[columns])
    return sketch


def from_sketch(sketch: torch.Tensor, num_parameters: int, seed: int) -> torch.Tensor:
    """Returns the sketch [M, k] times Cᵀ: each column's signed bucket sum, float32 [M, d]."""
    buckets, signs = _buckets_and_signs(num_parameters, sketch.size(1), seed, sketch.device)
    return sketch.index_select(1, buckets) * signs


def _buckets_and_signs(
    num_parameters: int, num_buckets: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each column's bucket, an integer below k, and sign, int8; both of shape [d]."""
    generator = torch.Generator().manual_seed(seed)
    dtype = index_dtype(num_parameters)
    order = torch.randperm(num_parameters, generator=generator, dtype=dtype)
    signs = torch.randint(2, (num_parameters,), generator=generator, dtype=torch.int8)
    return (order % num_buckets).to(device), signs.mul_(2).sub_(1).to(device)
