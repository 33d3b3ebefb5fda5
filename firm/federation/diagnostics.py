"""Numbers that tell how a round went: on one solve, and on the clients together."""

from collections.abc import Sequence

import torch

from firm.federation.client import Adapter


def gradient_norms(gram: torch.Tensor) -> torch.Tensor:
    """Returns the norms of the gradients behind a Gram matrix, [M, M] to [M]."""
    return gram.diagonal().clamp(min=0).sqrt()


def cosines(gram: torch.Tensor) -> torch.Tensor:
    """Returns the cosine of each pair of gradients; 0 where one of them is zero.

    Args:
        gram: Gram matrix, shape [M, M].

    Returns:
        The upper triangle, row by row (01, 02, ..., 12, ...), shape [M(M-1)/2], in [-1, 1].
    """
    norms = gradient_norms(gram)
    products = norms[:, None] * norms
    cosine = torch.where(products > 0, gram / products, torch.zeros_like(gram)).clamp(-1, 1)
    first, second = torch.triu_indices(*gram.shape, offset=1)
    return cosine[first, second]


def beta_effect(weights: torch.Tensor, unregularised: torch.Tensor) -> float:
    """Returns how far the regulariser moved the weights, ‖λ - λ(0)‖ / ‖1/M - λ(0)‖.

    0 says that β did nothing, 1 that it made the weights uniform; where λ(0) is itself uniform
    there is nothing to move, and the effect is 0. Weights from a preference can exceed 1.

    Args:
        weights: λ, shape [M].
        unregularised: λ(0), the weights at β = 0, shape [M].
    """
    uniform = torch.full_like(unregularised, 1 / len(unregularised))
    distance = torch.linalg.vector_norm(uniform - unregularised).item()
    if distance < 1e-9:  # rounding of λ(0), not a direction
        return 0.0
    return torch.linalg.vector_norm(weights - unregularised).item() / distance


def weights_spread(weights: Sequence[Sequence[Sequence[float]]]) -> torch.Tensor:
    """Returns the spread of the clients' weights: multi-objective disagreement, made visible.

    Args:
        weights: For each client its solves' weights, C nested lists of shape [S, M].

    Returns:
        Standard deviation (of the population) over clients of each client's mean, shape [M].
    """
    means = [torch.tensor(solves, dtype=torch.float64).mean(dim=0) for solves in weights]
    return torch.stack(means).std(dim=0, correction=0)


def drift(adapters: Sequence[Adapter], mean: Adapter, start: Adapter) -> float:
    """Returns how far clients scatter beside how far they go together.

    That is the mean over clients of ‖θ_c - θ̄‖, over ‖θ̄ - θ_t‖; 0 where the mean did not move.

    Args:
        adapters: θ_c, the adapters that were aggregated.
        mean: θ̄, what they became.
        start: θ_t, where they all began.
    """
    progress = _distance(mean, start)
    if progress == 0.0:
        return 0.0
    return sum(_distance(adapter, mean) for adapter in adapters) / len(adapters) / progress


def _distance(first: Adapter, second: Adapter) -> float:
    norms = [torch.linalg.vector_norm((first[name] - second[name]).double()) for name in first]
    return torch.stack(norms).norm().item()
