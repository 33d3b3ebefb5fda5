"""ApproxGramJacobian: the Gram matrix of the clients' mean Jacobian, from compressed messages.

Algorithms 3, 6 and 9 and Eq. (13) and (14) of Askin et al. (2024), FedCMOO. They approximate the
Gram matrix of (1/n) Σ_i A_i, where A_i [M, d] is client i's Jacobian (the paper's H̃_i transposed),
H_i the server's reconstruction of it, and R_i = A_i - H_i.

In one-way communication, a client uploads one message. In two-way communication, the server answers
with a compressed Σ_i H_i (`broadcast`), and the client sends 2M² more numbers (`two_way_reply`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from firm.gradients.compression import Compressor, Message, checked_jacobian
from firm.gradients.gram import CHUNK, gram_matrix


@dataclass(frozen=True)
class TwoWayReply:
    """A client's upload after the broadcast: two of the terms of Eq. (14)."""

    own_gram: torch.Tensor
    """A_i A_iᵀ, float64 [M, M]."""
    correction: torch.Tensor
    """R_i (h - H_i)ᵀ, float64 [M, M], not symmetric."""

    @property
    def num_bytes(self) -> int:
        """Bytes of both matrices."""
        return self.own_gram.nbytes + self.correction.nbytes


def one_way_gram(
    messages: Sequence[Message],
    *,
    own_grams: Sequence[torch.Tensor] | None = None,
    num_clients: int | None = None,
) -> torch.Tensor:
    """Returns the Gram matrix of the mean Jacobian, estimated from messages (Algorithm 3).

    For messages that are reconstructed this is the Gram matrix of the mean reconstruction; for
    sketches that of the mean sketch, which no decompression improves.

    With `own_grams` the terms A_i A_iᵀ are exact and only those between two clients are estimated,
    as in the first two terms of Eq. (13). This removes the bias of unbiased compressors, whose
    noise is correlated with nothing but itself, for M² more numbers a client.

    Args:
        messages: One per client, of one compressor; or, for sketches, their sum alone.
        own_grams: Each client's `gram_matrix` of its own Jacobian, [M, M], in the same order.
        num_clients: n; by default the number of messages. Needed when secure aggregation leaves one
            message that is the sum of n.

    Returns:
        float64 [M, M], symmetric and positive semidefinite. Estimates that are differences (with
        `own_grams`, or of `HybridMessage`) may be indefinite and are projected, which is a
        departure: solvers of weights do not accept an indefinite Gram matrix, and the true one is
        never indefinite.

    Raises:
        ValueError: When there are no messages, they differ in kind, shape or shared seed, or
            `own_grams` do not belong to them.
    """
    _check_alike(messages)
    if num_clients is not None and num_clients < len(messages):
        raise ValueError(
            f"num_clients must be at least the {len(messages)} messages given, got {num_clients}."
        )
    num_clients = num_clients or len(messages)
    total = sum_of_parts(messages)
    estimate = _inner_products_of(total, total)
    if own_grams is not None:
        _check_own_grams(own_grams, messages[0].shape[0])
        if not len(own_grams) == len(messages) == num_clients:
            raise ValueError(
                f"own_grams need one message per client, got {len(own_grams)} Gram matrices beside "
                f"{len(messages)} messages of {num_clients} clients."
            )
        for message, own_gram in zip(messages, own_grams, strict=True):
            parts = message.parts()
            estimate += own_gram.to(estimate) - _inner_products_of(parts, parts)
    return project_to_psd(estimate / num_clients**2)


def broadcast(
    messages: Sequence[Message],
    compressor: Compressor,
    *,
    generator: torch.Generator,
    shared_seed: int = 0,
) -> Message:
    """Returns the server's answer, the compressed sum of reconstructions (Algorithm 6, line 12).

    Raises:
        ValueError: When there are no messages, they differ in kind or shape, or they are sketches,
            whose errors are correlated across clients of one seed: Eq. (14) neglects Σ R_i R_jᵀ.
    """
    _check_two_way(messages)
    ((_, total),) = sum_of_parts(messages)
    return compressor.compress(total, generator=generator, shared_seed=shared_seed)


