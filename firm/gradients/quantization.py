"""An unbiased quantiser of Jacobians, the compressor that FedCMOO's theory assumes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from firm.base.sizes import BUCKET, FLOAT_BYTES, MAX_BITS
from firm.gradients.compression import (
    Compressor,
    JacobianMessage,
    check_values,
    draw_seed,
    random_positions,
)

CHUNK = 65_536
"""Codes packed per chunk; a multiple of 8, so that every chunk fills whole bytes."""


@dataclass(frozen=True)
class QuantizedMessage(JacobianMessage):
    """Entries rounded stochastically to a few levels, with one scale per bucket."""

    codes: torch.Tensor
    """Levels from 0 to 2s, packed `bits` each, objective by objective, uint8 [⌈M·k·bits/8⌉]."""
    scales: torch.Tensor
    """Largest absolute value of each bucket, float32 [M, ⌈k/bucket⌉]."""
    bits: int
    """Bits per entry; s = 2^(bits-1) - 1."""
    bucket: int
    """Entries per bucket, which share a scale."""
    num_kept: int
    """Entries per objective, k; a random subset if below d."""
    seed: int
    """Seed of the k columns, which are the same for all objectives."""

    def _check(self) -> None:
        num_objectives, num_parameters = self.shape
        if not (2 <= self.bits <= MAX_BITS and 1 <= self.num_kept <= num_parameters):
            raise ValueError(
                f"a quantised message needs 2 to {MAX_BITS} bits and 1 to {num_parameters} "
                f"entries per objective, got {self.bits} and {self.num_kept}."
            )
        if self.bucket < 1:
            raise ValueError(f"bucket must be at least 1, got {self.bucket}.")
        check_values("scales", self.scales, (num_objectives, -(-self.num_kept // self.bucket)))
        num_packed = -(-num_objectives * self.num_kept * self.bits // 8)
        if self.codes.dtype != torch.uint8 or self.codes.shape != (num_packed,):
            raise ValueError(
                f"codes must be uint8 of shape [{num_packed}], "
                f"got {self.codes.dtype} of shape {list(self.codes.shape)}."
            )

    def reconstruct(self) -> torch.Tensor:
        """Returns an unbiased estimate of the Jacobian, float32 [M, d]."""
        num_objectives, num_parameters = self.shape
        num_levels = 2 ** (self.bits - 1) - 1
        codes = _unpack(self.codes, num_objectives * self.num_kept, self.bits)
        levels = codes.view(num_objectives, self.num_kept).to(self.scales.device) - num_levels
        length = min(self.bucket, self.num_kept)  # a client may claim buckets of any length
        scales = self.scales.repeat_interleave(length, dim=1)[:, : self.num_kept]
        values = levels * (scales * (num_parameters / self.num_kept / num_levels))
        if self.num_kept == num_parameters:
            return values
        rows = values.new_zeros(self.shape)
        columns = random_positions(num_parameters, self.num_kept, self.seed)
        rows[:, columns.to(rows.device)] = values
        return rows


@dataclass(frozen=True)
class QuantizingCompressor(Compressor):
    """Stochastic rounding after QSGD (Alistarh et al., 2017), per objective: Assumption 5.

    Every entry x of a bucket with largest absolute value a is rounded stochastically to one of its
    two neighbours among the 2s + 1 multiples of a/s between -a and a, s = 2^(bits-1) - 1, so that
    its expectation is x. If the budget does not cover all entries even at few bits (M above 14 at a
    budget of d), k random columns of d are kept and scaled by d/k, which is unbiased too. In total
    E‖Q(x) - x‖² ≤ q‖x‖² with

        q = (d/k) (1 + min(n/(4s²), √n/s)) - 1,  n = min(bucket, k).

    Departures from QSGD: the scale is the bucket's largest absolute value, not its norm, which only
    makes the steps smaller; and codes have a fixed length.
    """

    message = QuantizedMessage

    bits: int | None = None
    """Bits per entry, from 2 to 16; if None, the number with the smallest q."""
    bucket: int = BUCKET
    """Entries per bucket, which share one scale of 4 bytes."""
    rounding: Literal["random", "nearest"] = "random"
    """"random" is unbiased; "nearest" has the smallest error, but is biased."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None and not 2 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits must be from 2 to {MAX_BITS} or None, got {self.bits}.")
        if self.bucket < 1:
            raise ValueError(f"bucket must be at least 1, got {self.bucket}.")

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[Any]:
        num_objectives, num_parameters = jacobian.shape
        bits, num_kept = self._rate(num_objectives, num_parameters, budget)
        num_levels = 2 ** (bits - 1) - 1
        seed = draw_seed(generator)
        values = jacobian
        if num_kept < num_parameters:
            columns = random_positions(num_parameters, num_kept, seed)
            values = jacobian[:, columns.to(jacobian.device)]
        num_runs = -(-num_kept // self.bucket)
        padding = (0, num_runs * self.bucket - num_kept)
        runs = torch.nn.functional.pad(values, padding).view(num_objectives, num_runs, self.bucket)
        scales = runs.abs().amax(dim=2)  # [M, runs]
        steps = runs / torch.where(scales > 0, scales, 1).unsqueeze(2) * num_levels
        if self.rounding == "nearest":
            levels = steps.round()
        else:
            floors = steps.floor()
            draws = torch.rand(runs.shape, generator=generator).to(runs.device)
            levels = floors + (draws < steps - floors)
        levels.clamp_(-num_levels, num_levels)
        codes = (levels + num_levels).view(num_objectives, -1)[:, :num_kept]
        packed = _pack(codes.to(torch.int32).reshape(-1), bits).to(jacobian.device)
        return packed, scales, bits, self.bucket, num_kept, seed

    def _rate(self, num_objectives: int, num_parameters: int, budget: int) -> tuple[int, int]:
        """Returns bits per entry and entries per objective."""
        available = 8 * FLOAT_BYTES * budget // num_objectives  # bits per objective
        rates: list[tuple[int, int]] = []
        for bits in range(2, MAX_BITS + 1) if self.bits is None else [self.bits]:
            num_runs, rest = divmod(available, self.bucket * bits + 8 * FLOAT_BYTES)
            num_kept = num_runs * self.bucket + max(rest - 8 * FLOAT_BYTES, 0) // bits
            rates.append((bits, min(num_kept, num_parameters)))
        affordable = [rate for rate in rates if rate[1] > 0]
        if not affordable:
            raise ValueError(
                f"a budget of {budget} numbers is too small for one entry of each of the "
                f"{num_objectives} objectives; set at least {2 * num_objectives}."
            )
        return min(affordable, key=lambda rate: self._bound(rate[0], rate[1], num_parameters))

    def _bound(self, bits: int, num_kept: int, num_parameters: int) -> float:
        num_levels = 2 ** (bits - 1) - 1
        n = min(self.bucket, num_kept)
        rounding = min(n / (4 * num_levels**2), math.sqrt(n) / num_levels)
        return num_parameters / num_kept * (1 + rounding) - 1


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns codes below 2^bits [N] packed, most significant bits first, uint8 [⌈N·bits/8⌉]."""
    shifts = np.arange(bits - 1, -1, -1)
    pieces = [
        np.packbits((chunk.numpy()[:, None] >> shifts & 1).astype(np.uint8))
        for chunk in codes.cpu().split(CHUNK)
    ]
    return torch.from_numpy(np.concatenate(pieces))


def _unpack(packed: torch.Tensor, num_codes: int, bits: int) -> torch.Tensor:
    """Returns the codes that `_pack` packed, int32 [N] on the CPU."""
    powers = 2 ** np.arange(bits - 1, -1, -1, dtype=np.int32)
    num_bytes = CHUNK * bits // 8
    pieces = [
        np.unpackbits(chunk.numpy())[: min(CHUNK, num_codes - start) * bits].reshape(-1, bits)
        @ powers
        for start, chunk in zip(
            range(0, num_codes, CHUNK), packed.cpu().split(num_bytes), strict=True
        )
    ]
    return torch.from_numpy(np.concatenate(pieces))
