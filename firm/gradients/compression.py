"""Compressors of a client's Jacobian, and the messages that replace it in the upload.

FedCMOO's server needs the Gram matrix of the mean Jacobian, at an upload of no more than one model
per client: d numbers for the M·d entries of the Jacobian. Every compressor here takes a `budget` in
4-byte numbers and returns a message, a record of plain tensors and integers that reports its size
in bytes. `firm.federation.fedcmoo.approx_gram` estimates the Gram matrix from the messages.

Shapes, ranks and rates follow from M, d and the budget, which both sides know, and are not counted,
nor is the transport's framing. A seed counts 8 bytes, on top of the budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from firm.base.sizes import FLOAT_BYTES
from firm.gradients.jacobian import check_finite_rows

SEED_BYTES = 8
MAX_SEED = 2**63 - 1
SEEDS = {"seed", "shared_seed"}
"""Fields with a seed."""


@dataclass(frozen=True)
class JacobianMessage:
    """A client's compressed Jacobian.

    Raises:
        ValueError: When a field that must be an integer is none, fields do not match, or a tensor
            holds NaN or infinity.
    """

    shape: tuple[int, int]
    """M and d of the compressed Jacobian."""

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or not all(type(n) is int and n > 0 for n in self.shape):
            raise ValueError(
                f"shape of a message must be M and d, both at least 1, got {self.shape}."
            )
        for own in fields(self):
            value = getattr(self, own.name)
            if own.type is int and type(value) is not int:  # transports keep 4.0 and True
                raise ValueError(f"{own.name} of a message must be an integer, got {value!r}.")
        for name in vars(self).keys() & SEEDS:
            check_seed(name, getattr(self, name))
        self._check()

    def _check(self) -> None:
        """Raises ``ValueError`` unless further fields match the shape."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors and the seed; the other fields are known to both sides."""
        tensors = sum(v.nbytes for v in vars(self).values() if isinstance(v, torch.Tensor))
        return tensors + (SEED_BYTES if vars(self).keys() & SEEDS else 0)

    def reconstruct(self) -> torch.Tensor:
        """Returns the Jacobian reconstructed from the message, float32 [M, d]."""
        raise NotImplementedError

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Returns signs and matrices [M, ·], each linear in the message.

        A Bᵀ of two Jacobians A and B is estimated by Σ sign · part(A) part(B)ᵀ. Because parts are
        linear, they can be averaged over the clients first, so that one product per part is enough.
        """
        return [(1, self.reconstruct())]


@dataclass(frozen=True)
class Compressor:
    """Turns a Jacobian into a message of about `budget` numbers."""

    message: ClassVar[type[JacobianMessage]]
    """Type of its messages."""

    budget: int | None = None
    """Size of a message in 4-byte numbers, excluding a seed; d if None."""

    def __post_init__(self) -> None:
        if self.budget is not None and (isinstance(self.budget, bool) or self.budget < 1):
            raise ValueError(f"budget must be at least 1, or None for d, got {self.budget}.")

    def compress(
        self, jacobian: torch.Tensor, *, generator: torch.Generator, shared_seed: int = 0
    ) -> Any:
        """Returns the message for a Jacobian.

        Args:
            jacobian: Gradients, one row per objective, any float dtype, shape [M, d].
            generator: The client's random generator, on the CPU; not shared between clients.
            shared_seed: Seed shared by all clients of a round, different in every round; from 0 to
                2^63 - 1.

        Raises:
            ValueError: When the Jacobian is not [M, d] or holds NaN or infinity (the message names
                the objective), or the budget is too small for it.
        """
        check_seed("shared_seed", shared_seed)
        jacobian = check_jacobian(jacobian)
        num_objectives, num_parameters = jacobian.shape
        budget = num_parameters if self.budget is None else self.budget
        fields = self._fields(jacobian, budget, generator, shared_seed)
        return self.message((num_objectives, num_parameters), *fields)

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[Any]:
        """Returns the fields of the message after its shape, for a checked float32 Jacobian."""
        raise NotImplementedError


@dataclass(frozen=True)
class LowRankMessage(JacobianMessage):
    """The leading singular components of the Jacobian reshaped to a nearly square matrix."""

    left: torch.Tensor
    """Left singular vectors times the singular values, float32 [rows, r]."""
    right: torch.Tensor
    """Right singular vectors, float32 [r, columns]."""

    def _check(self) -> None:
        rows, columns = near_square(math.prod(self.shape))
        check_values("left", self.left, (rows, self.left.size(-1)))
        check_values("right", self.right, (self.left.size(-1), columns))

    def reconstruct(self) -> torch.Tensor:
        """Returns the product of the factors, float32 [M, d]."""
        return (self.left @ self.right).reshape(-1)[: math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class LowRankCompressor(Compressor):
    """The paper's compressor: randomised SVD of the Jacobian reshaped to a nearly square matrix.

    Algorithms 3 and 6 of Askin et al. (2024), with the range finder of Halko et al. (2011,
    Algorithm 4.4): a Gaussian sketch of the columns, power iterations with a QR after each product,
    then an exact SVD in the subspace. All M·d entries, objective by objective and padded with
    zeros, fill a matrix of about √(Md) x √(Md). The rank is the largest that the budget allows,
    ⌊budget / (rows + columns)⌋, which is about √(d/M)/2 at the default budget.
    """

    message = LowRankMessage

    oversampling: int = 10
    """Dimensions of the subspace beyond the rank, dropped before sending."""
    power_iterations: int = 2
    """Power iterations that refine the subspace, each one product with the matrix and its
    transpose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oversampling < 0 or self.power_iterations < 0:
            raise ValueError(
                "oversampling and power_iterations must be non-negative, "
                f"got {self.oversampling} and {self.power_iterations}."
            )

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[torch.Tensor]:
        rows, columns = near_square(jacobian.numel())
        rank = min(budget // (rows + columns), rows, columns)
        if rank < 1:
            raise ValueError(
                f"a budget of {budget} numbers is too small for rank 1: a component of a Jacobian "
                f"of shape {list(jacobian.shape)} takes {rows} + {columns}; "
                f"set at least {rows + columns} or send the Jacobian uncompressed."
            )
        padding = (0, rows * columns - jacobian.numel())
        matrix = torch.nn.functional.pad(jacobian.reshape(-1), padding).view(rows, columns)
        width = min(rank + self.oversampling, rows, columns)
        test = torch.randn(columns, width, generator=generator, dtype=torch.float32).to(matrix)
        basis = torch.linalg.qr(matrix @ test).Q  # [rows, width]
        for _ in range(self.power_iterations):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
        u, values, vt = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        return basis @ (u[:, :rank] * values[:rank]), vt[:rank].contiguous()


@dataclass(frozen=True)
class TopKMessage(JacobianMessage):
    """The entries of largest absolute value, and their positions."""

    values: torch.Tensor
    """The kept entries, in the order of their positions, float32 [k]."""
    positions: torch.Tensor
    """Increasing positions in the flattened Jacobian, int32 or int64 [k]; or a bitmap of all
    entries, most significant bit first, uint8 [⌈Md/8⌉]."""

    def _check(self) -> None:
        num_entries = math.prod(self.shape)
        check_values("values", self.values, (self.values.numel(),))
        if self.positions.dtype == torch.uint8:
            is_whole = self.positions.shape == (_num_packed(num_entries),)
        else:
            is_whole = (
                self.positions.dtype in (torch.int32, torch.int64)
                and self.positions.shape == self.values.shape
                and bool(((self.positions >= 0) & (self.positions < num_entries)).all())
            )
        if not is_whole or len(self._indices()) != len(self.values):
            raise ValueError(
                f"positions must locate {self.values.numel()} values among {num_entries} entries, "
                f"got {self.positions.dtype} of shape {list(self.positions.shape)}."
            )

    def reconstruct(self) -> torch.Tensor:
        """Returns the Jacobian with all other entries zero, float32 [M, d]."""
        flat = self.values.new_zeros(math.prod(self.shape))
        flat[self._indices()] = self.values
        return flat.view(self.shape)

    def _indices(self) -> torch.Tensor:
        if self.positions.dtype != torch.uint8:
            return self.positions.long()
        bits = np.unpackbits(self.positions.cpu().numpy(), count=math.prod(self.shape))
        return torch.from_numpy(np.flatnonzero(bits)).to(self.positions.device)


@dataclass(frozen=True)
class TopKCompressor(Compressor):
    """Sends the k entries of largest absolute value unchanged; biased.

    Positions are encoded as a list of 4-byte indices (8 bytes beyond 2^31 entries) or as a bitmap
    of the Md entries, whichever leaves room for more values. At a budget of d that is the bitmap up
    to M = 15: it leaves 0.94 d values at M = 2, the list d/2. The budget includes positions.
    """

    message = TopKMessage

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[torch.Tensor]:
        num_kept, is_bitmap = self.num_kept(budget, jacobian.numel())
        flat = jacobian.reshape(-1)
        is_kept = torch.zeros_like(flat, dtype=torch.bool)
        is_kept[flat.abs().topk(num_kept, sorted=False).indices] = True
        if is_bitmap:
            packed = np.packbits(is_kept.cpu().numpy())
            positions = torch.from_numpy(packed).to(flat.device)
        else:
            positions = is_kept.nonzero().squeeze(1).to(index_dtype(flat.numel()))
        return flat[is_kept], positions

    @staticmethod
    def num_kept(budget: int, num_entries: int) -> tuple[int, bool]:
        """Returns how many values a budget allows, and whether positions are sent as a bitmap.

        >>> TopKCompressor.num_kept(1000, 2000)  # the bitmap takes 250 bytes, 62.5 numbers
        (937, True)
        >>> TopKCompressor.num_kept(1000, 40_000)
        (500, False)
        """
        num_bytes = FLOAT_BYTES * budget
        by_list = num_bytes // (FLOAT_BYTES + index_dtype(num_entries).itemsize)
        by_bitmap = (num_bytes - _num_packed(num_entries)) // FLOAT_BYTES
        num_kept = min(max(by_list, by_bitmap), num_entries)
        if num_kept < 1:
            raise ValueError(
                f"a budget of {budget} numbers keeps no entry of {num_entries}: "
                "a value and its index take 2 numbers (3 beyond 2^31 entries)."
            )
        return num_kept, by_bitmap > by_list


@dataclass(frozen=True)
class RandomMaskMessage(JacobianMessage):
    """Entries at random positions drawn from a seed."""

    values: torch.Tensor
    """The entries, scaled if the compressor says so, float32 [k]."""
    seed: int
    """Seed of the positions."""

    def _check(self) -> None:
        num_kept = min(self.values.numel(), math.prod(self.shape))
        check_values("values", self.values, (num_kept,))

    def reconstruct(self) -> torch.Tensor:
        """Returns the Jacobian with all other entries zero, float32 [M, d]."""
        flat = self.values.new_zeros(math.prod(self.shape))
        flat[random_positions(flat.numel(), len(self.values), self.seed).to(flat.device)] = (
            self.values
        )
        return flat.view(self.shape)


@dataclass(frozen=True)
class RandomMaskCompressor(Compressor):
    """Sends as many entries as the budget allows, at random positions encoded by one seed.

    The paper's text (Appendix B) sends a random subset of the entries unscaled: that is ``none``,
    whose expectation is p = k/(Md) times the Jacobian. ``inverse_probability`` divides by p, which
    makes the message unbiased (Assumption 5 with q = 1/p - 1).
    """

    message = RandomMaskMessage

    scaling: Literal["none", "inverse_probability"] = "none"
    """Scaling of sent entries: unscaled (biased), or divided by their sampling probability
    (unbiased)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaling not in ("none", "inverse_probability"):
            raise ValueError(
                f"scaling must be 'none' or 'inverse_probability', got {self.scaling!r}."
            )

    def _fields(
        self, jacobian: torch.Tensor, budget: int, generator: torch.Generator, shared_seed: int
    ) -> Sequence[Any]:
        num_kept = min(budget, jacobian.numel())
        seed = draw_seed(generator)  # others than those of other clients: errors average out
        positions = random_positions(jacobian.numel(), num_kept, seed).to(jacobian.device)
        values = jacobian.reshape(-1)[positions]
        if self.scaling == "inverse_probability":
            values *= jacobian.numel() / num_kept
        return values, seed


def near_square(num_entries: int) -> tuple[int, int]:
    """Returns rows and columns of a nearly square matrix that holds `num_entries` entries.

    >>> near_square(57_030)  # M = 2, d = 28,515: 90 entries are padding
    (238, 240)
    """
    rows = math.isqrt(num_entries)
    return rows, -(-num_entries // rows)


def check_jacobian(jacobian: torch.Tensor) -> torch.Tensor:
    """Returns a Jacobian [M, d] detached and in float32, the dtype of messages.

    Raises:
        ValueError: When the shape or dtype is wrong, or a row holds NaN or infinity; names the
            objective.
    """
    if jacobian.ndim != 2 or not jacobian.numel():
        raise ValueError(
            f"jacobian must have shape [M, d] with M and d at least 1, got {list(jacobian.shape)}."
        )
    if not jacobian.is_floating_point():
        raise ValueError(f"jacobian must hold floats, got {jacobian.dtype}.")
    jacobian = jacobian.detach().float()
    check_finite_rows(jacobian)
    return jacobian


def check_seed(name: str, seed: int) -> None:
    """Raises ``ValueError`` unless the seed fits in 8 bytes and is not negative."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"{name} must be from 0 to 2^63 - 1, got {seed}.")


def check_values(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless a tensor of a message is float32, finite and of this shape."""
    if values.shape != shape or values.dtype != torch.float32:
        raise ValueError(
            f"{name} must be float32 of shape {list(shape)}, "
            f"got {values.dtype} of shape {list(values.shape)}."
        )
    if not values.isfinite().all():
        raise ValueError(f"{name} of a message holds NaN or infinity; drop that client's upload.")


def draw_seed(generator: torch.Generator) -> int:
    """Returns a seed from 0 to 2^63 - 1 drawn from a CPU generator."""
    return int(torch.randint(MAX_SEED, (), generator=generator))


def random_positions(num_entries: int, num_kept: int, seed: int) -> torch.Tensor:
    """Returns distinct positions below `num_entries`, uniformly at random, int64 [num_kept]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_entries, generator=generator, dtype=index_dtype(num_entries))
    return order[:num_kept].long()


def index_dtype(num_entries: int) -> torch.dtype:
    """Returns the smallest index dtype for `num_entries`: int32 up to 2^31, then int64."""
    return torch.int32 if num_entries <= 2**31 else torch.int64


def _num_packed(num_bits: int) -> int:
    return -(-num_bits // 8)