def two_way_reply(jacobian: torch.Tensor, message: Message, answer: Message) -> TwoWayReply:
    """Returns a client's second upload (Algorithm 6, lines 14 to 16).

    Args:
        jacobian: The client's Jacobian A_i, shape [M, d].
        message: The client's first upload, which gives H_i.
        answer: The server's `broadcast`, which gives h.

    Raises:
        ValueError: When shapes differ, or the Jacobian holds NaN or infinity.
    """
    jacobian = checked_jacobian(jacobian)
    if not tuple(jacobian.shape) == tuple(message.shape) == tuple(answer.shape):
        raise ValueError(
            f"jacobian, message and answer must have one shape, got {list(jacobian.shape)}, "
            f"{list(message.shape)} and {list(answer.shape)}."
        )
    reconstruction = message.reconstruct()
    correction = inner_products(
        jacobian - reconstruction, answer.reconstruct().sub_(reconstruction)
    )
    return TwoWayReply(gram_matrix(jacobian), correction)


def two_way_gram(messages: Sequence[Message], replies: Sequence[TwoWayReply]) -> torch.Tensor:
    """Returns the Gram matrix of the mean Jacobian after two-way communication (Eq. 14).

    (1/n²) (Σ_i A_i A_iᵀ + Σ_{i≠j} H_i H_jᵀ + X + Xᵀ),  X = Σ_i R_i (h - H_i)ᵀ

    The second term takes the exact sum of the H_i, which the server has. Two departures from
    Algorithm 6, line 18: its 2X is symmetrised, since the term of Eq. (13) that it replaces is
    symmetric; and the estimate, which is sometimes indefinite because the last term is neglected,
    is projected, as in `one_way_gram`.

    The correction helps where R_i is small beside A_i (low rank, top-k, mask). Reconstructions that
    are unbiased but noisier than that (quantisers at M in the tens) add their noise to it: use
    `one_way_gram` with `own_grams` for those.

    Args:
        messages: One per client.
        replies: Each client's `two_way_reply`, in the same order.

    Returns:
        float64 [M, M], symmetric and positive semidefinite.

    Raises:
        ValueError: As `broadcast`, or when the replies do not belong to the messages.
    """
    _check_two_way(messages)
    if len(messages) != len(replies):
        raise ValueError(f"got {len(messages)} messages but {len(replies)} replies; one for each.")
    num_objectives = messages[0].shape[0]
    _check_own_grams([reply.own_gram for reply in replies], num_objectives)
    _check_own_grams([reply.correction for reply in replies], num_objectives, "correction")
    ((_, total),) = sum_of_parts(messages)
    estimate = gram_matrix(total)
    for message, reply in zip(messages, replies, strict=True):
        correction = reply.correction.to(estimate)
        estimate += reply.own_gram.to(estimate) - gram_matrix(message.reconstruct())
        estimate += correction + correction.T
    return project_to_psd(estimate / len(messages) ** 2)


def two_sample_gram(
    first: Sequence[Message], second: Sequence[Message], *, is_symmetrized: bool = False
) -> torch.Tensor:
    """Returns the unbiased estimate Y₁ Y₂ᵀ from two independent sets of clients (Algorithm 9).

    The mean Jacobians Y₁ and Y₂ share no noise, so with unbiased messages their product has the
    true Gram matrix as its mean; the Gram matrix of either one would add that of its noise.

    Args:
        first: Messages of one set of clients.
        second: Messages of another, drawn independently; sketches need the same shared seed.
        is_symmetrized: Whether the symmetric part is returned; the paper takes the product as is.

    Returns:
        float64 [M, M], in general neither symmetric nor positive semidefinite.

    Raises:
        ValueError: When a set is empty, or messages differ in kind, shape or shared seed.
    """
    _check_alike(first)
    _check_alike([first[0], *second])
    if not second:
        raise ValueError("The second set of messages is empty; there must be one at least.")
    product = _inner_products_of(sum_of_parts(first), sum_of_parts(second))
    product /= len(first) * len(second)
    return (product + product.T) / 2 if is_symmetrized else product


