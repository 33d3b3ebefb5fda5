"""ApproxGramJacobian: the Gram matrix of the clients' mean Jacobian, from compressed messages.

Algorithms 3, 6 and 9 and Eq. (13) and (14) of Askin et al. (2024), FedCMOO. They estimate the Gram
matrix of (1/n) Σ_i A_i, where A_i [M, d] is client i's Jacobian (the paper's H̃_i transposed), H_i
the server's reconstruction of it, and R_i = A_i - H_i.

In one-way communication, each client uploads one message. In two-way communication, the server then
broadcasts a compressed Σ_i H_i (`broadcast`), and each client uploads another 2M² numbers
(`two_way_reply`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from firm.gradients.compression import Compressor, JacobianMessage, check_jacobian
from firm.gradients.jacobian import CHUNK, gram_matrix


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


def one_way_gram(messages: Sequence[JacobianMessage]) -> torch.Tensor:
    """Returns the Gram matrix of the mean Jacobian, estimated from messages (Algorithm 3).

    This is the Gram matrix of the mean reconstruction, or, for sketches, of the mean sketch:
    decompressing sketches first would not improve the estimate.

    Args:
        messages: One message per client, all from the same compressor.

    Returns:
        float64 [M, M], symmetric and positive semidefinite. The estimate of `HybridMessage` is a
        difference, which may be indefinite and is projected. This departs from the paper: the
        weight solvers reject an indefinite Gram matrix, and the true one is never indefinite.

    Raises:
        ValueError: When there are no messages, or they differ in kind, shape or shared seed.
    """
    _check_alike(messages)
    total = sum_of_parts(messages)
    return project_to_psd(_inner_products_of(total, total) / len(messages) ** 2)


def broadcast(
    messages: Sequence[JacobianMessage],
    compressor: Compressor,
    *,
    generator: torch.Generator,
) -> JacobianMessage:
    """Returns the message the server broadcasts: the compressed Σ_i H_i (Algorithm 6, line 12).

    Raises:
        ValueError: When there are no messages, they differ in kind or shape, or they are sketches:
            sketches with a shared seed have correlated errors, and Eq. (14) neglects Σ R_i R_jᵀ.
    """
    _check_two_way(messages)
    ((_, total),) = sum_of_parts(messages)
    return compressor.compress(total, generator=generator)


def two_way_reply(
    jacobian: torch.Tensor, message: JacobianMessage, answer: JacobianMessage
) -> TwoWayReply:
    """Returns a client's second upload (Algorithm 6, lines 14 to 16).

    Args:
        jacobian: The client's Jacobian A_i, shape [M, d].
        message: The client's first upload, which gives H_i.
        answer: The server's `broadcast`, which gives h.

    Raises:
        ValueError: When shapes differ, or the Jacobian holds NaN or infinity.
    """
    jacobian = check_jacobian(jacobian)
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


def two_way_gram(
    messages: Sequence[JacobianMessage], replies: Sequence[TwoWayReply]
) -> torch.Tensor:
    """Returns the Gram matrix of the mean Jacobian after two-way communication (Eq. 14).

    (1/n²) (Σ_i A_i A_iᵀ + Σ_{i≠j} H_i H_jᵀ + X + Xᵀ),  X = Σ_i R_i (h - H_i)ᵀ

    The second term uses the exact sum of the H_i, which the server knows. Two departures from
    Algorithm 6, line 18: 2X becomes X + Xᵀ, because the term of Eq. (13) that it replaces is
    symmetric; and the estimate, which can be indefinite because the last term is neglected, is
    projected, as in `one_way_gram`.

    The correction helps when R_i is small compared to A_i (low rank, top-k, mask). Unbiased but
    noisy reconstructions (quantisers at M in the tens) add their noise to it.

    Args:
        messages: One message per client.
        replies: Each client's `two_way_reply`, in the same order.

    Returns:
        float64 [M, M], symmetric and positive semidefinite.

    Raises:
        ValueError: As in `broadcast`.
    """
    _check_two_way(messages)
    ((_, total),) = sum_of_parts(messages)
    estimate = gram_matrix(total)
    for message, reply in zip(messages, replies, strict=True):
        correction = reply.correction.to(estimate)
        estimate += reply.own_gram.to(estimate) - gram_matrix(message.reconstruct())
        estimate += correction + correction.T
    return project_to_psd(estimate / len(messages) ** 2)


def two_sample_gram(
    first: Sequence[JacobianMessage], second: Sequence[JacobianMessage]
) -> torch.Tensor:
    """Returns the unbiased estimate Y₁ Y₂ᵀ from two independent sets of clients (Algorithm 9).

    The mean Jacobians Y₁ and Y₂ have independent noise, so with unbiased messages the expectation
    of their product is the true Gram matrix; the Gram matrix of either one alone would include the
    Gram matrix of its noise.

    Args:
        first: Messages of one set of clients.
        second: Messages of another, drawn independently; sketches need the same shared seed.

    Returns:
        float64 [M, M], generally neither symmetric nor positive semidefinite.

    Raises:
        ValueError: When a set is empty, or messages differ in kind, shape or shared seed.
    """
    _check_alike(first)
    _check_alike([first[0], *second])
    if not second:
        raise ValueError("second is empty; pass at least one message of the second set of clients.")
    product = _inner_products_of(sum_of_parts(first), sum_of_parts(second))
    return product / (len(first) * len(second))


def project_to_psd(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the positive semidefinite matrix nearest to the symmetric part of a matrix [M, M].

    Negative eigenvalues are set to zero. The result is float64 and exactly symmetric.
    """
    matrix = matrix.double()
    matrix = (matrix + matrix.T) / 2
    values, vectors = torch.linalg.eigh(matrix)
    if values[0] >= 0:
        return matrix
    projected = (vectors * values.clamp(min=0)) @ vectors.T
    return (projected + projected.T) / 2


def inner_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns the inner products of two matrices' rows [M, d], summed in float64, [M, M]."""
    products = first.new_zeros(len(first), len(second), dtype=torch.float64)
    for left, right in zip(first.split(CHUNK, dim=1), second.split(CHUNK, dim=1), strict=True):
        products += left.double() @ right.double().T
    return products


def sum_of_parts(messages: Sequence[JacobianMessage]) -> list[tuple[int, torch.Tensor]]:
    """Returns the signed parts of the summed Jacobian; see `JacobianMessage.parts`."""
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


def _check_alike(messages: Sequence[JacobianMessage]) -> None:
    if not messages:
        raise ValueError("messages is empty; pass the message of at least one client.")

    def traits(message: JacobianMessage) -> dict[str, object]:
        # sketches add up only at equal widths; ranks and numbers of kept entries may differ
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


def _check_two_way(messages: Sequence[JacobianMessage]) -> None:
    _check_alike(messages)
    if getattr(messages[0], "shared_seed", None) is not None:
        raise ValueError(
            f"{type(messages[0]).__name__} does not support two-way communication: sketches with a "
            "shared seed have correlated errors, which Eq. (14) neglects. Use one_way_gram."
        )