def mean_own_gram(own_grams: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns (1/n) Σ_i A_i A_iᵀ of the clients' own Gram matrices [M, M], without any compression.

    The paper's Table 3 has this sum "with a proper scale" without saying which. 1/n is exact for
    identical clients and an upper bound otherwise (the difference is positive semidefinite); 1/n²
    would be right for clients whose gradients are orthogonal.

    Raises:
        ValueError: When there are none, or one is not a finite [M, M].
    """
    if not own_grams:
        raise ValueError("own_grams is empty; there must be one Gram matrix at least.")
    _check_own_grams(own_grams, len(own_grams[0]))
    return torch.stack(list(own_grams)).double().mean(dim=0)


def project_to_psd(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the positive semidefinite matrix nearest to the symmetric part of a matrix [M, M].

    Negative eigenvalues become zero; float64 and symmetric.
    """
    matrix = matrix.double()
    matrix = (matrix + matrix.T) / 2
    values, vectors = torch.linalg.eigh(matrix)
    if values[0] >= 0:
        return matrix
    projected = (vectors * values.clamp(min=0)) @ vectors.T
    return (projected + projected.T) / 2


def nrmse(
    truth: torch.Tensor,
    estimate: torch.Tensor,
    *,
    norm: Literal["frobenius", "spectral"] = "frobenius",
) -> float:
    """Returns ‖truth - estimate‖ / ‖truth‖, the error measure of the paper's Table 3.

    The paper writes ‖·‖₂ and calls it a root mean squared error, which is one over the entries: so
    Frobenius by default, with the spectral reading beside it.

    Raises:
        ValueError: When the shapes [M, M] differ, or the truth is zero.

    >>> nrmse(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), norm="spectral")
    1.0
    """
    if truth.shape != estimate.shape or truth.ndim != 2:
        raise ValueError(
            f"truth and estimate must have one shape [M, M], got {list(truth.shape)} "
            f"and {list(estimate.shape)}."
        )
    orders = {"frobenius": "fro", "spectral": 2}
    if norm not in orders:
        raise ValueError(f"norm must be 'frobenius' or 'spectral', got {norm!r}.")
    truth, estimate = truth.double(), estimate.double()
    scale = torch.linalg.matrix_norm(truth, ord=orders[norm])
    if not scale > 0:
        raise ValueError(f"truth must not be zero, got a norm of {scale.item()}.")
    return (torch.linalg.matrix_norm(truth - estimate, ord=orders[norm]) / scale).item()


def inner_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns the products of all rows of two matrices [M, d], summed in float64, shape [M, M]."""
    products = first.new_zeros(len(first), len(second), dtype=torch.float64)
    for left, right in zip(first.split(CHUNK, dim=1), second.split(CHUNK, dim=1), strict=True):
        products += left.double() @ right.double().T
    return products


def sum_of_parts(messages: Sequence[Message]) -> list[tuple[int, torch.Tensor]]:
    """Returns the signed parts of the summed Jacobian; see `Message.parts`."""
    total = [(sign, matrix.clone()) for sign, matrix in messages[0].parts()]
    for message in messages[1:]:
        for (_, matrix), (_, other) in zip(total, message.parts(), strict=True):
            matrix += other
    return total


def _inner_products_of(
    first: list[tuple[int, torch.Tensor]], second: list[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    products = [
        sign * (gram_matrix(left) if left is right else inner_products(left, right))
        for (sign, left), (_, right) in zip(first, second, strict=True)
    ]
    return torch.stack(products).sum(dim=0)


def _check_alike(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("There are no messages; a Gram matrix needs one client at least.")

    def traits(message: Message) -> dict[str, object]:
        # a sketch's width is a trait too, a rank or a number of kept entries is not
        sketch = getattr(message, "sketch", None)
        return {
            "kind": type(message).__name__,
            "shape [M, d]": list(message.shape),
            "shared_seed": getattr(message, "shared_seed", None),
            "sketch": None if sketch is None else list(sketch.shape),
        }

    expected = traits(messages[0])
    for index, message in enumerate(messages):
        for trait, value in traits(message).items():
            if value != expected[trait]:
                raise ValueError(
                    f"messages must agree in {trait}: message 0 has {expected[trait]}, "
                    f"message {index} has {value}."
                )


def _check_two_way(messages: Sequence[Message]) -> None:
    _check_alike(messages)
    if getattr(messages[0], "shared_seed", None) is not None:
        raise ValueError(
            f"{type(messages[0]).__name__} cannot go two ways: sketches of one seed err in the "
            "same direction, which the formula neglects. Use one_way_gram."
        )


def _check_own_grams(
    matrices: Sequence[torch.Tensor], num_objectives: int, name: str = "own Gram matrix"
) -> None:
    for index, matrix in enumerate(matrices):
        if matrix.shape != (num_objectives, num_objectives) or not matrix.isfinite().all():
            raise ValueError(
                f"the {name} of client {index} must be finite of shape "
                f"[{num_objectives}, {num_objectives}], got shape {list(matrix.shape)}"
                + (" with NaN or infinity." if not matrix.isfinite().all() else ".")
            )
